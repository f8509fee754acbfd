"""Copies that nobody asked for by name: what a call had to copy, why, and what would not.

A view shares storage; what cannot be a view is copied, silently. Explicit `clone()` calls in forward are
asked for and not listed; copies that autograd or the loop makes are.

May import: tape, ops, account (its dataclasses), ledgers. Never torch, never a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preflop.account import CopyRow
from preflop.ledgers.ledger import Ledger, Row
from preflop.ledgers.operators import starred
from preflop.ledgers.tally import Origin, count_by_origin, dtypes
from preflop.ops.arguments import keyword, result
from preflop.ops.moved import distinct_bytes
from preflop.tape.events import Phase, Signature, Tape, TensorMeta

_JOINS = {"aten.cat": "concatenate", "aten.stack": "concatenate"}
_REPEATS = {"aten.repeat": "repeat", "aten.repeat_interleave": "repeat"}
_MATERIALISED = {"aten._reshape_copy", "aten.contiguous"}


@dataclass(frozen=True, slots=True)
class Copy:
    """Why one kind of call copies."""

    kind: str
    """"contiguous", "expand", "cast", "move", "copy", "concatenate", "repeat"."""
    bytes: int
    """Bytes written."""
    reason: str
    instead: str | None


def copies_ledger(tape: Tape) -> Ledger:
    """Bytes written by copies in the steady step that the user did not ask for by name."""
    kinds = dtypes(tape)
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for origin, calls, copy in _copies(tape):
        key = (
            tape.signatures[origin.signature].op,
            tape.modules[origin.module],
            origin.phase.value,
            tape.sources[origin.source],
            kinds[origin.signature],
        )
        row = rows.setdefault(key, [0, 0])
        row[0] += copy.bytes * calls
        row[1] += calls
    ordered = tuple(Row(*key, value=value, calls=calls) for key, (value, calls) in rows.items())
    return Ledger("bytes", ordered)


def copy_rows(tape: Tape) -> tuple[CopyRow, ...]:
    """The same, one row per kind, line, module (numbers replaced by *) and reason, most bytes first."""
    sums: dict[tuple[str, str, str, str, str | None], list[int]] = {}
    for origin, calls, copy in _copies(tape):
        module = starred(tape.modules[origin.module])
        key = (copy.kind, tape.sources[origin.source], module, copy.reason, copy.instead)
        row = sums.setdefault(key, [0, 0])
        row[0] += calls
        row[1] += copy.bytes * calls
    rows = [
        CopyRow(kind, source or None, module, calls, count, reason, instead)
        for (kind, source, module, reason, instead), (calls, count) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _copies(tape: Tape) -> Iterator[tuple[Origin, int, Copy]]:
    known: dict[tuple[int, Phase], Copy | None] = {}
    for origin, calls in count_by_origin(tape.steady()).items():
        key = (origin.signature, origin.phase)
        if key not in known:
            known[key] = copy_of(tape.signatures[origin.signature], origin.phase)
        copy = known[key]
        if copy is not None and copy.bytes:
            yield origin, calls, copy


def copy_of(sig: Signature, phase: Phase) -> Copy | None:
    """What the call copies; None where it copies nothing, or does what its caller wrote."""
    if sig.op in ("aten.clone", *_MATERIALISED):
        return _clone(sig, phase)
    if sig.op == "aten._to_copy":
        return _cast(sig)
    if sig.op == "aten.copy_" and len(sig.inputs) > 1:
        return _into(sig)
    if sig.op in _JOINS:
        reason = f"{len(sig.inputs)} tensors are copied into one of shape {sig.outputs[0].shape}"
        return Copy(_JOINS[sig.op], _written(sig), reason, "write the parts into one tensor made beforehand")
    if sig.op in _REPEATS:
        source = sig.inputs[0].shape
        reason = f"shape {source} is repeated to {sig.outputs[0].shape}"
        return Copy(_REPEATS[sig.op], _written(sig), reason, "expand: a view with stride 0")
    return None


def _written(sig: Signature) -> int:
    return sum(distinct_bytes(meta) for meta in result(sig))


def _clone(sig: Signature, phase: Phase) -> Copy | None:
    """A clone with a memory format comes from contiguous() or reshape(); one without, in forward, from
    clone() itself."""
    source = sig.inputs[0]
    asked = keyword(sig, "memory_format") is None and sig.op == "aten.clone"
    if asked and phase is not Phase.BACKWARD:
        return None
    if any(stride == 0 and size > 1 for stride, size in zip(source.stride, source.shape, strict=True)):
        reason = f"shape {source.shape} with strides {source.stride} repeats elements: they are written out"
        return Copy("expand", _written(sig), reason, "keep the axis broadcast, or reduce before expanding")
    if is_contiguous(source):
        return Copy("copy", _written(sig), f"shape {source.shape} is copied as it is", None)
    wanted = contiguous_strides(source.shape)
    reason = f"shape {source.shape} with strides {source.stride} is not contiguous (that is {wanted})"
    return Copy(
        "contiguous",
        _written(sig),
        reason,
        "use the view as it is (matmul and einsum take strides), or permute before it is written",
    )


def _cast(sig: Signature) -> Copy:
    source, made = sig.inputs[0], sig.outputs[0]
    if source.dtype != made.dtype:
        reason = f"shape {source.shape}: {source.dtype} becomes {made.dtype}"
        return Copy("cast", _written(sig), reason, None)
    if source.device != made.device:
        return Copy("move", _written(sig), f"{source.device} to {made.device}", None)
    return Copy("copy", _written(sig), f"shape {source.shape} is copied to another layout", None)


def _into(sig: Signature) -> Copy:
    target, source = sig.inputs[0], sig.inputs[1]
    if target.dtype != source.dtype:
        reason = f"shape {source.shape}: {source.dtype} is written into {target.dtype}"
        return Copy("cast", _written(sig), reason, None)
    return Copy("copy", _written(sig), f"shape {source.shape} is written into another tensor", None)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(meta: TensorMeta) -> bool:
    """Whether the elements lie in the order of the shape, without gaps (axes of size 1 do not matter)."""
    wanted = contiguous_strides(meta.shape)
    return all(n == 1 or s == w for n, s, w in zip(meta.shape, meta.stride, wanted, strict=False))
