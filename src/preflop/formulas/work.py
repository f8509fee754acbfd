"""FLOPs of training, as papers estimate them from a model's dimensions. 1 multiply-add = 2 FLOPs.

Letters, where an equation keeps its paper's: N parameters, D tokens, B sequences, S positions of a
sequence, L layers, h width of the model, V words of the vocabulary.
"""

from __future__ import annotations


def six_nd(parameters: int, tokens: int) -> int:
    """FLOPs of training: forward 2ND, backward twice that, together 6·N·D.

    >>> f"{six_nd(70_000_000_000, 15_000_000_000_000):.2e}"
    '6.30e+24'

    Does not count attention scores; counts embeddings as if they were multiplied.
    Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1, C ≈ 6NBS.
    """
    return 6 * parameters * tokens


def eight_nd(parameters: int, tokens: int) -> int:
    """FLOPs the hardware does when the whole forward is recomputed in backward: 2ND + 2ND + 4ND.

    >>> eight_nd(1_000, 1) / six_nd(1_000, 1)
    1.3333333333333333

    Source: Chen et al. 2016 (arXiv 1604.06174), one extra forward; Korthikanti et al. 2022, section 5.
    """
    return 8 * parameters * tokens


def kaplan_forward_flops_per_token(parameters: int, layers: int, sequence: int, attention_width: int) -> int:
    """FLOPs of one token's forward: 2·N + 2·L·S·d_attn.

    Args:
        parameters: N, without embeddings.
        sequence: S, positions of the context.
        attention_width: d_attn, heads times width of a head.

    >>> kaplan_forward_flops_per_token(1_000_000, 2, 8, 64)
    2002048

    Source: Kaplan et al. 2020 (arXiv 2001.08361), equation 2.2 and table 1. Its attention term counts
    the scores only, 2·S·d_attn a layer; PaLM's, twice that, counts scores and the weighted sum.
    """
    return 2 * parameters + 2 * layers * sequence * attention_width


def palm_flops_per_token(parameters: int, layers: int, heads: int, head_width: int, sequence: int) -> int:
    """Model FLOPs of training on one token, attention in full: 6·N + 12·L·H·Q·T.

    Args:
        parameters: N. Who leaves embeddings out, and who does not, is the caller's convention.
        sequence: T, positions of the sequence.

    >>> palm_flops_per_token(540_350_000_000, 118, 48, 256, 2048) / 1e12        # PaLM 540B
    3.277734806784

    Does not count recomputation. Causal attention is counted as if it were full.
    Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B.
    """
    return 6 * parameters + 12 * layers * heads * head_width * sequence


def causal_flops_per_token(parameters: int, layers: int, heads: int, head_width: int, sequence: int) -> int:
    """Model FLOPs of training on one token, attention halved for causality: 6·N + 6·L·H·Q·T.

    >>> full = palm_flops_per_token(0, 32, 32, 128, 4096)
    >>> causal_flops_per_token(0, 32, 32, 128, 4096) * 2 == full
    True

    Source: NVIDIA Megatron-Bridge and MaxText (from July 2025) report TFLOP/s this way.
    """
    return 6 * parameters + 6 * layers * heads * head_width * sequence


def narayanan_iteration_flops(batch: int, sequence: int, layers: int, width: int, vocabulary: int) -> int:
    """FLOPs the hardware does in one iteration with full recomputation: 96·B·S·l·h²·(1 + S/6h + V/16lh).

    Multiplied out, so that it stays an integer: 96·B·S·l·h² + 16·B·S²·l·h + 6·B·S·h·V.

    >>> narayanan_iteration_flops(1, 1, 1, 1, 0)        # 96 + 16
    112

    Counts: forward twice, backward; the output layer once (it is not recomputed). Feed-forward of 4h.
    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 5.1 and appendix, equation 3.
    """
    tokens = batch * sequence
    matrices = 96 * tokens * layers * width**2
    attention = 16 * tokens * sequence * layers * width
    return matrices + attention + 6 * tokens * width * vocabulary


