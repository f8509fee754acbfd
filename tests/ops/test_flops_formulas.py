"""FLOPs of single operators, by hand, from signatures that no torch made."""

from __future__ import annotations

import pytest

from preflop.ops.attention import causal_pairs, window_pairs
from preflop.ops.pricing import work
from preflop.ops.registry import Kind
from tests.ops.signatures import meta, signature


def flops_of(op, *args, **kwargs) -> int:
    return work(signature(op, *args, **kwargs)).flops


def test_matrix_products():
    """2mkn for every form of a product: with bias, batched, one vector, two vectors, outer, int8."""
    a, b = meta(4, 8), meta(8, 16)
    assert flops_of("aten.mm", a, b, out=meta(4, 16)) == 2 * 4 * 8 * 16
    assert flops_of("aten.addmm", meta(16), a, b, out=meta(4, 16)) == 2 * 4 * 8 * 16
    assert flops_of("aten.bmm", meta(3, 4, 8), meta(3, 8, 16), out=meta(3, 4, 16)) == 3 * 1024
    assert flops_of("aten.addbmm", meta(4, 16), meta(3, 4, 8), meta(3, 8, 16), out=meta(4, 16)) == 3 * 1024
    assert flops_of("aten.mv", a, meta(8), out=meta(4)) == 64
    assert flops_of("aten.addmv", meta(4), a, meta(8), out=meta(4)) == 64
    assert flops_of("aten.dot", meta(8), meta(8), out=meta()) == 16
    assert flops_of("aten.addr", meta(4, 8), meta(4), meta(8), out=meta(4, 8)) == 64
    i8 = {"dtype": "int8"}
    assert (
        flops_of("aten._int_mm", meta(4, 8, **i8), meta(8, 16, **i8), out=meta(4, 16, dtype="int32")) == 1024
    )
    assert flops_of("aten.linear", meta(2, 4, 8), meta(16, 8), out=meta(2, 4, 16)) == 2 * 8 * 8 * 16


def test_complex_product():
    """A complex multiply-add is 8 real FLOPs."""
    a = meta(16, 16, dtype="complex64")
    assert flops_of("aten.mm", a, a, out=a) == 8 * 16**3


def test_linear_backward_mask():
    """Only the gradients asked for cost a product each; the bias costs none."""
    x, g, w = meta(4, 8), meta(4, 16), meta(16, 8)
    for mask, products in (((True, True, True), 2), ((False, True, True), 1), ((False, False, True), 0)):
        assert flops_of("aten.linear_backward", x, g, w, mask, out=x) == products * 1024


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((10, 4), (3, 4, 6), 2 * 10 * 4 * 6),
        ((3, 10, 4), (4, 30), 2 * 10 * 4 * 30),
        ((4, 10), (10, 6), 2 * 4 * 10 * 6),
        ((3, 5, 4), (3, 4, 6), 2 * 3 * 5 * 4 * 6),
    ],
)
def test_grouped_product(a, b, expected):
    """Each row meets one group's matrix: groups multiply the work only where both operands have them."""
    assert flops_of("aten._grouped_mm", meta(*a), meta(*b), out=meta(1)) == expected


def test_sparse_product():
    """Stored elements x columns x 2 where the tape knows them; else the dense bound, as an estimate."""
    dense, out = meta(8, 4), meta(8, 4)
    known = work(signature("aten._sparse_mm", meta(8, 8, stride=(), offset=5), dense, out=out))
    unknown = work(signature("aten._sparse_mm", meta(8, 8, stride=()), dense, out=out))
    assert (known.flops, known.estimate) == (2 * 5 * 4, False)
    assert (unknown.flops, unknown.estimate) == (2 * 8 * 8 * 4, True)


