"""What a run is: every setting, from flags or one TOML file, and saved with the run. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from preflop.errors import BadFile, BadNumber, PreflopError, unknown_name
from preflop.optimizers import find_optimizer
from preflop.precision import find_precision

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same reader under its older name
    import tomli as tomllib

FILE = "config.toml"


class UnknownKey(PreflopError):
    """No setting of that name."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one run. A step is `microbatches` batches, however many processes share them."""

    model: str = "gpt2-nano"
    """A name of `preflop models` that predicts the next token."""
    data: str
    """A folder that `preflop data` made."""
    out: str
    """The run's folder."""
    steps: int | None = None
    """Steps in all, or give `epochs`."""
    epochs: int | None = None
    """Times that every sample is seen; the last step is as short as what is left."""
    batch: int = 8
    """Sequences that one forward sees."""
    seq: int = 128
    """Tokens of one sequence."""
    microbatches: int = 1
    """Batches of one optimizer step, over all processes."""
    precision: str = "fp32"
    optimizer: str = "adamw-fused"
    learning_rate: float = 1e-3
    """At the end of the warm-up."""
    final_learning_rate_share: float = 0.1
    """Of `learning_rate`, where the cosine ends."""
    warmup_steps: int = 10
    """Steps taken while the rate rises linearly from 0."""
    decay_steps: int | None = None
    """Steps taken until the cosine ends; None: as many as the run has."""
    weight_decay: float = 0.1
    """On matrices and embeddings; never on biases and norms."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """Largest norm of all gradients together; 0: no clipping."""
    dropout: float | None = None
    """None: as the model has it."""
    vocab: int | None = None
    """Rows of the embedding; None: the data's vocabulary."""
    recompute: str = "none"
    """none, block or selective: which activations backward computes again."""
    seed: int = 0
    checkpoint_every: int = 100
    """Steps between checkpoints; 0: none."""
    keep: int = 3
    """Newest checkpoints that stay; the best one stays too."""
    async_save: bool = False
    """Write checkpoints beside the loop, from a copy."""
    evaluate_every: int | None = None
    """Steps between evaluations; 0: none; None: with every checkpoint."""
    evaluate_batches: int = 20
    """Batches of the validation split that an evaluation reads."""
    workers: int = 0
    """Processes that read data ahead."""
    device: str = "auto"
    """auto, cpu or cuda."""
    shard: str = "ddp"
    """With several processes: ddp (a copy each) or fsdp (parameters, gradients and states in parts)."""
    max_skipped: int = 20
    """Steps in a row without finite gradients after which the run stops."""
    log_every: int | None = None
    """Steps between printed lines where there is no terminal; None: each of up to 20 steps, else a line a second."""
    tensorboard: bool = False
    """Write event files for TensorBoard into the run's folder too."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations; 0: none."""
        return self.checkpoint_every if self.evaluate_every is None else self.evaluate_every


# What a run cannot change when it goes on: another value would be another run.
FIXED = (
    "model", "batch", "seq", "microbatches", "precision", "optimizer", "dropout", "vocab", "seed",
)  # fmt: skip
# Where a run is kept and shown; never part of what it computes.
PLACES = ("data", "out")

_LEAST = {
    "steps": 1, "epochs": 1, "batch": 1, "seq": 1, "microbatches": 1, "warmup_steps": 0, "decay_steps": 1,
    "vocab": 1, "checkpoint_every": 0, "keep": 1, "evaluate_every": 0, "evaluate_batches": 1, "workers": 0,
    "max_skipped": 1, "log_every": 1,
}  # fmt: skip
_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (0.0, math.inf), "final_learning_rate_share": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
    "beta1": (0.0, 1.0), "beta2": (0.0, 1.0), "clip": (0.0, math.inf), "dropout": (0.0, 1.0),
}  # fmt: skip
_CHOICES = {
    "recompute": ("none", "block", "selective"),
    "device": ("auto", "cpu", "cuda"),
    "shard": ("ddp", "fsdp"),
}


