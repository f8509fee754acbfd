"""What CPU kernels that resize images allocate inside: dense copies, and where an interpolation looks.

Sources: aten/src/ATen/native/cpu/UpSampleKernel.cpp and UpSampleMoreKernel.cpp; MaxPoolKernel.cpp,
AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp.
"""

from __future__ import annotations

from preflop.ops.arguments import need
from preflop.ops.inner_copies import lies_channels_last
from preflop.ops.registry import workspace
from preflop.ops.workspace import contiguous_copy_bytes, thread_count
from preflop.strides import is_channels_last
from preflop.tape.events import Signature, TensorMeta
from preflop.units import DTYPE_BYTES

_SMALL_OUTPUT = 128
"""Height and width together up to which any image takes the kernel for channels last, and ..."""
_FEW_CHANNELS = 3
"""... channels up to which one that lies channels last does not (`_use_vectorized_kernel_cond_2d`). A picture
of just as many takes it in bilinear interpolation on one thread."""
_READS_PER_AXIS = {"nearest": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "bicubic": 4}


@workspace(
    *(f"aten.{kind}{rank}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    *(f"aten.upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
)
def interpolation(sig: Signature) -> int:
    """Input and result in channels last, where they do not lie so and that kernel runs.

    The other kernel has tables: along each axis, for each position of the result, what it reads (an index) and
    with which weight.
    """
    x, made = need(sig, 0, "input"), sig.outputs[0]
    kind = sig.op.removeprefix("aten.").lstrip("_").removeprefix("upsample_").rstrip("123d").removesuffix("_exact")
    if _runs_channels_last(kind, x, made):
        return sum(meta.bytes for meta in (x, made) if not lies_channels_last(meta))
    entry = DTYPE_BYTES["int64"] + x.itemsize
    return sum(made.shape[2:]) * _READS_PER_AXIS[kind] * entry


def _runs_channels_last(kind: str, x: TensorMeta, made: TensorMeta) -> bool:
    if len(x.shape) == 3 or kind == "bicubic":
        return False
    many = lies_channels_last(x) and x.shape[1] > _FEW_CHANNELS
    if len(x.shape) > 4:
        return many
    picture = kind == "bilinear" and thread_count() == 1 and x.shape[1] == _FEW_CHANNELS
    return many or picture or sum(made.shape[2:]) <= _SMALL_OUTPUT


@workspace(
    *(
        f"aten.{kind}{rank}d_backward"
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for rank in (1, 2, 3)
    ),
    *(f"aten.upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
)
def interpolation_backward(sig: Signature) -> int:
    """Both gradients in channels last, where the result's lies so and the kernel knows that layout; else
    contiguous."""
    gradient, made = need(sig, 0, "grad_output"), sig.outputs[0]
    if "bicubic" not in sig.op and len(made.shape) > 3 and lies_channels_last(gradient):
        return sum(meta.bytes for meta in (gradient, made) if not lies_channels_last(meta))
    return contiguous_copy_bytes(gradient) + contiguous_copy_bytes(made)


@workspace("aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten._adaptive_avg_pool2d")
def pooling(sig: Signature) -> int:
    """The input dense, in the memory format that is nearest."""
    x = need(sig, 0, "self")
    return _dense_bytes(x, x)


@workspace(
    "aten.max_pool2d_with_indices_backward", "aten.avg_pool2d_backward", "aten._adaptive_avg_pool2d_backward"
)
def pooling_backward(sig: Signature) -> int:
    """Both gradients and the indices of maxima dense, in the memory format nearest to the result's gradient."""
    gradient = need(sig, 0, "grad_output")
    indices = sig.inputs[2:] if sig.op == "aten.max_pool2d_with_indices_backward" else ()
    return sum(_dense_bytes(meta, gradient) for meta in (gradient, *indices, sig.outputs[0]))


def _dense_bytes(meta: TensorMeta, like: TensorMeta) -> int:
    """The copy of a tensor in the memory format that another's strides suggest, if it does not lie so."""
    if is_channels_last(like.shape, like.stride):
        return 0 if lies_channels_last(meta) else meta.bytes
    return contiguous_copy_bytes(meta)
