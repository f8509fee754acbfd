"""Which of several kernels of one name a call runs, by its arguments, and how many tensors it works through.

May import: tape, ops. Never torch, never a device.
"""

from __future__ import annotations

from preflop.ops.arguments import argument, keyword
from preflop.tape.events import Ref, Signature, TensorMeta

_PRODUCTS = {
    "aten.mm": (0, 1), "aten.bmm": (0, 1), "aten.addmm": (1, 2), "aten.baddbmm": (1, 2),
}  # fmt: skip
_LISTS = ("aten._foreach_", "aten._fused_")


def variant(sig: Signature) -> str:
    """Which kernel of the operator the call runs, "" where the name says it all.

    A matmul's layout: N where a row of the factor is contiguous, T where a column is, so that a linear layer's
    forward is NT, the gradient of its input NN, of its weight TN. GELU's approximation, a power's exponent.
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
    return ""


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
