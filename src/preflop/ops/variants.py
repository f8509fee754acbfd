"""Which of several kernels of one name a call runs, by its arguments, and how many tensors it works through.

May import: tape, ops. Never torch, never a device.
"""

from __future__ import annotations

from preflop.ops.arguments import argument, keyword
from preflop.tape.events import Ref, Signature, TensorMeta

_PRODUCTS = {
    "aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2),
}  # fmt: skip
_SOFTMAX_DIM = {
    "aten._softmax": 1, "aten._log_softmax": 1, "aten._softmax_backward_data": 2, "aten._log_softmax_backward_data": 2,
}  # fmt: skip
"""Position of `dim`."""
_COPIES = ("aten.clone", "aten.copy_", "aten._to_copy")
_LISTS = ("aten._foreach_", "aten._fused_")


def variant(sig: Signature) -> str:
    """Which kernel of the operator the call runs, "" where the name says it all.

    A matmul's layout: N where a row of the factor is contiguous, T where a column is, so that a linear layer's
    forward is NT, the gradient of its input NN, of its weight TN. GELU's approximation, a power's exponent. A softmax
    over another dimension than the last ("strided"), whose elements lie apart. A copy between a tensor whose rows are
    contiguous and one whose rows are not ("transposed"). On a CPU each has a loop of its own: `vec_softmax` beside
    `vec_host_softmax_lastdim` (aten/src/ATen/native/cpu/SoftMaxKernel.cpp), and copies that cannot go by vectors.
    """
    factors = _PRODUCTS.get(sig.op)
    if factors is not None:
        return "".join(_layout(sig, at) for at in factors)
    if sig.op in ("aten.gelu", "aten.gelu_backward"):
        said = keyword(sig, "approximate", "none")
        return "" if said == "none" else str(said)
    if sig.op == "aten.pow":
        exponent = argument(sig, 1, "exponent")
        return f"{exponent:g}" if isinstance(exponent, (int, float)) else ""
    if sig.op in _SOFTMAX_DIM:
        return "" if _over_last(sig, _SOFTMAX_DIM[sig.op]) else "strided"
    if sig.op in _COPIES:
        return "transposed" if _turns(sig) else ""
    return ""


def _over_last(sig: Signature, position: int) -> bool:
    return argument(sig, position, "dim") in (-1, len(sig.inputs[0].shape) - 1)


def _turns(sig: Signature) -> bool:
    """Whether elements that are neighbours in what a copy reads are apart in what it writes, or the reverse."""
    if sig.op == "aten.copy_":
        to, source = sig.inputs[0], sig.inputs[-1]
    else:
        source, to = sig.inputs[0], sig.outputs[0]
    if len(source.shape) < 2 or len(source.shape) != len(to.shape) or source.shape[-1] == 1:
        return False
    return (source.stride[-1] == 1) != (to.stride[-1] == 1)


def _layout(sig: Signature, position: int) -> str:
    value = sig.args[position] if position < len(sig.args) else None
    meta: TensorMeta | None = sig.inputs[value.index] if isinstance(value, Ref) else None
    if meta is None or len(meta.stride) < 2:
        return "N"
    return "T" if meta.stride[-1] != 1 and meta.stride[-2] == 1 else "N"


def tensors_of(sig: Signature) -> int:
    """How many tensors a call works through one by one: those of a foreach or fused optimizer's list, else 1."""
    if not sig.op.startswith(_LISTS) or not sig.args:
        return 1
    first = sig.args[0]
    return max(1, len(first)) if isinstance(first, (tuple, list)) else 1
