"""How fast this machine is at the moment: one matmul, timed now and when the machine was calibrated.

The same kernel may take twice as long a minute later: a processor's clock follows its load and its heat, and what
else runs on a machine takes part of its caches and units. What was predicted from readings of one moment is
compared with steps of another by the ratio of the two (`measure/step_time.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from preflop.measure.clock import now
from preflop.timing.this import this_table

FEWEST_CALLS = 3
_WARM_UP = 2
_LONG_S = 0.2
"""A first call that takes so long is warm enough, and one more tells what the next takes."""
_MOST_CALLS = 1000
_SIDE_OF_CPU, _SIDE_OF_GPU = 512, 4096
"""Of the reference's square operands: milliseconds on either, and well above the cost of a call."""


def wait(where: torch.device) -> None:
    """Until an accelerator has done what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def seconds_of(
    call: Callable[[], Any], where: torch.device, budget_s: float = 0.0, before: Callable[[], Any] | None = None
) -> float:
    """Seconds of one call: the median of as many as the budget holds, at least `FEWEST_CALLS`; of one that takes
    `_LONG_S`, the second.

    Args:
        before: what runs before each of them, and is not counted.
    """
    begun = now(where)
    call()
    wait(where)
    long = now(where) - begun > _LONG_S
    for _ in range(0 if long else _WARM_UP - 1):
        call()
    wait(where)
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    fewest = 1 if long else FEWEST_CALLS
    while len(taken) < fewest or (time.perf_counter() < end and len(taken) < _MOST_CALLS):
        if before is not None:
            before()
        start = now(where)
        call()
        wait(where)
        taken.append(now(where) - start)
    return median(taken)


class Reference:
    """A float32 matmul that says by its time how fast the machine is.

    >>> reference = Reference(torch.device("cpu"))
    >>> reference.seconds() > 0
    True
    """

    def __init__(self, where: torch.device) -> None:
        side = _SIDE_OF_GPU if where.type == "cuda" else _SIDE_OF_CPU
        self._where = where
        self._a = torch.full((side, side), 0.7, device=where)
        self._b = torch.full((side, side), 0.7, device=where)

    def seconds(self) -> float:
        """Of one call, at the moment: the median of a few."""
        with torch.no_grad():
            return seconds_of(lambda: torch.mm(self._a, self._b), self._where)


def pace(readings_s: Sequence[float]) -> float | None:
    """What the reference takes now over what it took when this machine was calibrated: 1.2 is a machine that is
    slower now, by its clock or by what else it runs. None: the calibration has no such reading.

    Raises:
        BadFile: this machine was never calibrated.
    """
    calibrated_s = this_table().get("speed", {}).get("reference_s")
    return median(readings_s) / calibrated_s if calibrated_s else None
