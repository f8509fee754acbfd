"""The clock by which operators and steps are timed here."""

from __future__ import annotations

import time

import torch


def now(where: torch.device | None = None) -> float:
    """Seconds since some moment.

    With one thread on the CPU it is the processor time of this process, which other processes do not
    lengthen and which is what the wall shows on a machine with nothing else to do. Else the wall's.
    """
    on_cpu = where is None or where.type == "cpu"
    return time.process_time() if on_cpu and torch.get_num_threads() == 1 else time.perf_counter()


def clock_name(where: torch.device | None = None) -> str:
    """Which of the two it is, in words."""
    on_cpu = where is None or where.type == "cpu"
    return "processor time of one thread" if on_cpu and torch.get_num_threads() == 1 else "wall clock"
