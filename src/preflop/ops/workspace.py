"""What CPU kernels allocate inside themselves: bytes that never reach the dispatcher.

A rule gives the bytes alive at the kernel's own peak beyond its inputs and its fresh outputs. Each
states which allocation it is and where the kernel makes it (paths are those of pytorch/pytorch), and
`tests/zoo/test_workspace.py` holds it to what torch's profiler sees on real tensors.

Some kernels take scratch once per thread: `threads(n)` says how many there are. Rules of kernels that
ask oneDNN are in `workspace_onednn.py` and `workspace_lstm.py`. Wrapped numbers (a Python 2 in `x * 2` is
a tensor of 8 bytes) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from preflop.ops.arguments import argument, need, tensor
from preflop.ops.registry import workspace
from preflop.tape.events import Signature, SubjectInfo, TensorMeta
from preflop.units import AVX512_BYTES, DTYPE_BYTES

_THREADS: ContextVar[int] = ContextVar("threads", default=1)
_VECTOR_BYTES: ContextVar[int] = ContextVar("vector_bytes", default=AVX512_BYTES)


def thread_count() -> int:
    """Threads that the rules assume (`torch.get_num_threads()` of the machine that runs the step)."""
    return _THREADS.get()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Price what is inside for that many threads.

    >>> with threads(4):
    ...     thread_count()
    4
    """
    token = _THREADS.set(count)
    try:
        yield
    finally:
        _THREADS.reset(token)


def vector_bytes() -> int:
    """Width of a vector register that the rules assume: 64 (AVX-512) or 32 (AVX2)."""
    return _VECTOR_BYTES.get()


@contextmanager
def vectors(width_bytes: int) -> Iterator[None]:
    """Price what is inside for vector registers of that width.

    >>> with vectors(32):
    ...     vector_bytes()
    32
    """
    token = _VECTOR_BYTES.set(width_bytes)
    try:
        yield
    finally:
        _VECTOR_BYTES.reset(token)


@contextmanager
def recorded_by(subject: SubjectInfo | None) -> Iterator[None]:
    """Price what is inside for the CPU that recorded a tape; for one thread where the tape does not say."""
    with threads(subject.cpu_threads if subject is not None else 1):
        with vectors(subject.cpu_vector_bytes if subject is not None else vector_bytes()):
            yield


def is_contiguous(meta: TensorMeta) -> bool:
    """Whether the tensor lies in row-major order without gaps (dimensions of size 1 do not matter).

    >>> is_contiguous(TensorMeta((2, 1, 3), (3, 99, 1), 0, "float32"))
    True
    """
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != expected:
                return meta.elements == 0
            expected *= size
    return True


def contiguous_copy_bytes(meta: TensorMeta | None) -> int:
    """Bytes of the copy that `.contiguous()` makes inside a kernel: none if it is contiguous."""
    return 0 if meta is None or is_contiguous(meta) else meta.bytes


# ------------------------------------------------------------------------------- element by element

_FLOAT_RANK = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3, "complex64": 4, "complex128": 5}


def _common_dtype(metas: tuple[TensorMeta, ...]) -> str | None:
    """The floating dtype in which a TensorIterator computes, None for integers (no rule then)."""
    ranked = [meta for meta in metas if meta.shape] or list(metas)
    floats = [meta.dtype for meta in ranked if meta.dtype in _FLOAT_RANK]
    if not floats:
        return None
    if {"float16", "bfloat16"} <= set(floats):
        return "float32"
    return max(floats, key=lambda name: _FLOAT_RANK[name])


