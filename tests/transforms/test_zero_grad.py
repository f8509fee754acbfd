"""The law of zero_grad: zero_grad(record(loop), when) == record(the loop that does it then)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from preflop.errors import PreflopError
from preflop.folding import tape_of
from preflop.ledgers.memory import memory
from preflop.models.build import build
from preflop.record.loop import default_loss
from preflop.subject import Subject, resolve
from preflop.tape.replay import story
from preflop.transforms.zero_grad import zero_grad


class Late(torch.optim.SGD):
    """An optimizer that ignores the loop's zero_grad; `clear` does it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the loop under test clears elsewhere."""

    def clear(self) -> None:
        """What the loop calls at its own moment."""
        super().zero_grad(set_to_none=True)


class Clears(nn.Module):
    """A model that clears its gradients first thing in forward."""

    def __init__(self, inner: nn.Module, clear: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.clear = inner, clear

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Clear, then run."""
        self.clear()
        return self.inner(*args, **kwargs)


def tokens() -> dict[str, torch.Tensor]:
    """Eight tokens of two samples, with labels."""
    ids = torch.arange(16).reshape(2, 8)
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    """One small image with its class."""
    return {"images": torch.zeros(1, 3, 224, 224), "labels": torch.zeros(1, dtype=torch.int64)}


MODELS: list[tuple[str, Callable[[], Any]]] = [
    ("gpt2", tokens),
    ("llama-3.2-1b", tokens),
    ("pythia-160m", tokens),
    ("bert-base", tokens),
    ("vit-b-16", images),
    ("resnet-50", images),
]


def subject(name: str, batch: Callable[[], Any], when: str) -> Subject:
    """The loop that clears at `when`."""
    held: list[Late] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if when == "after_step":
            return torch.optim.SGD(parameters, 0.1, foreach=False)
        held.append(Late(parameters, 0.1, foreach=False))
        return held[-1]

    def loss(output: Any) -> torch.Tensor:
        value = default_loss(output)
        if when == "before_backward":
            held[-1].clear()
        return value

    def clear_last() -> None:
        if when == "before_forward" and held:
            held[-1].clear()

    return resolve(lambda: Clears(build(name), clear_last), batch, loss=loss, optimizer=optimizer)


@pytest.mark.parametrize(("name", "batch"), MODELS)
def test_before_forward(name: str, batch: Callable[[], Any]) -> None:
    """Freed first thing in the next step: event by event as recorded."""
    made = zero_grad(tape_of(subject(name, batch, "after_step")), when="before_forward")
    assert story(made) == story(tape_of(subject(name, batch, "before_forward")))


@pytest.mark.parametrize(("name", "batch"), MODELS[:2])
def test_before_backward(name: str, batch: Callable[[], Any]) -> None:
    """Freed after the next forward: the same peak, which is higher by the gradients held."""
    plain = tape_of(subject(name, batch, "after_step"))
    made = memory(zero_grad(plain, when="before_backward"))
    recorded = memory(tape_of(subject(name, batch, "before_backward")))
    assert made.peak_bytes == recorded.peak_bytes
    assert made.at_peak == recorded.at_peak
    assert made.peak_bytes >= memory(plain).peak_bytes


def test_after_step_is_the_identity_and_other_words_are_refused() -> None:
    """"after_step" changes nothing; a misspelt place names the nearest."""
    tape = tape_of(resolve(nn.Linear(4, 4), torch.randn(2, 4)))
    assert zero_grad(tape, when="after_step") is tape
    with pytest.raises(PreflopError, match="before_forward"):
        zero_grad(tape, when="before_forwards")
