"""Copies of the steady step: what had to be copied, why in terms of shape and stride, and what would not.

A view shares storage; what cannot be a view is copied, silently. Three sorts of copies are found: calls
that copy (clone, casts, copy_), copies that a kernel makes inside itself (`ops/inner_copies`), and joins
(cat, stack) and masks, which write a new tensor but are no copy kernel.

May import: tape, ops, account (its dataclasses), ledgers, strides. Never torch, never a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from preflop.account import CopyRow
from preflop.ledgers.ledger import Ledger, Row
from preflop.ledgers.operators import starred
from preflop.ledgers.tally import dtypes
from preflop.ops import inner_copies
from preflop.ops.arguments import keyword, result
from preflop.ops.moved import distinct_bytes
from preflop.ops.workspace import recorded_by
from preflop.strides import is_permuted, repeats
from preflop.tape.events import Call, Phase, Role, Signature, Storage, Tape, TensorMeta, require_tape

_CLONES = {"aten.clone", "aten._reshape_copy", "aten.contiguous"}
_JOINS = {"aten.cat": "cat", "aten.stack": "stack"}
_RESHAPES = {"aten._unsafe_view", "aten.view", "aten._reshape_alias"}
# matmul expands, reshapes and multiplies: its bmm comes within this many calls of a copy that it made.
_MATMUL_REACH = 6

ASKED = "clone"
"""The kind of copies that the user's code asks for by name."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy, and why it was made."""

    kind: str
    """"reshape", "slice", "repeat", "contiguous", "broadcast", "matmul", "cast", "mask", "layout", "move",
    "assign", "gradient", "optimizer", "clone" (asked for), "cat", "stack", "pad", "bias", "scalar"..."""
    bytes: int
    """Bytes written."""
    read_bytes: int
    """Distinct bytes read."""
    reason: str
    instead: str | None
    kernel: bool = True
    """torch's profiler shows an aten::copy_ for it (not for cat, stack and masks)."""


def copies_ledger(tape: Tape, *, kernels_only: bool = False) -> Ledger:
    """Bytes written by copies in the steady step.

    Args:
        kernels_only: only what torch's profiler shows as `aten::copy_`, without cat, stack and masks.
    """
    require_tape(tape, "copies_ledger")
    kinds = dtypes(tape)
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    for call, copy in copies(tape):
        if kernels_only and not copy.kernel:
            continue
        key = (
            tape.signatures[call.signature].op,
            tape.modules[call.module],
            call.phase.value,
            tape.sources[call.source],
            kinds[call.signature],
        )
        row = rows.setdefault(key, [0, 0])
        row[0] += copy.bytes
        row[1] += 1
    ordered = tuple(Row(*key, value=value, calls=calls) for key, (value, calls) in rows.items())
    return Ledger("bytes", ordered)