@workspace(
    *(
        f"aten.{name}{end}"
        for name in ("add", "sub", "mul", "div", "rsub", "pow", "lerp")
        for end in ("", "_")
    ),
    *(f"aten.{name}" for name in ("maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "copysign")),
    *(f"aten.addc{name}{end}" for name in ("mul", "div") for end in ("", "_")),
    *(f"aten.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)
def promoted_operands(sig: Signature) -> int:
    """Operands of another dtype are first copied to the common one, all alive at once.

    An in-place call whose own tensor is narrower has its result in the common dtype besides.
    Source: aten/src/ATen/TensorIterator.cpp, `compute_types` (CPU: "cast_common_dtype_to_outputs" and
    "promote_inputs_to_common_dtype").
    """
    common = _common_dtype(sig.inputs)
    if common is None:
        return 0
    copied = [meta for meta in sig.inputs if meta.dtype != common and meta.shape]
    if sig.op.endswith("_") and sig.inputs[0] in copied:
        copied.append(sig.inputs[0])
    return sum(meta.elements for meta in copied) * DTYPE_BYTES[common]


@workspace("aten.mse_loss", "aten.smooth_l1_loss")
def squared_error(sig: Signature) -> int:
    """With a reduction, the squared differences are a temporary beside the (same-sized) result buffer.

    Source: aten/src/ATen/native/Loss.cpp, `mse_loss_out`. The result's storage keeps the size of the
    unreduced loss, which the tape sees by itself.
    """
    whole = max(meta.elements for meta in sig.inputs) * sig.outputs[0].itemsize
    return whole if argument(sig, 2, "reduction", 1) else 0


@workspace("aten.binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(sig: Signature) -> int:
    """log sigmoid of the logits, its buffer and the product, beside the reduced result: two at once.

    Source: aten/src/ATen/native/Loss.cpp, `binary_cross_entropy_with_logits`.
    """
    logits = need(sig, 0, "self")
    return 2 * logits.bytes if argument(sig, 4, "reduction", 1) else logits.bytes


@workspace("aten.mean")
def mean(sig: Signature) -> int:
    """A 16-bit input is summed in fp32: a copy of it and an fp32 sum, where a dimension is reduced.

    Source: aten/src/ATen/native/ReduceOps.cpp, `mean_kernel_impl` on CPU: `at::sum_out(...).div_(n)`
    with the accumulation dtype.
    """
    meta = need(sig, 0, "self")
    if meta.dtype not in ("bfloat16", "float16"):
        return 0
    return (meta.elements + sig.outputs[0].elements) * DTYPE_BYTES["float32"]


# ----------------------------------------------------------------------------------------- softmax


@workspace("aten._safe_softmax")
def safe_softmax(sig: Signature) -> int:
    """Which scores are -inf, one bool each, and which rows are entirely so, one bool each.

    Source: aten/src/ATen/native/transformers/attention.cpp, `_safe_softmax`.
    """
    scores = need(sig, 0, "self")
    dim = int(argument(sig, 1, "dim"))
    return scores.elements + scores.elements // max(1, scores.shape[dim])


# Elements from which a kernel is worth several threads. Source: aten/src/ATen/Parallel.h, GRAIN_SIZE.
_GRAIN_ELEMENTS = 32768


@workspace("aten.masked_select")
def masked_select(sig: Signature) -> int:
    """The mask and its running sum as int64, an element each, where the parallel kernel runs; in any
    case the mask as int64, while it is counted and the output does not exist yet.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp, `masked_select_out_impl_cpu` (the serial
    kernel needs one thread or a small tensor, and both contiguous when expanded).
    """
    source, mask = need(sig, 0, "self"), need(sig, 1, "mask")
    shape = _broadcast(source.shape, mask.shape)
    elements = 1
    for size in shape:
        elements *= size
    expanded = source.shape != shape or mask.shape != shape
    contiguous = is_contiguous(source) and is_contiguous(mask) and not expanded
    if contiguous and (elements < _GRAIN_ELEMENTS or thread_count() == 1):
        return max(0, elements * DTYPE_BYTES["int64"] - sig.outputs[0].bytes)
    return 2 * elements * DTYPE_BYTES["int64"]


@workspace("aten.sum", "aten.prod", "aten.linalg_vector_norm")
def reduction(sig: Signature) -> int:
    """The input in the result's dtype, where it has another: a mask that is counted, say.

    Source: aten/src/ATen/native/ReduceOpsUtils.h, `make_reduction_from_ty` (`self.to(dtype)` on CPUs).
    """
    meta, result = need(sig, 0, "self"), sig.outputs[0]
    return 0 if meta.dtype == result.dtype else meta.elements * result.itemsize


@workspace("aten.all")
def all_true(sig: Signature) -> int:
    """A number's truth as a bool each, where the input is none.

    Source: aten/src/ATen/native/ReduceOps.cpp, `allany_impl` (measured: torch 2.13, CPU).
    """
    meta = need(sig, 0, "self")
    return 0 if meta.dtype in ("bool", "uint8") else meta.elements


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(one), len(other))
    padded = [(1,) * (rank - len(shape)) + shape for shape in (one, other)]
    return tuple(b if a == 1 else a for a, b in zip(*padded))


@workspace("aten.cumsum", "aten.cumprod")
def cumulative(sig: Signature) -> int:
    """A copy in the result's dtype, where the input has another.

    Source: aten/src/ATen/native/ReduceOps.cpp, `impl_func_cum_ops`: `self.toType(result.scalar_type())`.
    """
    meta, result = need(sig, 0, "self"), sig.outputs[0]
    return 0 if meta.dtype == result.dtype else meta.elements * result.itemsize


@workspace("aten.sort")
def sort(sig: Signature) -> int:
    """Scratch of one sorted row: values and indices of the dimension sorted along, per call.

    Source: aten/src/ATen/native/cpu/SortingKernel.cpp, `sort_stable_kernel` (a strided row is copied
    to a buffer; contiguous rows of 32 or 64 bits go through fbgemm's or x86-simd-sort's buffers).
    """
    meta = need(sig, 0, "self")
    if not meta.shape:
        return 0
    dim = argument(sig, 1, "dim", -1)
    return meta.shape[dim if isinstance(dim, int) else -1] * 8


# ------------------------------------------------------------------------------------ normalization


@workspace("aten.native_layer_norm")
def layer_norm(sig: Signature) -> int:
    """A contiguous copy of the input, where it is not.

    Source: aten/src/ATen/native/layer_norm.cpp, `layer_norm_cpu`: `input.expect_contiguous()`.
    """
    return contiguous_copy_bytes(need(sig, 0, "input"))


@workspace("aten.native_layer_norm_backward")
def layer_norm_backward(sig: Signature) -> int:
    """Per thread a partial sum of both parameters' gradients, and contiguous copies of dY and X.

    Source: aten/src/ATen/native/cpu/layer_norm_kernel.cpp, `LayerNormBackwardKernelImplInternal`:
    `at::empty({2, at::get_num_threads(), N})`.
    """
    gradient, x = need(sig, 0, "grad_out"), need(sig, 1, "input")
    copies = contiguous_copy_bytes(gradient) + contiguous_copy_bytes(x)
    weight = tensor(sig, 5, "weight")
    _, wants_weight, wants_bias = argument(sig, 7, "output_mask")
    if weight is None or not (wants_weight or wants_bias):
        return copies
    return copies + 2 * thread_count() * weight.elements * weight.itemsize


@workspace("aten._softmax", "aten._log_softmax")
def softmax(sig: Signature) -> int:
    """A contiguous copy of the input, where it is not.

    Source: aten/src/ATen/native/SoftMax.cpp, `softmax_cpu_out`: `input.contiguous()`.
    """
    return contiguous_copy_bytes(need(sig, 0, "input"))


@workspace("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(sig: Signature) -> int:
    """Contiguous copies of the gradient and of the result, where they are not.

    Source: aten/src/ATen/native/SoftMax.cpp, `softmax_backward_cpu_out`.
    """
    return contiguous_copy_bytes(need(sig, 0, "grad_output")) + contiguous_copy_bytes(need(sig, 1, "output"))


@workspace("aten.native_group_norm")
def group_norm(sig: Signature) -> int:
    """A contiguous copy of the input, where it is not (channels-last input is taken as it is)."""
    meta = need(sig, 0, "input")
    return 0 if _is_channels_last(meta) else contiguous_copy_bytes(meta)


@workspace("aten.native_group_norm_backward")
def group_norm_backward(sig: Signature) -> int:
    """Two sums per sample and channel, of dY x and of dY.

    Source: aten/src/ATen/native/cpu/group_norm_kernel.cpp, `GroupNormBackwardKernelImplInternal`:
    `ds` and `db`, `at::empty({N, C})` each.
    """
    x = need(sig, 1, "input")
    return 2 * x.shape[0] * x.shape[1] * DTYPE_BYTES["float32"]


@workspace("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten.cudnn_batch_norm")
def batch_norm(sig: Signature) -> int:
    """Means and summed variances while statistics are collected; per-thread sums for (N, C) input.

    Source: aten/src/ATen/native/Normalization.cpp, `batch_norm_cpu_update_stats_template`, and
    native/cpu/batch_norm_kernel.cpp, `batch_norm_cpu_collect_stats_channels_last_impl` (buffer
    `{num_threads, C}`).
    """
    x = need(sig, 0, "input")
    if argument(sig, 5, "training") is not True:
        return 0
    statistics = 2 * x.shape[1] * DTYPE_BYTES["float32"]
    if len(x.shape) == 2 or _is_channels_last(x):
        return statistics + thread_count() * x.shape[1] * DTYPE_BYTES["float32"]
    return statistics


@workspace("aten.native_batch_norm_backward")
def batch_norm_backward(sig: Signature) -> int:
    """One activation-sized temporary: dY or X brought to the memory format of the other's.

    Source: aten/src/ATen/native/Normalization.cpp, `batch_norm_backward_cpu_template`: `grad_input`
    is allocated once by the caller and once more inside. (N, C) and channels-last input add two sums
    per thread and channel (native/cpu/batch_norm_kernel.cpp), which come after it is freed.
    """
    x = need(sig, 1, "input")
    if len(x.shape) == 2 or _is_channels_last(x):
        return max(x.bytes, 2 * thread_count() * x.shape[1] * DTYPE_BYTES["float32"])
    return x.bytes


def _is_channels_last(meta: TensorMeta) -> bool:
    """NHWC in memory, and not NCHW at the same time.

    >>> _is_channels_last(TensorMeta((2, 8, 4, 4), (128, 1, 32, 8), 0, "float32"))
    True
    """
    if len(meta.shape) != 4 or is_contiguous(meta):
        return False
    n, c, h, w = meta.shape
    return meta.stride[1:] == (1, w * c, c)


# ----------------------------------------------------------------------------------- linear algebra

_POWERS = 5
"""Matrices that the polynomial of degree 18 is made of, and as many sums of them (`compute_T18`)."""


@workspace("aten.linalg_matrix_exp")
def matrix_exponential(sig: Signature) -> int:
    """The powers and their sums; for one matrix also the result that it is copied to, and the copy.

    That is degree 18: a batch always takes it, one matrix only where its norm asks for it (4 to 9 matrices
    otherwise). Source: aten/src/ATen/native/LinearAlgebra.cpp, `mexp_impl`.
    """
    meta = need(sig, 0, "self")
    if meta.shape[-1] < 2:
        return 0
    one = meta.elements == meta.shape[-1] ** 2
    return (2 * _POWERS + (2 if one else 0)) * meta.bytes


# ---------------------------------------------------------------------------------------- embedding


@workspace("aten.embedding")
def embedding(sig: Signature) -> int:
    """A contiguous copy of the indices, where they are not (expanded positions)."""
    return contiguous_copy_bytes(need(sig, 1, "indices"))


@workspace("aten.embedding_dense_backward")
def embedding_dense_backward(sig: Signature) -> int:
    """Contiguous copies of the gradient and of the indices.

    Source: aten/src/ATen/native/Embedding.cpp, `embedding_dense_backward_cpu`.
    """
    gradient, indices = need(sig, 0, "grad_output"), need(sig, 1, "indices")
    return contiguous_copy_bytes(gradient) + contiguous_copy_bytes(indices)


# ---------------------------------------------------------------------------------- fused attention

_KV_BLOCK = 512
"""Keys per block. Source: native/cpu/FlashAttentionKernel.cpp, `flash_attention_kernel_impl`."""


def _query_block(length: int) -> int:
    """Queries per block: 256 from 768 on, 64 from 192 on, else 32 (same place)."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


@workspace("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention(sig: Signature) -> int:
    """Per thread, in fp32: scores of one block, their maxima and sums, and the output of the block.

    16-bit inputs add the block's scores in 16 bits, and, where packing pays, reordered keys and values
    and per-thread room to transpose them (CPUs with AMX or AVX512-BF16: assumed).
    Source: native/cpu/FlashAttentionKernel.cpp, `cpu_flash_attention`.
    """
    query, key = need(sig, 0, "query"), need(sig, 1, "key")
    batch, _, length, width = query.shape
    key_heads, keys = key.shape[1:3]
    rows, columns = _query_block(length), min(_KV_BLOCK, keys)
    per_thread = (rows * columns + 2 * rows + rows * width) * DTYPE_BYTES["float32"]
    if query.itemsize == DTYPE_BYTES["float32"]:
        return thread_count() * per_thread
    if query.itemsize > DTYPE_BYTES["float32"]:
        return thread_count() * per_thread * 2
    if not _packs(query, key, causal=argument(sig, 4, "is_causal", False)):
        return thread_count() * (per_thread + rows * columns * query.itemsize)
    even, even_block = width + width % 2, columns + columns % 2
    tail = (keys - 1) % columns + 1
    even_keys = (keys - 1) // columns * even_block + tail + tail % 2
    packed = batch * key_heads * (even * keys + even_keys * width)
    padded_query = rows * even if width % 2 else 0
    room = rows * even_block + columns * width + padded_query
    return thread_count() * per_thread + (packed + thread_count() * room) * query.itemsize


def _packs(query: TensorMeta, key: TensorMeta, *, causal: bool) -> bool:
    """Whether reordering keys and values pays: four times as much gemm per thread as packing."""
    batch, heads, length, _ = query.shape
    key_heads, keys = key.shape[1:3]
    if keys < 64 or length < 64:
        return False
    rows = _query_block(length)
    blocks = batch * heads * -(-length // rows)
    gemm = -(-blocks // thread_count()) * rows * (min(length, keys) if causal else keys)
    return gemm >= 4 * batch * key_heads * keys


@workspace("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(sig: Signature) -> int:
    """A row-major (B, S, H, D) copy of dO, and per thread scores and their gradients of one block.

    16-bit inputs keep both in 16 bits too. Not counted: what oneDNN takes for 16-bit gemms of a block.
    Source: native/cpu/FlashAttentionKernel.cpp, `cpu_flash_attention_backward`.
    """
    gradient, query, key = need(sig, 0, "grad_out"), need(sig, 1, "query"), need(sig, 2, "key")
    rows, columns = _query_block(query.shape[2]), min(_KV_BLOCK, key.shape[2])
    wide = max(query.itemsize, DTYPE_BYTES["float32"])
    narrow = query.itemsize if query.itemsize < wide else 0
    per_thread = 2 * rows * columns * (wide + narrow)
    return _swapped_copy_bytes(gradient) + thread_count() * per_thread + rows * wide


def _swapped_copy_bytes(meta: TensorMeta) -> int:
    """Bytes of `x.transpose(1, 2).contiguous()`."""
    order = (0, 2, 1, 3)
    swapped = TensorMeta(
        tuple(meta.shape[axis] for axis in order), tuple(meta.stride[axis] for axis in order), 0, meta.dtype
    )
    return contiguous_copy_bytes(swapped)


# ----------------------------------------------------------------------------------- embedding bags

_INDEX_BYTES = DTYPE_BYTES["int64"]
_MEAN, _MAX = 1, 2
"""Modes of `_embedding_bag`; 0 is the sum."""


@workspace("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(sig: Signature) -> int:
    """Which bag each index is in, while it is summed up: one number per index and one more.

    The sum needs none. Source: aten/src/ATen/native/EmbeddingBag.cpp, `make_offset2bag_out`.
    """
    if argument(sig, 4, "mode", 0) not in (_MEAN, _MAX):
        return 0
    numbers = need(sig, 1, "indices").elements + 1
    made = sum(meta.elements for meta in sig.outputs[2:])
    return max(0, numbers - made) * _INDEX_BYTES


@workspace("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward")
def embedding_bag_backward(sig: Signature) -> int:
    """Indices sorted with their origins (three lists), the bag of each where forward did not say.

    The maximum scatters bag by bag instead: chosen rows and their gradients. A gradient that is not
    contiguous is copied. Source: aten/src/ATen/native/EmbeddingBag.cpp,
    `_embedding_bag_dense_backward_cpu`.
    """
    gradient, indices = need(sig, 0, "grad"), need(sig, 1, "indices")
    copy = contiguous_copy_bytes(gradient)
    mode = argument(sig, 8, "mode", 0)
    if mode == _MAX:
        bags = gradient.shape[0]
        return copy + gradient.elements * (_INDEX_BYTES + gradient.itemsize) + bags * _INDEX_BYTES
    bag_of_each = 0 if mode == _MEAN else indices.elements + 1
    return copy + (3 * indices.elements + bag_of_each) * _INDEX_BYTES
