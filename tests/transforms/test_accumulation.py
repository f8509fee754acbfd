"""The law of accumulation: accumulate(record(one microbatch), K) == record(K microbatches)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from preflop.errors import BadNumber
from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.subject import resolve
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
