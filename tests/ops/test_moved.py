"""Bytes read and written by single calls, by hand: each distinct storage range once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.ops.moved import distinct_bytes, union_bytes
from preflop.ops.pricing import moved
from preflop.ops.registry import Moved
from preflop.strides import contiguous_strides
from tests.ops.signatures import meta, signature

F = 4  # bytes of a float32
I = 8  # bytes of an int64


def bytes_of(op, *args, **kwargs) -> tuple[int, int]:
    got = moved(signature(op, *args, **kwargs))
    return got.read_bytes, got.write_bytes


def test_matmul():
    """(m, k) @ (k, n) reads both and writes the product."""
    assert bytes_of("aten.mm", meta(4, 8), meta(8, 16), out=meta(4, 16)) == (F * (32 + 128), F * 64)


def test_square_of_one_matrix_reads_it_once():
    """a @ a reads a once: both arguments are the same storage."""
    a = meta(16, 16, dtype="complex64")
    sig = signature("aten.mm", a, a, out=a)
    assert moved(sig, (0, 0, 1)) == Moved(2048, 2048)
    assert moved(sig, (0, 1, 2)) == Moved(4096, 2048)


def test_elementwise():
    """a - b reads both and writes one: 72 bytes of (2, 3); in place it writes its first argument."""
    x = meta(2, 3)
    assert bytes_of("aten.sub", x, x, out=x) == (48, 24)
    assert bytes_of("aten.sub_", x, x) == (48, 24)
    assert bytes_of("aten.mul_", x, 2.0) == (24, 24)


def test_broadcast_is_read_once():
    """An expanded operand (stride 0) is read at its own size."""
    big = meta(4, 8)
    assert bytes_of("aten.mul", big, meta(4, 8, stride=(0, 1)), out=big) == (F * (32 + 8), F * 32)


def test_views_and_empty_memory_move_nothing():
    """Views return the same storage; empty and resize_ give memory without touching it."""
    x = meta(2, 3)
    view = signature("aten.t", x, out=meta(3, 2, stride=(1, 3)))
    view = type(view)(view.op, "", view.args, (), view.inputs, view.outputs, (0,), ())
    assert moved(view) == Moved(0, 0)
    for op in ("empty_like", "new_empty", "empty_strided"):
        assert bytes_of(f"aten.{op}", x, out=x) == (0, 0)


def test_factories_only_write():
    """Zeros, ones and random numbers are written; what gave the shape is not read."""
    x = meta(2, 3)
    for op in ("zeros_like", "ones_like", "rand_like", "new_zeros"):
        assert bytes_of(f"aten.{op}", x, out=x) == (0, 24)
    for op in ("zero_", "normal_", "fill_", "uniform_"):
        assert bytes_of(f"aten.{op}", x) == (0, 24)


def test_copy_reads_its_source_only():
    """copy_ overwrites its target; a slice of it moves its own elements only."""
    half = meta(2, 3, dtype="bfloat16")
    assert bytes_of("aten.copy_", meta(2, 3), half) == (12, 24)
    assert bytes_of("aten.copy_", meta(2, 3, stride=(6, 1)), meta(2, 3)) == (24, 24)


def test_normalisation():
    """layer_norm reads x, weight, bias and writes the output and two statistics per row; its backward
    does not read the bias."""
    x, w, s = meta(4, 8), meta(8), meta(4, 1)
    assert bytes_of("aten.native_layer_norm", x, (8,), w, w, 1e-5, out=(x, s, s)) == (
        F * (32 + 8 + 8),
        F * (32 + 4 + 4),
    )
    mask = (True, True, True)
    got = bytes_of("aten.native_layer_norm_backward", x, x, (8,), s, s, w, w, mask, out=(x, w, w))
    assert got == (F * (32 + 32 + 4 + 4 + 8), F * (32 + 8 + 8))


def test_batch_norm_updates_its_statistics():
    """In training the running statistics are written too, though the schema does not say so."""
    x, c = meta(2, 3, 4, 4), meta(3)
    for training, extra in ((True, 2 * F * 3), (False, 0)):
        args = (x, c, c, c, c, training, 0.1, 1e-5)
        got = bytes_of("aten.native_batch_norm", *args, out=(x, c, c))
        assert got == (F * (96 + 4 * 3), F * (96 + 2 * 3) + extra)


def test_softmax():
    """Softmax reads and writes its scores once; backward reads gradient and output."""
    x = meta(4, 8)
    assert bytes_of("aten._softmax", x, 1, False, out=x) == (128, 128)
    assert bytes_of("aten._softmax_backward_data", x, x, 1, "float32", out=x) == (256, 128)


def test_embedding():
    """A lookup reads indices and the rows they name; its gradient writes the whole table once."""
    table, ids, rows = meta(1000, 64), meta(2, 8, dtype="int64"), meta(2, 8, 64)
    assert bytes_of("aten.embedding", table, ids, out=rows) == (I * 16 + F * 1024, F * 1024)
    got = bytes_of("aten.embedding_dense_backward", rows, ids, 1000, -1, False, out=table)
    assert got == (F * 1024 + I * 16, F * 64_000)


def test_cross_entropy_gathers():
    """The negative log-likelihood reads one score per target; its gradient reads none."""
    scores, target, one = meta(16, 1000), meta(16, dtype="int64"), meta()
    assert bytes_of("aten.nll_loss_forward", scores, target, None, 1, -100, out=(one, one)) == (
        I * 16 + F * 16,
        2 * F,
    )
    got = bytes_of("aten.nll_loss_backward", one, scores, target, None, 1, -100, one, out=scores)
    assert got == (F + I * 16 + F, F * 16_000)


def test_gather_and_scatter():
    """index_select reads what it returns; scatter_add_ touches the addressed elements only."""
    x, index, part = meta(100, 8), meta(5, dtype="int64"), meta(5, 8)
    assert bytes_of("aten.index_select", x, 0, index, out=part) == (I * 5 + F * 40, F * 40)
    wide = meta(5, 8, dtype="int64")
    assert bytes_of("aten.scatter_add_", x, 0, wide, part) == (I * 40 + 2 * F * 40, F * 40)
    assert bytes_of("aten.index_put_", x, [index], part) == (I * 5 + F * 40, F * 40)
    assert bytes_of("aten.index_put_", x, [index], part, True) == (I * 5 + 2 * F * 40, F * 40)


def test_fused_attention_with_grouped_heads():
    """q at 8 heads, k and v at 2; the output and one log-sum per query are written. No scores."""
    q, kv, lse = meta(2, 8, 128, 64), meta(2, 2, 128, 64), meta(2, 8, 128)
    got = bytes_of("aten._scaled_dot_product_flash_attention_for_cpu", q, kv, kv, out=(q, lse))
    assert got == (F * (131_072 + 2 * 32_768), F * (131_072 + 2_048))


def test_convolution():
    """Input, weight and bias are read; backward reads only what the wanted gradients need."""
    x, w, y = meta(2, 8, 6, 6), meta(16, 8, 3, 3), meta(2, 16, 6, 6)
    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    assert bytes_of("aten.convolution", x, w, meta(16), *rest, out=y) == (F * (576 + 1152 + 16), F * 1152)
    only_weight = bytes_of("aten.convolution_backward", y, x, w, None, *rest, (False, True, False), out=w)
    assert only_weight == (F * (1152 + 576), F * 1152)
    only_input = bytes_of("aten.convolution_backward", y, x, w, None, *rest, (True, False, False), out=x)
    assert only_input == (F * (1152 + 1152), F * 576)


def test_fused_adamw():
    """Parameter, gradient and two states are read, parameter and states written: 28 bytes each."""
    p, step = meta(10, 10), meta()
    sig = signature(
        "aten._fused_adamw_", [p], [p], [p], [p], [], [step], lr=1e-3, weight_decay=0.1, grad_scale=None
    )
    sig = type(sig)(sig.op, "", sig.args, sig.kwargs, sig.inputs, (), (), (0, 1, 2, 3))
    assert moved(sig) == Moved(4 * 400 + F, 3 * 400)


def test_foreach_add():
    """A list operator reads and writes every tensor of its list."""
    p = meta(10)
    assert bytes_of("aten._foreach_add_", [p, p], [p, p]) == (160, 80)
    assert bytes_of("aten._foreach_zero_", [p, p]) == (0, 80)


def test_slices_of_one_storage_do_not_count_twice():
    """q, k and v cut from one tensor cover it once; a tensor and its transpose are the same bytes."""
    cuts = [meta(10, 4, stride=(12, 1), offset=4 * i) for i in range(3)]
    assert union_bytes(cuts, (0, 0, 0)) == 10 * 12 * F
    assert union_bytes([meta(3, 5), meta(5, 3, stride=(1, 5))], (0, 0)) == 15 * F
    assert union_bytes([meta(4), meta(4, offset=2)], (0, 0)) == 6 * F
    assert union_bytes([meta(4), meta(4, offset=8)], (0, 0)) == 8 * F


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms())
def test_a_permuted_tensor_covers_its_storage(shape, random):
    """Any permutation of a contiguous tensor covers all of its bytes, and never more."""
    order = list(range(len(shape)))
    random.shuffle(order)
    strides = contiguous_strides(tuple(shape))
    view = meta(*(shape[i] for i in order), stride=tuple(strides[i] for i in order))
    assert distinct_bytes(view) == view.bytes


@pytest.mark.parametrize("window", [2, 3])
def test_overlapping_windows_count_once(window):
    """unfold's windows overlap: bytes seen twice are read once."""
    assert distinct_bytes(meta(8, window, stride=(1, 1))) == (8 + window - 1) * F
