"""What fusion may claim: FLOPs equal, bytes moved never more, memory never more, said as an assumption."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import preflop
from preflop.folding import tape_of
from preflop.ledgers.flops import flops_ledger, flops_totals
from preflop.ledgers.memory import memory
from preflop.ledgers.traffic import traffic_ledger
from preflop.subject import resolve
from preflop.tape.events import Tape
from preflop.transforms.fusion import ASSUMPTION, fuse

SIZE = {"batch_size": 2, "sequence_length": 32}
CASES = [
    ("gpt2", {}),
    ("llama-3.2-1b", {"device": "h100-sxm", "precision": "bf16-mixed"}),
    ("bert-base", {}),
    ("pythia-160m", {"optimizer": "sgd", "recompute": "block"}),
    ("vit-b-16", {}),
    ("resnet-50", {}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_flops_equal_and_traffic_never_larger(name: str, options: dict) -> None:
    """FLOPs by kind are equal, fewer calls move fewer bytes, and no storage is lost on the way."""
    size = {"batch_size": 2} if name.startswith(("vit", "resnet")) else SIZE
    plain = tape_of(resolve(name, size, **options))
    fused = fuse(plain)
    assert flops_totals(fused) == flops_totals(plain)
    assert flops_ledger(fused).unknown == flops_ledger(plain).unknown
    assert len(fused.calls) < len(plain.calls)
    assert traffic_ledger(fused).total() < traffic_ledger(plain).total()
    assert memory(fused).columns.parameters == memory(plain).columns.parameters
    assert memory(fused).columns.optimizer_states == memory(plain).columns.optimizer_states
    assert ASSUMPTION in fused.assumptions
    assert ASSUMPTION not in plain.assumptions


def moved(tape: Tape) -> int:
    """Bytes read and written."""
    return traffic_ledger(tape).total()


def test_a_chain_reads_and_writes_once() -> None:
    """exp(sin(x) * 2): three kernels move 6 x, one moves 2 x."""
    x = torch.randn(1000, 100)
    tape = preflop.record(lambda: (torch.sin(x) * 2).exp())
    assert moved(tape) == 6 * 400_000
    assert moved(fuse(tape)) == 2 * 400_000


def test_what_is_used_elsewhere_is_still_written() -> None:
    """sin(x) is kept by a matmul: it is written once, and read by it."""
    x, w = torch.randn(100, 100), torch.randn(100, 100)

    def run() -> torch.Tensor:
        y = torch.sin(x)
        return (y * 2).exp() + y @ w

    assert moved(fuse(preflop.record(run))) < moved(preflop.record(run))
    kernels = [s.op for s in fuse(preflop.record(run)).signatures]
    assert "preflop.fused" in kernels


def test_matmuls_are_left_alone() -> None:
    """A model of matmuls only is the same after fusion."""
    tape = preflop.record(nn.Linear(8, 8, bias=False), torch.randn(4, 8))
    assert [c.signature for c in fuse(tape).calls] == [c.signature for c in tape.calls]
