"""Workspaces of CUDA's kernels, worked by hand from the allocations in their source."""

from __future__ import annotations

import pytest

from preflop.ops.pricing import inside_bytes
from preflop.ops.registry import WORKSPACE_CUDA
from preflop.ops.workspace_cuda import convolution_bounds
from preflop.tape.events import Signature, TensorMeta

from .signatures import meta, signature

HALF = "bfloat16"


def heads(batch: int, count: int, length: int, width: int, dtype: str = HALF) -> TensorMeta:
    """(batch, heads, sequence, width) as attention has it: a transpose."""
    stride = (length * count * width, width, count * width, 1)
    return meta(batch, count, length, width, dtype=dtype, stride=stride)


def inside(sig: Signature) -> int:
    return inside_bytes(sig, cuda=True)


def flash_backward(query: TensorMeta, key: TensorMeta, gradient: TensorMeta | None = None) -> Signature:
    return signature(
        "aten._scaled_dot_product_flash_attention_backward", gradient or query, query, key, key, query,
        meta(*query.shape[:3]), None, None, query.shape[2], key.shape[2], 0.0, True,
    )  # fmt: skip


def test_flash_backward_accumulates_in_fp32() -> None:
    """2 x 4 heads of 200 x 80: rows round to 256, widths to 96: 2*4*256*4 + 2*256*4*96*4 bytes."""
    q = heads(2, 4, 200, 80)
    assert inside(flash_backward(q, q)) == 2 * 4 * 256 * 4 + 2 * 256 * 4 * 96 * 4


def test_flash_backward_rounds_wide_heads_to_64() -> None:
    """Heads of 160 accumulate as 192 wide."""
    q = heads(1, 1, 128, 160)
    assert inside(flash_backward(q, q)) == 128 * 4 + 128 * 192 * 4


def test_flash_backward_expands_grouped_heads() -> None:
    """Eight query heads over two key heads: dK and dV of eight heads in bf16 come on top."""
    q, k = heads(2, 8, 128, 64), heads(2, 2, 128, 64)
    alone = inside(flash_backward(q, q))
    assert inside(flash_backward(q, k)) == alone + 2 * (2 * 128 * 8 * 64 * 2)


def test_flash_backward_copies_a_gradient_that_lies_otherwise() -> None:
    """dO contiguous as (B, H, S, D) is copied to (B, S, H, D)."""
    q = heads(2, 4, 128, 64)
    plain = meta(2, 4, 128, 64, dtype=HALF)
    assert inside(flash_backward(q, q, plain)) == inside(flash_backward(q, q)) + plain.bytes


def efficient_backward(query: TensorMeta) -> Signature:
    return signature(
        "aten._scaled_dot_product_efficient_attention_backward", query, query, query, query, None, query,
        meta(*query.shape[:3]), None, None, 0.0, (True, True, True, False), True,
    )  # fmt: skip


def test_efficient_backward_in_fp32_multiplies_dO_and_O() -> None:
    """fp32: a product of dO's size and one sum per query."""
    q = heads(2, 4, 128, 64, "float32")
    assert inside(efficient_backward(q)) == q.elements * 4 + 2 * 4 * 128 * 4


def test_efficient_backward_in_16_bits_accumulates_dQ_in_fp32() -> None:
    """16-bit, 64 wide: fp32 dQ and one sum per query; 256 wide: dK and dV too."""
    q, wide = heads(2, 4, 128, 64), heads(2, 4, 128, 256)
    assert inside(efficient_backward(q)) == 2 * 4 * (128 * 64 + 128) * 4
    assert inside(efficient_backward(wide)) == 2 * 4 * (3 * 128 * 256 + 128) * 4


def test_efficient_forward_accumulates_wide_values() -> None:
    """Values wider than 128 in 16 bits: an fp32 copy of the output; else nothing."""
    op = "aten._scaled_dot_product_efficient_attention"
    wide, narrow = heads(1, 2, 64, 256), heads(1, 2, 64, 128)
    assert inside(signature(op, wide, wide, wide, None, True)) == wide.elements * 4
    assert inside(signature(op, narrow, narrow, narrow, None, True)) == 0


