"""Memory cases from the field: each a kind of fault other tools had, exact to the byte.

The cases about a CUDA allocator (M22, M23) are held by tests/hardware.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import preflop
from preflop.ledgers.flops import flops_ledger
from preflop.tape.events import Phase, Role
from tests.cases.new_bytes import left_alive, new_peak, new_storages

KIB = 1024


def squares(count: int, width: int) -> nn.Sequential:
    """A stack of square matrices."""
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def saved_bytes(model, x) -> int:
    """What forward leaves alive for backward, the input included."""
    columns = preflop.account(model, x).memory.columns
    loss_and_output = 4
    return columns.activations.bytes - loss_and_output + columns.inputs.bytes


def test_m02_parameters_of_a_container():
    """Parameters held by a Sequential itself count: 2 * 12 + 6 + 3 = 33, 132 bytes."""

    class Mixer(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
            self.alpha = nn.Parameter(torch.rand(2, 3))
            self.start = nn.Parameter(torch.zeros(1, 3))

        def forward(self, x):
            return sum((a * m(x) for a, m in zip(self.alpha, self)), self.start)

    column = preflop.account(Mixer(), torch.randn(4, 3)).memory.columns.parameters
    assert (column.elements, column.bytes) == (33, 132)


def test_m04_packed_weights():
    """Two 4-bit values a byte: 4,160 stored elements in 4,352 bytes, no gradient, no state; each call
    makes two fp32 temporaries of 32,768 bytes and multiplies 65,536 FLOPs."""

    class Packed4(nn.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.shape = (rows, columns)
            self.w = nn.Parameter(torch.zeros(rows, columns // 2, dtype=torch.uint8), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(rows), requires_grad=False)

        def forward(self, x):
            low, high = self.w & 15, self.w >> 4
            wide = torch.stack((low, high), -1).reshape(self.shape).to(x.dtype) * self.scale[:, None]
            return x @ wide.t()

    x = torch.randn(4, 128, requires_grad=True)
    account = preflop.account(Packed4(64, 128), x)
    columns = account.memory.columns
    assert (columns.parameters.elements, columns.parameters.bytes) == (4160, 4352)
    assert columns.parameters.dtypes == {"uint8": (4096, 4096), "float32": (256, 64)}
    assert columns.optimizer_states.bytes == 0
    tape = preflop.record(Packed4(64, 128), torch.randn(4, 128))
    assert [s.bytes for s in new_storages(tape) if s.dtype == "float32"].count(32_768) == 2
    assert flops_ledger(tape).by("op")["aten.mm"] == 65_536


def test_m05_a_layer_called_ten_times():
    """The input of every call is kept: 10 * 32,768 bytes, of which one is the user's own."""
    layer, x = nn.Linear(64, 64), torch.zeros(128, 64)

    class Ten(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            for _ in range(10):
                x = self.layer(x)
            return x.sum()

    assert saved_bytes(Ten(), x) == 327_680


@pytest.mark.parametrize(("inplace", "peak"), [(False, 16_384), (True, 9_216)])
def test_m06_inplace_activation(inplace, peak):
    """In place saves as much for backward (16,384 bytes) but needs less while it runs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=inplace), nn.Linear(64, 8))
    x = torch.randn(32, 64)
    assert new_peak(preflop.record(lambda: model(x))) == peak

    class Summed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).sum()

    assert saved_bytes(Summed(*model), x) == 16_384


@pytest.mark.parametrize(
    ("kwargs", "extra"),
    [({"foreach": True}, 131_072), ({"foreach": False}, 49_152), ({"fused": True}, 0)],
    ids=["foreach", "loop", "fused"],
)
def test_m10_optimizer_step(kwargs, extra):
    """Above parameters, gradients and states, foreach needs P, a loop three tensors, fused nothing."""
    model = squares(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), **kwargs)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tape = preflop.record(optimizer.step)
    large = [s for s in new_storages(tape) if s.bytes > 64]
    assert new_peak(tape) - _scalars_at_peak(tape) == extra
    assert bool(large) == bool(extra)


def _scalars_at_peak(tape) -> int:
    """Step counters and bias corrections, a few bytes each, alive at the peak."""
    peak = new_peak(tape)
    alive, best = 0, 0
    events = sorted(
        [(s.born, s.bytes) for s in new_storages(tape)]
        + [(s.died, -s.bytes) for s in new_storages(tape) if s.died is not None]
    )
    small = 0
    for _, change in events:
        alive += change
        small += change if abs(change) <= 64 else 0
        if alive == peak:
            best = small
            break
    return best


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 131_072),
        (torch.optim.AdamW, 262_176),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 393_248),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad"],
)
def test_m11_optimizer_states(make, states):
    """SGD 0; momentum P; AdamW 2P and eight 4-byte counters; amsgrad 3P and the counters."""
    account = preflop.account(squares(8, 64), torch.randn(2, 64), optimizer=make)
    assert account.memory.columns.optimizer_states.bytes == states


def test_m12_second_step_is_larger():
    """States exist in forward only from step 2 on: 2P = 4,194,304 bytes more (and eight counters)."""
    memory = preflop.account(squares(8, 256), torch.randn(2048, 256), optimizer="adamw").memory
    assert memory.peak_phase == "backward"
    assert memory.peak_bytes - memory.first_step_peak_bytes == 4_194_304 + 32


@pytest.mark.parametrize(
    ("order", "microbatches", "peak"),
    [
        ("before", 1, 19_136_520),
        ("late", 1, 20_971_520),
        ("zeros", 1, 21_233_672),
        ("before", 4, 21_233_672),
    ],
)
def test_m14_where_gradients_are_freed(order, microbatches, peak):
    """The peak depends on when gradients are freed, to the byte."""
    model, x = squares(8, 256), torch.randn(2048, 256)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)

    def steps():
        for _ in range(3):
            if order == "before":
                optimizer.zero_grad()
            for a in range(microbatches):
                loss = model(x).relu().sum()
                if order == "late" and a == 0:
                    optimizer.zero_grad()
                loss.backward()
                del loss
            optimizer.step()
            if order == "zeros":
                optimizer.zero_grad(set_to_none=False)

    assert new_peak(preflop.record(steps)) == peak
    assert all(parameter.grad is None for parameter in model.parameters())


def test_m15_optimizer_in_backward():
    """Gradients never coexist: the peak is 851,976 bytes though they sum to 2,097,152."""
    model, x = squares(8, 256), torch.randn(64, 256)
    optimizers = {p: torch.optim.SGD([p], 1e-3, foreach=False) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def run():
        for _ in range(3):
            model(x).relu().sum().backward()

    before = [p.detach().clone() for p in model.parameters()]
    assert new_peak(preflop.record(run)) == 851_976
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize(("cached", "casts"), [(True, 4), (False, 8)])
def test_m16_autocast_copies(cached, casts):
    """bf16 copies of the weights, 32,768 bytes each, are made once while autocast lasts, or each time."""
    model, x = squares(4, 128), torch.randn(16, 128)
    alive_inside = []

    def run():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            y = model(x)
            y = model(x)
            alive_inside.append(y)

    tape = preflop.record(run)
    weights = [s for s in new_storages(tape) if s.bytes == 32_768]
    inputs = [s for s in new_storages(tape) if s.bytes == 4_096 and s.dtype == "bfloat16"]
    assert len(weights) == casts
    assert len(inputs) >= 2
    assert all(s.dtype == "bfloat16" for s in weights)
    if cached:
        last_call = max(call.tick for call in tape.calls)
        assert all(s.died is None or s.died > last_call for s in weights)


@pytest.mark.parametrize(("upcast", "extra"), [(True, 768_008), (False, 384_004)])
def test_m17_logits(upcast, extra):
    """Cross entropy of bf16 logits: 12NV when they are cast to fp32 first, else 6NV."""
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 1000, (64,))

    def step():
        F.cross_entropy(logits.float() if upcast else logits, targets).backward()

    assert new_peak(preflop.record(step)) == extra


def test_m19_attention_that_falls_to_math():
    """Heads of unlike widths have no fused kernel here: the softmax, 4 * 64 * 64 * 4 bytes, is kept."""
    q = torch.randn(1, 4, 64, 48, requires_grad=True)
    v = torch.randn(1, 4, 64, 32, requires_grad=True)
    tape = preflop.record(lambda: F.scaled_dot_product_attention(q, q, v))
    softmax = [call for call in tape.calls if "softmax" in tape.signatures[call.signature].op]
    kept = tape.storages[softmax[0].storages[-1]]
    assert kept.bytes == 65_536
    assert left_alive(tape) >= 65_536
    fused = preflop.record(lambda: F.scaled_dot_product_attention(q, q, q))
    assert left_alive(fused) < 65_536


@pytest.mark.parametrize(
    ("precision", "bytes_per_parameter"),
    [("fp32", 16), ("bf16-master", 16), ("bf16", 8), ("bf16-mixed", 16), ("bf16-fp32-states", 12)],
)
def test_m25_bytes_per_parameter(precision, bytes_per_parameter):
    """Weights, gradients and states, from the dtypes that the recorded step really has."""
    columns = preflop.account(squares(4, 128), torch.randn(2, 128), precision=precision).memory.columns
    held = columns.parameters.bytes + columns.gradients.bytes + columns.optimizer_states.bytes
    counters = 4 * 4
    assert held - counters == bytes_per_parameter * columns.parameters.elements


def test_m25_autocast_copies_at_the_end_of_forward():
    """Autocast over fp32 weights holds 2 more bytes per parameter while forward runs."""
    model = squares(4, 128)
    tape = preflop.account(model, torch.randn(2, 128), precision="bf16-mixed").tape
    copies = [s for s in tape.storages if s.dtype == "bfloat16" and s.bytes == 32_768]
    assert len(copies) >= 4


def test_m26_losses_that_are_summed():
    """Five graphs kept: 5 * 4 * 131,072 bytes and the total."""
    model, x = squares(4, 128), torch.randn(256, 128)

    def evaluate_badly():
        total = 0
        for _ in range(5):
            total = total + model(x).pow(2).mean()
        return total

    assert left_alive(preflop.record(evaluate_badly)) in range(2_621_440, 2_621_440 + 64)


def test_m27_nothing_leaks():
    """Two hundred recordings of a checkpointed step leave as many objects as ten."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.randn(64, 256, requires_grad=True)

    def analyse():
        preflop.record(lambda: checkpoint(model, x, use_reentrant=False).sum().backward())

    for _ in range(10):
        analyse()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(190):
        analyse()
    gc.collect()
    assert abs(len(gc.get_objects()) - before) < before * 0.01


def test_m30_activations_beside_four_times_the_model():
    """135,232 bytes of parameters; 67,633,152 bytes kept for backward."""
    model = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 16))

    class Summed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).sum()

    x = torch.randn(8192, 16)
    memory = preflop.account(model, x).memory
    assert memory.columns.parameters.bytes == 135_232
    assert 4 * memory.columns.parameters.bytes == 540_928
    assert saved_bytes(Summed(*model), x) == 67_633_152


def test_m32_storages_not_tensors():
    """A small view keeps its whole storage: 1,081,344 bytes live, not 65,536."""

    def run():
        a = torch.randn(1024, 256)
        b = a[:, :8]
        del a
        return b, torch.randn(1024, 8)

    assert left_alive(preflop.record(run)) == 1_081_344


def test_roles_of_a_plain_recording():
    """A recorded backward says which storages became gradients."""
    model, x = squares(2, 64), torch.randn(4, 64)
    tape = preflop.record(lambda: model(x).sum().backward())
    gradients = [s for s in tape.storages if s.role is Role.GRADIENT]
    assert [s.bytes for s in gradients] == [16_384, 16_384]
    assert {c.phase for c in tape.calls} == {Phase.FORWARD, Phase.BACKWARD}
