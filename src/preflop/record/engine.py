"""Where the autograd engine treats fake tensors differently from real ones, and the correction.

When a tensor is used twice, the engine adds its two gradients. For ordinary tensors it adds in place
when nobody else holds the first one; for subclasses, which fakes are, it makes a new tensor
(torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). The step being priced runs on
ordinary tensors, so the recorder decides by the engine's own conditions: gradient mode off, no other
reference to the tensor or its storage, non-overlapping and dense.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preflop.record.fake import FakeKernels

aten = torch.ops.aten

IN_PLACE_ON_REAL = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
}
"""Backward formulas make zeros and write into them: in place, but out of place for subclasses.

Source: `areAnyTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp (index_backward,
value_selecting_reduction_backward, masked_select, take, trace) and in native/TensorAdvancedIndexing.cpp
(gather_backward, index_select_backward).
"""


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """How often the tensor and its storage are held, as seen from inside a dispatch."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def adds_in_place(first: torch.Tensor, second: Any) -> bool:
    """Whether the engine, adding `second` to the gradient `first`, would reuse the latter's memory."""
    if torch.is_grad_enabled() or not isinstance(second, torch.Tensor):
        return False
    if first.layout is not torch.strided or not dense(tuple(first.shape), first.stride()):
        return False
    return references(first) == sole_references()


def dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor covers its memory without gaps and overlaps, in any order of dimensions.

    >>> dense((2, 3), (1, 2)), dense((2, 3), (0, 1)), dense((2, 2), (4, 1))
    (True, False, False)
    """
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=1)
def sole_references() -> tuple[int, int]:
    """`references` of a gradient that only the engine holds, read off a backward where that is so."""
    kernels = FakeKernels()
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            del types
            with kernels.mode:
                result = func(*args, **(kwargs or {}))
            if func is aten.add.Tensor and not torch.is_grad_enabled():
                seen.append(references(args[0]))
            return result

    with torch.enable_grad():
        leaf = kernels.empty((2, 2), (2, 1), torch.float32).requires_grad_()
        with Probe():
            middle = leaf * 1.0
            (middle.sin() + middle.cos()).sum().backward()
    return seen[0]