def test_trilinear():
    """nn.Bilinear: 2·B·O·I·J for x1 with the weight, 2·B·O·J with x2."""
    sig = signature(
        "aten._trilinear", meta(2, 3), meta(5, 3, 4), meta(2, 4), (1, 3), (0,), (1, 2), (2, 3), out=meta(2, 5)
    )
    assert work(sig).flops == 2 * 2 * 5 * 3 * 4 + 2 * 2 * 5 * 4


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [(True, True, False), (False, True, True), (True, False, False)])
def test_convolution_backward(groups, mask):
    """Each gradient asked for costs one forward, whatever the groups."""
    x, w, y = meta(2, 8, 6, 6), meta(16, 8 // groups, 3, 3), meta(2, 16, 6, 6)
    rest = ((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    forward = flops_of("aten.convolution", x, w, None, *rest, out=y)
    assert forward == 2 * 2 * 16 * 36 * (8 // groups) * 9
    backward = flops_of("aten.convolution_backward", y, x, w, None, *rest, mask, out=x)
    assert backward == forward * (mask[0] + mask[1])


def test_transposed_convolution():
    """Each input element meets all taps of its output channels."""
    x, w, y = meta(2, 4, 8, 8), meta(4, 3, 3, 3), meta(2, 6, 17, 17)
    rest = ((2, 2), (0, 0), (1, 1), True, (0, 0), 2)
    assert flops_of("aten.convolution", x, w, None, *rest, out=y) == 2 * 2 * 4 * 64 * 3 * 9


SDPA = "aten._scaled_dot_product_"


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        (SDPA + "flash_attention", (), (0.0, True)),
        (SDPA + "flash_attention_for_cpu", (), (0.0, True)),
        (SDPA + "efficient_attention", (), (None, True, 0.0, True)),
        (SDPA + "cudnn_attention", (), (None, True, 0.0, True)),
        (SDPA + "fused_attention_overrideable", (), (None, 0.0, True)),
        ("aten.scaled_dot_product_attention", (), (None, 0.0, True)),
    ],
)
def test_attention_forward_forms(op, before, after):
    """Every fused form counts the query heads in full and knows its own causal flag."""
    q, kv = meta(2, 8, 16, 4), meta(2, 2, 16, 4)
    got = work(signature(op, *before, q, kv, kv, *after, out=q))
    assert (got.flops, got.kind) == (4 * 2 * 8 * 16 * 16 * 4, Kind.ATTENTION)
    assert got.attended_flops == 4 * 2 * 8 * 4 * 136


@pytest.mark.parametrize(
    ("op", "after"),
    [
        ("flash_attention", (None, None, 16, 16, 0.0, True)),
        ("flash_attention_for_cpu", (0.0, True)),
        ("cudnn_attention", (None, None, None, None, None, 16, 16, 0.0, True)),
    ],
)
def test_attention_backward_forms(op, after):
    """Four products are model work, the fifth (scores again) is hardware work."""
    q = meta(2, 8, 16, 4)
    got = work(signature(f"{SDPA}{op}_backward", q, q, q, q, q, meta(2, 8, 16), *after, out=(q, q, q)))
    one = 2 * 2 * 8 * 16 * 16 * 4
    assert (got.flops, got.hardware_flops) == (4 * one, 5 * one)
    assert got.attended_flops == 4 * 2 * 8 * 4 * 2 * 136


def test_attention_widths():
    """Scores go by the width of q and k, values by that of v (as in multi-head latent attention)."""
    q, v = meta(1, 2, 8, 6), meta(1, 2, 8, 4)
    got = work(signature(SDPA + "flash_attention", q, q, v, out=v))
    assert got.flops == 2 * 2 * 64 * (6 + 4)


def test_packed_attention_is_a_bound():
    """Packed sequences of unknown lengths: every query meets the longest, marked as an estimate."""
    q, cum = meta(192, 8, 64), meta(3, dtype="int32")
    got = work(
        signature("aten._flash_attention_forward", q, q, q, cum, cum, 128, 128, 0.0, False, False, out=q)
    )
    assert (got.flops, got.estimate) == (4 * 8 * 64 * 192 * 128, True)


@pytest.mark.parametrize(("left", "right"), [(511, 0), (-1, 0), (3, 2), (None, None)])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (5, 9), (9, 5)])
def test_pairs(left, right, queries, keys):
    """Closed forms of attended pairs equal counting them one by one."""

    def seen(i, j, shift):
        after_low = left is None or left < 0 or j >= i + shift - left
        before_high = right is None or right < 0 or j <= i + shift + right
        return after_low and before_high

    shift = keys - queries
    assert window_pairs(queries, keys, left, right) == sum(
        seen(i, j, shift) for i in range(queries) for j in range(keys)
    )
    causal = sum(j <= i for i in range(queries) for j in range(keys))
    assert causal_pairs(queries, keys) == causal
    aligned = sum(j <= i + shift for i in range(queries) for j in range(keys))
    assert causal_pairs(queries, keys, bottom_right=True) == aligned


