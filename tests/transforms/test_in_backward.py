"""The law of the optimizer in backward: update_in_backward(record(s)) == record(s updated in backward)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.record.optimizer_tape import record_optimizer
from preflop.subject import resolve
from preflop.tape.replay import story
from preflop.tape.stack import Refused
from preflop.transforms.accumulation import accumulate
from preflop.transforms.in_backward import update_in_backward
from preflop.transforms.optimizer import gradient_metas

SIZE = {"batch_size": 2, "sequence_length": 32}
CASES = [
    ("gpt2", "adamw", {}),
    ("llama-3.2-1b", "adamw-8bit", {"device": "h100-sxm", "precision": "bf16"}),
    ("bert-base", "lion", {"precision": "bf16-master"}),
    ("vit-b-16", "sgd", {"recompute": "block"}),
    ("pythia-160m", "momentum", {"device": "h100-sxm", "precision": "bf16-mixed"}),
    ("resnet-50", "adamw-fused", {}),
]
WHOLE = [
    ("gemma-2-2b", "adafactor", {}),
    ("qwen-2.5-0.5b", "muon", {"precision": "bf16-fp32-states"}),
    ("gpt2", "muon", {"device": "h100-sxm"}),
]


def hold(name: str, optimizer: str, options: dict) -> None:
    """Transformed == recorded."""
    size = {"batch_size": 2} if name.startswith(("vit", "resnet")) else SIZE
    base = tape_of(resolve(name, size, optimizer="adamw", **options))
    target = resolve(name, size, optimizer=f"{optimizer}-in-backward", **options)
    update = record_optimizer(target, base.parameters, gradient_metas(base))
    made, recorded = update_in_backward(base, update, name=target.optimizer_name), tape_of(target)
    assert story(made) == story(recorded)
    assert all(made.storages[info.storage].name == info.name for info in made.parameters)
    assert made.subject == recorded.subject
    assert memory(made).at_peak == memory(recorded).at_peak
    assert memory(made).columns == memory(recorded).columns
    assert flops_totals(made) == flops_totals(recorded)


@pytest.mark.parametrize(("name", "optimizer", "options"), CASES)
def test_moved_into_backward_equals_recorded(name: str, optimizer: str, options: dict) -> None:
    """Updates moved to where gradients are stored == the step recorded with hooks, event by event."""
    hold(name, optimizer, options)


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer", "options"), WHOLE)
def test_moved_into_backward_equals_recorded_whole(name: str, optimizer: str, options: dict) -> None:
    """The same for more architectures and optimizers."""
    hold(name, optimizer, options)


def test_gradients_are_not_all_alive() -> None:
    """Four equal layers: at most two gradients at once, where the plain step holds all four."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    plain = tape_of(resolve(model, torch.randn(2, 64), optimizer="sgd"))
    moved = tape_of(resolve(model, torch.randn(2, 64), optimizer="sgd-in-backward"))
    assert memory(plain).columns.gradients.bytes == 4 * 64 * 64 * 4
    assert memory(moved).columns.gradients.bytes == 64 * 64 * 4
    assert memory(moved).peak_bytes < memory(plain).peak_bytes


def test_several_microbatches_are_refused() -> None:
    """Gradients of several microbatches are complete after the last: no tape of them, from either side."""
    batch = torch.randn(2, 4)
    two = tape_of(resolve(nn.Linear(4, 4), batch, microbatches=2))
    with pytest.raises(Refused, match="several microbatches"):
        update_in_backward(two, two, name="adamw-in-backward")
    with pytest.raises(Refused, match="in backward"):
        accumulate(tape_of(resolve(nn.Linear(4, 4), batch, optimizer="adamw-in-backward")), microbatches=2)
