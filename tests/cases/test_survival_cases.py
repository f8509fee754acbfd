"""Survival cases from the field: what people have must be analysed, not refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributions import Categorical
from torch.nn.utils import parametrizations

import preflop
from preflop.errors import BadSubject
from preflop.ledgers.flops import flops_ledger
from preflop.ledgers.traffic import traffic_ledger
from preflop.tape.events import Phase
from tests.cases.new_bytes import new_storages


def test_c01_odd_inputs():
    """Mappings, keywords, strings and None pass through: 2 * 3 * 8 * 4 = 192 FLOPs forward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 4, bias=False)

        def forward(self, batch, *, scale, extra=None):
            return {"out": self.l(batch["x"]) * scale, "aux": (batch["mask"].sum(), extra)}

    inner = {"x": torch.randn(3, 8), "mask": torch.ones(3, dtype=torch.bool), "name": "abc", "none": None}
    batch = {"batch": inner, "scale": torch.tensor(2.0), "extra": None}
    account = preflop.account(Model(), batch, loss=lambda out: out["out"].sum())
    assert flops_ledger(account.tape).by("phase") == {"forward": 192, "backward": 192}
    tape = preflop.record(Model(), inner, scale=torch.tensor(2.0))
    assert flops_ledger(tape).total() == 192


def test_c02_tokens():
    """Token ids keep their values: 2 * 14 * 16 * 100 = 44,800 FLOPs forward."""
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    account = preflop.account(model, torch.randint(0, 100, (2, 7)))
    assert flops_ledger(account.tape).by("phase")["forward"] == 44_800


def test_c02_ids_outside_of_the_table():
    """An id outside of the vocabulary is named, with the table's size."""
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    with pytest.raises(BadSubject, match=r"100"):
        preflop.account(model, torch.tensor([[3, 100]]))


def test_c03_output_that_is_no_tensor():
    """A distribution reaches the loss as itself; forward and dW cost 100 FLOPs each."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(10, 5)

        def forward(self, x):
            return Categorical(logits=self.l(x))

    account = preflop.account(
        Policy(), torch.randn(1, 10), loss=lambda d: -d.log_prob(torch.tensor([1])).mean()
    )
    assert flops_ledger(account.tape).by("phase") == {"forward": 100, "backward": 100}
    with pytest.raises(BadSubject, match="loss="):
        preflop.account(Policy(), torch.randn(1, 10))


def test_c04_empty_and_zero_dimensional():
    """An empty batch costs nothing, and its intensity is none; a 0-dim tensor has 4 bytes."""
    layer = nn.Linear(16, 4, bias=False)
    empty = preflop.record(lambda: layer(torch.randn(0, 16)))
    assert flops_ledger(empty).total() == 0
    assert sum(s.bytes for s in new_storages(empty)) == 0
    scaled = preflop.record(lambda: torch.tensor(2.0) * torch.randn(3))
    assert traffic_ledger(scaled).write_bytes() >= 12
    assert {s.bytes for s in new_storages(scaled)} == {4, 12}
    half = preflop.record(lambda: layer(torch.randn(2, 16)) * torch.tensor(0.5))
    assert flops_ledger(half).by("op")["aten.mm"] == 2 * 2 * 16 * 4
    account = preflop.account(nn.Linear(16, 4, bias=False), torch.randn(0, 16), loss=lambda y: y.sum())
    assert account.flops.model == 0
    assert account.to_dict()["schema"] == "preflop.account/1"


class Experts(nn.Module):
    """Routed experts with data-dependent shapes: which tokens go where is read back by `where`."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False))
            for _ in range(8)
        )

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return y


def test_c06_data_dependent_shapes():
    """The empty `nonzero` is (0, 2); routing is taken as balanced, and the tape says so: every token
    passes 2 of 8 experts, so the matmuls are those of 64 tokens * 2 experts and the gate."""
    shapes = []
    preflop.record(lambda: shapes.append(tuple(torch.nonzero(torch.ones(1, 0)).shape)))
    assert shapes == [(0, 2)]
    tape = preflop.record(Experts(), torch.randn(64, 64))
    matmuls = flops_ledger(tape).by("op")["aten.mm"]
    assert matmuls == 2 * 64 * 64 * 8 + 2 * 64 * 2 * (2 * 64 * 128)
    assert any("topk" in text and "balanced" in text for text in tape.assumptions)


