"""Facts of the named models: what each is made of and how many parameters were published. No torch.

One TOML file per family in `catalog/`; to add a model, add a table there. The tests build every
entry on the meta device and hold its parameter count to the published one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from preflop.axes import SEQ, Axis
from preflop.errors import BadSubject, UnknownModel, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same reader under its older name
    import tomli as tomllib

_FOLDER = Path(__file__).with_name("catalog")


class Architecture(str, Enum):
    """Which of our modules builds the model; several families share one."""

    GPT2 = "gpt2"
    LLAMA = "llama"
    NEOX = "neox"
    BERT = "bert"
    VIT = "vit"
    RESNET = "resnet"

    @property
    def is_image(self) -> bool:
        """True where the model reads images and not tokens."""
        return self in (Architecture.VIT, Architecture.RESNET)


class Norm(str, Enum):
    """Which normalisation the blocks use."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"
    RMS_NORM_UNIT_OFFSET = "rms_norm_unit_offset"
    """RMS norm that multiplies by 1 + weight (Gemma)."""
    BATCH_NORM = "batch_norm"


class Activation(str, Enum):
    """Which non-linearity the feed-forward (or the convolution) uses."""

    GELU = "gelu"
    """Exact, with erf: one operator."""
    GELU_TANH = "gelu_tanh"
    """Tanh approximation: one operator."""
    GELU_TANH_UNFUSED = "gelu_tanh_unfused"
    """The same formula spelled out operator by operator, as `transformers` runs GPT-2 ("gelu_new")."""
    SILU = "silu"
    RELU = "relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch slow rotary frequencies ("rope_type": "llama3")."""

    factor: float
    """Frequencies slower than the low limit are divided by this."""
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    """Context, in tokens, before the stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What one named model is made of. Sizes are in elements; None where a fact does not apply."""

    name: str
    title: str
    family: str
    architecture: Architecture
    parameters: int
    """Published exact count; tied parameters once, buffers not counted."""
    parameters_source: str
    """Where that count was published."""
    source: str
    """Where the dimensions come from."""
    note: str = ""
    """What a reader must know to compare counts (which head is built, for instance)."""
    aliases: tuple[str, ...] = ()

    layers: int
    """Repeated blocks (`blocks` of the module); for a ResNet its bottlenecks."""
    hidden: int
    """Width of the residual stream; for a ResNet the channels of the last stage."""
    norm: Norm
    norm_eps: float
    activation: Activation
    dropout: float
    """Probability, on embeddings and residual branches."""
    attention_dropout: float
    initializer_std: float | None = None
    """Standard deviation of initial weights; None: by fan-out (convolutions)."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    max_positions: int | None = None
    """Longest sequence, in tokens."""
    tied_embeddings: bool = False
    qkv_bias: bool = False

    rope_theta: int | None = None
    """Longest wavelength of the rotary positions, over 2 pi, in tokens."""
    rotary_fraction: float = 1.0
    """Share of each head's dimensions that are rotated."""
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """Tokens that a windowed block attends to, itself included; None: all before it."""
    window_every: int = 1
    """Of how many consecutive blocks the first is windowed (1: all, 2: every other one)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scale: float | None = None
    """Factor on query-key products; None: head_dim ** -0.5."""
    scale_embeddings: bool = False
    """True: token embeddings are multiplied by hidden ** 0.5."""
    post_norms: bool = False
    """True: each branch is normalised again before it is added."""
    token_types: int | None = None
    padding_token: int | None = None
    """Token whose embedding gets no gradient from being looked up ("pad_token_id")."""

    image_size: int | None = None
    """Height and width of the images, in pixels."""
    channels: int | None = None
    patch_size: int | None = None
    classes: int | None = None
    stem: int | None = None
    """Channels after the first convolution of a ResNet."""
    depths: tuple[int, ...] = ()
    """Bottlenecks per stage of a ResNet."""

    @property
    def is_image(self) -> bool:
        """True where the model reads images and not tokens."""
        return self.architecture.is_image

    @property
    def regimes(self) -> tuple[tuple[Axis, ...], ...]:
        """Its size axes, once for each stretch of lengths with one structure: up to a window, and beyond it."""
        if self.is_image:
            return ((),)
        if self.window is None or self.window >= (self.max_positions or 0):
            return ((Axis(SEQ, self.max_positions),),)
        return (Axis(SEQ, self.window),), (Axis(SEQ, self.max_positions, after=self.window),)

    @property
    def equal_blocks(self) -> bool:
        """True where `layers` blocks of one kind follow each other (not the stages of a ResNet)."""
        return self.architecture is not Architecture.RESNET

    def needed(self, fact: str) -> int:
        """A size that the architecture cannot be without.

        >>> find("gpt2").needed("heads")
        12

        Raises:
            BadSubject: the facts do not have it.
        """
        value = getattr(self, fact)
        if value is None:
            raise BadSubject(
                f"the facts of {self.name} have no {fact}, and a {self.architecture.value} needs it.\n"
                f"  Give {fact}, as the models of `preflop models` do."
            )
        return int(value)


@dataclass(frozen=True, slots=True)
class _Catalog:
    models: tuple[ModelFacts, ...]
    by_name: dict[str, ModelFacts] = field(default_factory=dict)


def _facts(name: str, table: dict[str, Any]) -> ModelFacts:
    """One table of a catalog file as facts. An unknown or missing key raises TypeError."""
    values = dict(table, name=name)
    for key, enum in (("architecture", Architecture), ("norm", Norm), ("activation", Activation)):
        values[key] = enum(values[key])
    for key in ("aliases", "depths"):
        if key in values:
            values[key] = tuple(values[key])
    if "rope_scaling" in values:
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return ModelFacts(**values)


def _read_family(path: Path) -> list[ModelFacts]:
    """All models of one catalog file: `[shared]` facts, then one `[models.NAME]` table each."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    shared = document["shared"]
    return [_facts(name, {**shared, **table}) for name, table in document["models"].items()]


def fold(name: str) -> str:
    """A name as it is looked up: case and the choice between space, `_` and `-` do not matter.

    >>> fold("Llama_2 7B")
    'llama-2-7b'
    """
    return "-".join(name.strip().casefold().replace("_", "-").split())


@lru_cache(maxsize=1)
def _catalog() -> _Catalog:
    found = [facts for path in sorted(_FOLDER.glob("*.toml")) for facts in _read_family(path)]
    catalog = _Catalog(tuple(found))
    for facts in found:
        for name in (facts.name, *facts.aliases):
            if fold(name) in catalog.by_name:
                raise ValueError(f"two models are called {name!r} in the catalog")
            catalog.by_name[fold(name)] = facts
    return catalog


def models() -> tuple[ModelFacts, ...]:
    """Every named model, by family and then by size as the files list them."""
    return _catalog().models


def names() -> list[str]:
    """Every name and alias that `find` knows."""
    return [name for facts in models() for name in (facts.name, *facts.aliases)]


def known(name: str) -> bool:
    """True where `find(name)` would answer."""
    return fold(name) in _catalog().by_name


def find(name: str) -> ModelFacts:
    """The facts of the model of that name or alias.

    >>> find("gpt2").parameters
    124439808
    >>> find("meta-llama/Llama-2-7b-hf").name
    'llama-2-7b'

    Raises:
        UnknownModel: no such name; the message gives the nearest ones.
    """
    facts = _catalog().by_name.get(fold(name))
    if facts is None:
        raise unknown_name(UnknownModel, "model", name, names(), "`preflop models`")
    return facts
