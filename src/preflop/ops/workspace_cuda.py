"""What CUDA kernels allocate inside themselves: bytes that never reach the dispatcher.

A rule gives the bytes alive at the kernel's own peak beyond its inputs and its fresh outputs, and states
which allocation it is and where the kernel makes it (paths are those of pytorch/pytorch). Rules of kernels
that PyTorch's own source contains are read from it; those of cuDNN, whose source is closed, are
assumptions and say so. cuBLAS's workspace is not here: it belongs to a handle, not to a call
(`hardware/allocator.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from preflop.ops.arguments import argument, need
from preflop.ops.registry import workspace_cuda
from preflop.tape.events import Signature, TensorMeta
from preflop.units import DTYPE_BYTES

_FLOAT = DTYPE_BYTES["float32"]
_INDEX = DTYPE_BYTES["int64"]
_HALF_BYTES = 2


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _contiguous(meta: TensorMeta) -> bool:
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != expected:
                return meta.elements == 0
            expected *= size
    return True


def _copy_bytes(meta: TensorMeta | None) -> int:
    """Bytes of `.contiguous()`: none where it is."""
    return 0 if meta is None or _contiguous(meta) else meta.bytes


def _sequence_first_copy_bytes(meta: TensorMeta) -> int:
    """Bytes of `x.transpose(1, 2).contiguous()` of a (batch, heads, sequence, width) tensor."""
    order = (0, 2, 1, 3)
    return _copy_bytes(
        TensorMeta(
            tuple(meta.shape[axis] for axis in order),
            tuple(meta.stride[axis] for axis in order),
            0,
            meta.dtype,
        )
    )


# -------------------------------------------------------------------------------------- attention

# flash_api.cpp, `mha_bwd`: sequences round up to 128, widths to 32 (to 64 above 128).
_FLASH_SEQUENCE, _FLASH_WIDTH, _FLASH_WIDE_WIDTH, _FLASH_WIDE_FROM = 128, 32, 64, 128


@workspace_cuda("aten._scaled_dot_product_flash_attention_backward")
def flash_attention_backward(sig: Signature) -> int:
    """dQ accumulated in fp32, the row sums of dO * O, and for grouped heads dK and dV per query head.

    Both rounded up to the kernel's blocks. dO and O are first made contiguous as (B, S, H, D).
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `dq_accum`,
    `softmax_d`, `dk_expanded`, `dv_expanded`; attention_backward.cu, `_flash_attention_backward`.
    """
    gradient, query, key, out = (need(sig, at, name) for at, name in _FLASH_BACKWARD)
    batch, heads, length, width = query.shape
    rows = _rounded(length, _FLASH_SEQUENCE)
    columns = _rounded(width, _FLASH_WIDTH if width <= _FLASH_WIDE_FROM else _FLASH_WIDE_WIDTH)
    sums = batch * heads * rows * _FLOAT
    accumulated = batch * rows * heads * columns * _FLOAT
    copies = _sequence_first_copy_bytes(gradient) + _sequence_first_copy_bytes(out)
    return sums + accumulated + _expanded_bytes(query, key) + copies


_FLASH_BACKWARD = ((0, "grad_out"), (1, "query"), (2, "key"), (4, "out"))


def _expanded_bytes(query: TensorMeta, key: TensorMeta) -> int:
    """Gradients of keys and values with as many heads as the queries, where those have more."""
    if query.shape[1] == key.shape[1]:
        return 0
    return 2 * query.shape[0] * query.shape[1] * key.shape[2] * query.shape[3] * query.itemsize


# kernel_forward.h: the widest value head for which one block keeps the output in registers.
_EFFICIENT_IN_REGISTERS = 128


@workspace_cuda("aten._scaled_dot_product_efficient_attention")
def efficient_attention(sig: Signature) -> int:
    """An fp32 copy of the output, for 16-bit values wider than 128.

    Source: native/transformers/cuda/attention.cu, `_efficient_attention_forward`:
    `Kernel::kNeedsOutputAccumulatorBuffer`.
    """
    query, value = need(sig, 0, "query"), need(sig, 2, "value")
    width = value.shape[3]
    if value.itemsize != _HALF_BYTES or width <= _EFFICIENT_IN_REGISTERS:
        return 0
    return prod(query.shape[:3]) * width * _FLOAT


# kernel_backward.h: the kernels work in blocks of at least so many queries, keys and columns.
_EFFICIENT_BLOCK = 64


@workspace_cuda("aten._scaled_dot_product_efficient_attention_backward")
def efficient_attention_backward(sig: Signature) -> int:
    """16-bit: gradients accumulated in fp32 (dQ; dK and dV too for heads wider than 128) and row sums.

    fp32 accumulates in place, but its row sums come from a product of dO and O of their size. dO is first
    made contiguous as (B, S, H, D). Blocks of 64 are assumed (some kernels take 128).
    Source: attention_backward.cu, `_efficient_attention_backward`: `delta`, `workspace`;
    mem_eff_attention/kernel_backward.h: `kNeedsAccumGradQ/K/V`, `workspace_elements_*`.
    """
    gradient, query, key, value = (need(sig, at, name) for at, name in _EFFICIENT_BACKWARD)
    batch, heads, length, width = query.shape
    copy = _sequence_first_copy_bytes(gradient)
    sums = batch * heads * length * _FLOAT
    if query.itemsize != _HALF_BYTES:
        return copy + gradient.elements * _FLOAT + sums
    block = _EFFICIENT_BLOCK
    elements = _rounded(length, block) * _rounded(width, block)
    if max(width, value.shape[3]) > _EFFICIENT_IN_REGISTERS:
        keys = _rounded(key.shape[2], block)
        elements += keys * (_rounded(width, block) + _rounded(value.shape[3], block))
    return copy + sums + batch * heads * elements * _FLOAT


_EFFICIENT_BACKWARD = ((0, "grad_out_"), (1, "query"), (2, "key"), (3, "value"))


@workspace_cuda("aten._scaled_dot_product_cudnn_attention_backward")
def cudnn_attention_backward(sig: Signature) -> int:
    """Assumed: dQ in fp32, row sums, and dK, dV per query head, as every published algorithm takes.

    cuDNN asks for one workspace and does not say what for. dO is copied where it lies otherwise than O.
    Source: native/cudnn/MHA.cpp, `run_cudnn_SDP_bprop` (`workspace_size`, `permute_to_matching_layout`).
    """
    gradient, query, key, out = (need(sig, at, name) for at, name in _FLASH_BACKWARD)
    batch, heads, length, _ = query.shape
    copy = 0 if gradient.stride == out.stride else gradient.bytes
    return copy + query.elements * _FLOAT + batch * heads * length * _FLOAT + _expanded_bytes(query, key)


# ------------------------------------------------------------------------------------------ matmul


@workspace_cuda("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
def matmul(sig: Signature) -> int:
    """A copy of every matrix that BLAS cannot read as it lies (neither rows nor columns dense).

    Source: aten/src/ATen/native/cuda/Blas.cpp, `prepare_matrix_for_cublas` and
    `prepare_batch_matrix_for_cublas`.
    """
    added = 1 if sig.op in ("aten.addmm", "aten.baddbmm") else 0
    return sum(0 if _blas_reads(meta) else meta.bytes for meta in sig.inputs[added : added + 2])


def _blas_reads(meta: TensorMeta) -> bool:
    """Whether one of the last two dimensions is dense and the other at least as far apart.

    >>> _blas_reads(TensorMeta((4, 8), (0, 0), 0, "float32"))
    False
    """
    (rows, columns), (down, across) = meta.shape[-2:], meta.stride[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


# ----------------------------------------------------------------------------- norms and embeddings


@workspace_cuda(
    "aten.native_layer_norm", "aten._fused_rms_norm", "aten.native_group_norm", "aten._softmax",
    "aten._log_softmax",
)  # fmt: skip
def norm(sig: Signature) -> int:
    """A contiguous copy of the input, where it is not.

    Source: native/cuda/layer_norm_kernel.cu, `layer_norm_cuda`: `input.expect_contiguous()`; SoftMax.cu,
    `host_softmax`: `input_.contiguous()`.
    """
    return _copy_bytes(need(sig, 0, "input"))


@workspace_cuda(
    "aten.native_layer_norm_backward", "aten._fused_rms_norm_backward", "aten._softmax_backward_data",
    "aten._log_softmax_backward_data",
)  # fmt: skip
def norm_backward(sig: Signature) -> int:
    """Contiguous copies of dY and X (of a softmax: of its result), where they are not.

    Left out: partial sums of the weight's gradient for very many rows.
    Source: native/cuda/layer_norm_kernel.cu, `layer_norm_backward_cuda`; SoftMax.cu, `host_softmax_backward`.
    """
    return _copy_bytes(need(sig, 0, "grad_out")) + _copy_bytes(need(sig, 1, "input"))


# EmbeddingBackwardKernel.cu: one partial sum per so many equal indices (NROWS_PER_THREAD).
_ROWS_PER_PARTIAL = 10
# Embedding.cu, `embedding_dense_backward_cuda`: up to so many indices one kernel needs no scratch.
_FEW_INDICES = 3072
# Sorted indices, their order, cub's alternates of both, and offsets of segments.
_INDEX_ARRAYS = 5


@workspace_cuda("aten.embedding_dense_backward")
def embedding_dense_backward(sig: Signature) -> int:
    """Sorted indices and, in fp32, one partial sum per distinct index and per ten equal ones.

    Indices are taken as distinct where there are enough rows, which is the most that can be.
    Source: native/cuda/Embedding.cu, `embedding_dense_backward_cuda`; EmbeddingBackwardKernel.cu,
    `embedding_backward_cuda_kernel`: `grad_weight_per_segment`.
    """
    gradient, indices = need(sig, 0, "grad_output"), need(sig, 1, "indices")
    rows = int(argument(sig, 2, "num_weights"))
    copies = _copy_bytes(gradient)
    count = indices.elements
    if count <= _FEW_INDICES and (argument(sig, 3, "padding_idx", -1) or -1) < 0:
        return copies
    partials = min(count, rows + count // _ROWS_PER_PARTIAL)
    return copies + _INDEX_ARRAYS * count * _INDEX + partials * gradient.shape[-1] * _FLOAT


@workspace_cuda("aten._index_put_impl_", "aten.index_put_", "aten.index_put")
def index_put(sig: Signature) -> int:
    """With accumulation: linear indices, sorted ones, their order, and cub's alternates of both.

    Source: native/cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    if argument(sig, 3, "accumulate", False) is not True:
        return 0
    places = [meta for meta in sig.inputs[1:] if meta.dtype in ("int64", "int32")]
    return _INDEX_ARRAYS * max((meta.elements for meta in places), default=0) * _INDEX