@pytest.mark.parametrize(
    ("stride", "copied"),
    [((8, 1), False), ((1, 4), False), ((16, 1), False), ((0, 0), True), ((16, 2), True)],
)
def test_blas_copies_what_it_cannot_read(stride: tuple[int, int], copied: bool) -> None:
    """Rows or columns must be dense; an expanded or strided matrix is copied."""
    left, right = meta(4, 8, stride=stride), meta(8, 5)
    assert inside(signature("aten.mm", left, right)) == (left.bytes if copied else 0)


def test_addmm_does_not_copy_its_bias() -> None:
    """An expanded bias is read as it is."""
    bias = meta(4, 5, stride=(0, 1))
    assert inside(signature("aten.addmm", bias, meta(4, 8), meta(8, 5))) == 0


def test_embedding_backward_sorts_and_sums_in_fp32() -> None:
    """8192 indices into 50257 rows: five arrays of int64, and at most 8192 partial rows of fp32."""
    gradient, indices = meta(8192, 768, dtype=HALF), meta(8192, dtype="int64")
    sig = signature("aten.embedding_dense_backward", gradient, indices, 50257, -1, False)
    assert inside(sig) == 5 * 8192 * 8 + 8192 * 768 * 4
    few = signature("aten.embedding_dense_backward", meta(3072, 8), meta(3072, dtype="int64"), 100, -1, False)
    assert inside(few) == 0


def test_index_put_needs_scratch_only_to_accumulate() -> None:
    """Accumulation sorts: five int64 arrays of the indices' number; plain writing takes nothing."""
    grad, ids, values = meta(100, 8), meta(32, dtype="int64"), meta(32, 8)
    assert inside(signature("aten._index_put_impl_", grad, (ids,), values, True, True)) == 5 * 32 * 8
    assert inside(signature("aten._index_put_impl_", grad, (ids,), values, False)) == 0


def test_convolution_workspace_is_bounded() -> None:
    """16-bit channels-first: copies of all three operands are assumed; fp32: none; never more than copies."""
    x, w, y = meta(2, 8, 16, 16, dtype=HALF), meta(4, 8, 3, 3, dtype=HALF), meta(2, 4, 16, 16, dtype=HALF)
    bounds = convolution_bounds(signature("aten.convolution", x, w, None, out=y))
    assert (bounds.lower, bounds.assumed, bounds.upper) == (0, x.bytes + w.bytes + y.bytes, bounds.assumed)
    single = [meta(*t.shape) for t in (x, w, y)]
    assert convolution_bounds(signature("aten.convolution", *single[:2], None, out=single[2])).assumed == 0


def test_cpu_rules_stay_the_cpus() -> None:
    """The two tables do not mix: CPU flash attention has no CUDA rule."""
    assert "aten._scaled_dot_product_flash_attention_for_cpu" not in WORKSPACE_CUDA
    assert inside_bytes(flash_backward(heads(1, 1, 128, 64), heads(1, 1, 128, 64)), cuda=False) == 0


def test_cudnn_rnn_copies_batch_first_input() -> None:
    """Batch-first input of 4 x 10 x 32 fp32 is copied time-first: 5120 bytes; time-first is not."""
    x, w, h = meta(4, 10, 32), meta(256, 32), meta(1, 4, 64)
    for batch_first, expected in ((True, x.bytes), (False, 0)):
        more = (2, 64, 0, 1, batch_first, 0.0, True, False, (), None)
        sig = signature("aten._cudnn_rnn", x, (w,), 4, w, h, h, *more)
        assert inside(sig) == expected


def test_softmax_copies_what_is_not_contiguous() -> None:
    """A transposed input is copied first; backward copies gradient and result."""
    turned, plain = meta(4, 8, dtype="float32", stride=(1, 4)), meta(4, 8)
    assert inside(signature("aten._softmax", turned, -1, False, out=plain)) == 4 * 8 * 4
    assert inside(signature("aten._softmax", plain, -1, False, out=plain)) == 0
    backward = signature("aten._log_softmax_backward_data", turned, turned, -1, "float32", out=plain)
    assert inside(backward) == 2 * 4 * 8 * 4
