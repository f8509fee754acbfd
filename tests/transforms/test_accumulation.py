"""The law of accumulation: accumulate(record(one microbatch), K) == record(K microbatches)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from preflop.errors import BadNumber
from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.subject import Subject, resolve
from preflop.tape.replay import story
from preflop.tape.stack import Refused
from preflop.transforms.accumulation import accumulate

SIZE = {"batch_size": 2, "sequence_length": 32}
CASES = [
    ("gpt2", {}),
    ("gpt2", {"precision": "fp16-mixed"}),
    ("gpt2", {"precision": "bf16-mixed", "device": "h100-sxm"}),
    ("pythia-160m", {"precision": "bf16-master"}),
    ("bert-base", {"optimizer": "sgd"}),
    ("vit-b-16", {}),
    ("resnet-50", {}),
]
WHOLE = [
    ("llama-3.2-1b", {"recompute": "block"}),
    ("gemma-2-2b", {}),
    ("qwen-2.5-0.5b", {"precision": "bf16", "recompute": "selective"}),
]


def hold(name: str, options: dict) -> None:
    """Transformed == recorded."""
    size = {"batch_size": 2} if name.startswith(("vit", "resnet")) else SIZE
    made = accumulate(tape_of(resolve(name, size, **options)), microbatches=3)
    recorded = tape_of(resolve(name, size, microbatches=3, **options))
    assert story(made) == story(recorded)
    assert made.subject == recorded.subject
    assert memory(made).peak_bytes == memory(recorded).peak_bytes
    assert memory(made).columns == memory(recorded).columns
    assert flops_totals(made) == flops_totals(recorded)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_accumulated_equals_recorded(name: str, options: dict) -> None:
    """accumulate(record(s), 3) == record(s with 3 microbatches), event by event."""
    hold(name, options)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), WHOLE)
def test_accumulated_equals_recorded_whole(name: str, options: dict) -> None:
    """The same for more architectures."""
    hold(name, options)


def test_one_microbatch_is_the_identity() -> None:
    """accumulate(tape, 1) is the tape."""
    tape = tape_of(resolve(nn.Linear(4, 4), torch.randn(2, 4)))
    assert accumulate(tape, microbatches=1) is tape


def test_bad_counts() -> None:
    """Zero microbatches and a tape of several are refused."""
    tape = tape_of(resolve(nn.Linear(4, 4), torch.randn(2, 4)))
    with pytest.raises(BadNumber, match="microbatches is 0"):
        accumulate(tape, microbatches=0)
    two = tape_of(resolve(nn.Linear(4, 4), torch.randn(2, 4), microbatches=2))
    with pytest.raises(Refused):
        accumulate(two, microbatches=4)


class Counting(nn.Module):
    """Does more in every second forward: its microbatches are not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.linear(x)
        return x if self.calls % 2 else x.relu()


class Cached(nn.Module):
    """Makes a table in its first forward and keeps it."""

    made = staticmethod(lambda: torch.arange(4.0))

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = self.made()
        return self.linear(x) * self.table


class CachedByTwo(Cached):
    """The same by two calls, of which only the second's result is kept: not recognised as made once."""

    made = staticmethod(lambda: torch.arange(4.0) * 2)


NANO = ("gpt2-nano", {"batch_size": 2, "sequence_length": 16})
BATCH = torch.randn(3, 4)
MANY = {
    "fp32": (*NANO, {}),
    "fp16 with its scaler": (*NANO, {"precision": "fp16-mixed"}),
    "recompute": (*NANO, {"recompute": "block", "precision": "bf16-mixed"}),
    "for a GPU": (*NANO, {"precision": "bf16-mixed", "device": "h100-sxm", "recompute": "selective"}),
    "output kept": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), BATCH, {"keep_output": True}),
    "no optimizer": (nn.Linear(4, 4), BATCH, {"optimizer": None}),
    "a table kept": (Cached, BATCH, {}),
    "frozen": (nn.Linear(4, 4).requires_grad_(requires_grad=False), BATCH, {}),
}


@pytest.mark.parametrize("name", MANY)
def test_many_microbatches_are_repeated_and_equal_the_recording(name: str, monkeypatch) -> None:
    """Five microbatches: never recorded, and event by event what recording all of them gives."""
    from preflop import folding

    model, batch, options = MANY[name]
    subject = resolve(model, batch, microbatches=5, **options)
    recorded = tape_of(subject)
    asked: list[int] = []

    def watched(one: Subject):
        asked.append(one.microbatches)
        return tape_of(one)

    monkeypatch.setattr(folding, "tape_of", watched)
    made = folding.tape_of_many(subject)
    assert asked == [1, 2]
    assert story(made) == story(recorded)
    assert made.subject == recorded.subject
    assert made.assumptions == recorded.assumptions
    assert made.parameters == recorded.parameters
    # Deaths with nothing between them have no order, so neither have a timeline's points there.
    figures = [dataclasses.replace(memory(tape), timeline=()) for tape in (made, recorded)]
    assert figures[0] == figures[1]
    assert flops_totals(made) == flops_totals(recorded)


def accumulates_wrongly(model, subject: Subject) -> bool:
    """Whether a repetition without its proof would be another tape: the case is not empty."""
    repeated = accumulate(tape_of(resolve(model, BATCH)), microbatches=subject.microbatches)
    return story(repeated) != story(tape_of(subject))


@pytest.mark.parametrize("model", [Counting, CachedByTwo])
def test_microbatches_that_differ_are_all_recorded(model) -> None:
    """A model that does something else the second time is not repeated: the tape is the recorded one."""
    from preflop import folding

    subject = resolve(model, BATCH, microbatches=5)
    made = folding.tape_of_many(subject)
    assert story(made) == story(tape_of(subject))
    assert accumulates_wrongly(model, subject)
    if model is not Counting:
        return
    relus = [call for call in made.calls if made.signatures[call.signature].op == "aten.relu"]
    assert len(relus) == 5  # of ten forwards


def test_the_public_account_repeats(monkeypatch) -> None:
    """`preflop.account` of 50 microbatches records three, and equals the account of 50 recorded."""
    import preflop
    from preflop import folding
    from preflop.accounting import account_tape

    asked: list[int] = []

    def watched(one: Subject):
        asked.append(one.microbatches)
        return tape_of(one)

    monkeypatch.setattr(folding, "tape_of", watched)
    made = preflop.account(nn.Linear(4, 4), BATCH, microbatches=50)
    assert asked == [1, 2]
    wanted = account_tape(tape_of(resolve(nn.Linear(4, 4), BATCH, microbatches=50)))
    assert made.to_dict() == wanted.to_dict()


def test_more_microbatches_than_a_tape_holds() -> None:
    """A number that nobody can write down is refused before it is tried, with what can be priced."""
    import preflop

    with pytest.raises(BadNumber, match=r"microbatches is 1,000,000,000, and a step .* with [\d,]+ at most"):
        preflop.account(nn.Linear(4, 4), BATCH, microbatches=10**9)
