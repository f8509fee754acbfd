"""Linears in fp8, as NVIDIA's Transformer Engine computes them with delayed scaling (`--precision fp8`).

The linears of a model's copy are made to run what `transformer_engine.pytorch.Linear` runs under `autocast(
recipe=DelayedScaling())`: input and weight are cast to E4M3 and gradients to E5M2 by scales of earlier steps, each
cast also noting the largest value for later ones; products are `_scaled_mm`, into autocast's dtype. Where the device
multiplies fp8 only row by row of both operands, every cast writes the transpose too, and backward keeps that.

Source: NVIDIA/TransformerEngine@d0067d0, `pytorch/module/linear.py` (`_linear_forward_impl`, `_linear_backward`),
`pytorch/module/base.py` (`grad_output_preprocess`), `pytorch/csrc/quantizer.cpp` (`Float8Quantizer::create_tensor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preflop.errors import BadSubject
from preflop.hardware.catalog import find
from preflop.record.fake import FakeKernels
from preflop.record.recompute import repeated_blocks
from preflop.record.recorder import Recorder
from preflop.record.target import CPU, find_target
from preflop.subject import Subject

# Formats of forward and backward: `Format.HYBRID`, the recipe's default (common/recipe/__init__.py).
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

AMAX_HISTORY_LENGTH = 1024
"""Steps of which the largest value is remembered: `DelayedScaling.amax_history_len` (common/recipe/__init__.py)."""
FORWARD_TENSORS, BACKWARD_TENSORS = 3, 2
"""Scales of input, weight and output; of both gradients: `set_meta_tensor` (pytorch/module/base.py)."""
# Sizes that an fp8 product takes: `assert_dim_for_fp8_exec` (pytorch/utils.py), of input and weight. A weight's both
# sizes must be multiples of 16 to be converted (huggingface/accelerate, utils/transformer_engine.py).
_ROWS, _FEATURES = 8, 16
# One workspace for all products: `get_cublas_workspace_size_bytes` (pytorch/cpp_extensions/gemm.py).
_WORKSPACE_BYTES, _HOPPER_WORKSPACE_BYTES = 4 << 20, (32 << 20) + 1024
_HOPPER = (9, 0)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of Transformer Engine's own workspace for cuBLAS.

    >>> workspace_bytes((8, 9)), workspace_bytes((9, 0))
    (4194304, 33555456)
    """
    return _HOPPER_WORKSPACE_BYTES if capability >= _HOPPER else _WORKSPACE_BYTES


def any_layout(capability: tuple[int, int]) -> bool:
    """Whether fp8 products take operands of any layout, so that nobody needs a transpose.

    Source: `nvte_is_non_tn_fp8_gemm_supported` (common/transformer_engine.cpp).

    >>> [any_layout(capability) for capability in ((8, 9), (9, 0), (10, 0), (12, 0))]
    [False, False, True, False]
    """
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def convert_linears(model: nn.Module, subject: Subject, recorder: Recorder) -> None:
    """Let the linears of `model`, a copy that nobody else holds, compute in fp8, and say so.

    Raises:
        BadSubject: a CPU, or a model without a linear for it. MissingFigure: a device without fp8.
    """
    capability = _capability(subject.device)
    chosen = [module for module in candidates(model) if _divisible(module)]
    if not chosen:
        raise BadSubject(
            f"no linear of {subject.name} would compute in fp8.\n"
            f"  Needed: an nn.Linear with both sizes divisible by {_FEATURES} in its repeated blocks, or, in a model "
            "without such blocks, one that is not its last.\n  Take --precision bf16-mixed."
        )
    rules = Rules(any_layout(capability), recorder.assumed)
    for module in chosen:
        _convert(module, rules, recorder.kernels)
    workspace = recorder.kernels.empty((workspace_bytes(capability),), (1,), torch.uint8)
    model.register_buffer("fp8_workspace", workspace, persistent=False)
    for words in _assumptions(rules):
        recorder.assumed(words)


def _capability(device: str) -> tuple[int, int]:
    target = find_target(device)
    if target is None:
        raise BadSubject(
            f"a {CPU} has no fp8 matrix units, and --precision fp8 is for devices that have.\n"
            "  Price the step for one: `preflop account ... --device h100-sxm`; or take --precision bf16-mixed."
        )
    find(device).require_fp8()
    return target.capability


