"""Element-wise operators joined in one kernel (`transforms.fusion`), and which operators join."""

from __future__ import annotations

from preflop.ops.pointwise import GRADIENTS, PER_RESULT, other
from preflop.ops.registry import Work, flops
from preflop.tape.events import Signature

FUSED = "preflop.fused"

# Of the tables, what is not element by element.
_NOT_ALIKE = "kron linalg_cross cross mvlgamma frexp equal sum_to_size dropout feature_dropout"
_FREE_ALIKE = (
    "_to_copy clone copy_ where masked_fill logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not zeros_like ones_like full_like"
)
_BY_HAND = "add sub rsub addcmul addcdiv gelu gelu_backward silu_backward"


def _names() -> frozenset[str]:
    table = " ".join([*PER_RESULT.values(), *GRADIENTS.values(), _BY_HAND, _FREE_ALIKE]).split()
    plain = set(table) - set(_NOT_ALIKE.split())
    return frozenset(
        f"aten.{form}" for name in plain for form in (name, f"{name.rstrip('_')}_")
    )


FUSABLE = _names()
"""Operators that compute each element of their result from the elements in its place."""


@flops(FUSED)
def fused(sig: Signature) -> Work:
    """FLOPs of a fused kernel: the sum of its parts, which its first argument holds.

    >>> fused(Signature(FUSED, "", (24,), (), (), (), (), ())).flops
    24
    """
    return other(int(sig.args[0]))
