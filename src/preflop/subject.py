"""The subject: what is trained, as the user named it.

`resolve` turns any of the ways to name a model into a `Subject`: plain data and callables. Nothing is
built here and torch is not imported; recording and measuring build from the same subject.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflop.errors import BadFile, BadNumber, BadSubject, NotYet, PreflopError
from preflop.optimizers import IN_BACKWARD, OptimizerSpec, find_optimizer
from preflop.precision import Precision, find_precision
from preflop.recomputation import parse as parse_recompute

RECOMPUTE = ("none", "block", "selective")
"""The modes that are compared where several are; `recomputation` knows more."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A stack of equal blocks by construction, and the same model with another number of them."""

    path: str
    """Dotted path of the stack in the model."""
    count: int
    build: Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One training step to be priced: everything the contract's loop needs."""

    name: str
    make_model: Callable[[], Any]
    """Builds the model anew. For a module that the user holds, `module` is set instead."""
    module: Any = None
    """The user's own module, never changed: whoever runs it copies it first."""
    make_batch: Callable[[], Any]
    batch_text: str = ""
    loss: Callable[[Any], Any] | None = None
    """None: the contract's default loss."""
    optimizer: OptimizerSpec | Callable[[Any], Any] | None = None
    precision: Precision = field(default_factory=lambda: find_precision("fp32"))
    microbatches: int = 1
    recompute: str | Callable[[str], bool] = "none"
    keep_output: bool = False
    device: str = "cpu"
    tokens: int | None = None
    """Tokens of one microbatch, where the subject knows."""
    architecture: str = ""
    """Of a named model: which of our modules builds it."""
    sizes: tuple[int, int | None] | None = None
    """Of a named model: its batch size and sequence length."""
    layers: Layers | None = None
    """Of a named model: its equal blocks, of which fewer can be built."""
    casts_parameters: bool = True
    """Whether precision decides the parameters' dtype also for fp32 (named models), or a module's own
    dtypes stand unless a 16-bit precision is asked for."""

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer as the report shows it."""
        if self.optimizer is None:
            return None
        if isinstance(self.optimizer, OptimizerSpec):
            return self.optimizer.name
        return getattr(self.optimizer, "__qualname__", type(self.optimizer).__name__)

    @property
    def recompute_name(self) -> str:
        """The recomputation as the report shows it."""
        if isinstance(self.recompute, str):
            return self.recompute
        return getattr(self.recompute, "__qualname__", type(self.recompute).__name__)


def resolve(
    model: Any,
    batch: Any,
    *,
    loss: Any = None,
    optimizer: Any = "adamw",
    precision: str = "fp32",
    microbatches: int = 1,
    recompute: Any = "none",
    keep_output: bool = False,
    device: str = "cpu",
    gpus: int = 1,
    shard: str = "none",
) -> Subject:
    """The subject of the contract's arguments (see `preflop.account`).

    Raises:
        PreflopError: a name that is not known, a number that cannot be, a batch of the wrong kind.
    """
    _one_device(gpus, shard)
    common: dict[str, Any] = {
        "loss": _callable_or_none("loss", loss),
        "optimizer": _optimizer(optimizer),
        "precision": find_precision(precision),
        "microbatches": whole("microbatches", microbatches),
        "recompute": _recompute(recompute),
        "keep_output": bool(keep_output),
        "device": device,
    }
    _check_optimizer(common["optimizer"], common["precision"], common["microbatches"])
    if isinstance(model, str):
        return _by_name(model, batch, common)
    if isinstance(model, os.PathLike):
        return _by_name(os.fspath(model), batch, common)
    make_batch, text = _batch_maker(batch)
    if _is_module(model):
        return Subject(
            name=type(model).__name__, make_model=lambda: model, module=model,
            make_batch=make_batch, batch_text=text, casts_parameters=False, **common,
        )
    if callable(model):
        return Subject(
            name=getattr(model, "__qualname__", type(model).__name__), make_model=model,
            make_batch=make_batch, batch_text=text, casts_parameters=False, **common,
        )
    raise BadSubject(
        f"a model cannot be {type(model).__name__}.\n"
        "  Give an nn.Module, a callable that builds one, a name from `preflop models`, "
        "'package.module:factory', 'path/file.py:factory' or a folder with a config.json."
    )


# -- checks ---------------------------------------------------------------------------------------


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least `least`, or a clear error.

    >>> whole("batch", 8)
    8
    >>> whole("batch", 0)
    Traceback (most recent call last):
    preflop.errors.BadNumber: batch is 0; it must be a whole number of at least 1.
    """
    integral = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not integral or value < least:
        raise BadNumber(f"{name} is {value}; it must be a whole number of at least {least}.")
    return int(value)


