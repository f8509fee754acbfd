"""A step that torch would refuse to run gets an error and no price; a loss that was chosen is stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import preflop
from preflop.errors import BadSubject


class Mixed(nn.Module):
    """Casts to fp32 between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A bf16 layer, a cast, another layer."""
        return self.second(self.first(x).float())


def test_matmul_of_two_dtypes_is_refused() -> None:
    """bf16 weights meet fp32 activations: the real step raises, so does the account."""
    with pytest.raises(BadSubject, match="must have the same dtype, but got bfloat16, float32"):
        preflop.account(Mixed(), torch.randn(4, 8), precision="bf16")
    with pytest.raises(RuntimeError):
        Mixed().to(torch.bfloat16)(torch.randn(4, 8, dtype=torch.bfloat16))


def test_autocast_makes_them_agree() -> None:
    """Under autocast the same model runs, and is priced."""
    assert preflop.account(Mixed(), torch.randn(4, 8), precision="bf16-mixed").memory.peak_bytes > 0


class Returns(nn.Module):
    """Returns what `shape` makes of its layer's output."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(8, 8), shape

    def forward(self, x: torch.Tensor) -> Any:
        """The layer, shaped."""
        return self.shape(self.layer(x))


def test_the_scalar_of_a_tuple_is_the_loss() -> None:
    """(logits, loss), as nanoGPT returns it: the same as giving the loss by hand."""
    model = Returns(lambda y: (y, (y**2).mean()))
    x = torch.randn(4, 8)
    found, given = preflop.account(model, x), preflop.account(model, x, loss=lambda output: output[1])
    assert found.memory.peak_bytes == given.memory.peak_bytes
    assert found.flops.model == given.flops.model
    assert not [line for line in found.assumptions if "without a loss" in line]


def test_a_chosen_mean_is_stated() -> None:
    """A dict without a loss: the mean of its first tensor, and the account says so."""
    step = preflop.account(Returns(lambda y: {"logits": y, "value": y.sum(-1)}), torch.randn(4, 8))
    assert [line for line in step.assumptions if "dict without a loss" in line]
