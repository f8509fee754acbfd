"""What is assumed where a call wants the values of fake floats.

Only what depends on floats needs an assumption, and each one is written on the tape:
routing and sampling are balanced, a condition on floats is false, a number read back is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# Operators whose integer results choose rows by the size of floats: which output holds the choice.
_CHOICES: dict[Any, int] = {
    aten.topk.default: 1,
    aten.sort.default: 1,
    aten.sort.stable: 1,
    aten.argmax.default: 0,
    aten.argmin.default: 0,
    aten.max.dim: 1,
    aten.min.dim: 1,
    aten.multinomial.default: 0,
}


def choice_output(func: Any) -> int | None:
    """The output of `func` that holds chosen indices, or None."""
    return _CHOICES.get(func)


FINITE = "numbers that are not computed are taken as finite where a step asks."
DIFFERENT = "numbers that are not computed are taken as different from what they are compared to."

_AFTER_NAN = {aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default}
_EQUAL = {aten.eq.Tensor, aten.eq.Scalar}
_UNEQUAL = {aten.ne.Tensor, aten.ne.Scalar}
ASKS = _AFTER_NAN | _EQUAL | _UNEQUAL
"""Operators whose answer for every element `taken_answer` knows."""

CHECKS = {aten.all.default, aten.all.dim, aten._is_all_true.default, aten.any.default, aten.any.dim}
"""Operators that sum up answers. `(a == b).all()` and `(a != b).any()` guard against what a training step
does not meet: they are not to be read off what was taken (see `by_value`)."""


def taken_answer(func: Any, args: tuple[Any, ...]) -> tuple[bool, str] | None:
    """What a call of `ASKS` on numbers that are not computed answers for every element, and the assumption
    that says so; None where nothing is assumed. `isfinite` arrives as `x == x` and `abs(x) != inf`."""
    if func in _AFTER_NAN:
        return False, FINITE
    unequal, other = func in _UNEQUAL, args[1]
    if other is args[0]:
        return not unequal, FINITE
    if isinstance(other, float) and math.isinf(other):
        return unequal, FINITE
    if any(isinstance(arg, torch.Tensor) and arg.dtype is torch.bool for arg in args):
        return None
    return unequal, DIFFERENT


ALLOCATES_INSIDE = {
    "aten.linalg_matrix_exp": (
        "works by its argument's norm, which is not computed: priced as the polynomial of degree 18 without"
        " squarings, as batches are; one matrix of a small norm takes less, down to a third of the memory"
    ),
}
"""Operators whose kernels allocate and compute by values. Source: aten/src/ATen/native/LinearAlgebra.cpp,
`mexp_impl`."""


def balanced_choice(func: Any, args: tuple[Any, ...], kwargs: Any, shape: torch.Size) -> torch.Tensor:
    """Indices that choose every candidate equally often: 0, 1, 2, ... modulo the number of candidates.

    Along the chosen axis they are distinct, as those of a real topk or sort are.
    """
    values = args[0]
    if values.ndim == 0:
        return torch.zeros(shape, dtype=torch.int64)
    dim = -1
    if func in (aten.max.dim, aten.min.dim):
        dim = args[1]
    elif func is aten.topk.default:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    elif func in (aten.argmax.default, aten.argmin.default):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if dim is None:
            return torch.zeros(shape, dtype=torch.int64)
    elif func is aten.sort.default:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    elif func is aten.sort.stable:
        dim = kwargs.get("dim", -1)
    candidates = max(values.shape[dim], 1)
    if func not in (aten.topk.default, aten.sort.default, aten.sort.stable):
        count = torch.Size(shape).numel()
        return (torch.arange(count) % candidates).reshape(shape)
    moved = list(shape)
    along = moved.pop(dim)
    count = along
    for size in moved:
        count *= size
    flat = (torch.arange(count) % candidates).reshape([*moved, along])
    return flat.movedim(-1, dim if dim >= 0 else len(shape) + dim).contiguous()


def assumed_number(dtype: torch.dtype) -> float | int | bool | complex:
    """What a number read back from a fake tensor is taken to be."""
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return complex(1.0)
    if dtype.is_floating_point:
        return 1.0
    return 1


class NumpyReads:
    """Answers `.numpy()` of fake tensors, which matchers of boxes and other solvers outside of torch call:
    every number is `assumed_number`. What comes back has the shape that real values would have given.
    Use as a context manager."""

    def __init__(self, assumed: Callable[[str], None]) -> None:
        self._assumed = assumed
        self._outer = vars(FakeTensor).get("numpy")

    def __enter__(self) -> NumpyReads:
        assumed = self._assumed

        def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
            if tensor.requires_grad and not force:
                raise RuntimeError(
                    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
                )
            value = assumed_number(tensor.dtype)
            assumed(f"numbers that are not computed are read by numpy: taken as {value}, all of them.")
            with _disable_current_modes():
                return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape).numpy()

        FakeTensor.numpy = numpy  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del FakeTensor.numpy  # torch.Tensor's is below it
        else:
            FakeTensor.numpy = self._outer  # type: ignore[method-assign]
