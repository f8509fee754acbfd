"""FLOPs cases from the field: each a kind of fault other counters had, with the value worked by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import preflop
from preflop.ledgers.flops import flops_ledger, flops_totals
from preflop.ledgers.operators import operator_rows
from preflop.ledgers.traffic import traffic_ledger
from preflop.ops.registry import FLOPS, Kind, Work, flops


def total(fn, *args) -> int:
    """Matmul-like FLOPs of one call."""
    return flops_ledger(preflop.record(fn, *args)).total()


def test_f01_fused_attention():
    """4·B·H·S·S·D forward; backward 4 matmuls as model work, 5 as hardware work."""
    q, k, v = (torch.randn(1, 12, 64, 64, requires_grad=True) for _ in range(3))
    assert total(lambda: F.scaled_dot_product_attention(q, k, v)) == 12_582_912
    step = preflop.record(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward())
    totals = flops_totals(step)
    assert totals.model == 12_582_912 + 25_165_824
    assert totals.hardware == 12_582_912 + 31_457_280


def test_f02_grouped_heads():
    """FLOPs go by the 8 query heads, bytes by the 2 key and value heads."""
    q, kv = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64)
    tape = preflop.record(lambda: F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True))
    assert flops_ledger(tape).total() == 67_108_864
    assert traffic_ledger(tape).read_bytes() == 4 * (q.numel() + kv.numel())


def test_f05_causal():
    """Dense by convention, 4·H·S·S·D; the attended half is (S + 1)/2S of it, not one half."""
    q = torch.randn(1, 2, 1024, 64)
    tape = preflop.record(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert flops_totals(tape).model == 536_870_912
    assert flops_totals(tape).attended == 268_697_600


@pytest.mark.parametrize(("window", "pairs"), [(512, 917_760), (4096, 2_098_176)])
def test_f06_sliding_window(window, pairs):
    """A known mask counts its own pairs; a window longer than the sequence is causal."""
    length, heads, width = 2048, 4, 64
    i = torch.arange(length)
    mask = (i[None] <= i[:, None]) & (i[:, None] - i[None] < window)
    q = torch.randn(1, heads, length, width)
    totals = flops_totals(preflop.record(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)))
    assert totals.model == 4 * heads * length * length * width
    assert totals.attended == 4 * heads * width * pairs


@pytest.mark.parametrize("tie", [True, False])
def test_f07_tied_weights(tie):
    """A lookup costs nothing; a tied head costs what an untied one does, 2·16·64·1000."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(1000, 64)
            self.h = nn.Linear(64, 1000, bias=False)
            if tie:
                self.h.weight = self.e.weight

        def forward(self, t):
            return self.h(self.e(t))

    model, tokens = Model(), torch.randint(0, 1000, (2, 8))
    assert total(lambda: model(tokens)) == 2_048_000
    assert total(lambda: model(tokens).sum().backward()) == 3 * 2_048_000


def test_f08_shared_module():
    """Three calls of one layer are three times its FLOPs, once in the per-module table."""

    class Branch(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.l = layer

        def forward(self, x):
            return self.l(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Linear(100, 100, bias=False)
            self.a, self.b, self.c = Branch(layer), Branch(layer), Branch(layer)

        def forward(self, x):
            p = x.chunk(3, -1)
            return self.a(p[0]) + self.b(p[1]) + self.c(p[2])

    ledger = flops_ledger(preflop.record(Net(), torch.randn(1, 300)))
    assert ledger.total() == 60_000
    assert sum(ledger.by("module").values()) == 60_000


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((8,), (8,), 16), ((4, 8), (8,), 64), ((8,), (8, 5), 80), ((2, 1, 4, 8), (3, 8, 5), 1920)],
)
def test_f11_any_rank(a, b, expected):
    """2 · output elements · contracted length, also for dot and mv."""
    x, y = torch.randn(a), torch.randn(b)
    assert total(lambda: x @ y) == expected


def test_f15_transposed_convolution():
    """Each input element meets every tap: 2·N·Cin·Cout/g·K·prod(in)."""
    a, xa = nn.ConvTranspose2d(32, 1, 3, bias=False), torch.randn(1, 32, 1, 1)
    b, xb = nn.ConvTranspose2d(3, 1, 2, stride=2, bias=False), torch.randn(1, 3, 2, 2)
    assert total(a, xa) == 576
    assert total(b, xb) == 96


def test_f17_grouped_convolution_backward():
    """Forward and backward together are 3x forward, whatever the groups."""
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    y = torch.randn(2, 4, 8, 8, requires_grad=True)
    dw = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
    g4 = nn.Conv2d(16, 32, 3, padding=1, groups=4, bias=False)
    dt = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=4, bias=False)
    for module, given, expected in ((dw, x, 110_592), (g4, x, 884_736), (dt, y, 27_648)):
        assert total(lambda m=module, g=given: m(g).sum().backward()) == expected
        assert total(module, given) * 3 == expected


