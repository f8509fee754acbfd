"""A tape in a file: compressed JSON, one list per field, equal tensors written once.

    {"schema": "preflop.tape/1", "preflop": "0.1.0", "subject": {...}, "dtypes": [...], ...}

`load(save(tape)) == tape`, exactly. A file that is damaged, foreign or newer is refused in words.

May import: tape.events, files, errors.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from preflop.errors import BadTape, described
from preflop.files import write_atomically
from preflop.tape.events import (
    Call,
    Mark,
    ParameterInfo,
    Phase,
    Ref,
    Role,
    Signature,
    Storage,
    SubjectInfo,
    Tape,
    TensorMeta,
    require_tape,
)
from preflop.tape.sizes import Constant
from preflop.units import DTYPE_BYTES

VERSION = 1
SCHEMA = f"preflop.tape/{VERSION}"
_FAMILY = "preflop.tape/"
_PHASES = list(Phase)
_ROLES = list(Role)


def save(tape: Tape, path: str | os.PathLike[str]) -> None:
    """Write a tape to a file, whole or not at all.

    Raises:
        BadFile: the file cannot be written.
        BadTape: an operator has an argument of a kind that the format does not know.
    """
    require_tape(tape, "save_tape")
    text = json.dumps(tape_to_json(tape), separators=(",", ":"), allow_nan=False)
    write_atomically(path, gzip.compress(text.encode(), compresslevel=6, mtime=0))


def load(path: str | os.PathLike[str]) -> Tape:
    """Read a tape that `save` wrote. Needs no torch.

    Raises:
        BadTape: there is no such file, or it is damaged, foreign, or written by a newer Preflop; or what is given
            names no file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise BadTape(f"a tape is read from a file, and not from {described(path)}.\n  Give its path: 'run.tape'.")
    document = _document(os.fspath(path))
    try:
        tape = tape_from_json(document)
        _check(tape)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadTape(
            f"{os.fspath(path)} is a damaged tape: {type(error).__name__}: {error}.\n"
            "  Record it again with `preflop account MODEL ... --tape FILE`."
        ) from error
    return tape


def is_tape(path: str | os.PathLike[str]) -> bool:
    """Whether a name says that it is a tape file."""
    return os.fspath(path).endswith(".tape")


# --- reading the container


