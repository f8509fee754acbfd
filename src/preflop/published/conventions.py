"""How each source counts the FLOPs behind the MFU or TFLOP/s it prints, and that number from its step time.

Each convention was checked by its collectors against all rows of the source (the README beside the
tables). N: parameters; the attention term is 12·L·h·S per token in full, 6·L·h·S halved for causality.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preflop.formulas.work import (
    causal_flops_per_token,
    korthikanti_model_flops,
    narayanan_iteration_flops,
    palm_flops_per_token,
)
from preflop.published.rows import CannotBuild, Row


@dataclass(frozen=True)
class Sizes:
    """The dimensions that a row gives."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool

    @property
    def matrices(self) -> int:
        """Parameters of the layers' matrices."""
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * inner + 2 * kv)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.ffn)

    @property
    def embedding(self) -> int:
        """Parameters of one vocabulary matrix."""
        return self.vocab * self.hidden

    @property
    def norms(self) -> int:
        """Weights of two norms a layer and of the last."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def total(self) -> int:
        """All parameters, a tied head once, without biases and positions."""
        return self.matrices + self.norms + self.embedding * (1 if self.tied else 2)


def sizes_of(row: Row) -> Sizes:
    """The row's dimensions.

    Raises:
        CannotBuild: one of them is missing, or the model is a mixture of experts.
    """
    if row.whole("experts"):
        raise CannotBuild("a mixture of experts: active parameters are not given")
    hidden, heads = row.needed("hidden"), row.needed("heads")
    return Sizes(
        layers=row.needed("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=row.whole("kv_heads") or heads,
        head_dim=row.whole("head_dim") or hidden // heads,
        ffn=row.needed("ffn"),
        vocab=row.needed("vocab"),
        sequence=row.needed("seq"),
        gated="glu" in row.text("mlp"),
        tied=row.text("tied_emb") == "1",
    )


def _full(parameters: int, sizes: Sizes) -> int:
    return palm_flops_per_token(parameters, sizes.layers, sizes.heads, sizes.head_dim, sizes.sequence)


def _halved(parameters: int, sizes: Sizes) -> int:
    return causal_flops_per_token(parameters, sizes.layers, sizes.heads, sizes.head_dim, sizes.sequence)


def _foundry(row: Row, sizes: Sizes) -> float:
    """llm-foundry: learned positions and the tied head counted, once each."""
    return _full(sizes.total + sizes.sequence * sizes.hidden, sizes)


def _nanotron(row: Row, sizes: Sizes) -> float:
    """nanotron: input embedding and head counted; tied models hold two copies under pipelining."""
    copies = sizes.embedding if sizes.tied and (row.whole("pp") or 1) > 1 else 0
    return _full(sizes.total + copies, sizes)


def _titan(row: Row, sizes: Sizes) -> float:
    """torchtitan: up to April 2024 (its A100 rows) all parameters, since August without the embedding."""
    early = "a100" in row.text("gpu").casefold()
    return _full(sizes.total - (0 if early else sizes.embedding), sizes)


def _nemo(row: Row, sizes: Sizes) -> float:
    """NeMo 24: without the input embedding, the head counted, attention in full."""
    return _full(sizes.matrices + sizes.embedding, sizes)


def _bridge(row: Row, sizes: Sizes) -> float:
    """Megatron-Bridge: the same with attention halved."""
    return _halved(sizes.matrices + sizes.embedding, sizes)


def _narayanan(row: Row, sizes: Sizes) -> float:
    """Megatron SC21: hardware FLOPs with full recomputation."""
    iteration = narayanan_iteration_flops(1, sizes.sequence, sizes.layers, sizes.hidden, sizes.vocab)
    return iteration / sizes.sequence


def _korthikanti(row: Row, sizes: Sizes) -> float:
    """Korthikanti: model FLOPs, attention in full."""
    return (
        korthikanti_model_flops(1, sizes.sequence, sizes.layers, sizes.hidden, sizes.vocab) / sizes.sequence
    )


def _palm(row: Row, sizes: Sizes) -> float:
    """PaLM: 6N + 12LHQT, with the parameters that the paper prints."""
    parameters = row.number("params_b")
    if parameters is None:
        raise CannotBuild("the row gives no params_b")
    return _full(round(parameters * 1e9), sizes)


_CONVENTIONS: tuple[tuple[str, Callable[[Row, Sizes], float]], ...] = (
    ("llm-foundry", _foundry),
    ("HF Ultra-Scale Playbook benchmarks", _nanotron),
    ("torchtitan", _titan),
    ("torchao pretraining", _titan),
    ("Megatron-LM README weak scaling", _nemo),
    ("NVIDIA NeMo 24", _nemo),
    ("NVIDIA Megatron-Bridge", _bridge),
    ("Narayanan", _narayanan),
    ("MT-NLG", _narayanan),
    ("BigScience 176B", _narayanan),
    ("Korthikanti", _korthikanti),
    ("PaLM", _palm),
)


@dataclass(frozen=True)
class Recomputed:
    """A printed utilization and the same from the row's own step time."""

    printed: float
    recomputed: float
    rounding: float
    """Half of the printed number's last digit."""
    unit: str
    """"share" (of the peak) or "FLOP/s"."""


def recomputed_utilization(row: Row) -> Recomputed:
    """The row's MFU (or FLOP/s per GPU) from its step time, by its source's convention.

    Raises:
        CannotBuild: the convention or one of the numbers is not known.
    """
    if any(word in row.text("section") for word in ("LoRA", "SFT")):
        raise CannotBuild("how this source counts the FLOPs of fine-tuning is not known")
    if "26.04.01" in row.text("section"):
        raise CannotBuild("this container's rows are 0.98 to 1.01 of the source's own formula: not known why")
    convention = next((rule for name, rule in _CONVENTIONS if row.source.startswith(name)), None)
    if convention is None:
        raise CannotBuild("how this source counts FLOPs is not known")
    flops = convention(row, sizes_of(row)) * _tokens_per_s(row)
    mfu, rate = row.text("mfu_pct"), row.text("tflops_gpu")
    if row.number("mfu_pct"):
        peak = row.number("peak_tflops_used")
        if peak is None:
            raise CannotBuild("the row does not say which peak its MFU is of")
        return Recomputed(float(mfu) / 100, flops / (peak * 1e12), _half_digit(mfu) / 100, "share")
    if row.number("tflops_gpu"):
        return Recomputed(float(rate) * 1e12, flops, _half_digit(rate) * 1e12, "FLOP/s")
    raise CannotBuild("the row prints neither MFU nor FLOP/s")


def _tokens_per_s(row: Row) -> float:
    """Tokens per second of one GPU: from the step time where the batch is given."""
    step_s, batch, gpus = row.number("step_time_s"), row.number("global_batch"), row.number("gpus")
    if step_s and batch and gpus:
        return batch * row.needed("seq") / (step_s * gpus)
    rate = row.number("tokens_per_s_gpu")
    if rate is None:
        raise CannotBuild("the row gives neither a step time with its batch nor tokens per second")
    return rate


def _half_digit(printed: str) -> float:
    """Half of the last digit of a printed number.

    >>> _half_digit("36.6"), _half_digit("406.0")
    (0.05, 0.5)
    """
    text = printed.strip().removesuffix(".0")
    _, _, decimals = text.partition(".")
    return 0.5 * 10.0 ** -len(decimals)