# ------------------------------------------------------------------------------------- convolution


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of a workspace that nobody documents: what is assumed, and between what."""

    lower: int
    assumed: int
    upper: int


def convolution_bounds(sig: Signature) -> Bounds:
    """cuDNN's workspace for one convolution: nothing at least; copies of all operands at most.

    Tensor-core kernels read channels-last. Channels-first operands in 16 bits are transposed into the
    workspace and back (profiles show `nchwToNhwc` and `nhwcToNchw`), so there the copies are assumed;
    otherwise, and for fp32, whose kernels read both layouts, nothing is. Transposing is the largest use
    that is known; FFT and Winograd kernels, which want more, are no longer chosen for common shapes.
    """
    operands = [meta for meta in (*sig.inputs, *sig.outputs) if len(meta.shape) >= 3]
    copies = sum(meta.bytes for meta in operands)
    transposes = all(
        meta.itemsize == _HALF_BYTES and (_contiguous(meta) or len(meta.shape) == 3) for meta in operands
    )
    return Bounds(0, copies if transposes and operands else 0, copies)


@workspace_cuda("aten.convolution", "aten.convolution_backward")
def convolution(sig: Signature) -> int:
    """Assumed: see `convolution_bounds`."""
    return convolution_bounds(sig).assumed


# --------------------------------------------------------------------------------------- optimizer


@workspace_cuda("aten._foreach_norm")
def foreach_norm(sig: Signature) -> int:
    """Partial norms of every chunk of 65536 elements, per tensor as many as the longest has.

    Source: native/cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`: `output_per_tensor`.
    """
    if not sig.inputs:
        return 0
    chunks = -(-max(meta.elements for meta in sig.inputs) // 65536)
    return len(sig.inputs) * chunks * _FLOAT


# --------------------------------------------------------------------------------------- recurrent


@workspace_cuda("aten._cudnn_rnn")
def recurrent(sig: Signature) -> int:
    """A time-first copy of batch-first input. Left out: cuDNN's own workspace, which it does not describe.

    Source: native/cudnn/RNN.cpp, `_cudnn_rnn`: `input.transpose(0, 1)` and `x = input.contiguous()`.
    """
    x = need(sig, 0, "input")
    return x.bytes if argument(sig, 10, "batch_first") is True else 0


@workspace_cuda("aten._cudnn_rnn_backward")
def recurrent_backward(sig: Signature) -> int:
    """Time-first copies of batch-first input, output and the output's gradient.

    Source: native/cudnn/RNN.cpp, `_cudnn_rnn_backward_input` and `_cudnn_rnn_backward_weight`.
    """
    if argument(sig, 13, "batch_first") is not True:
        return 0
    return need(sig, 0, "input").bytes + 2 * need(sig, 6, "output").bytes