def candidates(model: nn.Module) -> Iterator[nn.Linear]:
    """Linears inside the repeated blocks; of a model without such blocks, all but the last, its head.

    What computes otherwise than `nn.Linear` (a subclass with a forward of its own) is left as it is.
    """
    blocks = repeated_blocks(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    linears = list(_linears(model))
    if blocks:
        yield from (module for module in linears if id(module) in inside)
    else:
        yield from linears[:-1]


def _linears(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            yield module


def _divisible(module: nn.Linear) -> bool:
    return module.in_features % _FEATURES == 0 and module.out_features % _FEATURES == 0


def _assumptions(rules: Rules) -> Iterator[str]:
    kept = "its input in 8 bits and the weight once" if rules.any_layout else (
        "its transposed input in 8 bits and the weight twice, as it is and transposed"
    )
    yield (
        f"fp8: every nn.Linear in the repeated blocks with both sizes divisible by {_FEATURES} (in a model without "
        "blocks: all but the last) computes as Transformer Engine's with delayed scaling: E4M3 forward, E5M2 "
        f"gradients, {AMAX_HISTORY_LENGTH:,} largest values of each tensor remembered; all else as in bf16-mixed"
    )
    yield f"fp8: for backward each of them keeps {kept}; weights are cast anew for every microbatch"
    yield (
        "fp8: the update of the scales, once a step, and the partial sums of a bias's gradient are not priced"
    )


# -- a linear ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What all of a model's fp8 linears share."""

    any_layout: bool
    """Of the device's fp8 products (`any_layout`): no transposes."""
    assumed: Callable[[str], None]
    """Is told what was assumed of a call."""


class Float8Linear(nn.Linear):
    """A linear that computes in fp8."""

    fp8_rules: Rules

    fp8_scale_forward: torch.Tensor
    fp8_scale_backward: torch.Tensor
    fp8_amax_history_forward: torch.Tensor
    fp8_amax_history_backward: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - nn.Linear's name
        """The product in autocast's dtype; in 16 bits where fp8 products do not take so many rows."""
        if math.prod(input.shape[:-1]) % _ROWS:
            self.fp8_rules.assumed(
                f"fp8: a linear of rows that are no multiple of {_ROWS}, which its kernels refuse, is in 16 bits"
            )
            return super().forward(input)
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self, torch.is_grad_enabled()
        )
        return product


def _convert(module: nn.Linear, rules: Rules, kernels: FakeKernels) -> None:
    module.__class__ = Float8Linear
    for name, tensors in (("forward", FORWARD_TENSORS), ("backward", BACKWARD_TENSORS)):
        _buffer(module, f"fp8_scale_{name}", (tensors,), kernels)
        _buffer(module, f"fp8_amax_history_{name}", (AMAX_HISTORY_LENGTH, tensors), kernels)
    module.fp8_rules = rules  # type: ignore[assignment]


def _buffer(module: nn.Module, name: str, shape: tuple[int, ...], kernels: FakeKernels) -> None:
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    module.register_buffer(name, kernels.empty(shape, strides, torch.float32), persistent=False)


@dataclass(slots=True)
class _Cast:
    """A matrix in fp8: as it is, transposed where products need that, and what it is divided by."""

    plain: torch.Tensor
    transposed: torch.Tensor | None
    inverse: torch.Tensor

    @property
    def columns(self) -> torch.Tensor:
        """What a product that sums over rows reads."""
        return self.plain if self.transposed is None else self.transposed


def _cast(
    matrix: torch.Tensor, scale: torch.Tensor, history: torch.Tensor, dtype: torch.dtype, *, both: bool
) -> _Cast:
    if not both:
        plain, inverse = torch.ops.preflop.fp8_cast(matrix, scale, history, dtype)
        return _Cast(plain, None, inverse)
    return _Cast(*torch.ops.preflop.fp8_cast_transpose(matrix, scale, history, dtype))


def _cast_with_bias(
    matrix: torch.Tensor, scale: torch.Tensor, history: torch.Tensor, dtype: torch.dtype, *, both: bool
) -> tuple[_Cast, torch.Tensor]:
    if not both:
        plain, inverse, bias = torch.ops.preflop.fp8_bias_cast(matrix, scale, history, dtype)
        return _Cast(plain, None, inverse), bias
    *parts, bias = torch.ops.preflop.fp8_bias_cast_transpose(matrix, scale, history, dtype)
    return _Cast(*parts), bias


class _Product(torch.autograd.Function):
    """One linear, forward and backward, as `_Linear` of Transformer Engine."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: Float8Linear,
        trains: bool,
    ) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        turned = trains and not linear.fp8_rules.any_layout
        rows = hidden.contiguous().view(-1, hidden.shape[-1])
        scale, history = linear.fp8_scale_forward, linear.fp8_amax_history_forward
        read = _cast(rows, scale, history, E4M3, both=turned and weight.requires_grad)
        matrix = _cast(weight, scale, history, E4M3, both=turned and hidden.requires_grad)
        # cuBLAS takes no fp32 bias for an fp8 product.
        added = None if bias is None else bias.to(torch.bfloat16 if dtype is torch.float32 else dtype)
        result = _multiply(read.plain, matrix.plain.t(), read.inverse, matrix.inverse, dtype, added)
        if trains:
            kept = read.columns if weight.requires_grad else None
            ctx.save_for_backward(kept, read.inverse, matrix.plain, matrix.transposed, matrix.inverse)
        ctx.linear, ctx.dtype, ctx.shape = linear, dtype, hidden.shape
        return result.view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, kept_inverse, weight, turned_weight, weight_inverse = ctx.saved_tensors
        linear, wide = ctx.linear, ctx.linear.fp8_rules.any_layout
        rows = gradient.contiguous().view(-1, gradient.shape[-1])
        scale, history = linear.fp8_scale_backward, linear.fp8_amax_history_backward
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        both = not wide and (of_weight or of_bias)
        for_bias = None
        if of_bias:
            read, for_bias = _cast_with_bias(rows, scale, history, E5M2, both=both)
        else:
            read = _cast(rows, scale, history, E5M2, both=both)
        for_input = for_weight = None
        if of_input:
            other = weight if turned_weight is None else turned_weight.t()
            for_input = _multiply(read.plain, other, read.inverse, weight_inverse, ctx.dtype).view(ctx.shape)
        if of_weight:
            left = read.plain.t() if read.transposed is None else read.transposed
            right = kept if wide else kept.t()
            for_weight = _multiply(left, right, read.inverse, kept_inverse, ctx.dtype)
        return for_input, for_weight, for_bias, None, None


def _multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    left_inverse: torch.Tensor,
    right_inverse: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch._scaled_mm(left, right, scale_a=left_inverse, scale_b=right_inverse, bias=bias, out_dtype=dtype)


# -- operators --------------------------------------------------------------------------------------


def _fp8_cast(matrix: torch.Tensor, scale: Any, history: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    del scale, history
    return torch.empty_like(matrix, dtype=dtype), matrix.new_empty(1, dtype=torch.float32)


def _fp8_cast_transpose(
    matrix: torch.Tensor, scale: Any, history: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    plain, inverse = _fp8_cast(matrix, scale, history, dtype)
    return plain, matrix.new_empty(matrix.shape[::-1], dtype=dtype), inverse


def _fp8_bias_cast(matrix: torch.Tensor, scale: Any, history: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return *_fp8_cast(matrix, scale, history, dtype), matrix.new_empty(matrix.shape[-1])


def _fp8_bias_cast_transpose(
    matrix: torch.Tensor, scale: Any, history: Any, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    return *_fp8_cast_transpose(matrix, scale, history, dtype), matrix.new_empty(matrix.shape[-1])


for _function, _results in (
    (_fp8_cast, 2), (_fp8_cast_transpose, 3), (_fp8_bias_cast, 3), (_fp8_bias_cast_transpose, 4),
):  # fmt: skip
    _name = f"preflop::{_function.__name__.lstrip('_')}"
    torch.library.define(
        _name,
        "(Tensor matrix, Tensor scale, Tensor(a!) amax_history, ScalarType dtype) -> "
        f"({', '.join(['Tensor'] * _results)})",
    )
    torch.library.register_fake(_name, _function)