def _one_device(gpus: Any, shard: str) -> None:
    if whole("gpus", gpus) != 1 or shard != "none":
        raise NotYet(
            f"gpus={gpus}, shard={shard!r}: this version prices one device.\n"
            "  Leave both out (gpus=1, shard='none'); sharded runs come in a later version."
        )


def _optimizer(optimizer: Any) -> Any:
    if optimizer is None or (not isinstance(optimizer, str) and callable(optimizer)):
        return optimizer
    if isinstance(optimizer, str):
        return None if optimizer.casefold() == "none" else find_optimizer(optimizer)
    raise BadSubject(
        f"an optimizer cannot be {type(optimizer).__name__}.\n"
        "  Give a name, a callable from parameters to an Optimizer, or None."
    )


def _check_optimizer(spec: Any, precision: Precision, microbatches: int) -> None:
    """Refuse what an optimizer cannot do together with the rest of the step."""
    if not isinstance(spec, OptimizerSpec):
        return
    plain = spec.name.removesuffix(IN_BACKWARD)
    if spec.in_backward and microbatches > 1:
        raise BadSubject(
            f"{spec.name} updates each weight in backward, with {microbatches} microbatches before the "
            f"gradients are complete.\n  Take microbatches=1, or {plain}."
        )
    if spec.in_backward and precision.scaled:
        raise BadSubject(
            f"{spec.name} updates each weight in backward, and {precision.name} scales gradients that are only "
            f"unscaled when all are there.\n  Take bf16-mixed, or {plain}."
        )
    if spec.quantised and precision.name == "bf16-fp32-states":
        raise BadSubject(
            f"{spec.name} keeps 8-bit states, and {precision.name} asks for fp32 ones.\n"
            "  Take bf16 (8-bit states), bf16-master (with an fp32 copy), or adamw."
        )


def _recompute(recompute: Any) -> Any:
    parse_recompute(recompute)
    return recompute