def test_f18_recurrent():
    """2·B·G·H·(I + H) per step; backward drops x's gradient and h0's step, which nothing wants."""
    x = torch.randn(5, 3, 10)
    lstm, gru = nn.LSTM(10, 20), nn.GRU(10, 20)
    assert total(lambda: lstm(x)) == 72_000
    assert total(lambda: gru(x)) == 54_000
    assert total(lambda: lstm(x)[0].sum().backward()) == 182_400
    assert total(lambda: gru(x)[0].sum().backward()) == 136_800


def test_lstm_gradients_that_are_wanted():
    """With gradients of x and h0 wanted, the LSTM's backward is twice its forward."""
    x, h = torch.randn(5, 3, 10, requires_grad=True), torch.randn(1, 3, 20, requires_grad=True)
    lstm = nn.LSTM(10, 20)
    c = torch.zeros(1, 3, 20)
    assert total(lambda: lstm(x, (h, c))[0].sum().backward()) == 3 * 72_000


def test_f21_fused_encoder_layer():
    """The fused evaluation path costs what the training path does."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 16, 64)

    def run():
        with torch.no_grad():
            return layer(x)

    assert total(run) == 2_228_224
    assert flops_totals(preflop.record(run)).by_kind["attention"] == 131_072
    assert total(layer.train(), x) == 2_228_224


def test_multihead_attention_fast_path():
    """nn.MultiheadAttention in evaluation: projections 2·32·4·64² and attention 4·2·16·16·64."""
    layer = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 16, 64)

    def run():
        with torch.no_grad():
            return layer(x, x, x, need_weights=False)

    assert total(run) == 2 * 32 * 4 * 64 * 64 + 4 * 2 * 16 * 16 * 64


def test_f22_inference_mode():
    """Inference mode counts as no_grad does."""
    model, x = nn.Linear(8, 5, bias=False), torch.randn(3, 8)

    def run():
        with torch.inference_mode():
            return model(x)

    assert total(run) == 240


def test_f24_checkpointing():
    """Model FLOPs 6u in all three; hardware 6u plain, 7u non-reentrant (stops early), 8u reentrant."""
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64, requires_grad=True)

    def f(t):
        return b(F.gelu(a(t)))

    unit = 65_536
    runs = {
        6: lambda: f(x).sum().backward(),
        7: lambda: checkpoint(f, x, use_reentrant=False).sum().backward(),
        8: lambda: checkpoint(f, x, use_reentrant=True).sum().backward(),
    }
    for units, run in runs.items():
        totals = flops_totals(preflop.record(run))
        assert (totals.model, totals.hardware) == (6 * unit, units * unit)
        assert total(run) == units * unit


def test_f25_again_and_again():
    """The fifth analysis of a model counts what the first did."""
    model, x = nn.Linear(8, 8, bias=False), torch.randn(2, 8)
    assert [total(model, x) for _ in range(5)] == [256] * 5


def test_f26_lora():
    """A frozen base costs forward and input gradients only; the first layer not even those: 5u + 17r."""

    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(64, 64, bias=False)
            self.w.weight.requires_grad_(False)
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x):
            return self.w(x) + self.b(self.a(x))

    model, x = nn.Sequential(LoRA(), LoRA(), LoRA()), torch.randn(32, 64)
    assert total(lambda: model(x).sum().backward()) == 1_589_248


def test_f27_first_layer():
    """Data need no gradient: forward and weight gradient only, 4N per sample."""
    model, x = nn.Linear(1000, 10, bias=False), torch.randn(4, 1000)
    assert total(lambda: model(x).sum().backward()) == 160_000


def test_f28_mixture_of_experts():
    """Router and the k active experts per token, whatever the routing."""
    tokens, d, f, experts, k = 32, 64, 256, 8, 2

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.Linear(d, experts, bias=False)
            self.u = nn.ModuleList(nn.Linear(d, f, bias=False) for _ in range(experts))
            self.w = nn.ModuleList(nn.Linear(f, d, bias=False) for _ in range(experts))

        def forward(self, x):
            g, i = self.r(x).softmax(-1).topk(k, -1)
            o = torch.zeros_like(x)
            for e in range(experts):
                t, j = (i == e).nonzero(as_tuple=True)
                o = o.index_add(0, t, self.w[e](F.gelu(self.u[e](x[t]))) * g[t, j, None])
            return o

    assert total(MoE(), torch.randn(tokens, d)) == 4_227_072


def test_f29_custom_operator():
    """An operator without a formula is named with its calls; once registered it counts."""

    @torch.library.custom_op("t_bugs::mymm", mutates_args=())
    def mymm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @mymm.register_fake
    def _(a, b):
        return a.new_empty(a.shape[0], b.shape[1])

    a, b = torch.randn(8, 16), torch.randn(16, 4)
    tape = preflop.record(lambda: mymm(a, b))
    ledger = flops_ledger(tape)
    assert (ledger.total(), ledger.unknown) == (0, {"t_bugs.mymm": 1})
    assert [row.write_bytes for row in operator_rows(tape) if row.op == "t_bugs.mymm"] == [128]

    @flops("t_bugs.mymm")
    def priced(sig):
        (m, k), (_, n) = sig.inputs[0].shape, sig.inputs[1].shape
        return Work(2 * m * k * n, Kind.MATMUL)

    try:
        ledger = flops_ledger(tape)
        assert (ledger.total(), ledger.unknown) == (1024, {})
    finally:
        del FLOPS["t_bugs.mymm"]


def test_f30_flex_attention():
    """flex_attention is counted dense and does not raise."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 16)
    assert total(lambda: flex_attention(q, q, q)) == 2_097_152


def test_f32_complex():
    """A complex multiply-add is 8 real FLOPs; its elements are 8 bytes."""
    a = torch.randn(16, 16, dtype=torch.complex64)
    b = torch.randn(16, 16, dtype=torch.complex64)
    assert total(lambda: a @ a) == 32_768
    tape = preflop.record(lambda: a @ b)
    assert traffic_ledger(tape).total() == 3 * 2_048


def test_f33_second_order():
    """A gradient of a gradient: 2u forward, 2u first gradient, 5u second backward."""
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    x = torch.randn(8, 64, requires_grad=True)

    def run():
        y = b(torch.tanh(a(x))).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.pow(2).sum().backward()

    assert total(run) == 9 * 65_536


def test_f35_packed_lengths():
    """Sequences of their own length cost their own squares, not the longest's."""
    qs = [torch.randn(1, 8, n, 64) for n in (128, 64)]
    assert total(lambda: [F.scaled_dot_product_attention(q, q, q) for q in qs]) == 41_943_040


def test_f36_elementwise():
    """One FLOP per element and operation when asked for, none otherwise; bytes always: a - b is 72."""
    a, b = torch.rand(2, 3), torch.rand(2, 3)
    runs = (lambda: a - b, lambda: a + (-b), lambda: a / b, lambda: a**2)
    tapes = [preflop.record(run) for run in runs]
    assert [flops_ledger(tape, elementwise=True).total() for tape in tapes] == [6, 12, 6, 6]
    assert [flops_ledger(tape).total() for tape in tapes] == [0, 0, 0, 0]
    assert traffic_ledger(tapes[0]).total() == 72
    assert operator_rows(tapes[0])[0].arithmetic_intensity == 6 / 72


def test_f37_no_grad_encoder():
    """An encoder under no_grad costs forward only; the head no input gradient."""
    enc, head = nn.Linear(32, 32, bias=False), nn.Linear(32, 4, bias=False)
    x = torch.randn(8, 32)

    def step():
        with torch.no_grad():
            h = enc(x)
        head(h).sum().backward()

    assert total(step) == 20_480


def test_f40_work_in_parent_and_child():
    """Children's work and the parent's own sum to the total."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU())
            self.p = nn.Parameter(torch.randn(8, 4))

        def forward(self, x):
            return self.c(x) @ self.p

    ledger = flops_ledger(preflop.record(M(), torch.randn(2, 8)))
    assert ledger.total() == 384
    assert ledger.by("module") == {"c.0": 256, "": 128}


def test_f41_fft_estimate():
    """A real transform is estimated at 2.5·n·log2 n, and labelled as an estimate."""
    x = torch.randn(4, 1024)
    tape = preflop.record(lambda: torch.fft.rfft(x))
    assert flops_ledger(tape).total() == 102_400
    assert flops_totals(tape).estimates == {"aten._fft_r2c": 102_400}
    assert flops_totals(tape).model == 0


def test_f42_swiglu():
    """Three matrices, not two."""
    d, f = 64, 172
    g, u, o = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)
    x = torch.randn(10, d)
    assert total(lambda: o(F.silu(g(x)) * u(x))) == 660_480


def test_f43_padding_and_dilation():
    """Every tap counts, also on padding; dilation changes nothing."""
    pad, one = nn.Conv2d(4, 4, 3, padding=1, bias=False), torch.randn(1, 4, 1, 1)
    dil = nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False)
    assert total(pad, one) == 288
    assert total(dil, torch.randn(1, 4, 8, 8)) == 18_432