def _check(config: TrainConfig) -> None:
    """Raises for a value that no run can have."""
    for key, kind in get_type_hints(TrainConfig).items():
        _check_kind(key, getattr(config, key), kind)
    for key, least in _LEAST.items():
        value = getattr(config, key)
        if value is not None and value < least:
            raise BadNumber(f"{key} is {value}; it must be a whole number of at least {least}.")
    for key, (low, high) in _RANGES.items():
        value = getattr(config, key)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise BadNumber(f"{key} is {value}; it must be from {low:g} to {high:g}.")
    for key, choices in _CHOICES.items():
        if getattr(config, key) not in choices:
            raise PreflopError(f"{key} is {getattr(config, key)!r}; it must be one of {', '.join(choices)}.")
    if (config.steps is None) == (config.epochs is None):
        raise PreflopError("a run needs steps or epochs, and not both.\n  Give --steps N, or --epochs N.")
    if find_precision(config.precision).fp8_linears:
        raise PreflopError(
            "`preflop train` does not run fp8: its linears need Transformer Engine's kernels, which are no part of "
            "torch.\n  Take --precision bf16-mixed; `preflop account` prices a step in fp8."
        )
    spec = find_optimizer(config.optimizer)
    if spec.matrices_only or spec.quantised or spec.in_backward:
        raise PreflopError(
            f"`preflop train` does not run {spec.name}: its clipping and checkpoints need an update of all "
            "parameters at once, whose states are tensors.\n  Take adamw, lion, adafactor or another one."
        )


def _check_kind(key: str, value: Any, kind: Any) -> None:
    kinds = getattr(kind, "__args__", (kind,))
    if value is None and type(None) in kinds:
        return
    wanted = next(one for one in kinds if one is not type(None))
    right = isinstance(value, (int, float) if wanted is float else wanted)
    if not right or (isinstance(value, bool) and wanted is not bool):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise BadNumber(f"{key} is {value!r}; it must be {names[wanted]}.")


def keys() -> list[str]:
    """Every setting's name."""
    return [one.name for one in dataclasses.fields(TrainConfig)]


def make_config(values: Mapping[str, Any]) -> TrainConfig:
    """The settings of a mapping, checked.

    >>> make_config({"data": "d", "out": "r", "steps": 10, "learning_rat": 1})
    Traceback (most recent call last):
    preflop.trainer.config.UnknownKey: no setting named 'learning_rat'.
      Nearest: learning_rate... All: ...

    Raises:
        PreflopError: a key that is not known, one that is missing, a value that cannot be.
    """
    for key in values:
        if key not in keys():
            raise unknown_name(UnknownKey, "setting", key, keys(), ", ".join(keys()))
    for key, meaning in (("data", "the folder that `preflop data` made"), ("out", "the run's folder")):
        if not values.get(key):
            raise PreflopError(f"--{key} is missing: {meaning}.")
    return TrainConfig(**values)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings that a TOML file gives; names are not checked here.

    Raises:
        BadFile: missing, or not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read the config {path}: {error.strerror}.") from error
    except ValueError as error:
        raise BadFile(f"the config {path} is not TOML: {error}.") from error


def to_toml(config: TrainConfig) -> str:
    """The settings as TOML, which `read_toml` and `make_config` read back as they were.

    What is None is left out.
    """
    lines = ["# The settings of this run, as `preflop train --config` reads them."]
    for key in keys():
        value = getattr(config, key)
        if value is not None:
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: bool | int | float | str) -> str:
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that a resumed run has otherwise than before."""

    key: str
    before: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Changes:
    """How two configs differ: what forbids to go on, and what is only said."""

    forbidden: tuple[Change, ...] = field(default=())
    allowed: tuple[Change, ...] = field(default=())


def changes(before: Mapping[str, Any], now: TrainConfig) -> Changes:
    """What differs between a checkpoint's settings and those of the run that goes on from it."""
    found = [
        Change(key, before.get(key), getattr(now, key))
        for key in keys()
        if key not in PLACES and before.get(key) != getattr(now, key)
    ]
    return Changes(
        forbidden=tuple(change for change in found if change.key in FIXED),
        allowed=tuple(change for change in found if change.key not in FIXED),
    )