def test_recurrent_on_a_gpu():
    """cuDNN's LSTM: 2 · rows · weights; two layers of one direction, x needing no gradient."""
    x, weights = meta(5, 3, 10), [meta(80, 10), meta(80, 20), meta(80), meta(80), meta(80, 20), meta(80, 20)]
    hidden, h = 80 * 20 + 80 * 20, meta(2, 3, 20)
    every = 80 * 10 + 80 * 20 + hidden
    forward = signature("aten._cudnn_rnn", x, weights, 4, None, h, h, 2, 20, 0, 2, out=meta(5, 3, 20))
    assert work(forward).flops == 2 * 15 * every
    tail = (
        meta(5, 3, 20),
        meta(5, 3, 20),
        None,
        None,
        2,
        20,
        0,
        2,
        False,
        0.0,
        True,
        False,
        (),
        None,
        meta(9),
    )
    for mask, steps in (((False, False, False, True), 4), ((True, True, True, True), 5)):
        sig = signature("aten._cudnn_rnn_backward", x, weights, 4, meta(9), h, h, *tail, mask, out=x)
        back = 2 * 15 * (80 * 20) + (2 * 15 * 80 * 10 if mask[0] else 0) + 2 * 3 * steps * hidden
        assert work(sig).flops == 2 * 15 * every + back


def test_elementwise_counts():
    """One per element and operation; nothing for selecting, copying, casting, drawing."""
    x = meta(2, 3)
    assert flops_of("aten.add", x, x, out=x, overload="Tensor") == 6
    assert flops_of("aten.add", x, x, out=x, alpha=2) == 12
    assert flops_of("aten.addcmul_", x, x, x, value=0.1) == 18
    assert flops_of("aten._foreach_add_", [x, x], 1) == 12
    assert flops_of("aten.sum", x, out=meta()) == 6
    assert flops_of("aten._softmax", x, 1, False, out=x) == 30
    assert flops_of("aten.gelu", x, out=x) == 30
    assert flops_of("aten.gelu", x, out=x, approximate="tanh") == 54
    for op in ("clone", "_to_copy", "cat", "embedding", "where", "bernoulli", "index_select"):
        assert flops_of(f"aten.{op}", x, out=x) == 0


def test_matrix_exponential():
    """Degree 18 takes five products: A², A³, A⁶ and two of sums of them."""
    given = meta(3, 4, 4)
    assert flops_of("aten.linalg_matrix_exp", given, out=given) == 3 * 5 * 2 * 4**3


def test_views_are_known_and_the_rest_is_unknown():
    """A call that only returns views is free, also a custom one; one that makes something is unknown."""
    x = meta(2, 3)
    view = signature("mine.alias", x, out=x)
    view = type(view)(view.op, "", view.args, (), view.inputs, view.outputs, (0,), ())
    assert work(view).flops == 0
    assert work(signature("mine.make", x, out=x)) is None
    assert work(signature("aten.linalg_svd", x, out=x)) is None


def test_encoder_layer_has_parts():
    """A fused encoder layer's parts sum to it and keep their kinds."""
    weights = [meta(192, 64), meta(192), meta(64, 64), meta(64)]
    norms = [meta(64)] * 4
    feed = [meta(128, 64), meta(128), meta(64, 128), meta(64)]
    x = meta(2, 16, 64)
    got = work(
        signature(
            "aten._transformer_encoder_layer_fwd", x, 64, 4, *weights, True, False, 1e-5, *norms, *feed, out=x
        )
    )
    assert got.flops == 2_228_224
    assert {part.kind: part.flops for part in got.parts} == {Kind.MATMUL: 2_097_152, Kind.ATTENTION: 131_072}