def _document(path: str) -> dict[str, Any]:
    again = "  A tape is what `preflop account MODEL ... --tape FILE` writes."
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except OSError as error:
        raise BadTape(f"cannot read the tape {path}: {error.strerror or error}.\n{again}") from error
    if raw[:2] != b"\x1f\x8b":
        raise BadTape(f"{path} is not a tape: it does not begin as one ({len(raw)} bytes).\n{again}")
    try:
        document = json.loads(gzip.decompress(raw))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTape(f"{path} is damaged or cut short: {error}.\n{again}") from error
    except (ValueError, RecursionError) as error:
        raise BadTape(f"{path} is compressed, but not a tape: {error}.\n{again}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not str(schema).startswith(_FAMILY):
        raise BadTape(f"{path} is not a tape: its schema is {schema!r}, not {SCHEMA!r}.\n{again}")
    if schema != SCHEMA:
        raise BadTape(
            f"{path} has schema {schema!r} (written by Preflop {document.get('preflop', '?')}); this "
            f"Preflop reads {SCHEMA!r}.\n  Upgrade Preflop, or record the step again."
        )
    return document


# --- tape to JSON


class _Table:
    """Distinct values in order of appearance, and the index of each."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.index.setdefault(value, len(self.index))


def tape_to_json(tape: Tape) -> dict[str, Any]:
    """The tape as JSON columns, as `save` writes them."""
    metas, shapes = _Table(), _Table()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "preflop": _version(),
        "subject": None if tape.subject is None else dataclasses.asdict(tape.subject),
        "phases": [phase.value for phase in _PHASES],
        "roles": [role.value for role in _ROLES],
        "steps": tape.steps,
        "assumptions": tape.assumptions,
        "modules": tape.modules,
        "module_types": tape.module_types,
        "sources": tape.sources,
        "signatures": [_signature_to_json(sig, metas) for sig in tape.signatures],
        "calls": _calls_to_json(tape.calls),
        "storages": _storages_to_json(tape.storages, shapes),
        "marks": [[m.tick, m.name, m.step, m.microbatch] for m in tape.marks],
        "parameters": [
            [p.name, list(p.shape), p.dtype, p.trainable, p.storage, p.module_type]
            for p in tape.parameters
        ],
    }
    document["shapes"] = [list(shape) for shape in shapes.index]
    document["metas"] = [
        [list(m.shape), list(m.stride), m.offset, m.dtype, m.device] for m in metas.index
    ]
    return document


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("preflop")
    except PackageNotFoundError:
        return "unknown"


def _signature_to_json(sig: Signature, metas: _Table) -> dict[str, Any]:
    return {
        "op": sig.op,
        "overload": sig.overload,
        "args": _argument_to_json(sig.args),
        "kwargs": [[name, _argument_to_json(value)] for name, value in sig.kwargs],
        "inputs": [metas(meta) for meta in sig.inputs],
        "outputs": [metas(meta) for meta in sig.outputs],
        "aliases": list(sig.aliases),
        "writes": list(sig.writes),
        "attended_pairs": sig.attended_pairs,
    }


def _argument_to_json(value: Any) -> Any:
    """Numbers, strings, bools and None as they are; tuples as lists; the rest as tagged objects."""
    if isinstance(value, tuple):
        return [_argument_to_json(item) for item in value]
    if isinstance(value, Ref):
        return {"tensor": value.index}
    if isinstance(value, Constant):
        return {"constant": value.index}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [_argument_to_json(value.real), _argument_to_json(value.imag)]}
    raise BadTape(f"cannot save an operator's argument of type {type(value).__name__}: {value!r}.")


def _calls_to_json(calls: Sequence[Call]) -> dict[str, Any]:
    return {
        "signature": [c.signature for c in calls],
        "counts": [len(c.storages) for c in calls],
        "storages": [s for c in calls for s in c.storages],
        "tick": _differences([c.tick for c in calls]),
        "phase": [_PHASES.index(c.phase) for c in calls],
        "step": [c.step for c in calls],
        "microbatch": [c.microbatch for c in calls],
        "module": [c.module for c in calls],
        "source": [c.source for c in calls],
    }


def _storages_to_json(storages: Sequence[Storage], shapes: _Table) -> dict[str, Any]:
    return {
        "bytes": [s.bytes for s in storages],
        "dtype": [s.dtype for s in storages],
        "shape": [shapes(s.shape) for s in storages],
        "born": _differences([s.born for s in storages]),
        "life": [None if s.died is None else s.died - s.born for s in storages],
        "role": [_ROLES.index(s.role) for s in storages],
        "name": [s.name for s in storages],
        "call": _differences([s.call for s in storages]),
        "device": [s.device for s in storages],
    }


def _differences(values: list[int]) -> list[int]:
    """Each value minus the one before it: small numbers, which compress well.

    >>> _differences([5, 7, 7]), _sums([5, 2, 0])
    ([5, 2, 0], [5, 7, 7])
    """
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _sums(differences: Iterable[int]) -> list[int]:
    total, values = 0, []
    for difference in differences:
        total += difference
        values.append(total)
    return values


# --- JSON to tape


def tape_from_json(document: dict[str, Any]) -> Tape:
    """The tape of such JSON columns. Not checked: `load` does that for files from outside."""
    metas = [TensorMeta(tuple(s), tuple(t), o, d, v) for s, t, o, d, v in document["metas"]]
    subject = document["subject"]
    return Tape(
        subject=None if subject is None else SubjectInfo(**subject),
        signatures=[_signature(item, metas) for item in document["signatures"]],
        calls=_calls(document["calls"], [Phase(name) for name in document["phases"]]),
        storages=_storages(
            document["storages"],
            [tuple(s) for s in document["shapes"]],
            [Role(name) for name in document["roles"]],
        ),
        modules=document["modules"],
        module_types=document["module_types"],
        sources=document["sources"],
        marks=[Mark(*item) for item in document["marks"]],
        parameters=[
            ParameterInfo(name, tuple(shape), *rest) for name, shape, *rest in document["parameters"]
        ],
        assumptions=document["assumptions"],
        steps=document["steps"],
    )


def _signature(item: dict[str, Any], metas: list[TensorMeta]) -> Signature:
    return Signature(
        op=item["op"],
        overload=item["overload"],
        args=_argument(item["args"]),
        kwargs=tuple((name, _argument(value)) for name, value in item["kwargs"]),
        inputs=tuple(metas[i] for i in item["inputs"]),
        outputs=tuple(metas[i] for i in item["outputs"]),
        aliases=tuple(item["aliases"]),
        writes=tuple(item["writes"]),
        attended_pairs=item["attended_pairs"],
    )


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    readers: dict[str, Callable[[Any], Any]] = {
        "tensor": Ref,
        "constant": Constant,
        "float": float,
        "complex": lambda parts: complex(_argument(parts[0]), _argument(parts[1])),
    }
    return readers[kind](content)


def _calls(columns: dict[str, Any], phases: list[Phase]) -> list[Call]:
    storages, ends = columns["storages"], _sums(columns["counts"])
    starts = [0, *ends][: len(ends)]
    ticks = _sums(columns["tick"])
    rows = zip(
        columns["signature"], starts, ends, ticks, columns["phase"], columns["step"],
        columns["microbatch"], columns["module"], columns["source"], strict=True,
    )  # fmt: skip
    return [
        Call(sig, tuple(storages[a:b]), tick, phases[phase], step, micro, module, source)
        for sig, a, b, tick, phase, step, micro, module, source in rows
    ]


def _storages(
    columns: dict[str, Any], shapes: list[tuple[int, ...]], roles: list[Role]
) -> list[Storage]:
    rows = zip(
        columns["bytes"], columns["dtype"], columns["shape"], _sums(columns["born"]), columns["life"],
        columns["role"], columns["name"], _sums(columns["call"]), columns["device"], strict=True,
    )  # fmt: skip
    return [
        Storage(size, dtype, shapes[shape], born, None if life is None else born + life,
                roles[role], name, call, device)
        for size, dtype, shape, born, life, role, name, call, device in rows
    ]  # fmt: skip


# --- is it a tape that the ledgers can read?


def _check(tape: Tape) -> None:
    """Every index points into its table, and what must be a number is one."""
    counts = {
        "signature": len(tape.signatures),
        "module": len(tape.modules),
        "source": len(tape.sources),
    }
    for call in tape.calls:
        for name, count in counts.items():
            _within(name, getattr(call, name), count)
        for index in call.storages:
            _within("storage", index, len(tape.storages))
    if any(a.tick > b.tick for a, b in zip(tape.calls, tape.calls[1:], strict=False)):
        raise ValueError("calls are not in the order of their ticks")
    for storage in tape.storages:
        if storage.bytes < 0 or storage.born < 0 or (storage.died or 0) < 0:
            raise ValueError("a storage has a negative size or tick")
        if storage.dtype not in DTYPE_BYTES:
            raise ValueError(f"a storage has the unknown dtype {storage.dtype!r}")
        if storage.call != -1:
            _within("call", storage.call, len(tape.calls))
    if tape.steps < 1:
        raise ValueError("it holds no step")


def _within(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"{name} {index} is not among {count}")
