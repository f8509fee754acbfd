"""CUDA's autocast policy, applied to the fake CPU tensors of a recording.

Autocast decides per operator which of its inputs are cast, and CUDA decides differently from the CPU:
softmax, sums, powers and norms run in fp32 there, `cat` and many losses of the CPU's lists do not. The
tables are those of ATen/autocast_mode.h (AT_FORALL_*), which every torch installs; a test holds them to
the installed one.

How: each operator gets a kernel under the key AutocastCPU for as long as the recording runs, which casts
as CUDA would and calls on with that key excluded. Operators that both devices run in lower precision keep
torch's own kernel, and every other cast to lower precision goes through torch's own `cached_cast` too
(see `_Caster`), so that a weight is cast once per autocast region and its copy dies when the region ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from preflop.record import target_recurrent
from preflop.record.target_kernels import composite

Kernel = Callable[..., Any]

AUTOCAST = "AutocastCPU"


class Policy(str, Enum):
    """What autocast does with an operator's inputs (`CastPolicy` in autocast_mode.h)."""

    LOWER_PRECISION = "lower_precision_fp"
    FP32 = "fp32"
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Inputs stay; the operator is told to compute in fp32, unless it was told a dtype."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """The same, by calling the overload that takes a dtype."""
    PROMOTE = "promote"
    """All inputs to the widest dtype among them."""
    BANNED = "banned"
    """Raises: the operator is unsafe to autocast."""


# ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP.
_LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
# AT_FORALL_FP32.
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
# AT_FORALL_FP32_SET_OPT_DTYPE.
_FP32_SET_OPT_DTYPE = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: the overload called, and the one called instead.
_FP32_APPEND_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
# AT_FORALL_PROMOTE.
_PROMOTE = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
# Not in the header: aten/src/ATen/autocast_mode.cpp, TORCH_LIBRARY_IMPL(aten, Autocast), registers these
# three for CUDA alone. The cuDNN ones are never called on a CPU and need no kernel here.
_CUDA_ONLY_BANNED = "binary_cross_entropy"
CUDA_ONLY_UNUSED = frozenset({"cudnn_convolution", "cudnn_convolution_transpose"})

CUDA_POLICY: dict[str, Policy] = {
    **dict.fromkeys(_LOWER_PRECISION.split(), Policy.LOWER_PRECISION),
    **dict.fromkeys(_FP32.split(), Policy.FP32),
    **dict.fromkeys(_FP32_SET_OPT_DTYPE.split(), Policy.FP32_SET_OPT_DTYPE),
    **dict.fromkeys(_FP32_APPEND_DTYPE, Policy.FP32_APPEND_DTYPE),
    **dict.fromkeys(_PROMOTE.split(), Policy.PROMOTE),
    _CUDA_ONLY_BANNED: Policy.BANNED,
}
"""Operator ("name" or "name.overload") -> what autocast on CUDA does with it."""

# Operators whose CPU kernel is torch's own lower_precision_fp: autocast_mode.cpp, "lower_precision_fp
# cast policy" of TORCH_LIBRARY_IMPL(aten, AutocastCPU). They are left alone.
_SAME_ON_CPU = frozenset(
    """
    _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
    scaled_dot_product_attention
    """.split()
)
# From autocast_mode.cpp, the text of the CUDA kernel that refuses.
_BANNED_TEXT = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer. In this case, combine the "
    "two layers using torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss."
)


def install(library: torch.library.Library) -> None:
    """Give `library` (of namespace "aten") the kernels of CUDA's policy, under AutocastCPU.

    They hold until the library is destroyed. Operators that this torch does not have are left out, and
    those that only the CPU casts are passed through.
    """
    caster = _Caster(library)
    ours = {name for name in CUDA_POLICY if _overload(name) is not None}
    for name in sorted(ours - _SAME_ON_CPU):
        library.impl(name, _kernel(name, CUDA_POLICY[name], caster), AUTOCAST)
    for name in sorted(_cpu_names() - ours):
        library.impl(name, torch.library.fallthrough_kernel, AUTOCAST)
    target_recurrent.install_autocast(library, caster.lower, _excluded)


@contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Inside, `torch.autocast("cuda")`, which a model may enter or leave by itself, acts on the CPU tensors
    that stand for CUDA's; without a GPU torch would ignore it."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def _cpu_names() -> set[str]:
    """Operators that the CPU's autocast casts, as "name.overload" in namespace aten."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST)
    return {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}


