"""The law of the optimizer: with_optimizer(record(s), other) == record(s with the other)."""

from __future__ import annotations

import pytest
import torch

from preflop.folding import tape_of
from preflop.ledgers.memory import memory
from preflop.optimizers import OPTIMIZERS
from preflop.record.optimizer_tape import record_optimizer
from preflop.subject import resolve
from preflop.tape.replay import story
from preflop.transforms.optimizer import gradient_metas, with_optimizer

SIZE = {"batch_size": 2, "sequence_length": 32}
CASES = [
    ("gpt2", "sgd", {}),
    ("llama-3.2-1b", "adafactor", {}),
    ("bert-base", "rmsprop", {"precision": "bf16-master"}),
    ("vit-b-16", "adamw-fused", {}),
    ("pythia-160m", "momentum", {"device": "h100-sxm", "precision": "bf16-mixed"}),
    ("resnet-50", "adagrad", {}),
]
# Each of the newer ones on six architectures, in the form that a CPU or a GPU runs.
NEWER = [
    (name, other, options)
    for other in ("lion", "adamw-8bit", "muon")
    for name, options in (
        ("gpt2", {}),
        ("llama-3.2-1b", {"device": "h100-sxm", "precision": "bf16"}),
        ("bert-base", {"precision": "bf16-master"}),
        ("vit-b-16", {"device": "h100-sxm", "precision": "bf16-mixed"}),
        ("pythia-160m", {"microbatches": 2}),
        ("resnet-50", {}),
    )
]
WHOLE = [("gpt2", other, {"microbatches": 2}) for other in OPTIMIZERS if other not in ("adamw", "muon")]


def hold(name: str, other: str, options: dict) -> None:
    """Transformed == recorded."""
    size = {"batch_size": 2} if name.startswith(("vit", "resnet")) else SIZE
    base = tape_of(resolve(name, size, **options))
    target = resolve(name, size, optimizer=other, **options)
    update = record_optimizer(target, base.parameters, gradient_metas(base))
    made, recorded = with_optimizer(base, update, name=target.optimizer_name), tape_of(target)
    assert story(made) == story(recorded)
    assert all(made.storages[info.storage].name == info.name for info in made.parameters)
    assert made.subject == recorded.subject
    assert memory(made).at_peak == memory(recorded).at_peak
    assert memory(made).columns == memory(recorded).columns
    assert set(made.assumptions) >= set(recorded.assumptions)


@pytest.mark.parametrize(("name", "other", "options"), CASES)
def test_another_optimizer_equals_recorded(name: str, other: str, options: dict) -> None:
    """The update replaced == the step recorded with it, event by event."""
    hold(name, other, options)


@pytest.mark.parametrize(
    ("name", "other", "options"),
    [
        case if case[0] in ("gpt2", "vit-b-16") else pytest.param(*case, marks=pytest.mark.long)
        for case in NEWER
    ],
)
def test_newer_optimizers_equal_recorded(name: str, other: str, options: dict) -> None:
    """Lion, 8-bit AdamW and Muon with AdamW: replaced == recorded, event by event."""
    if other == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    hold(name, other, options)


@pytest.mark.long
@pytest.mark.parametrize(("name", "other", "options"), WHOLE)
def test_another_optimizer_equals_recorded_whole(name: str, other: str, options: dict) -> None:
    """The same for more optimizers, under accumulation."""
    hold(name, other, options)
