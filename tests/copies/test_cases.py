"""Hidden copies from the field, told afresh: bytes, reason and remedy; each equal to torch's profiler."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import preflop
from preflop.ledgers.copies import copy_rows
from tests.copies.truth import both


def rows(function, kind=None):
    """Copies of a call, one row per reason, without the numbers that kernels turn into tensors."""
    found = [row for row in copy_rows(preflop.record(function)) if row.kind not in ("scalar", "bias")]
    return [row for row in found if kind is None or row.kind == kind]


def same_as_profiler(function) -> bool:
    real, told = both(function)
    return real == told


def test_h01_a_broadcast_operand_is_written_out():
    """matmul writes the 65,536 bytes of B out as 4,194,304; an einsum copies nothing."""
    a, b = torch.randn(64, 16, 1, 32), torch.randn(16, 32, 32)
    (row,) = rows(lambda: a @ b)
    assert (row.kind, row.calls, row.bytes, row.read_bytes) == ("broadcast", 1, 4_194_304, 65_536)
    assert row.reason == ("(64, 16, 32, 32) with strides (0, 1024, 32, 1) cannot be viewed as (1024, 32, 32)")
    assert "einsum" in row.instead
    assert rows(lambda: torch.einsum("bhid,hde->bhie", a, b)) == []
    assert same_as_profiler(lambda: a @ b)


def test_h02_one_expression_two_answers():
    """W @ U copies nothing without a gradient; with one, the operands are folded: two clones of 600 B."""
    u, w = torch.randn(10, 5, 3), torch.randn(5, 5)
    learned = torch.randn(5, 5, requires_grad=True)
    assert rows(lambda: w @ u) == []
    assert [(row.calls, row.bytes) for row in rows(lambda: learned @ u)] == [(1, 600), (1, 600)]
    assert same_as_profiler(lambda: w @ u)
    assert same_as_profiler(lambda: learned @ u)


def test_h03_expanded_key_value_heads():
    """expand is free, reshape copies 524,288 bytes from 131,072; enable_gqa copies nothing."""
    kv, q = torch.randn(2, 2, 128, 64), torch.randn(2, 8, 128, 64)

    def expanded():
        return kv[:, :, None].expand(2, 2, 4, 128, 64).reshape(2, 8, 128, 64)

    (row,) = rows(expanded)
    assert (row.kind, row.bytes, row.read_bytes) == ("repeat", 524_288, 131_072)
    assert "enable_gqa" in row.instead
    assert rows(lambda: F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)) == []
    assert same_as_profiler(expanded)


def test_h05_repeat_of_one_and_of_many():
    """Expanding an axis of size 1 makes no bytes and aliases; repeating a longer one writes 144."""
    a, b = torch.tensor([[1], [2], [3]]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert rows(lambda: a.expand(3, 3)) == []
    assert preflop.same_storage(a, a.expand(3, 3))

    def longer():
        return b.unsqueeze(-1).expand(3, 2, 3).reshape(3, 6)

    (row,) = rows(longer)
    assert (row.kind, row.bytes, row.read_bytes) == ("repeat", 144, 48)
    assert same_as_profiler(longer)


def test_h08_logits_cut_for_shifted_labels():
    """logits[:, :-1].reshape copies 12,000 bytes; shifting the labels instead copies no logits."""
    logits, labels = torch.randn(2, 16, 100), torch.randint(0, 100, (2, 16))

    def cut():
        return F.cross_entropy(logits[:, :-1].reshape(-1, 100), labels[:, 1:].reshape(-1))

    def padded():
        return F.cross_entropy(logits.view(-1, 100), F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1))

    largest = rows(cut)[0]
    assert (largest.kind, largest.bytes) == ("slice", 12_000)
    assert "labels" in largest.instead
    assert max(row.bytes for row in rows(padded)) < 300
    torch.testing.assert_close(cut(), padded())
    assert same_as_profiler(cut)


def test_h09_a_bool_mask_is_written_out_as_numbers():
    """A mask of 1,024 bytes becomes a float mask of 4,096; is_causal makes none."""
    q, m = torch.randn(2, 4, 32, 16), torch.ones(32, 32, dtype=torch.bool).tril()

    def masked():
        return F.scaled_dot_product_attention(q, q, q, attn_mask=m)

    (row,) = rows(masked)
    assert (row.kind, row.bytes, row.read_bytes) == ("mask", 4_096, 1_024)
    assert "is_causal" in row.instead
    causal = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
    assert rows(causal) == []
    torch.testing.assert_close(masked(), causal())


@pytest.mark.skipif(not hasattr(F, "rms_norm"), reason="torch has no rms_norm")
def test_h11_rms_norm_computes_in_fp32():
    """RMS norm of bf16 data casts x up (8,192 bytes), its result down (4,096); layer_norm casts nothing."""
    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    found = {(row.bytes, row.kind) for row in rows(lambda: F.rms_norm(x, (64,), w))}
    assert {(8_192, "cast"), (4_096, "cast")} <= found
    assert rows(lambda: F.layer_norm(x, (64,), w)) == []
    assert same_as_profiler(lambda: F.rms_norm(x, (64,), w))


def test_autocast_casts_weights_again_for_each_microbatch():
    """A weight is cast once per microbatch under autocast, and the row names it."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    account = preflop.account(
        model, torch.randn(8, 64), precision="bf16-mixed", microbatches=3, optimizer=None
    )
    (row,) = [row for row in account.copies if "the weight" in row.reason]
    assert (row.calls, row.bytes) == (2 * 3, 2 * 3 * 64 * 64 * 2)
    assert "the weight *.weight (64, 64): float32 becomes bfloat16" in row.reason


def test_contiguous_of_a_contiguous_tensor_is_free():
    """.contiguous() copies only what is not contiguous."""
    x = torch.randn(4, 8)
    assert rows(lambda: x.contiguous()) == []
    (row,) = rows(lambda: x.t().contiguous())
    assert (row.kind, row.bytes) == ("contiguous", 128)
    assert row.reason == "(8, 4) with strides (1, 8) is not contiguous"


def test_gradients_copied_by_accumulate_grad():
    """A gradient whose strides are not the parameter's is copied into its order, and the row says so; one
    that lies as the parameter does is kept."""
    weight = torch.nn.Parameter(torch.randn(8, 4))
    turned_factor, factor = torch.randn(4, 8), torch.randn(8, 4)

    def turned():
        (weight.t() * turned_factor * 2).sum().backward()
        weight.grad = None

    def straight():
        (weight * factor * 2).sum().backward()
        weight.grad = None

    (row,) = rows(turned, "gradient")
    assert row.bytes == 8 * 4 * 4
    assert row.reason.startswith("the gradient (8, 4) has strides (1, 8) and the parameter (4, 1)")
    assert rows(straight, "gradient") == []
    assert same_as_profiler(turned)
    assert same_as_profiler(straight)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: torch.stack([x, x]), "stack"),
        (lambda x: F.pad(x, (1, 1)), "pad"),
        (lambda x: x.repeat(2, 1), "repeat"),
        (lambda x: x.masked_fill(x > 0, 0.0), "clone"),
        (lambda x: x.to(torch.float64), "cast"),
        (lambda x: x.clone(), "clone"),
        (lambda x: x.clone().copy_(x), "assign"),
        (lambda x: x**1.0, "copy"),
    ],
)
def test_each_kind_is_named(call, kind):
    """Every sort of copy has its name, and says why."""
    x = torch.randn(4, 6)
    found = rows(lambda: call(x), kind)
    assert found
    assert all(row.reason for row in found)