def korthikanti_model_flops(batch: int, sequence: int, layers: int, width: int, vocabulary: int) -> int:
    """Model FLOPs of one iteration, no recomputation: 72·B·L·s·h²·(1 + s/6h + v/12hL).

    Multiplied out: 72·B·L·s·h² + 12·B·L·s²·h + 6·B·s·h·v.

    >>> korthikanti_model_flops(1, 1, 1, 1, 0)        # 72 + 12
    84

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, equation 7.
    """
    tokens = batch * sequence
    matrices = 72 * tokens * layers * width**2
    attention = 12 * tokens * sequence * layers * width
    return matrices + attention + 6 * tokens * width * vocabulary


def korthikanti_selective_hardware_flops(
    batch: int, sequence: int, layers: int, width: int, vocabulary: int
) -> int:
    """FLOPs the hardware does with selective recomputation: 72·B·L·s·h²·(1 + s/3h + v/12hL).

    >>> korthikanti_selective_hardware_flops(1, 1, 1, 1, 0) - korthikanti_model_flops(1, 1, 1, 1, 0)
    12

    The paper recomputes attention scores and counts their forward anew; as printed the attention
    term doubles, an upper bound (one more forward of attention would be a third of it).
    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, equation 8.
    """
    attention = 12 * batch * sequence**2 * layers * width
    return korthikanti_model_flops(batch, sequence, layers, width, vocabulary) + attention


def chinchilla_layer_forward_flops(
    sequence: int, width: int, heads: int, key_width: int, feed_forward: int
) -> int:
    """FLOPs of one layer's forward over one sequence, softmax included.

    Projections 2·3·S·d·(kh), scores and weighted sum 2·S²·(kh) each, softmax 3·h·S², output
    2·S·(kh)·d, feed-forward 2·S·2·d·f.

    >>> chinchilla_layer_forward_flops(2048, 640, 10, 64, 2560) // 2048
    15134720

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), appendix F.
    """
    inner = key_width * heads
    projections = 8 * sequence * width * inner
    scores_and_sum = 4 * sequence**2 * inner
    softmax = 3 * heads * sequence**2
    return projections + scores_and_sum + softmax + 4 * sequence * width * feed_forward


def chinchilla_core_flops_per_token(
    layers: int, sequence: int, width: int, heads: int, key_width: int, feed_forward: int
) -> float:
    """FLOPs of training on one token without embedding and logits: 3 x the layers' forward.

    This, over 6 x `chinchilla_parameters`, gives all six ratios of the paper's table A4. The formula
    as printed adds embedding and logits (`chinchilla_flops_per_token`) and does not give them.

    >>> chinchilla_core_flops_per_token(10, 2048, 640, 10, 64, 2560)
    454041600.0

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), appendix F, table A4.
    """
    layer = chinchilla_layer_forward_flops(sequence, width, heads, key_width, feed_forward)
    return 3 * layers * layer / sequence


def chinchilla_flops_per_token(
    layers: int, sequence: int, width: int, heads: int, key_width: int, feed_forward: int, vocabulary: int
) -> float:
    """FLOPs of training on one token as appendix F prints them, embedding and logits included.

    Adds 2·d·V for the embedding, as if it were a matmul, and 2·d·V for the logits, three times each.

    >>> chinchilla_flops_per_token(10, 2048, 640, 10, 64, 2560, 32000)
    699801600.0

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), appendix F.
    """
    core = chinchilla_core_flops_per_token(layers, sequence, width, heads, key_width, feed_forward)
    return core + 3 * 4 * width * vocabulary


def chinchilla_parameters(
    layers: int, width: int, heads: int, key_width: int, feed_forward: int, vocabulary: int
) -> int:
    """Parameters behind table A4: L·(5·d·k·h + 2·d·f) + V·d.

    Five attention matrices a layer: query, key, value, output and one for relative positions.

    >>> chinchilla_parameters(10, 640, 10, 64, 2560, 32000)
    73728000

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), tables A4 and A9, whose counts it reproduces.
    """
    layer = 5 * width * key_width * heads + 2 * width * feed_forward
    return layers * layer + vocabulary * width
