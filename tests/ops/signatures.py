"""Hand-built signatures for the tests of `ops` and `ledgers`, without torch."""

from __future__ import annotations

from typing import Any

from preflop.strides import contiguous_strides
from preflop.tape.events import Call, Phase, Ref, Role, Signature, Storage, Tape, TensorMeta


def meta(
    *shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None, offset: int = 0
) -> TensorMeta:
    """A tensor, contiguous unless a stride is given."""
    return TensorMeta(shape, contiguous_strides(shape) if stride is None else stride, offset, dtype)


def signature(op: str, *args: Any, out: Any = (), overload: str = "default", **kwargs: Any) -> Signature:
    """A call of `op`: tensors among the arguments are given as metas; `out` is a meta or several, all
    fresh; for an in-place operator (name ends in _) the first argument is written."""
    inputs: list[TensorMeta] = []

    def plain(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            inputs.append(value)
            return Ref(len(inputs) - 1)
        return tuple(plain(item) for item in value) if isinstance(value, tuple | list) else value

    plain_args = tuple(plain(value) for value in args)
    plain_kwargs = tuple((name, plain(value)) for name, value in kwargs.items())
    outputs = (out,) if isinstance(out, TensorMeta) else tuple(out)
    writes: tuple[int, ...] = ()
    aliases: tuple[int | None, ...] = (None,) * len(outputs)
    if op.endswith("_") and not outputs:
        first = plain_args[0]
        writes = tuple(r.index for r in first) if isinstance(first, tuple) else (first.index,)
        if not isinstance(first, tuple):
            outputs, aliases = (inputs[0],), (0,)
    return Signature(op, overload, plain_args, plain_kwargs, tuple(inputs), outputs, aliases, writes)


def tape_of(*signatures: Signature, phases: tuple[Phase, ...] | None = None) -> Tape:
    """A tape of one call per signature, each tensor in a storage of its own."""
    tape = Tape(None)
    for number, sig in enumerate(signatures):
        first = len(tape.storages)
        ids = list(range(first, first + len(sig.inputs) + len(sig.outputs)))
        for position, alias in enumerate(sig.aliases):
            if alias is not None:
                ids[len(sig.inputs) + position] = ids[alias]
        for tensor in sig.inputs + sig.outputs:
            tape.storages.append(Storage(tensor.bytes, tensor.dtype, tensor.shape, 0, None, Role.TEMPORARY))
        phase = phases[number] if phases else Phase.FORWARD
        tape.signatures.append(sig)
        tape.calls.append(Call(number, tuple(ids), number + 1, phase, 0, 0, 0, 0))
    return tape
