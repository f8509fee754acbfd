"""torchtitan's selective recomputation: which matmuls are computed again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from preflop.folding import tape_of
from preflop.published.selective import save_every_second_matmul
from preflop.subject import resolve


class Block(nn.Module):
    """So many matmuls, one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after another, with an element-wise function between."""
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


@pytest.mark.parametrize("count", [4, 7])
def test_every_second_matmul_is_computed_again(count: int) -> None:
    """Of `count` in each of two blocks the second, fourth, ...; the element-wise functions all but the last."""

    def model() -> nn.Module:
        built = nn.Sequential(Block(count), Block(count))
        save_every_second_matmul(built)
        return built

    tape = tape_of(resolve(model, torch.zeros(8, 16), optimizer=None))
    again = Counter(tape.signatures[call.signature].op for call in tape.steady() if call.phase.value == "recompute")
    forward = Counter(tape.signatures[call.signature].op for call in tape.steady() if call.phase.value == "forward")
    assert forward["aten.mm"] == 2 * count
    assert again["aten.mm"] == 2 * (count // 2)
    assert again["aten.tanh"] >= 2 * (count - 1)
