"""A real step on some ranks, and what it allocates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import nn


def trained(model: nn.Module, x: torch.Tensor, microbatches: int) -> Callable[[], None]:
    """One step of the model under AdamW, after two of them: the optimizer's states exist."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        for _ in range(microbatches):
            loss = model(x).float().mean()
            (loss / microbatches).backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    return step


def peak_of_events(profiler: Any) -> int:
    """Most bytes that the profiled code held at once of what it allocated."""
    return max(accumulate(_changes(profiler)), default=0)


def left_by_events(profiler: Any) -> int:
    """Bytes that the profiled code allocated and did not free."""
    return sum(_changes(profiler))


def _changes(profiler: Any) -> list[int]:
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(found, key=lambda e: e.start_ns())]
