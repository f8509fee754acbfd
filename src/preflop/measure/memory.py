"""The memory of a real training step on this CPU: the recorded loop, run on real tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from preflop.errors import BadSubject, PreflopError
from preflop.measure.allocations import Span, garbage_collector_off, spans_of
from preflop.record import prepare
from preflop.record.loop import default_loss, train_step
from preflop.record.optimizers import build_optimizer, named_parameters
from preflop.record.recompute import apply_recompute
from preflop.subject import FAILURES, Subject, users_error
from preflop.tape.events import Phase
from preflop.units import bytes_text

_STEP = "preflop.step:"
_PHASE = "preflop.phase:"
# Which phase begins at which moment of the loop.
_BEGINS = {
    "microbatch": Phase.FORWARD,
    "forward_end": Phase.BACKWARD,
    "backward_end": Phase.OPTIMIZER,
    "optimizer_end": Phase.OTHER,
}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What one real optimizer step held. Absolute bytes: parameters, buffers and inputs included."""

    peak_bytes: int
    start_bytes: int
    """Alive when the step began."""
    end_bytes: int
    phases: dict[str, int]
    """Peak of each phase: "forward", "backward", "optimizer"; recomputation is inside backward."""


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Real steps of one subject, in order. The last one is the steady state."""

    steps: tuple[MeasuredStep, ...]
    threads: int
    """`torch.get_num_threads()`: some CPU kernels take scratch once per thread."""
    torch_version: str

    @property
    def first_step_peak_bytes(self) -> int:
        """Peak of the step that makes the optimizer's states."""
        return self.steps[0].peak_bytes

    @property
    def steady_peak_bytes(self) -> int:
        """Peak of the last step."""
        return self.steps[-1].peak_bytes


@dataclass(slots=True)
class RealSubject:
    """The parts of a subject's loop on real CPU tensors. The user's module is copied, never used."""

    subject: Subject
    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None

    def step(self, observe: Callable[[str, int], None] = lambda name, microbatch: None) -> None:
        """One optimizer step of the contract's loop."""
        precision = self.subject.precision
        autocast = precision.autocast_dtype
        try:
            train_step(
                self.model,
                self.batch,
                self.subject.loss or default_loss,
                self.optimizer,
                autocast_dtype=None if autocast is None else getattr(torch, autocast),
                # A scale of one cannot overflow: a skipped step would make no optimizer states.
                scaler=torch.amp.GradScaler("cpu", init_scale=1.0) if precision.scaled else None,
                microbatches=self.subject.microbatches,
                keep_output=self.subject.keep_output,
                observe=observe,
            )
        except PreflopError:
            raise
        except FAILURES as error:
            raise users_error("running the step", error) from error


def build(subject: Subject) -> RealSubject:
    """Model, batch and optimizer of a subject, for real.

    Raises:
        PreflopError: the subject cannot be built here; its own error is given once.
    """
    model = prepare.real_model(subject)
    apply_recompute(model, subject.recompute)
    batch = prepare.real_batch(subject)
    return RealSubject(subject, model, batch, build_optimizer(subject, named_parameters(model)))


def measure_steps(subject: Subject, *, steps: int = 2) -> MeasuredSteps:
    """Peak bytes of real optimizer steps here, read from the allocator's own events.

    Everything is built inside the profiled region, so that what is alive before the first step is
    counted too. Random states are left as they were found.

    Raises:
        PreflopError: the subject cannot be built or run here.
    """

    def run() -> None:
        real = build(subject)
        with garbage_collector_off():
            for index in range(steps):
                with record_function(f"{_STEP}{index}"), _PhaseMarks(index) as marks:
                    real.step(marks.observe)

    with torch.random.fork_rng(devices=[]):
        spans, _ = spans_of(run, lambda name: name.startswith(("preflop.step:", "preflop.phase:")))
    return MeasuredSteps(
        steps=tuple(_step(spans, index) for index in range(steps)),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
    )


def _step(spans: list[Span], index: int) -> MeasuredStep:
    whole = next(span for span in spans if span.name == f"{_STEP}{index}")
    prefix = f"{_PHASE}{index}:"
    phases: dict[str, int] = {}
    for span in spans:
        if span.name.startswith(prefix):
            phase = span.name.removeprefix(prefix)
            phases[phase] = max(phases.get(phase, 0), span.peak_bytes)
    return MeasuredStep(whole.peak_bytes, whole.start_bytes, whole.end_bytes, phases)


class _PhaseMarks:
    """Turns the loop's moments into spans: one begins where the last one ends."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._open: record_function | None = None

    def observe(self, name: str, microbatch: int) -> None:
        del microbatch
        if name in _BEGINS:
            self._close()
            self._open = record_function(f"{_PHASE}{self._step}:{_BEGINS[name].value}")
            self._open.__enter__()
        elif name == "step_end":
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def __enter__(self) -> _PhaseMarks:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()


def check_fits(needed_bytes: int) -> None:
    """Refuse a real run that this machine's free memory cannot hold.

    Raises:
        BadSubject: says how much is needed and how much there is.
    """
    try:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return  # a system that does not say: the run itself will tell
    if needed_bytes > free_bytes:
        raise BadSubject(
            f"the step needs {bytes_text(needed_bytes)} and this machine has {bytes_text(free_bytes)} free.\n"
            "  Verify with a smaller batch, a shorter sequence or fewer layers; `preflop account` needs no"
            " memory."
        )
