"""Where torch's fake kernels lay out a result otherwise than the real ones do.

A wrong layout costs a copy that no real step makes (or hides one), so these few are put right.
`tests/record/test_layouts.py` holds both to each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def _contiguous(inputs: list[torch.Tensor]) -> tuple[int, ...]:
    return torch.empty(inputs[0].shape, device="meta").stride()


def _as_second(inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """In the memory format of the layer's input."""
    x = inputs[1]
    return torch.empty(x.shape, device="meta", memory_format=suggest_memory_format(x)).stride()


def _as_first_format(inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """In the memory format of the first operand."""
    return _as_second([inputs[0], inputs[0]])


def _contiguous_if_first_is(inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """Contiguous where the first operand is, also where one pixel an image makes it channels-last as well."""
    return _contiguous(inputs) if inputs[0].is_contiguous() else _as_first_format(inputs)


def _as_first(inputs: list[torch.Tensor]) -> tuple[int, ...]:
    """As TensorIterator does: the permutation of the first operand, without its gaps."""
    return torch.empty_like(inputs[0], device="meta").stride()


_FIRST_OUTPUT = {
    # native/layer_norm.cpp, layer_norm_backward_cpu: empty_like(*X, Contiguous)
    aten.native_layer_norm_backward.default: _contiguous,
    # native/group_norm.cpp, native_group_norm_backward: X.suggest_memory_format()
    aten.native_group_norm_backward.default: _as_second,
    # native/Normalization.cpp, batch_norm_backward_cpu_template: input.suggest_memory_format()
    aten.native_batch_norm_backward.default: _as_second,
    # native/Normalization.cpp, batch_norm_cpu: suggest_memory_format_contig(self) where all is contiguous
    aten.native_batch_norm.default: _contiguous_if_first_is,
    aten._native_batch_norm_legit.default: _contiguous_if_first_is,
    aten._native_batch_norm_legit.no_stats: _contiguous_if_first_is,
    # native/SoftMax.cpp, structured log_softmax_backward: a contiguous result
    aten._log_softmax_backward_data.default: _contiguous,
    aten.hardswish_backward.default: _as_first,
    aten.elu_backward.default: _as_first,
}


WANTS_DENSE = {aten.native_group_norm_backward.default}
"""Operators whose fake kernel views its inputs and refuses other layouts; the real ones copy."""


def first_stride(func: Any, inputs: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Strides that the real kernel gives its first result; None where the fake kernel's are right."""
    rule = _FIRST_OUTPUT.get(func)
    return None if rule is None else tuple(rule(inputs))
