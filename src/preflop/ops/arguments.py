"""Reading an operator's arguments from a signature, by position or by name, with the schema's default."""

from __future__ import annotations

from typing import Any

from preflop.tape.events import Ref, Signature, TensorMeta

# Arithmetic of one complex multiply-add in real FLOPs: 4 multiplies and 4 adds; a real one is 2.
COMPLEX_MULTIPLY_ADD_FLOPS = 8
REAL_MULTIPLY_ADD_FLOPS = 2


def argument(sig: Signature, position: int, name: str, default: Any = None) -> Any:
    """The value of an argument as the caller gave it; `default` (the schema's) where left out."""
    if position < len(sig.args):
        return sig.args[position]
    for key, value in sig.kwargs:
        if key == name:
            return value
    return default


def keyword(sig: Signature, name: str, default: Any = None) -> Any:
    """The value of a keyword-only argument; `default` (the schema's) where left out."""
    for key, value in sig.kwargs:
        if key == name:
            return value
    return default


def tensor(sig: Signature, position: int, name: str) -> TensorMeta | None:
    """The tensor given for an argument; None where it was left out or None."""
    value = argument(sig, position, name)
    return sig.inputs[value.index] if isinstance(value, Ref) else None


def tensors(sig: Signature, position: int, name: str) -> tuple[TensorMeta, ...]:
    """The tensors of a list argument, in order; empty where it was left out."""
    value = argument(sig, position, name)
    if isinstance(value, Ref):
        return (sig.inputs[value.index],)
    if not isinstance(value, tuple | list):
        return ()
    return tuple(sig.inputs[item.index] for item in value if isinstance(item, Ref))


def need(sig: Signature, position: int, name: str) -> TensorMeta:
    """The tensor given for an argument that the operator's schema requires."""
    found = tensor(sig, position, name)
    if found is None:
        raise ValueError(f"{sig.op}: argument {name!r} is not a tensor on this tape")
    return found


def multiply_add_flops(meta: TensorMeta) -> int:
    """Real FLOPs of one multiply-add in the dtype of `meta`: 2, or 8 for complex numbers."""
    is_complex = meta.dtype.startswith("complex")
    return COMPLEX_MULTIPLY_ADD_FLOPS if is_complex else REAL_MULTIPLY_ADD_FLOPS


def is_sparse(meta: TensorMeta) -> bool:
    """True for a tensor without strides (a sparse layout): a shape but no stride on the tape."""
    return bool(meta.shape) and not meta.stride


def stored_elements(meta: TensorMeta) -> int | None:
    """Elements that a sparse tensor stores; None where the recording does not say.

    A sparse tensor has no offset, so the tape keeps the number of stored elements in that place.
    """
    return meta.offset or None


def product(sizes: tuple[int, ...]) -> int:
    """Product of sizes, 1 for none.

    >>> product((2, 3, 4)), product(())
    (24, 1)
    """
    result = 1
    for size in sizes:
        result *= size
    return result


def is_out_variant(sig: Signature) -> bool:
    """True where the caller gave the result tensors (`out=`): they are written and not read."""
    return "out" in sig.overload.split("_") or sig.overload.endswith("_out")


def result(sig: Signature) -> tuple[TensorMeta, ...]:
    """What the call computes: the inputs it writes where it writes in place, else its outputs."""
    if sig.writes:
        return tuple(sig.inputs[index] for index in sig.writes)
    return sig.outputs


def result_elements(sig: Signature) -> int:
    """Elements the call computes, over all result tensors."""
    return sum(meta.elements for meta in result(sig))


def call_dtype(sig: Signature) -> str:
    """The dtype the arithmetic is done in: the first floating (or complex) input's, else the first
    input's, else the first output's; "" where there is no tensor."""
    for meta in sig.inputs:
        if "float" in meta.dtype or "complex" in meta.dtype:
            return meta.dtype
    for meta in sig.inputs + sig.outputs:
        return meta.dtype
    return ""