@pytest.mark.parametrize("full", [True, False])
def test_c07_branches_on_masks(full):
    """`mask.all()` takes the branch that a real run takes on these inputs."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8, bias=False)

        def forward(self, x, mask):
            if mask.all():
                mask = None
            h = self.l(x)
            return h if mask is None else h.masked_fill(~mask[..., None], 0.0)

    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 0] = full
    tape = preflop.record(Model(), torch.randn(2, 4, 8), mask)
    assert flops_ledger(tape).total() in range(1024, 1024 + 200)
    assert flops_ledger(tape).by("op")["aten.mm"] == 1024
    assert any("masked_fill" in s.op for s in tape.signatures) is not full
    assert tape.assumptions == []
    account = preflop.account(Model(), (torch.randn(2, 4, 8), mask))
    assert flops_ledger(account.tape).by("phase") == {"forward": 1024, "backward": 1024} or full is False


def test_values_that_are_read_back():
    """`.item()` of integers is what it is; of floats that are not computed it is assumed, and said so."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8, bias=False)

        def forward(self, x, lengths):
            h = self.l(x[:, : lengths.max().item()])
            return h / max(h.abs().max().item(), 1e-6)

    tape = preflop.record(Model(), torch.randn(2, 6, 8), torch.tensor([3, 4]))
    assert flops_ledger(tape).by("op")["aten.mm"] == 2 * 2 * 4 * 8 * 8
    assert any(".item()" in text for text in tape.assumptions)


def in_two_gigabytes(code: str) -> list[str]:
    """Runs a program of its own; the words it prints, the last being its peak resident KiB."""
    ends = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + ends],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_c09_larger_than_this_machine():
    """85.9 GB of fp32 weights, priced within 1 GiB: 2N FLOPs a token forward."""
    parameters, forward, rss_kib = in_two_gigabytes("""
        import torch, preflop
        from torch import nn
        with torch.device('meta'):
            model = nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(80)])
        account = preflop.account(model, torch.zeros(1, 16384))
        print(account.memory.columns.parameters.elements)
        print(preflop.flops_ledger(account.tape).by('phase')['forward'])
    """)
    assert int(parameters) == 21_474_836_480
    assert int(forward) == 42_949_672_960
    assert int(rss_kib) < 2**20


def test_c17_a_wide_encoder():
    """4,833,116,160 parameters and 8 x 2048 positions are priced without a large allocation."""
    parameters, peak, rss_kib = in_two_gigabytes("""
        import torch, preflop
        from torch import nn
        with torch.device('meta'):
            layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True)
            model = nn.TransformerEncoder(layer, 24)
            x = torch.empty(8, 2048, 4096)
        account = preflop.account(model, x)
        print(account.memory.columns.parameters.elements)
        print(account.memory.peak_bytes)
    """)
    assert int(parameters) == 4_833_116_160
    assert int(peak) > 16 * 4_833_116_160
    assert int(rss_kib) < 2**20


def test_c11_weight_norm():
    """8 + 8 + 128 = 144 parameters; the effective weight is a temporary of 512 bytes per forward."""
    model, x = parametrizations.weight_norm(nn.Linear(16, 8)), torch.randn(4, 16)
    account = preflop.account(model, x)
    assert account.memory.columns.parameters.elements == 144
    tape = preflop.record(model, x)
    assert flops_ledger(tape).by("op")["aten.addmm"] == 1024
    assert [s.bytes for s in new_storages(tape)].count(512) >= 1


