"""The subject: what is trained, as the user named it.

`resolve` turns any of the ways to name a model into a `Subject`: plain data and callables. Nothing is
built here and torch is not imported; recording and measuring build from the same subject.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preflop.axes import (
    BATCH,
    KEYS,
    SEQ,
    Axis,
    SizedBatch,
    Sizes,
    lengths_of,
    size_batch,
    sizes_text,
)
from preflop.errors import BadFile, BadNumber, BadSubject, NotYet, PreflopError
from preflop.optimizers import IN_BACKWARD, OptimizerSpec, find_optimizer
from preflop.precision import Precision, find_precision
from preflop.quantity import whole
from preflop.recomputation import parse as parse_recompute

if TYPE_CHECKING:
    from preflop.models.catalog import ModelFacts

RECOMPUTE = ("none", "block", "selective")
"""The modes that are compared where several are; `recomputation` knows more."""

FAILURES = (Exception, SystemExit)
"""What code of the user's may raise and becomes one message (`users_error`). `sys.exit` is no way out of
a recording: its status would be taken for ours."""

_LARGEST_SIZE = 2**63 - 1
"""Torch's sizes are 64-bit."""


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
    sizes: tuple[int, ...] | None = None
    """Where the batch was made at sizes: samples, and the length along each axis."""
    regimes: tuple[tuple[Axis, ...], ...] = ()
    """The axes that it can be resized along, once for each stretch of lengths with one structure; none where
    the batch is data."""
    layers: Layers | None = None
    """Of a named model: its equal blocks, of which fewer can be built."""
    assumptions: tuple[str, ...] = ()
    """What was assumed of it before anything ran; the report repeats it."""
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
        "loss": _loss(loss),
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
        return _by_name(as_path(os.fspath(model)), batch, common)
    common |= {"casts_parameters": False, **of_batch(batch)}
    if _is_module(model):
        return Subject(name=type(model).__name__, make_model=lambda: model, module=model, **common)
    if callable(model):
        return Subject(name=getattr(model, "__qualname__", type(model).__name__), make_model=model, **common)
    raise BadSubject(
        f"a model cannot be {type(model).__name__}.\n"
        "  Give an nn.Module, a callable that builds one, a name from `preflop models`, "
        "'package.module:factory', 'path/file.py:factory' or a folder with a config.json."
    )


# -- checks ---------------------------------------------------------------------------------------


