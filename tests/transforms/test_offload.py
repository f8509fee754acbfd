"""The law of offloading: offload(record(s)) == record(s whose blocks offload by torch's hooks).

Left out of the comparison are views that the hooks themselves make (`aten.detach`, `aten.as_strided`), and lines:
where a hook makes a view while a forward call runs, the recorder takes the hook's line for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from preflop.accounting import account_tape
from preflop.choosing import Accounts, offloaded
from preflop.errors import BadNumber, BadSubject
from preflop.folding import tape_of
from preflop.hardware.catalog import find as device
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.host import HostMemory, host_memory
from preflop.ledgers.memory import memory
from preflop.ledgers.traffic import traffic_ledger
from preflop.models.build import build, example_batch
from preflop.models.catalog import find
from preflop.ops.transfer import TO_DEVICE, TO_HOST
from preflop.plan.outcome import outcome_of
from preflop.record.subject_tape import record_cut, record_subject
from preflop.subject import Subject, resolve
from preflop.tape.events import HOST, Tape
from preflop.tape.replay import story
from preflop.tape.stack import Refused
from preflop.timing.link import LINK
from preflop.transforms.depth import unfold
from preflop.transforms.offload import ASSUMPTION, offload
from tests.transforms.offloaded import Offloading

CASES = [
    ("gpt2", {}),
    ("gpt2", {"precision": "bf16-mixed", "device": "h100-sxm", "microbatches": 2}),
    ("llama-3.2-1b", {"precision": "bf16", "device": "h100-sxm"}),
    ("pythia-160m", {"optimizer": "lion"}),
    ("bert-base", {"precision": "fp16-mixed"}),
    ("vit-b-16", {"optimizer": "sgd"}),
    ("resnet-50", {}),
]
VIEWS = {"aten.detach", "aten.as_strided"}


def without_lines(tape: Tape) -> Tape:
    """Calls without lines, transfers without module, host storages on the host."""
    ops = [signature.op for signature in tape.signatures]
    calls = [
        dataclasses.replace(
            call, source=0, module=0 if ops[call.signature] in (TO_HOST, TO_DEVICE) else call.module
        )
        for call in tape.calls
    ]
    storages = [
        dataclasses.replace(s, device=HOST)
        if s.call >= 0 and ops[tape.calls[s.call].signature] == TO_HOST
        else s
        for s in tape.storages
    ]
    return dataclasses.replace(tape, calls=calls, storages=storages)


def hold(name: str, options: dict[str, Any]) -> None:
    """Transformed == recorded."""
    facts = find(name)
    size = {"batch_size": 2} if facts.is_image else {"batch_size": 2, "sequence_length": 32}
    made = without_lines(offload(unfold(record_cut(resolve(name, size, **options), lives=True))))

    def make() -> nn.Module:
        model = build(name)
        Offloading(model, 1024)
        return model

    batch = example_batch(facts, 2, None if facts.is_image else 32)
    recorded = without_lines(tape_of(resolve(make, batch, **options)))
    assert story(made, without=VIEWS) == story(recorded, without=VIEWS)
    assert memory(made).at_peak == memory(recorded).at_peak
    assert memory(made).columns == memory(recorded).columns
    assert flops_totals(made) == flops_totals(recorded)


def annotated(subject: Subject) -> Tape:
    """The subject's annotated tape, recorded in full."""
    return record_subject(subject, lives=True)