def copy_rows(tape: Tape) -> tuple[CopyRow, ...]:
    """The same, one row per kind, line, module (numbers replaced by *) and reason, most bytes first."""
    sums: dict[tuple[str, str, str, str, str, str | None, bool], list[int]] = {}
    modules = [starred(name) for name in tape.modules]
    for call, copy in copies(tape):
        key = (
            copy.kind, tape.sources[call.source], modules[call.module], call.phase.value, copy.reason,
            copy.instead, copy.kernel,
        )  # fmt: skip
        row = sums.setdefault(key, [0, 0, 0])
        row[0] += 1
        row[1] += copy.bytes
        row[2] += copy.read_bytes
    rows = [
        CopyRow(kind, source or None, module, calls, count, reason, instead, phase, read, kernel)
        for (kind, source, module, phase, reason, instead, kernel), (calls, count, read) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def copies(tape: Tape) -> Iterator[tuple[Call, Copy]]:
    """Every copy of the steady step, in order, with the call that made it (a call may make several)."""
    calls = tape.steady()
    on_gpu = tape.subject is not None and tape.subject.device != "cpu"
    with recorded_by(tape.subject):
        inner = [_inner(sig, on_gpu) for sig in tape.signatures]
    watched = [sig.op in _CLONES or sig.op in _WHY for sig in tape.signatures]
    known: dict[tuple[object, ...], Copy | None] = {}
    for position, call in enumerate(calls):
        for copy in inner[call.signature]:
            yield call, copy
        if watched[call.signature]:
            context = _context(tape, calls, position)
            key = (call.signature, call.phase, context)
            if key not in known:
                known[key] = copy_of(tape.signatures[call.signature], call.phase, context)
            found = known[key]
            if found is not None and found.bytes:
                yield call, found


@dataclass(frozen=True, slots=True)
class Context:
    """What surrounds a call, as far as it tells why it copies."""

    viewed_as: tuple[int, ...] | None = None
    """The shape in which the next call looks at the result: a reshape's target."""
    in_matmul: bool = False
    """A batched product on the same line takes the result."""
    role: Role | None = None
    """Of the storage that is written (copy_), or read (a cast)."""
    name: str = ""


_NOWHERE = Context()


def _context(tape: Tape, calls: list[Call], position: int) -> Context:
    call = calls[position]
    sig = tape.signatures[call.signature]
    if sig.op in _CLONES:
        made = call.storages[len(sig.inputs)]
        viewed = _viewed_as(tape, calls, position, made)
        return Context(viewed, viewed is not None and _feeds_matmul(tape, calls, position, made))
    if sig.op in {"aten.copy_", "aten._to_copy"} and call.storages:
        storage: Storage = tape.storages[call.storages[0]]
        if _made_for_gradient(tape, calls, position):
            return Context(role=Role.GRADIENT)
        return Context(role=storage.role, name=storage.name and starred(storage.name))
    return _NOWHERE


def _made_for_gradient(tape: Tape, calls: list[Call], position: int) -> bool:
    """AccumulateGrad makes memory with the parameter's strides and copies the gradient into it at once."""
    call = calls[position]
    if (
        position == 0
        or call.phase is not Phase.BACKWARD
        or tape.signatures[call.signature].op != "aten.copy_"
    ):
        return False
    before = calls[position - 1]
    made = tape.signatures[before.signature].op == "aten.new_empty_strided"
    return made and before.storages[-1] == call.storages[0]


def _viewed_as(tape: Tape, calls: list[Call], position: int, made: int) -> tuple[int, ...] | None:
    if position + 1 >= len(calls):
        return None
    following = calls[position + 1]
    sig = tape.signatures[following.signature]
    if sig.op in _RESHAPES and following.storages and following.storages[0] == made:
        return sig.outputs[0].shape
    return None


def _feeds_matmul(tape: Tape, calls: list[Call], position: int, made: int) -> bool:
    origin = calls[position]
    for call in calls[position + 1 : position + 1 + _MATMUL_REACH]:
        if call.source != origin.source or call.module != origin.module or call.phase is not origin.phase:
            return False
        if tape.signatures[call.signature].op in {"aten.bmm", "aten.mm"}:
            return made in call.storages[:2]
    return False


def copy_of(sig: Signature, phase: Phase, context: Context = _NOWHERE) -> Copy | None:
    """What the call itself copies, and why; None where it copies nothing."""
    if sig.op in _CLONES:
        return _clone(sig, phase, context)
    why = _WHY.get(sig.op)
    return None if why is None else why(sig, phase, context)


# -------------------------------------------------------------------------------------------- clones


def _clone(sig: Signature, phase: Phase, context: Context) -> Copy | None:
    """A clone with a memory format comes from contiguous() or reshape(); one without, from clone()."""
    source = sig.inputs[0]
    kind, instead = _why_cloned(sig, source, phase, context)
    reason = f"{source.shape} with strides {source.stride} {_what_for(context, kind)}"
    return Copy(kind, sig.outputs[0].bytes, distinct_bytes(source), reason, instead)


def _what_for(context: Context, kind: str) -> str:
    if context.viewed_as is not None and kind != ASKED:
        return f"cannot be viewed as {context.viewed_as}"
    return "is copied as it lies" if kind in (ASKED, "gradient", "optimizer") else "is not contiguous"


def _why_cloned(sig: Signature, source: TensorMeta, phase: Phase, context: Context) -> tuple[str, str | None]:
    asked = sig.op == "aten.clone" and keyword(sig, "memory_format") is None
    if asked or (sig.op == "aten.clone" and keyword(sig, "memory_format") == "torch.preserve_format"):
        return _asked(phase)
    if repeats(source.shape, source.stride):
        return ("broadcast", _FOLD) if context.in_matmul else ("repeat", _GROUPS)
    if context.in_matmul:
        return "matmul", _LAYOUT
    if context.viewed_as is None:
        return "contiguous", _AS_IT_IS
    if is_permuted(source.shape, source.stride):
        return "reshape", _ORDER
    return "slice", _SHIFT


def _asked(phase: Phase) -> tuple[str, str | None]:
    if phase is Phase.OPTIMIZER:
        return "optimizer", None
    if phase is Phase.BACKWARD:
        return "gradient", None
    return ASKED, None


_FOLD = (
    "fold the broadcast axis into the rows: torch.einsum over named axes multiplies without writing the "
    "operand out"
)
_GROUPS = (
    "keep the groups as an axis: scaled_dot_product_attention(..., enable_gqa=True), or broadcast in the "
    "product's rows"
)
_LAYOUT = (
    "use scaled_dot_product_attention, which takes strides; else lay the operand out once with the product's "
    "batch axes outermost"
)
_AS_IT_IS = (
    "leave the call out where the next operator takes strides (bmm, attention, element-wise); else have the "
    "tensor written in this order"
)
_ORDER = (
    "have it written in this order: scaled_dot_product_attention lays its result out as (batch, position, "
    "head, width), so that merging the heads is a view, and so is splitting them"
)
_SHIFT = (
    "do not cut the large tensor: shift the small one (labels padded with the index that the loss ignores) "
    "and keep the whole"
)

# --------------------------------------------------------------------------------- casts and assignments


def _cast(sig: Signature, phase: Phase, context: Context) -> Copy:
    source, made = sig.inputs[0], sig.outputs[0]
    read = distinct_bytes(source)
    if source.dtype != made.dtype:
        kind = "mask" if source.dtype == "bool" else "cast"
        what = _cast_what(source, context)
        reason = f"{what}{source.shape}: {source.dtype} becomes {made.dtype}"
        if phase is Phase.BACKWARD:
            return Copy(kind, made.bytes, read, f"{reason} (the gradient of a cast)", None)
        return Copy(kind, made.bytes, read, reason, _cast_instead(source, made, context))
    if source.device != made.device:
        return Copy("move", made.bytes, read, f"{source.shape}: {source.device} to {made.device}", _PINNED)
    reason = f"{source.shape}: strides {source.stride} become {made.stride}"
    return Copy("layout", made.bytes, read, reason, "make the tensor in that memory format")


_PINNED = "make the tensor there, or pin it and copy with non_blocking=True"


def _cast_what(source: TensorMeta, context: Context) -> str:
    if context.role is Role.PARAMETER:
        return f"the weight {context.name} "
    return ""


def _cast_instead(source: TensorMeta, made: TensorMeta, context: Context) -> str | None:
    if source.dtype == "bool":
        return "keep the mask bool (torch.where), or is_causal=True, which needs none"
    if context.role is Role.PARAMETER:
        return "keep the weight in the format that it is used in (bf16 with an fp32 master copy)"
    if source.dtype in ("bfloat16", "float16") and made.dtype == "float32":
        return "hand the half-precision tensor on: losses and norms compute in fp32 inside their kernels"
    return None


def _into(sig: Signature, phase: Phase, context: Context) -> Copy | None:
    if len(sig.inputs) < 2:
        return None
    target, source = sig.inputs[0], sig.inputs[1]
    read = distinct_bytes(source)
    if target.device != source.device:
        return Copy(
            "move", target.bytes, read, f"{source.shape}: {source.device} to {target.device}", _PINNED
        )
    if phase is Phase.OPTIMIZER:
        reason = f"{source.shape}: {source.dtype} is written into {target.dtype}"
        return Copy("optimizer", target.bytes, read, reason, None)
    if phase is Phase.BACKWARD and context.role is Role.GRADIENT:
        return _gradient(target, source, read)
    if target.dtype != source.dtype:
        reason = f"{source.shape}: {source.dtype} is written into {target.dtype}"
        return Copy("cast", target.bytes, read, reason, "make the source in the target's dtype")
    return Copy("assign", target.bytes, read, f"{source.shape} is written into a tensor made before", None)


def _gradient(target: TensorMeta, source: TensorMeta, read: int) -> Copy:
    """AccumulateGrad keeps a gradient that lies as the parameter does and that nobody else holds.

    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if source.stride != target.stride:
        reason = (
            f"the gradient {source.shape} has strides {source.stride} and the parameter {target.stride}: "
            "it is copied into the parameter's order"
        )
        return Copy("gradient", target.bytes, read, reason, "use the parameter without transposing it")
    reason = f"the gradient {source.shape} is held elsewhere too, or is part of another: it is copied"
    return Copy("gradient", target.bytes, read, reason, None)


# -------------------------------------------------------------------------------- joins, masks, inside


def _join(sig: Signature, phase: Phase, context: Context) -> Copy:
    count = len(sig.inputs)
    written = sum(meta.bytes for meta in result(sig))
    read = sum(distinct_bytes(meta) for meta in sig.inputs)
    reason = f"{count} tensors are copied into one of shape {sig.outputs[0].shape}"
    instead = "write the parts into one tensor made beforehand" if phase is Phase.FORWARD else None
    return Copy(_JOINS[sig.op], written, read, reason, instead, kernel=False)


def _mask(sig: Signature, phase: Phase, context: Context) -> Copy | None:
    """where(mask, number, number): a bool mask is written out as numbers."""
    if len(sig.inputs) != 3 or any(meta.shape for meta in sig.inputs[1:]):
        return None
    mask, made = sig.inputs[0], sig.outputs[0]
    reason = f"the mask {mask.shape} of {mask.bytes} bytes is written out as {made.dtype}"
    instead = "is_causal=True needs no mask; else make the float mask once, outside of the layers"
    return Copy("mask", made.bytes, distinct_bytes(mask), reason, instead, kernel=False)


_WHY = {
    "aten._to_copy": _cast,
    "aten.copy_": _into,
    "aten.cat": _join,
    "aten.stack": _join,
    "aten.where": _mask,
}


def _inner(sig: Signature, on_gpu: bool) -> tuple[Copy, ...]:
    """Copies inside the call's kernel, without those that only a CPU's makes where the tape is a GPU's."""
    return tuple(
        Copy(copy.kind, copy.bytes, copy.bytes, copy.reason, copy.instead)
        for copy in inner_copies.copies_of(sig)
        if not (on_gpu and copy.cpu_only)
    )


def kernels(tape: Tape) -> Iterator[tuple[str, int, str, int]]:
    """Copy kernels as (operator of the tape, bytes written, kind, 1), for comparison with a profiler."""
    for call, copy in copies(tape):
        if copy.kernel:
            yield tape.signatures[call.signature].op, copy.bytes, copy.kind, 1
