"""How many (query, key) pairs a mask leaves, where its values are known.

A boolean mask is real and can be counted. Attention adds a floating one, 0 where a pair is attended and
minus infinity (or the least number of the dtype) where not; that one may be fake, so it is counted when
it is made from a boolean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from preflop.record.recorder import Recorder

aten = torch.ops.aten
# Scores that low are masked in every dtype: the least float16 is -65504.
_MASKED_BELOW = -1e4
MAKERS = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill_.Scalar}
"""Operators that make a floating mask from a boolean one."""


class Count(NamedTuple):
    """Attended pairs of a mask, and its shape."""

    attended: int
    shape: tuple[int, ...]


def count_made(func: Any, args: Any) -> Count | None:
    """The mask that a call of `MAKERS` makes; None where it makes none or its values are not known."""
    if func is aten.where.self:
        condition, kept, other = args
        if not _known(condition) or condition.ndim < 2:
            return None
        low, high = _number(other), _number(kept)
        if low is None or high is None or (low <= _MASKED_BELOW) is (high <= _MASKED_BELOW):
            return None
        true = int(condition.count_nonzero())
        attended = true if low <= _MASKED_BELOW else condition.numel() - true
        return Count(attended, tuple(condition.shape))
    target, hidden, value = args
    if not _known(hidden) or isinstance(value, torch.Tensor) or value > _MASKED_BELOW:
        return None
    if target.ndim < 2 or tuple(hidden.shape) != tuple(target.shape) or _stands_for_scores(target):
        return None
    return Count(hidden.numel() - int(hidden.count_nonzero()), tuple(hidden.shape))


def attended_pairs(recorder: Recorder, name: str, args: Any, kwargs: Any) -> int | None:
    """(query, key) pairs of an attention call with a mask of known values, summed over the batch and
    averaged over heads. None: no mask, or not known."""
    if "scaled_dot_product" not in name and "_efficient_attention" not in name:
        return None
    query = args[1] if name.endswith("_backward") else args[0]
    for item in [*args[3:], *kwargs.values()]:
        count = _count(recorder, item, query.shape[-2])
        if count is not None:
            return _over_batch(count, query)
    return None


def _count(recorder: Recorder, item: Any, queries: int) -> Count | None:
    if not isinstance(item, torch.Tensor) or item.ndim < 2 or item.shape[-2] not in (1, queries):
        return None
    if item.dtype is torch.bool and _known(item):
        return Count(int(item.count_nonzero()), tuple(item.shape))
    if not item.dtype.is_floating_point:
        return None
    number = recorder.table.known(item)
    return None if number is None else recorder.masks.get(number)


def _over_batch(count: Count, query: torch.Tensor) -> int | None:
    shape = count.shape
    batch = query.shape[0] if query.ndim == 4 else 1
    heads = shape[-3] if len(shape) >= 3 else 1
    own_batch = shape[-4] if len(shape) >= 4 else 1
    rows = query.shape[-2] // max(shape[-2], 1)
    return count.attended * rows * batch // (own_batch * heads)


def _known(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool and type(tensor) is not FakeTensor and tensor.device.type == "cpu"


def _number(tensor: torch.Tensor) -> float | None:
    if type(tensor) is FakeTensor or tensor.numel() != 1 or tensor.device.type != "cpu":
        return None
    return float(tensor.detach().item())


def _stands_for_scores(target: torch.Tensor) -> bool:
    """Scores that are masked are no mask: they need a gradient, or come from something that does."""
    return target.requires_grad
