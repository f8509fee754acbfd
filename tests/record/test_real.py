"""Real steps recorded where fake ones cannot be: the same tape, and a way out that is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import preflop
from preflop.measure.memory import measure_steps
from preflop.subject import resolve
from tests.sweep import untouched


@torch.library.custom_op("preflop_test_real::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """Refuses what it is not made for, and has no fake kernel: only real values show what it returns."""
    if x[0, 0].item() == 0:
        raise RuntimeError("starts with a zero")
    return x * 2


positive.register_autograd(lambda ctx, grad: grad * 2)


class Doubled(nn.Module):
    """A layer, and the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return positive(self.layer(x))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Embedding(100, 32), layer, nn.Linear(32, 100))


@pytest.mark.parametrize("size", [(4, 128), (7, 200), (1, 160)])
def test_real_steps_give_the_tape_that_fake_ones_give(size: tuple[int, int]) -> None:
    """Peaks, FLOPs and what is alive at the peak: run as they are, scaled, and scaled at a batch of one."""
    ids = torch.randint(0, 100, size)
    fake, real = preflop.account(_encoder(), ids), preflop.account_real(_encoder(), ids)
    assert real.memory.peak_bytes == fake.memory.peak_bytes
    assert real.memory.first_step_peak_bytes == fake.memory.first_step_peak_bytes
    assert real.memory.at_peak == fake.memory.at_peak
    assert real.flops.total == fake.flops.total
    assert any("real steps on this CPU" in words for words in real.tape.assumptions)


def test_an_operator_without_fake_kernel_names_line_and_way_out() -> None:
    """The message has the operator, the line and --real; the way out measures as predicted."""
    batch = torch.rand(64, 16)
    with pytest.raises(preflop.PreflopError) as raised:
        preflop.account(Doubled(), batch)
    message = str(raised.value)
    assert "preflop_test_real.positive" in message
    assert "test_real.py:" in message
    assert "--real" in message
    real = preflop.account_real(Doubled(), batch)
    measured = measure_steps(resolve(Doubled(), batch)).steady_peak_bytes
    assert abs(real.memory.peak_bytes - measured) <= 16  # numbers that torch wraps for the time of a call
    assert real.flops.unknown == {"preflop_test_real.positive": 1}


def test_a_step_that_does_not_scale_is_refused() -> None:
    """Work that is no polynomial of the batch has no tape at other sizes, and the message says so."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[: max(1, len(x) * len(x) * len(x) // 7)])

    with pytest.raises(preflop.PreflopError, match="does not scale from small sizes"):
        preflop.account_real(Halving(), torch.rand(64, 8))


class Positions(nn.Module):
    """Words and a position table of 48 rows; short sequences are refused too."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.words, self.places, self.least = nn.Embedding(50, 8), nn.Embedding(48, 8), least

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) < self.least:
            raise ValueError("a batch is too small")
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("size", [(9, 48), (64, 16), (6, 33)])
def test_no_probe_is_longer_than_what_was_asked(size: tuple[int, int]) -> None:
    """A short position table is enough for a batch that it holds: real == fake, to the byte."""
    ids = torch.randint(0, 50, size)
    fake, real = preflop.account(Positions(), ids), preflop.account_real(Positions(), ids)
    assert real.memory.peak_bytes == fake.memory.peak_bytes
    assert real.flops.total == fake.flops.total
    assert real.tape.subject == fake.tape.subject


def test_a_probe_that_fails_is_called_ours() -> None:
    """What does not run at a size of Preflop's choosing says so, and which sizes are run as they are."""
    with pytest.raises(preflop.PreflopError) as raised:
        preflop.account_real(Positions(least=5), torch.randint(0, 50, (9, 16)))
    message = str(raised.value)
    assert "a batch is too small" in message
    assert "2 x 16, a size that Preflop chose to scale to 9 x 16 from" in message
    assert "at most 4" in message


def test_the_headline_is_that_of_the_ordinary_path() -> None:
    """A factory's batch is called by its name, scaled or not."""

    def some_ids() -> torch.Tensor:
        return torch.randint(0, 50, (9, 48))

    fake, real = preflop.account(Positions, some_ids), preflop.account_real(Positions, some_ids)
    assert real.tape.subject == fake.tape.subject


def test_a_real_step_changes_nothing_of_the_model() -> None:
    """Weights, gradients, flags, hooks and random states are as they were: the step ran on copies."""
    model, ids = _encoder(), torch.randint(0, 100, (2, 16))
    before = untouched.state_of(model)
    preflop.account_real(model, ids)
    assert untouched.differences(before, untouched.state_of(model)) == []


def test_the_comparison_sees_what_changes() -> None:
    """A planted change of a weight, a flag, a hook, an attribute and the random state is found."""
    model = _encoder()
    before = untouched.state_of(model)
    with torch.no_grad():
        model[0].weight[0, 0] += 1.0
    model[1].eval()
    model[2].register_forward_hook(lambda *_: None)
    model[2].cache = 1
    torch.rand(1)
    found = " ".join(untouched.differences(before, untouched.state_of(model)))
    for what in ("parameter 0.weight", "1: training", "2: _forward_hooks", "2: attributes", "state of torch"):
        assert what in found
