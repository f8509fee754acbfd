"""Activation bytes of a transformer, after Korthikanti et al. 2022 (arXiv 2205.05198).

Letters as in the paper: s sequence, b microbatch, h width, a heads, t tensor-parallel size, L layers,
p pipeline stages, v vocabulary. Activations in 16 bits, dropout masks in 8, feed-forward of 4h,
attention scores kept (no fused attention), dropout after attention and feed-forward.
All functions but the last two give bytes of one layer on one device.
"""

from __future__ import annotations

from preflop.errors import BadNumber


def _per_tensor_rank(count: int, t: int) -> int:
    """`count / t`; the equations split evenly or not at all."""
    if t < 1 or count % t:
        raise BadNumber(
            f"tensor-parallel size is {t}.\n  Needed: a divisor of what it splits ({count} bytes)."
        )
    return count // t


def layer_bytes(s: int, b: int, h: int, a: int) -> int:
    """No parallelism, nothing recomputed: s·b·h·(34 + 5·a·s/h).

    >>> layer_bytes(2048, 1, 12_288, 96)        # GPT-3
    2868903936

    Source: equation 1.
    """
    return s * b * (34 * h + 5 * a * s)


def layer_bytes_tensor_parallel(s: int, b: int, h: int, a: int, t: int) -> int:
    """Tensor parallel: s·b·h·(10 + 24/t + 5·a·s/(h·t)).

    >>> layer_bytes_tensor_parallel(2048, 1, 12_288, 96, 1) == layer_bytes(2048, 1, 12_288, 96)
    True

    Source: equation 2.
    """
    return 10 * s * b * h + _per_tensor_rank(s * b * (24 * h + 5 * a * s), t)


def layer_bytes_tensor_sequence_parallel(s: int, b: int, h: int, a: int, t: int) -> int:
    """Tensor and sequence parallel: s·b·h/t·(34 + 5·a·s/h).

    >>> 8 * layer_bytes_tensor_sequence_parallel(2048, 1, 12_288, 96, 8) == layer_bytes(2048, 1, 12_288, 96)
    True

    Source: equation 4.
    """
    return _per_tensor_rank(layer_bytes(s, b, h, a), t)


def layer_bytes_tensor_parallel_selective(s: int, b: int, h: int, t: int) -> int:
    """Tensor parallel, attention scores recomputed: s·b·h·(10 + 24/t).

    >>> layer_bytes_tensor_parallel_selective(2048, 1, 12_288, 8) == 2048 * 12_288 * 13
    True

    Source: table 2.
    """
    return 10 * s * b * h + _per_tensor_rank(24 * s * b * h, t)


def layer_bytes_tensor_sequence_parallel_selective(s: int, b: int, h: int, t: int) -> int:
    """Tensor and sequence parallel, attention scores recomputed: 34·s·b·h/t.

    >>> layer_bytes_tensor_sequence_parallel_selective(2048, 1, 12_288, 1) == 34 * 2048 * 12_288
    True

    Source: equation 6 and table 2.
    """
    return _per_tensor_rank(34 * s * b * h, t)


def layer_bytes_full_recompute(s: int, b: int, h: int) -> int:
    """Only the layer's input is kept: 2·s·b·h.

    >>> layer_bytes_full_recompute(2048, 1, 12_288)
    50331648

    Source: table 2.
    """
    return 2 * s * b * h


def outside_layers_bytes(s: int, b: int, h: int, v: int, t: int, p: int) -> int:
    """First pipeline stage, beside its layers: s·b·h·L/t · (p/L + [p = 1]·4/L·(1 + v/h)).

    Dropout masks of the embedding for p microbatches in flight; without pipeline also the last
    normalisation, the output layer's input and the logits in fp32. L cancels.

    >>> outside_layers_bytes(2048, 1, 12_288, 51_200, 8, 8) == 2048 * 12_288
    True

    Source: section 4.3, equation 5 and the text below it.
    """
    head = 4 * s * b * (h + v) if p == 1 else 0
    return _per_tensor_rank(s * b * h * p + head, t)


def interleaving_factor(p: int, m: int) -> float:
    """What interleaved pipelining multiplies the first stage's activations by: 1 + (p − 1)/(p·m).

    Args:
        p: pipeline stages.
        m: model chunks per stage.

    >>> interleaving_factor(8, 3)
    1.2916666666666667

    Source: section 4.2.3.

    Raises:
        BadNumber: fewer than one stage or chunk.
    """
    if p < 1 or m < 1:
        raise BadNumber(f"{p} pipeline stages with {m} chunks each.\n  Needed: 1 or more of both.")
    return 1 + (p - 1) / (p * m)
