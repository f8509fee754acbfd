"""What is assumed where a call wants the values of fake floats.

Only what depends on floats needs an assumption, and each one is written on the tape:
routing and sampling are balanced, a condition on floats is false, a number read back is 1.
"""

from __future__ import annotations

from typing import Any

import torch

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