def _one_device(gpus: Any, shard: str) -> None:
    if whole("gpus", gpus) != 1 or shard != "none":
        raise NotYet(
            f"gpus={gpus}, shard={shard!r}: only `preflop account` prices several devices; this is for one device.\n"
            "  Leave both out (gpus=1, shard='none')."
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


def _loss(loss: Any) -> Any:
    if loss is None:
        return None
    if not callable(loss):
        raise BadSubject(f"loss is {type(loss).__name__}; it must be a function from output to scalar.")
    try:
        inspect.signature(loss.forward if _is_module(loss) else loss).bind(None)
    except ValueError:
        return loss  # a built-in, which does not tell
    except TypeError as error:
        raise BadSubject(
            f"the loss cannot be called with the model's output alone: {error}.\n"
            "  Write loss(output), with labels from outside of it: "
            "lambda output: torch.nn.functional.cross_entropy(output, labels)."
        ) from error
    return loss


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


def of_batch(batch: Any) -> dict[str, Any]:
    """The fields of a `Subject` that its batch gives: data, a callable, or `axes.sized_batch`.

    Raises:
        BadSubject: sizes alone, which do not say what a batch is.
    """
    if batch is None:
        return {"make_batch": no_batch, "batch_text": "nothing"}
    if _only_sizes(batch):
        raise BadSubject(
            "batch_size and sequence_length (--batch, --seq) size the batch of a named model or a "
            "config.json; for this model they do not say what a batch is.\n"
            "  Give the batch itself: a tensor, a tuple or a mapping of tensors, or a callable that makes "
            "one (on the command line: --batch-from FILE:function)."
        )
    if isinstance(batch, SizedBatch):
        sizes = batch.sizes.batch, *batch.lengths
        text = sizes_text(batch.axes, sizes[0], sizes[1:], "samples")
        return {"make_batch": batch, "batch_text": text, "sizes": sizes, "regimes": (batch.axes,)}
    if callable(batch) and not isinstance(batch, Mapping):
        return {"make_batch": batch, "batch_text": getattr(batch, "__qualname__", "batch")}
    return {"make_batch": lambda: batch}


def _only_sizes(batch: Any) -> bool:
    """Whether a batch is sizes, `{"batch_size": 8, ...}`, and not data."""
    if not isinstance(batch, Mapping) or not batch or not set(batch) <= set(KEYS.values()):
        return False
    return KEYS[BATCH] in batch or not any(hasattr(value, "shape") for value in batch.values())


# -- by name --------------------------------------------------------------------------------------


def _by_name(name: str, batch: Any, common: dict[str, Any]) -> Subject:
    if not name.strip():
        raise BadSubject(
            "the model's name is empty.\n"
            "  Give a name of `preflop models`, path/file.py:factory, or a folder or file with a config.json."
        )
    if ":" in name and not os.path.exists(name):
        make_model = load_function(name, "model")
        return Subject(name=name, make_model=make_model, casts_parameters=False, **of_batch(batch), **common)
    if is_config(name):
        from preflop.huggingface import resolve_config

        return resolve_config(Path(name), batch, common)
    if not known_model(name):
        _check_no_path(name)
    return _named_model(name, batch, common)


def is_config(name: str) -> bool:
    """Whether a name is that of a folder or file with a Hugging Face configuration. A model of the catalog is never
    hidden by a folder of its name; that one is `./gpt2`."""
    return not known_model(name) and (Path(name).is_dir() or name.endswith(".json"))


def as_path(name: str) -> str:
    """A path as it has to be written, where a model of the catalog has the same name.

    >>> as_path("gpt2"), as_path("my-checkpoint")
    ('./gpt2', 'my-checkpoint')
    """
    return os.path.join(os.curdir, name) if known_model(name) else name


def known_model(name: str) -> bool:
    """Whether the catalog has a model of that name."""
    from preflop.models.catalog import known

    return known(name)


def _check_no_path(name: str) -> None:
    """What is no named model may be a path: say what is missing of it.

    Raises:
        BadFile: there is nothing of that name, or it is no model. BadSubject: a Python file, without a
            word on what in it makes the model.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".py":
        made = _names_in(path)
        hint = f" It has: {', '.join(made)}." if made else ""
        raise BadSubject(
            f"{name} is a Python file; which function or class of it makes the model?\n"
            f"  Name it after a colon: {name}:{made[0] if made else 'factory'}.{hint}"
        )
    if path.is_file():
        raise BadFile(
            f"{name} is a file, and no model that can be read.\n"
            "  Give path/file.py:factory, a config.json of Hugging Face, or a recording (.tape)."
        )
    # "org/name" of the Hugging Face hub is no path, unless there is such a folder.
    inside = os.sep in name and Path(path.parts[0]).is_dir()
    if path.suffix == ".py" or inside or name.startswith((".", "~")):
        raise BadFile(
            f"no file or folder {name!r} (looked in {os.getcwd()}).\n"
            "  Give path/file.py:factory, a folder or file with a config.json, or a name of `preflop models`."
        )


def _names_in(path: Path, most: int = 5) -> list[str]:
    """Functions and classes that a Python file defines, as far as it can be read; it is not run."""
    import ast

    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [item.name for item in body if isinstance(item, kinds) and not item.name.startswith("_")][:most]


def _named_model(name: str, batch: Any, common: dict[str, Any]) -> Subject:
    from preflop.models.catalog import find

    facts = find(name)
    if batch is None:
        raise needs_batch()
    sizes = batch_sizes(batch)
    made = of_batch(batch) if sizes is None else _named_batch(facts, sizes)

    def make_model() -> Any:
        from preflop.models.build import build

        return build(facts)

    def build_layers(layers: int) -> Any:
        from preflop.models.build import build

        return build(dataclasses.replace(facts, layers=layers))

    layers = Layers("blocks", facts.layers, build_layers) if facts.equal_blocks else None
    hidden = Path(name).is_dir()
    said = (f"{name} is the model of that name; the folder of that name here is {as_path(name)}",) if hidden else ()
    return Subject(
        name=facts.name, make_model=make_model, architecture=facts.architecture.value, layers=layers,
        assumptions=said, **made, **common,
    )  # fmt: skip


def _named_batch(facts: ModelFacts, sizes: Sizes) -> dict[str, Any]:
    """The fields of a `Subject` of a named model whose batch is made at sizes."""
    length = sizes.lengths.get(SEQ)
    # Whether it wants a sequence, and how long that may be, is said where the batch is made.
    axes = tuple(Axis(axis.name) for axis in facts.regimes[0])
    others = {name: size for name, size in sizes.lengths.items() if name != SEQ}
    lengths_of(axes, others | {axis.name: 1 for axis in axes}, facts.name)

    def make_batch() -> Any:
        from preflop.models.build import example_batch

        return example_batch(facts, sizes.batch, length)

    return {
        "make_batch": make_batch,
        "batch_text": f"{sizes.batch} x {length} tokens" if length else f"{sizes.batch} images",
        "tokens": sizes.batch * length if length else None,
        "sizes": (sizes.batch, *([] if length is None else [length])),
        "regimes": facts.regimes,
    }


def batch_sizes(batch: Any) -> Sizes | None:
    """The sizes of a size-only batch, `{"batch_size": 8, "sequence_length": 1024}`; None where it is data.

    Raises:
        BadSubject: the batch size is missing. BadNumber: a size that is no whole number of at least 1.
    """
    if not isinstance(batch, Mapping) or not (_only_sizes(batch) or not batch):
        return None
    if KEYS[BATCH] not in batch:
        raise BadSubject("the batch needs batch_size (on the command line: --batch N).")
    size = whole("batch size", batch[KEYS[BATCH]])
    lengths = {
        name: whole(key.replace("_", " "), batch[key])
        for name, key in KEYS.items()
        if name != BATCH and batch.get(key) is not None
    }
    if size * max([1, *lengths.values()]) > _LARGEST_SIZE:
        words = " x ".join(f"{each:,}" for each in (size, *lengths.values()))
        raise BadNumber(f"a batch of {words} has more elements than a tensor can have, {_LARGEST_SIZE:,}.")
    return Sizes(size, lengths)


def resized(batch: Any, axes: tuple[Axis, ...], size: int, lengths: Sequence[int]) -> Any:
    """A batch of sizes, or of `axes.sized_batch`, at other sizes."""
    if isinstance(batch, SizedBatch):
        named = {axis.name: length for axis, length in zip(axes, lengths)}
        return dataclasses.replace(batch, sizes=Sizes(size, named))
    return size_batch(axes, size, lengths)


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
        names = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise BadSubject(f"{place} has no {name!r}.\n  {_what_there_is(name, names)}")
    if not callable(found):
        raise BadSubject(f"{spec} is {type(found).__name__}, not a function that makes the {what}.")
    return found  # type: ignore[no-any-return]


def _what_there_is(name: str, names: list[str], most: int = 8) -> str:
    """The near names, or, where none is near, those that there are.

    >>> _what_there_is("fime", ["fine", "batch"]), _what_there_is("nope", ["unet", "batch"])
    ('Nearest: fine. It has 2 functions and classes.', 'It has: unet, batch.')
    """
    from preflop.errors import nearest

    near = nearest(name, names)
    if near:
        return f"Nearest: {', '.join(near)}. It has {len(names)} functions and classes."
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"It has: {', '.join(names[:most])}{more}." if names else "It has no functions and classes."


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
    except FAILURES as error:
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
    except FAILURES as error:
        raise users_error(f"importing {name}", error) from error
    finally:
        sys.path.remove(os.getcwd())


def users_error(doing: str, error: BaseException) -> PreflopError:
    """The user's own exception, said once, with the line that raised it; a `sys.exit` likewise.

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
    if isinstance(error, SyntaxError):
        return BadSubject(
            f"{doing} raised {type(error).__name__}: {error.msg}\n  at {error.filename}:{error.lineno}"
        )
    text = f"{doing} {_raised(error)}"
    if frames:
        last = frames[-1]
        text += f"\n  at {last.filename}:{last.lineno}" + (f": {last.line}" if last.line else "")
    return BadSubject(text)


_MOST_LINES = 4


def _raised(error: BaseException) -> str:
    r"""What was raised, in words: the message's own first lines, without the frames of torch's C++.

    >>> _raised(SystemExit(3))
    'ended the program: sys.exit(3)'
    >>> _raised(RuntimeError("too large\nException raised from check at x.h:7\nframe #0: c10::Error"))
    'raised RuntimeError: too large'
    """
    if isinstance(error, SystemExit):
        return f"ended the program: sys.exit({'' if error.code is None else repr(error.code)})"
    # torch/c10/util/Exception.cpp: a message's backtrace begins with this line.
    said = str(error).partition("\nException raised from ")[0].strip().splitlines()
    lines = [line for line in said if not line.startswith(("frame #", "C++ CapturedTraceback"))]
    more = [f"  ... ({len(lines) - _MOST_LINES} more lines)"] if len(lines) > _MOST_LINES else []
    message = "\n".join((*lines[:_MOST_LINES], *more)) or type(error).__name__
    return f"raised {type(error).__name__}: {message}"


def read_json(path: Path) -> Any:
    """A JSON file, or a clear error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise BadFile(f"{path} is not JSON: {error}.") from error