class Block(nn.Module):
    """Keeps its input (64 wide) and one tanh (256 wide)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + down(tanh(up(x)))."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks over a given tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other, and a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_offloaded_equals_recorded(name: str, options: dict[str, Any]) -> None:
    """Activations moved on the tape == the step recorded with hooks that move them, event by event."""
    hold(name, options)


def test_host_and_link_are_counted() -> None:
    """Three blocks keep 3 tanh of 100 x 256 and 2 inputs of 100 x 64 (the first is the batch): all are on the
    host when forward ends, and go there and back once."""
    tape = offload(annotated(resolve(Net(), torch.randn(100, 64))))
    kept = 3 * 100 * 256 * 4 + 2 * 100 * 64 * 4
    assert host_memory(tape) == HostMemory(kept, kept, kept)
    assert ASSUMPTION in tape.assumptions


def test_only_one_block_is_on_the_device() -> None:
    """At the end of forward nothing of 100 x 256 is on the device, where the plain step holds three."""
    subject = resolve(Net(), torch.randn(100, 64))
    plain, moved = memory(record_subject(subject)), memory(offload(annotated(subject)))
    assert plain.columns.activations.bytes - moved.columns.activations.bytes == 3 * 100 * 256 * 4 + 2 * 100 * 64 * 4
    assert moved.peak_bytes < plain.peak_bytes


def test_small_tensors_stay() -> None:
    """Above the largest nothing goes: the tape is the plain one."""
    subject = resolve(Net(), torch.randn(100, 64))
    tape = offload(annotated(subject), least_bytes=100 * 256 * 4 + 1)
    assert host_memory(tape) == HostMemory(0, 0, 0)
    assert story(tape, without=VIEWS) == story(record_subject(subject), without=VIEWS)


def test_flops_stay_and_transfers_are_bytes_of_the_device() -> None:
    """FLOPs as before; each byte that goes is read once, each that comes written once."""
    subject = resolve(Net(), torch.randn(100, 64))
    plain, moved = record_subject(subject), offload(annotated(subject))
    assert flops_totals(moved).total == flops_totals(plain).total
    link_bytes = host_memory(moved).link_bytes
    assert traffic_ledger(moved).total() - traffic_ledger(plain).total() == link_bytes


def test_the_link_is_a_bound() -> None:
    """A step is no shorter than its transfers; where the catalog has no link they are not timed, and it says so."""
    tape = offload(annotated(resolve(Net(), torch.randn(100_000, 64), device="h100-sxm5-80gb")))
    account = account_tape(tape, device("h100-sxm"))
    link_s = host_memory(tape).link_bytes / 63e9
    assert account.time.lower_s == account.time.expected_s == link_s
    assert account.time.bound == LINK
    assert any("to the host and back" in text for text in account.assumptions)
    bare = dataclasses.replace(device("h100-sxm"), figures={
        name: figure for name, figure in device("h100-sxm").figures.items() if not name.startswith("pcie")
    })  # fmt: skip
    untimed = account_tape(tape, bare)
    assert untimed.time.lower_s is not None
    assert untimed.time.lower_s < link_s
    assert any("transfers are not timed" in text for text in untimed.assumptions)


def test_what_cannot_is_refused() -> None:
    """A plain tape, one that recomputes, a model without blocks, a negative size."""
    subject = resolve(Net(), torch.randn(4, 64))
    with pytest.raises(Refused, match="does not say what held its tensors"):
        offload(record_subject(subject))
    with pytest.raises(BadSubject, match="no repeated blocks"):
        offload(annotated(resolve(nn.Linear(4, 4), torch.randn(2, 4))))
    with pytest.raises(BadNumber, match="least_bytes is -1"):
        offload(annotated(subject), least_bytes=-1)
    with pytest.raises(BadSubject, match="activations of Net cannot be offloaded: .*is recomputed"):
        offloaded(resolve(Net(), torch.randn(4, 64), recompute="block"), None)
    with pytest.raises(BadSubject, match="what holds its tensors cannot be followed"):
        offloaded(subject, None)


def test_it_is_a_row_of_what_if() -> None:
    """gpt2-nano: a lower peak, host and link bytes beside it, the training as it is."""
    size = {"batch_size": 8, "sequence_length": 128}
    prices = Accounts("gpt2-nano", size, device="h100-sxm")
    outcome = outcome_of(prices.account(prices.choice.but(offload=True)))
    plain = outcome_of(prices.account(prices.choice))
    assert outcome.peak_bytes < plain.peak_bytes
    assert outcome.link_bytes == 2 * outcome.host_bytes > 0
    assert outcome.flops_total == plain.flops_total
