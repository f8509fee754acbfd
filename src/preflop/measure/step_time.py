"""How long a real step takes here, beside what `device="this"` predicts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from preflop.accounting import account_tape, find_device
from preflop.errors import BadSubject, PreflopError
from preflop.measure.allocations import garbage_collector_off
from preflop.measure.clock import clock_name, now
from preflop.measure.memory import RealSubject, build, check_fits
from preflop.measure.pages import keep_freed_memory
from preflop.measure.speed import Reference, pace
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject
from preflop.timing.this import THIS, other_threads, this_table

TOLERANCE = 0.20
"""Relative difference of the step's time within which it verifies."""

_WARM_UP = 2
_FEWEST, _MOST = 5, 50
_BUDGET_S = 5.0
_KEPT = (
    "measured in a process that keeps the memory it frees, as `preflop train` does; by default glibc returns the top "
    "of its heap and faults it in anew in every step"
)


@dataclass(frozen=True, slots=True)
class TimeVerification:
    """A step's time, predicted for this machine and measured on it."""

    model: str
    lower_s: float
    predicted_s: float
    upper_s: float
    measured_s: float
    """The median of the steps."""
    fastest_s: float
    slowest_s: float
    steps: int
    threads: int
    clock: str
    """By which the steps were timed."""
    tolerance: float
    assumptions: tuple[str, ...]
    pace: float | None = None
    """Of the machine between these steps, as `speed.pace` gives it."""

    @property
    def predicted_now_s(self) -> float:
        """The prediction at the machine's speed while the steps ran."""
        return self.predicted_s * (self.pace or 1.0)

    @property
    def error(self) -> float:
        """Relative, of the prediction at the machine's speed now: 0.1 is ten percent predicted too much."""
        return self.predicted_now_s / self.measured_s - 1

    @property
    def verifies(self) -> bool:
        """Whether the prediction is within the tolerance."""
        return abs(self.error) <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """JSON of `preflop verify --time`, schema "preflop.verify-time/1"."""
        return {
            "schema": "preflop.verify-time/1",
            **asdict(self),
            "predicted_now_s": self.predicted_now_s,
            "error": self.error,
            "verifies": self.verifies,
        }


def verify_step_time(
    subject: Subject, *, tolerance: float = TOLERANCE, progress: Callable[[str], None] = lambda words: None
) -> TimeVerification:
    """Record the subject, time real steps of it here, and compare. The machine must have been calibrated.

    Raises:
        PreflopError: not calibrated, calibrated with other threads, or the subject cannot be run here.
    """
    device = find_device(THIS)
    if device is None:
        raise PreflopError("this machine is not calibrated.\n  Run `preflop calibrate` first.")
    head = this_table()["device"]
    if head["records_as"] != "cpu":
        raise BadSubject(
            f"this machine was calibrated on its {head['name']}, and a real step runs on the CPU.\n"
            "  Calibrate the CPU: `preflop calibrate --device cpu`."
        )
    if why := other_threads(torch.get_num_threads()):
        raise BadSubject(why)
    progress("recording")
    account = account_tape(record_subject(subject), device)
    timed = account.time
    if timed.expected_s is None or timed.lower_s is None or timed.upper_s is None:
        raise BadSubject("this step has an operator or dtype that the calibration did not measure.")
    check_fits(account.memory.first_step_peak_bytes)
    progress("timing real steps")
    reference = Reference(torch.device("cpu"))
    paces: list[float] = []
    kept = (_KEPT,) if keep_freed_memory() else ()
    taken = measured_steps(subject, lambda: paces.append(reference.seconds()))
    return TimeVerification(
        model=subject.name, lower_s=timed.lower_s, predicted_s=timed.expected_s, upper_s=timed.upper_s,
        measured_s=median(taken), fastest_s=min(taken), slowest_s=max(taken), steps=len(taken),
        threads=torch.get_num_threads(), clock=clock_name(), tolerance=tolerance,
        assumptions=(*account.assumptions, *kept),
        pace=pace(paces),
    )  # fmt: skip


def measured_steps(subject: Subject, before_each: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of real optimizer steps, the first ones (which warm up) left out.

    Args:
        before_each: called before every step that is timed.
    """
    taken: list[float] = []
    with torch.random.fork_rng(devices=[]):
        real = build(subject)
        with garbage_collector_off():
            for _ in range(_WARM_UP):
                real.step()
            # The loop collects garbage after each step: what is there already need not be searched, which
            # would take longer than the step and empty the caches.
            gc.freeze()
            end = time.perf_counter() + _BUDGET_S
            try:
                while len(taken) < _FEWEST or (time.perf_counter() < end and len(taken) < _MOST):
                    before_each()
                    taken.append(_one_step(real))
            finally:
                gc.unfreeze()
    return taken


def _one_step(real: RealSubject) -> float:
    """Seconds from the start to the optimizer's end; the loop's own collection of garbage comes after it."""
    ended = start = now()

    def observe(name: str, microbatch: int) -> None:
        del microbatch
        nonlocal ended
        if name in ("backward_end", "optimizer_end"):
            ended = now()

    real.step(observe)
    return ended - start
