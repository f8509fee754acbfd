"""Which attention kernel CUDA gives a call of scaled_dot_product_attention, and recording that kernel.

The choice is torch's own, restated: `select_sdp_backend` of
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp with the checks shared by all devices in
native/transformers/sdp_utils_cpp.h. The call is then answered with the operator that CUDA would run, so
that what it saves (log-sum-exp, seeds, padded heads) and its backward are CUDA's.

For as long as the recording runs, a kernel under AutogradCPU stands where torch would choose a CPU
kernel. It is below autocast, so its inputs are cast already, and above autograd, so that backward is
recorded; it is reached from wherever the function was imported, and from nn.MultiheadAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch._subclasses.fake_tensor import FakeTensor

from preflop.record.target_kernels import composite

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


class Backend(str, Enum):
    """The kernels torch chooses from."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    CUDNN = "cuDNN"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class Enabled:
    """Which kernels the user left enabled (torch.backends.cuda, torch.nn.attention.sdpa_kernel)."""

    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    math: bool = True

    @classmethod
    def now(cls) -> Enabled:
        """As torch has them now."""
        cuda = torch.backends.cuda
        return cls(
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What the choice depends on (`sdp_params`), with shapes (batch, heads, sequence, width)."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    capability: tuple[int, int]
    mask: tuple[int, ...] | None = None
    """Shape of the mask, if there is one."""
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    """`enable_gqa`."""
    gradient: bool = True
    """Whether an input needs a gradient."""
    mask_gradient: bool = False
    strides_last: tuple[int, int, int] = (1, 1, 1)
    """Strides of the last dimension of query, key and value."""


# sdp_utils.cpp, check_flash_attention_hardware_support and its likes.
_FLASH_FROM, _EFFICIENT_FROM, _CUDNN_FROM, _TO = (8, 0), (5, 0), (8, 0), (12, 1)
# check_head_dim_size_flash.
_FLASH_WIDEST = 256
# check_cudnn_tensor_shapes: wider heads need a cuDNN (9.22) newer than torch 2.13's wheels bring.
_CUDNN_WIDEST = 128
_CUDNN_WIDEST_PAIR = (192, 128)
# check_cudnn_dropout: probabilities are multiples of this.
_CUDNN_DROPOUT_STEP = 1 / 16


def choose(question: Question, enabled: Enabled | None = None) -> Backend:
    """The kernel that CUDA takes: the first in its order whose conditions hold.

    >>> bf16 = dict(dtype=torch.bfloat16, causal=True)
    >>> heads = dict.fromkeys(("query", "key", "value"), (8, 16, 1024, 64))
    >>> choose(Question(**heads, **bf16, capability=(8, 0))).value       # A100
    'flash'
    >>> choose(Question(**heads, **bf16, capability=(9, 0))).value       # H100
    'cuDNN'
    >>> choose(Question(**heads, dtype=torch.float32, capability=(8, 0))).value
    'memory-efficient'

    Raises:
        RuntimeError: no kernel that is enabled can take the call, in torch's words.

    Assumes the cuDNN that torch's CUDA wheels bring (9.15.1 or newer), no
    TORCH_CUDNN_SDPA_DEPRIORITIZED in the environment, and no deterministic algorithms.
    Source: `select_sdp_backend` and `priority_order`.
    """
    enabled = enabled or Enabled()
    can: dict[Backend, Callable[[Question], bool]] = {
        Backend.FLASH: lambda q: enabled.flash and _can_flash(q),
        Backend.EFFICIENT: lambda q: enabled.efficient and _can_efficient(q),
        Backend.CUDNN: lambda q: enabled.cudnn and _can_cudnn(q),
        Backend.MATH: lambda q: enabled.math,
    }
    order = [Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN]
    if _prefers_cudnn(question.capability):
        order = [Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    for backend in order:
        if can[backend](question):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    """`check_prefer_cudnn_attention`: data-centre Hopper and Blackwell, from torch 2.9 on."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9):
        return False
    return capability[0] in (9, 10)


def _can_flash(q: Question) -> bool:
    widths = {q.query[-1], q.key[-1], q.value[-1]}
    return (
        _common(q)
        and q.mask is None
        and len(widths) == 1
        and q.query[-1] <= _FLASH_WIDEST
        and _FLASH_FROM <= q.capability <= _TO
        and not _flash_backward_too_wide(q)
        and (not q.causal or q.query[-2] == q.key[-2])
        and q.dtype in HALF
        and _heads_fit(q, grouped=True)
        and _last_dense(q, ignore_single=True)
    )


def _flash_backward_too_wide(q: Question) -> bool:
    """`check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`."""
    small = (8, 6) <= q.capability <= (8, 9) or (12, 0) <= q.capability <= (12, 1)
    width = q.query[-1]
    return q.gradient and small and not (width <= 192 or (q.dropout == 0 and width > 224))


def _can_efficient(q: Question) -> bool:
    alignment = _gemm_alignment(q)
    dtypes = (torch.float16, torch.float32) + ((torch.bfloat16,) if q.capability >= (8, 0) else ())
    return (
        _common(q)
        and _EFFICIENT_FROM <= q.capability <= _TO
        and q.query[-1] == q.key[-1]
        and q.query[-1] % alignment == 0
        and q.value[-1] % alignment == 0
        and _heads_fit(q, grouped=_efficient_takes_groups())
        and _last_dense(q, ignore_single=False)
        and q.dtype in dtypes
    )


def _efficient_takes_groups() -> bool:
    """Grouped heads came to the memory-efficient kernel with torch 2.14 (`supports_gqa`)."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def _gemm_alignment(q: Question) -> int:
    """`minimum_gemm_alignment`: elements of 16 bytes on tensor cores."""
    half = q.dtype in HALF
    at_least = 4 if q.capability[0] >= 8 else 1
    if q.capability[0] >= 8 or (q.capability[0] == 7 and half):
        return max(at_least, 128 // (16 if half else 32))
    return at_least


def _can_cudnn(q: Question) -> bool:
    dtypes = HALF if q.capability[0] >= 8 else (torch.float16,)
    width, width_v = q.query[-1], q.value[-1]
    pair = (width, width_v) == _CUDNN_WIDEST_PAIR and q.capability[0] in (9, 10)
    return (
        _common(q)
        and not q.mask_gradient
        and q.dtype in dtypes
        and _CUDNN_FROM <= q.capability <= _TO
        and (q.dropout / _CUDNN_DROPOUT_STEP).is_integer()
        and (pair or max(width, width_v) <= _CUDNN_WIDEST)
        and width % 8 == 0
        and width_v % 8 == 0
        and q.key[-2] != 1
        and (q.dropout == 0 or q.query[-2] != 1)
        and _heads_fit(q, grouped=True)
        and _last_dense(q, ignore_single=True)
    )


def _common(q: Question) -> bool:
    """`check_tensor_shapes` and `check_nonzero_sequence_lengths_dense`."""
    four = len(q.query) == len(q.key) == len(q.value) == 4
    return four and 0 not in (q.query[-2], q.key[-2], q.value[-2])


def _heads_fit(q: Question, *, grouped: bool) -> bool:
    """`check_batch_size_and_num_heads_dense`: the same batch, and the same heads or whole groups."""
    if not q.query[0] == q.key[0] == q.value[0]:
        return False
    heads, keys, values = q.query[1], q.key[1], q.value[1]
    if grouped and q.grouped:
        return keys == values and heads % keys == 0
    return heads == keys == values


def _last_dense(q: Question, *, ignore_single: bool) -> bool:
    shapes = (q.query, q.key, q.value)
    return all(
        stride == 1 or (ignore_single and shape[-1] == 1)
        for stride, shape in zip(q.strides_last, shapes, strict=True)
    )


# ------------------------------------------------------------------------------------- the kernel


def install(
    library: torch.library.Library, capability: tuple[int, int], assumed: Callable[[str], None]
) -> None:
    """Answer scaled_dot_product_attention with the target's kernel for as long as `library` lives."""
    original = aten.scaled_dot_product_attention.default

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not any(isinstance(tensor, FakeTensor) for tensor in (query, key, value)):
            return composite(  # type: ignore[no-any-return]
                original,
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        backend = choose(call.question(capability), Enabled.now())
        assumed(f"attention runs as CUDA's {backend.value} kernel, as torch would choose it.")
        return call.run(backend)

    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of scaled_dot_product_attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def question(self, capability: tuple[int, int]) -> Question:
        gradients = torch.is_grad_enabled()
        query, key, value = (tuple(tensor.shape) for tensor in self._tensors)
        return Question(
            query,
            key,
            value,
            dtype=self.query.dtype,
            capability=capability,
            mask=None if self.mask is None else tuple(self.mask.shape),
            dropout=self.dropout,
            causal=self.causal,
            grouped=self.grouped,
            gradient=self._needs_gradient(),
            mask_gradient=gradients and self.mask is not None and self.mask.requires_grad,
            strides_last=tuple(tensor.stride(-1) for tensor in self._tensors),  # type: ignore[arg-type]
        )

    def _needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._tensors)

    def run(self, backend: Backend) -> torch.Tensor:
        """The call as attention.cpp's `scaled_dot_product_attention` makes it for that kernel."""
        if backend is Backend.FLASH:
            return self._flash()
        mask = _additive(self.mask, self.query.dtype)
        if backend is Backend.CUDNN:
            keep = self._needs_gradient()
            return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
                *self._tensors, mask, keep, self.dropout, self.causal, False, scale=self.scale
            )[0]
        if backend is Backend.EFFICIENT:
            if mask is not None:
                mask = _aligned(mask, self.query, self.key)
            return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
                *self._tensors, mask, self._needs_gradient(), self.dropout, self.causal, scale=self.scale
            )[0]
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            *self._tensors, mask, self.dropout, self.causal, None, scale=self.scale, enable_gqa=self.grouped
        )[0]

    def _flash(self) -> torch.Tensor:
        """Heads are padded to multiples of 8 before the call, so that the padded copies are what is
        saved (`pad_last_dim<8>`); the result is cut back, which is a view."""
        width = self.query.shape[-1]
        scale = width**-0.5 if self.scale is None else self.scale
        padded = [_padded(tensor, 8) for tensor in self._tensors]
        result = aten._scaled_dot_product_flash_attention(
            *padded, self.dropout, self.causal, False, scale=scale
        )[0]
        return result if result.shape[-1] == width else result[..., :width]


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as zeros and minus infinities of the query's dtype (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype))


# attention.cpp, `preprocess_mask`: rows of the bias start at multiples of 16 elements.
_MASK_ALIGNMENT = 16


def _aligned(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask with rows padded in memory where they are not aligned, expanded to the scores' shape."""
    *outer, last = mask.stride()
    misplaced = last != 1 or any(step % _MASK_ALIGNMENT for step in outer)
    if misplaced or mask.shape[-1] % _MASK_ALIGNMENT:
        missing = _MASK_ALIGNMENT - mask.shape[-1] % _MASK_ALIGNMENT
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