def test_c12_names_that_the_model_owns():
    """The user's attributes and buffers named as a tool's private ones stay as they are."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].register_buffer("total_ops", torch.tensor(7.0))
    model[0].flops, model[0].name = "mine", "x"
    x = torch.randn(1, 3, 8, 8)
    account = preflop.account(model, x)
    assert flops_ledger(account.tape).by("phase")["forward"] == 7776
    assert (model[0].total_ops.item(), model[0].flops, model[0].name) == (7.0, "mine", "x")
    assert set(vars(model)) == set(vars(nn.Sequential()))


def test_c13_no_parameters():
    """A model without parameters has 0 bytes of them and can still be priced."""
    model, x = nn.Sequential(nn.Tanh(), nn.Flatten()), torch.randn(2, 3, 4)
    account = preflop.account(model, x)
    assert (account.memory.columns.parameters.bytes, account.memory.columns.parameters.elements) == (0, 0)
    assert account.memory.peak_bytes >= 2 * 2 * 3 * 4 * 4
    assert account.flops.model == 0
    with_gradient = preflop.account(model, torch.randn(2, 3, 4, requires_grad=True))
    assert with_gradient.flops.backward > 0


def test_c13_no_arguments():
    """A forward without arguments: 10 parameters, no matmul, one gradient of 40 bytes."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = nn.Parameter(torch.zeros(5, 2))

        def forward(self):
            return self.t.exp().sum(0)

    for batch in ((), {}):
        account = preflop.account(Table(), batch)
        assert account.memory.columns.parameters.elements == 10
        assert account.memory.columns.gradients.bytes == 40
        assert account.flops.model == 0
    assert preflop.account(Table(), None).memory.columns.gradients.bytes == 40


def test_c18_data_parallel_wrapper(tmp_path):
    """A wrapped model costs what the inner one does: 65,536 FLOPs forward, 163,840 a step."""
    inner = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(4, 64)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(inner)
        account = preflop.account(model, x)
        assert flops_ledger(account.tape).by("phase")["forward"] == 65_536
        assert account.flops.model == 163_840
        assert account.memory.columns.parameters.elements == 8_192
        assert [info.name for info in account.tape.parameters] == ["0.weight", "1.weight"]
        step = preflop.record(lambda: model(x).sum().backward())
        assert flops_ledger(step).total() == 163_840 or flops_ledger(step).by("op")["aten.mm"] == 163_840
        assert all(parameter.grad is None for parameter in inner.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_lazy_modules():
    """A lazy module learns its shapes on a copy, from the batch's shapes; the user's stays lazy."""
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(2, 3, 8, 8)
    account = preflop.account(model, x)
    assert account.memory.columns.parameters.elements == 4 * 27 + 4 + 4 * 36 * 5 + 5
    assert isinstance(model[0], nn.LazyConv2d)
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)
    known = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    assert account.memory.peak_bytes == preflop.account(known, x).memory.peak_bytes
    assert account.flops == preflop.account(known, x).flops
    made = preflop.account(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), x)
    assert made.memory.columns.parameters.elements == 192 * 5 + 5


def test_mixed_devices():
    """Parts on other devices (meta stands for them here) are priced as one device's."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, device="meta"))
    account = preflop.account(model, torch.randn(2, 8))
    assert flops_ledger(account.tape).by("phase")["forward"] == 2 * 2 * 8 * 8 + 2 * 2 * 8 * 4
    moved = preflop.account(nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8, device="meta"))
    assert moved.memory.columns.inputs.bytes == 64


def test_double_backward():
    """A gradient penalty: the second backward is backward too, and its FLOPs are counted."""
    layer = nn.Linear(16, 16, bias=False)
    x = torch.randn(4, 16, requires_grad=True)

    def step():
        y = layer(x).pow(2).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.pow(2).sum().backward()

    tape = preflop.record(step)
    one = 2 * 4 * 16 * 16
    assert flops_ledger(tape).by("op")["aten.mm"] % one == 0
    assert flops_ledger(tape).by("op")["aten.mm"] >= 5 * one
    assert Phase.BACKWARD in {call.phase for call in tape.calls}
    assert layer.weight.grad is None
    assert x.grad is None


def test_custom_operator():
    """An operator of the user's own runs by its fake kernel and is listed where it has no price."""

    @torch.library.custom_op("preflop_test::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @halve.register_fake
    def _(x):
        return torch.empty_like(x)

    halve.register_autograd(lambda ctx, grad: grad / 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return halve(self.l(x))

    account = preflop.account(Model(), torch.randn(2, 8))
    assert account.flops.unknown == {"preflop_test.halve": 1}
    assert account.flops.model == 2 * 2 * 2 * 8 * 8


def test_custom_operator_without_a_fake_kernel():
    """One without a fake kernel is run on small stand-ins, or named in the error."""

    @torch.library.custom_op("preflop_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    tape = preflop.record(lambda: twice(torch.randn(4, 4, requires_grad=False)))
    assert flops_ledger(tape).unknown == {"preflop_test.twice": 1}