def _overload(name: str) -> Any:
    """torch's operator of that name, or None where this torch has none."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return None if found is None else getattr(found, overload or "default", None)


@contextmanager
def _excluded() -> Iterator[None]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


class _Caster:
    """Casts tensors, to lower precision by torch's own `cached_cast`.

    That function cannot be called from Python, but torch's kernel of an operator whose inputs it casts
    can: `prelu`, with integers (which are never cast) as its other input. What that kernel calls on with
    is caught under AutogradCPU and handed back.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self._caught: list[torch.Tensor] | None = None
        self._prelu = torch.ops.aten.prelu.default
        self._never_cast = torch.zeros(1, dtype=torch.int64)
        library.impl("prelu", self._catch, "AutogradCPU")

    def _catch(self, tensor: torch.Tensor, weight: torch.Tensor) -> Any:
        if self._caught is None:
            return composite(self._prelu, tensor, weight)
        self._caught.append(tensor)
        return tensor

    def lower(self, value: Any) -> Any:
        """A tensor (or list of them) in autocast's dtype, its copy shared within the region."""
        if isinstance(value, (list, tuple)):
            return [self.lower(item) for item in value]
        if not _eligible(value):
            return value
        self._caught = []
        try:
            self._prelu(value, self._never_cast)
            return self._caught[0]
        finally:
            self._caught = None

    def to(self, dtype: torch.dtype, value: Any) -> Any:
        """The same in any dtype (only the lower precision is cached, as in torch)."""
        if dtype == torch.get_autocast_dtype("cpu"):
            return self.lower(value)
        if isinstance(value, (list, tuple)):
            return [self.to(dtype, item) for item in value]
        return value.to(dtype) if _eligible(value) and value.dtype != dtype else value


def _eligible(value: Any) -> bool:
    """`is_eligible` of autocast_mode.h: a floating tensor that is not float64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def _kernel(name: str, policy: Policy, caster: _Caster) -> Kernel:
    op = _overload(name)
    if policy is Policy.LOWER_PRECISION:
        return _casting(op, caster.lower)
    if policy is Policy.FP32:
        return _casting(op, lambda value: caster.to(torch.float32, value))
    if policy is Policy.FP32_SET_OPT_DTYPE:
        return _setting_dtype(op)
    if policy is Policy.FP32_APPEND_DTYPE:
        return _appending_dtype(getattr(op.overloadpacket, _FP32_APPEND_DTYPE[name]))
    if policy is Policy.PROMOTE:
        return _promoting(op, caster)
    return _refusing


def _casting(op: Any, cast: Callable[[Any], Any]) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        new = tuple(cast(arg) if _holds_tensors(arg) else arg for arg in args)
        named = {key: cast(value) if _holds_tensors(value) else value for key, value in kwargs.items()}
        with _excluded():
            return op(*new, **named)

    return kernel


def _setting_dtype(op: Any) -> Kernel:
    arguments = op._schema.arguments
    place = next(i for i, argument in enumerate(arguments) if argument.name == "dtype")
    by_name = arguments[place].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if by_name or place >= len(args) else args[place]
        if given is None and _eligible(args[0]):
            args = args if by_name else args[:place]
            kwargs = {**kwargs, "dtype": torch.float32}
        with _excluded():
            return op(*args, **kwargs)

    return kernel


def _appending_dtype(typed: Any) -> Kernel:
    defaults = [argument.default_value for argument in typed._schema.arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The overload without a dtype has defaults where the other has none.
        args = (*args, *(2 if i == 1 else False for i in range(len(args), len(defaults))))
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        with _excluded():
            return typed(*args, **kwargs, dtype=dtype)

    return kernel


def _promoting(op: Any, caster: _Caster) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("cpu")
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        for item in flat:
            if _eligible(item) and item.dtype == torch.float32:
                widest = torch.float32
        cast = _casting(op, lambda value: caster.to(widest, value))
        return cast(*args, **kwargs)

    return kernel


def _refusing(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_BANNED_TEXT)
