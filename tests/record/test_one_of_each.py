"""Updates recorded once for each kind of parameter == all of them recorded, event by event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from preflop.optimizers import OPTIMIZERS
from preflop.record.one_of_each import OneOfEach, pick
from preflop.record.optimizers import build_optimizer, named_parameters
from preflop.record.subject_tape import _record, _recorded, record_subject
from preflop.subject import Subject, resolve
from preflop.tape.events import Phase, Tape
from preflop.tape.replay import story
from preflop.tape.stack import Refused

SIZE = {"batch_size": 2, "sequence_length": 16}


class Stack(nn.Module):
    """Layers of three widths, twice each and more: parameters of several kinds, between them norms."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 16, 16, 8, 8, 8)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in zip(widths, widths[1:]))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def subject_of(**options: Any) -> Subject:
    """The step of `Stack`."""
    return resolve(Stack(), torch.randn(4, 8), **options)


def all_recorded(subject: Subject) -> Tape:
    """Every update recorded."""
    return _recorded(subject, [], [], least_period=None)


def one_recorded(subject: Subject) -> Tape:
    """One of each kind recorded, the others written."""
    return _recorded(subject, [], [], least_period=None, in_part=True)


def hold(subject: Subject) -> None:
    """The law."""
    made, recorded = one_recorded(subject), all_recorded(subject)
    assert story(made) == story(recorded)
    assert (made.parameters, made.assumptions) == (recorded.parameters, recorded.assumptions)
    assert [made.storages[info.storage].name for info in made.parameters] == [i.name for i in made.parameters]


LOOPED = [
    name
    for name, spec in OPTIMIZERS.items()
    if not (spec.matrices_only or spec.factored or spec.quantised) and not name.endswith(("-fused", "-foreach"))
]


@pytest.mark.parametrize("optimizer", LOOPED)
def test_one_of_each_equals_all(optimizer: str) -> None:
    """Every optimizer that loops over its parameters on the CPU."""
    subject = subject_of(optimizer=optimizer)
    hold(subject)
    named = named_parameters(Stack())
    assert not build_optimizer(subject, named).defaults.get("foreach"), "it would not be looked at in part"


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"}, {"precision": "bf16-master"}, {"precision": "bf16-fp32-states"},
        {"precision": "bf16-master", "device": "h100-sxm"}, {"precision": "fp16-mixed"}, {"microbatches": 3},
        {"optimizer": "adamw-loop", "device": "h100-sxm"}, {"optimizer": "adamw-in-backward"},
        {"optimizer": "adafactor"}, {"optimizer": "muon"}, {"optimizer": "adamw-8bit"}, {"optimizer": None},
    ],
    ids=str,
)  # fmt: skip
def test_in_each_precision_and_form(options: dict[str, Any]) -> None:
    """Copies and states of another precision; loops on a GPU; and those that see every gradient."""
    if options.get("optimizer") == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    hold(subject_of(**options))


@pytest.mark.parametrize("name", ["gpt2-nano", pytest.param("resnet-50", marks=pytest.mark.long)])
def test_of_named_models(name: str) -> None:
    """Tied weights; convolutions, whose gradients lie in memory as their kernels leave them."""
    hold(resolve(name, SIZE if name == "gpt2-nano" else {"batch_size": 2}))


def test_fewer_are_seen() -> None:
    """Of 24 parameters of six kinds the optimizer is shown 9: first, last, each kind between, a second of one."""
    seen = []
    model = Stack()
    named = named_parameters(model)
    optimizer = build_optimizer(subject_of(), named)
    assert optimizer is not None
    inner = optimizer.step
    optimizer.step = lambda: (  # type: ignore[method-assign]
        seen.append([one.name for one in named if one.parameter.grad is not None]), inner()
    )  # fmt: skip
    model(torch.randn(4, 8)).backward()
    gradients = [one.parameter.grad for one in named]
    part = OneOfEach(optimizer, named)
    part.step()
    assert part.picked is not None
    assert seen == [part.picked.recorded]
    assert (len(named), len(seen[0])) == (24, 9)
    assert all(one.parameter.grad is gradient for one, gradient in zip(named, gradients)), "they are given back"


class LastOtherwise(torch.optim.SGD):
    """Treats the last but one of its parameters otherwise: equal kinds, other calls."""

    def step(self, closure: Any = None) -> None:
        """SGD, and one call more."""
        del closure
        with torch.no_grad():
            parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            for place, parameter in enumerate(parameters):
                parameter.add_(parameter.grad, alpha=-0.1)
                if place == len(parameters) - 2:
                    parameter.mul_(0.9)


def test_what_differs_is_recorded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that treats two equal parameters differently: refused, and every update recorded."""
    monkeypatch.setattr("preflop.record.optimizers._class_of", lambda spec: LastOtherwise)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    subject = resolve(model, torch.randn(4, 8), optimizer="sgd-loop")
    with pytest.raises(Refused, match="treats equal parameters differently"):
        one_recorded(subject)
    tape = _record(subject, [], [])
    assert story(tape) == story(all_recorded(subject)) == story(record_subject(subject))
    assert sum(call.phase is Phase.OPTIMIZER for call in tape.calls) == 2 * (6 + 1)


def test_the_first_and_the_last_stand_for_themselves() -> None:
    """What their loop's variables leave behind is another's: never written for others."""
    picked = pick({str(number): 0 for number in range(8)})
    assert picked.recorded == ["0", "1", "6", "7"]
    assert set(picked.stands_for.values()) == {"0", "1", "7"}
    assert picked.proof == ("1", "6")