def _callable_or_none(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise BadSubject(f"{name} is {type(value).__name__}; it must be a function from output to scalar.")


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def needs_batch() -> PreflopError:
    """The error where a model needs a batch and none was given."""
    return BadSubject(
        "this model needs a batch: a tensor, a tuple or a mapping of tensors, or a callable that "
        "makes one.\n"
        "  On the command line: --batch N (and --seq N) for a named model or a config.json, "
        "--batch-from FILE:function for a factory."
    )


def no_batch() -> tuple[()]:
    """The batch of a model whose forward takes nothing; whoever builds the model checks that."""
    return ()


def _batch_maker(batch: Any) -> tuple[Callable[[], Any], str]:
    if batch is None:
        return no_batch, "nothing"
    if isinstance(batch, Mapping) and batch and set(batch) <= {"batch_size", "sequence_length"}:
        raise BadSubject(
            "batch_size and sequence_length (--batch, --seq) size the batch of a named model or a "
            "config.json; for this model they do not say what a batch is.\n"
            "  Give the batch itself: a tensor, a tuple or a mapping of tensors, or a callable that makes "
            "one (on the command line: --batch-from FILE:function)."
        )
    if callable(batch) and not isinstance(batch, Mapping):
        return batch, getattr(batch, "__qualname__", "batch")
    return (lambda: batch), ""


# -- by name --------------------------------------------------------------------------------------


def _by_name(name: str, batch: Any, common: dict[str, Any]) -> Subject:
    if ":" in name and not os.path.exists(name):
        make_model = load_function(name, "model")
        make_batch, text = _batch_maker(batch)
        return Subject(
            name=name, make_model=make_model, make_batch=make_batch, batch_text=text,
            casts_parameters=False, **common,
        )
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        from preflop.huggingface import resolve_config

        return resolve_config(path, batch, common)
    return _named_model(name, batch, common)


def _named_model(name: str, batch: Any, common: dict[str, Any]) -> Subject:
    from preflop.models.catalog import find

    facts = find(name)
    if batch is None:
        raise needs_batch()
    sizes = batch_sizes(batch)
    if sizes is None:
        make_batch, text = _batch_maker(batch)
        tokens = None
    else:
        size, length = sizes

        def make_batch() -> Any:
            from preflop.models.build import example_batch

            return example_batch(facts, size, length)

        text = f"{size} x {length} tokens" if length else f"{size} images"
        tokens = size * length if length else None

    def make_model() -> Any:
        from preflop.models.build import build

        return build(facts)

    def build_layers(layers: int) -> Any:
        from preflop.models.build import build

        return build(dataclasses.replace(facts, layers=layers))

    layers = Layers("blocks", facts.layers, build_layers) if facts.equal_blocks else None
    return Subject(
        name=facts.name, make_model=make_model, make_batch=make_batch, batch_text=text,
        tokens=tokens, architecture=facts.architecture.value, sizes=sizes,
        layers=layers, **common,
    )


def batch_sizes(batch: Any) -> tuple[int, int | None] | None:
    """(batch_size, sequence_length) of a size-only batch; None where the batch is data."""
    if not isinstance(batch, Mapping) or not set(batch) <= {"batch_size", "sequence_length"}:
        return None
    if "batch_size" not in batch:
        raise BadSubject("the batch needs batch_size (on the command line: --batch N).")
    length = batch.get("sequence_length")
    return (
        whole("batch size", batch["batch_size"]),
        None if length is None else whole("sequence length", length),
    )


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """The function that "package.module:name" or "path/file.py:name" names.

    Raises:
        BadSubject: no such module or function, or importing it raised (its own error, once).
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise BadSubject(
            f"{spec!r} names no {what}; write 'path/file.py:function' or 'package.module:function'."
        )
    module = _load_file(Path(place), what) if place.endswith(".py") else _load_module(place, what)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        from preflop.errors import nearest

        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        near = nearest(name, names)
        hint = f"Nearest: {', '.join(near)}. " if near else ""
        raise BadSubject(f"{place} has no {name!r}.\n  {hint}It has {len(names)} functions and classes.")
    if not callable(found):
        raise BadSubject(f"{spec} is {type(found).__name__}, not a function that makes the {what}.")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path, what: str) -> Any:
    if not path.is_file():
        raise BadFile(f"no file {str(path)!r} to take the {what} from.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadFile(f"{str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise users_error(f"reading {path}", error) from error
    finally:
        sys.path.remove(folder)
    return module


def _load_module(name: str, what: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BadSubject(f"no module {error.name!r} to take the {what} from.") from error
    except Exception as error:
        raise users_error(f"importing {name}", error) from error
    finally:
        sys.path.remove(os.getcwd())


def users_error(doing: str, error: BaseException) -> PreflopError:
    """The user's own exception, said once, with the line that raised it.

    >>> try:
    ...     {}["width"]
    ... except KeyError as raised:
    ...     print(str(users_error("building the model", raised)).splitlines()[0])
    building the model raised KeyError: 'width'
    """
    if isinstance(error, PreflopError):
        return error
    ours = os.path.dirname(__file__) + os.sep
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours + "record", ours + "subject", ours + "api"))
        and f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    message = str(error).strip() or type(error).__name__
    if isinstance(error, SyntaxError):
        return BadSubject(
            f"{doing} raised {type(error).__name__}: {error.msg}\n  at {error.filename}:{error.lineno}"
        )
    text = f"{doing} raised {type(error).__name__}: {message}"
    if frames:
        last = frames[-1]
        text += f"\n  at {last.filename}:{last.lineno}" + (f": {last.line}" if last.line else "")
    return BadSubject(text)


def read_json(path: Path) -> Any:
    """A JSON file, or a clear error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise BadFile(f"{path} is not JSON: {error}.") from error
