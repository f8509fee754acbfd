"""Operators for which CUDA runs, and saves for backward, something else than a CPU does.

Each rule gives what CUDA's own code does and where that stands. They are kernels under AutogradCPU (above
autograd, so that the right tensors are saved) that live as long as the recording's library does, and
corrections of what torch's fake kernels say for a CPU tensor (`corrected`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from preflop.record.fake import Fresh, Output

aten = torch.ops.aten


def install(library: torch.library.Library) -> None:
    """Give `library` (of namespace "aten") these kernels."""
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("softmax.int", _softmax, "AutogradCPU")
    library.impl("log_softmax.int", _log_softmax, "AutogradCPU")
    if hasattr(aten, "_fused_rms_norm"):
        # A kernel for the device makes torch take the operator's own derivative instead of the
        # composite's (dispatch table: an alias Autograd kernel wins where a backend kernel exists).
        library.impl("_fused_rms_norm", _never, "CPU")
        library.impl("_fused_rms_norm_backward", _never, "CPU")


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch's C++ does for the operator on every device (`OpOverload.decompose` would prefer Python's
    decompositions, which do not always make the same calls)."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this operator runs on CUDA only; a recording answers it without running it")


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """`native_dropout`: one fused kernel that keeps a boolean mask (1 byte an element).

    The CPU's dropout keeps a mask of the input's own dtype.
    Source: aten/src/ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`: CUDA, 0 < p < 1, not empty.
    """
    if train and 0 < p < 1 and tensor.numel() > 0:
        return aten.native_dropout(tensor, p, train)[0]  # type: ignore[no-any-return]
    return composite(aten.dropout.default, tensor, p, train)  # type: ignore[no-any-return]


def _softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """fp16 in, fp32 out is one kernel on CUDA: no fp32 copy of the input.

    Source: aten/src/ATen/native/SoftMax.cpp, `softmax`: `input_.is_cuda() && kHalf && dtype == kFloat`
    (bf16 is copied).
    """
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return aten._softmax(tensor, dim, True)  # type: ignore[no-any-return]
    return composite(aten.softmax.int, tensor, dim, dtype)  # type: ignore[no-any-return]


def _log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same for log_softmax (`log_softmax` in SoftMax.cpp)."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return aten._log_softmax(tensor, dim, True)  # type: ignore[no-any-return]
    return composite(aten.log_softmax.int, tensor, dim, dtype)  # type: ignore[no-any-return]


# Which outputs CUDA makes in the accumulation dtype: statistics of 16-bit inputs are fp32.
# Source: native/cuda/layer_norm_kernel.cu, `layer_norm_cuda`: `acc_type = at::toAccumulateType(...)`.
# (group_norm keeps its statistics in the input's dtype on CUDA too: native/group_norm.cpp.)
_STATISTICS = {aten.native_layer_norm.default: (1, 2)}
# Seeds of the random numbers of attention: torch makes them always, 8 bytes each, on the CPU unless a
# CUDA graph is captured ("Note [Seed and Offset Device]", native/transformers/cuda/attention.cu).


def corrected(func: Any, outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """What CUDA's kernel returns, where torch's fake kernel describes the CPU's."""
    places = _STATISTICS.get(func)
    if places is None:
        return outputs
    return tuple(_wide(output) if index in places else output for index, output in enumerate(outputs))


def _wide(output: Output) -> Output:
    if not isinstance(output, Fresh) or output.dtype not in (torch.float16, torch.bfloat16):
        return output
    return dataclasses.replace(output, dtype=torch.float32, bytes=2 * output.bytes)
