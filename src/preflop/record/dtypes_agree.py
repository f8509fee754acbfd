"""Calls that real kernels refuse because dtypes differ, and fake kernels let pass.

A step that torch would not run must not get a price. torch's fake kernels compare shapes; the dtypes
of matmuls, convolutions and scattered sums are compared by the real ones only.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

# Operator -> what its tensors are called in torch's own message.
_ALIKE: dict[Any, str] = {
    aten.mm.default: "mat1 and mat2",
    aten.addmm.default: "self, mat1 and mat2",
    aten.bmm.default: "batch1 and batch2",
    aten.baddbmm.default: "self, batch1 and batch2",
    aten.mv.default: "matrix and vector",
    aten.addmv.default: "self, matrix and vector",
    aten.dot.default: "both vectors",
    aten.convolution.default: "input, weight and bias",
    aten.index_add.default: "self and source",
    aten.index_add_.default: "self and source",
    aten.scatter.src: "self and src",
    aten.scatter_.src: "self and src",
    aten.scatter_add.default: "self and src",
    aten.scatter_add_.default: "self and src",
}


def check_dtypes(func: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse a call whose floating tensors differ in dtype, as the real kernel would.

    Raises:
        RuntimeError: with the dtypes that met.
    """
    names = _ALIKE.get(func)
    if names is None:
        return
    kinds = [t.dtype for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
    if len(set(kinds)) > 1:
        met = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
        raise RuntimeError(f"{names} must have the same dtype, but got {met}")
