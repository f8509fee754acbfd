"""The learning rate: linear warm-up, then a cosine. Its position is the number of steps *taken*."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WarmupCosine:
    """The rate of each step. Source: Loshchilov and Hutter 2017 (arXiv:1608.03983), one cycle."""

    peak: float
    final_share: float
    warmup_steps: int
    decay_steps: int

    def rate(self, taken: int) -> float:
        """The learning rate of the step after `taken` steps.

        >>> schedule = WarmupCosine(peak=1.0, final_share=0.1, warmup_steps=2, decay_steps=12)
        >>> [round(schedule.rate(taken), 3) for taken in (0, 1, 2, 7, 12, 99)]
        [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
        """
        if taken < self.warmup_steps:
            return self.peak * (taken + 1) / self.warmup_steps
        span = max(self.decay_steps - self.warmup_steps, 1)
        progress = min((taken - self.warmup_steps) / span, 1.0)
        wave = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.final_share + (1.0 - self.final_share) * wave)


class Scheduler:
    """Sets the optimizer's rate, and moves on only when told that a step was taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: WarmupCosine) -> None:
        self._optimizer, self.schedule, self.taken = optimizer, schedule, 0
        self._apply()

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.rate(self.taken)

    def step(self) -> None:
        """A step was taken."""
        self.taken += 1
        self._apply()

    def state_dict(self) -> dict[str, int | float]:
        """The position, and the rate for the reader."""
        return {"taken": self.taken, "learning_rate": self.rate}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        """Go on where the state was saved."""
        self.taken = int(state["taken"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate
