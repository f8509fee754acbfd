"""How fast a training loop runs, and which share of the device's peak that is.

`Meter` is for any loop. It excludes warm-up steps, evaluation and saving, and reads the clock at the
edges of its windows only, where it waits for the device.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from preflop.account import Account
from preflop.errors import BadNumber, BadSubject, described
from preflop.formulas.utilization import model_flops_utilization
from preflop.ledgers.six_nd import step_tokens
from preflop.quantity import whole


@dataclass(frozen=True, slots=True)
class Reading:
    """What the meter saw. None where it does not know: no steady step yet, no FLOPs, no peak."""

    steps: int
    """Steady steps: what the rates below are over."""
    excluded_steps: int
    """Warm-up steps: compilation, allocator, autotuning; the first step, where the meter was not started before it."""
    step_s: float | None
    """Mean of the steady steps."""
    tokens_per_s: float | None
    """Of all devices, steady steps, without pauses."""
    mfu: float | None
    """Model FLOPs per second over the devices' dense peaks; recomputation does not count."""
    hfu: float | None
    """The same with recomputed FLOPs."""
    peak_flops_per_s: float | None
    """Of one device, dense."""
    peak_basis: str
    """Which device and number format that peak is of."""
    devices: int
    overall_tokens_per_s: float | None
    """All tokens over all time since the start: warm-up and pauses included."""
    paused_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each kind of pause."""

    def __str__(self) -> str:
        if not self.steps and not self.excluded_steps:
            return "nothing measured: no step was seen (call step() at the end of each)"
        parts = [f"{self.steps or 'no'} steps ({self.excluded_steps} warm-up steps left out)"]
        if self.tokens_per_s is not None and self.overall_tokens_per_s is not None:
            parts.append(
                f"{self.tokens_per_s:,.0f} tokens/s ({self.overall_tokens_per_s:,.0f} with everything)"
            )
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%} of {self.peak_basis}")
        return ", ".join(parts)


class Meter:
    """Counts steps, tokens and time of a training loop.

    >>> ticks = iter([0.0, 30.0, 32.0, 32.5, 33.0, 33.0])
    >>> meter = Meter(tokens=1000, warmup_steps=2, clock=lambda: next(ticks))
    >>> meter.start()
    >>> for _ in range(4):
    ...     meter.step()
    >>> print(meter.reading())
    2 steps (2 warm-up steps left out), 2,000 tokens/s (121 with everything)
    """

    def __init__(
        self,
        account: Account | None = None,
        *,
        tokens: int | None = None,
        model_flops: int | None = None,
        hardware_flops: int | None = None,
        peak_flops_per_s: float | None = None,
        peak_basis: str = "the peak that was given",
        devices: int = 1,
        warmup_steps: int = 2,
        window_steps: int = 1,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A meter; it runs from `start`, or from the end of the first step, which is then left out.

        Args:
            account: of one device's step: gives tokens, FLOPs and the dense peak.
            tokens: of one optimizer step, all microbatches and devices. Instead of the account's.
            model_flops: of one step, all devices: forward and backward, no recomputation.
            hardware_flops: the same, recomputation included.
            peak_flops_per_s: dense peak of one device (a data sheet's sparse figure is twice that).
            peak_basis: what that peak is of, in words; printed beside MFU.
            warmup_steps: left out of every rate but the overall one.
            window_steps: steps between two readings of the clock.
            synchronize: waits for the device (`torch.cuda.synchronize`); None: waits where CUDA is used.

        Raises:
            BadNumber: what is no number, or one below what it must be. BadSubject: an `account` that is none.
        """
        devices, window_steps = whole("devices", devices), whole("window_steps", window_steps)
        warmup_steps = whole("warmup_steps", warmup_steps, least=0)
        counts = {"tokens": tokens, "model_flops": model_flops, "hardware_flops": hardware_flops}
        for name, value in counts.items():
            if value is not None:
                _check_number(name, value)
        if peak_flops_per_s is not None:
            _check_number("peak_flops_per_s", peak_flops_per_s, zero=False)
        if account is not None and not isinstance(account, Account):
            raise BadSubject(
                f"Meter reads an account, and was given {described(account)}.\n"
                "  Give what preflop.account(...) returned, or tokens= and model_flops= without one."
            )
        if account is not None:
            counted, flops, timed = step_tokens(account.tape), account.flops, account.time
            tokens = counted * devices if tokens is None and counted is not None else tokens
            model_flops = flops.model * devices if model_flops is None else model_flops
            hardware_flops = flops.hardware * devices if hardware_flops is None else hardware_flops
            if peak_flops_per_s is None and timed.peak_flops_per_s and account.device is not None:
                peak_flops_per_s = timed.peak_flops_per_s
                peak_basis = (
                    f"{account.device.name}, {timed.peak_dtype}, dense: {peak_flops_per_s:.4g} FLOP/s"
                )
        self.tokens, self.model_flops, self.hardware_flops = tokens, model_flops, hardware_flops
        self.peak_flops_per_s, self.peak_basis, self.devices = peak_flops_per_s, peak_basis, devices
        self._warmup_steps, self._window_steps = warmup_steps, window_steps
        self._synchronize = _cuda_synchronize if synchronize is None else synchronize
        self._clock = clock
        self._started: float | None = None
        self._edge: float | None = None
        self._seen = self._in_window = self._window_tokens = self._all_tokens = 0
        self._steady_steps = self._steady_tokens = 0
        self._steady_s = 0.0
        self._paused: dict[str, float] = {}
        self._last: tuple[int, int, float] | None = None

    def start(self) -> None:
        """The first step begins now. Without it the meter starts at the end of the first step, which it leaves out."""
        self._synchronize()
        self._started = self._edge = self._clock()

    def step(self, tokens: int | None = None) -> None:
        """A step has ended.

        Args:
            tokens: of this step, where they differ from step to step.

        Raises:
            BadNumber: tokens below 0.
        """
        if tokens is not None:
            _check_number("tokens", tokens)
        self._seen += 1
        self._in_window += 1
        counted = tokens if tokens is not None else self.tokens or 0
        self._window_tokens += counted
        self._all_tokens += counted
        if self._edge is None:  # the first step's beginning was not seen: it is left out, its tokens too
            self.start()
            self._in_window = self._window_tokens = self._all_tokens = 0
            self._warmup_steps = max(self._warmup_steps, 1)
        elif self._in_window >= self._window_steps or self._seen == self._warmup_steps:
            self._close_window()

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Time inside is not the step's: evaluation, saving, logging."""
        if self._edge is None:
            yield
            return
        if self._in_window:
            self._close_window()
        begin = self._edge_now()
        self._steady_s += (begin - self._edge) if self._counting() else 0.0
        try:
            yield
        finally:
            self._edge = self._edge_now()
            self._paused[what] = self._paused.get(what, 0.0) + self._edge - begin

    def _edge_now(self) -> float:
        self._synchronize()
        return self._clock()

    def _counting(self) -> bool:
        return self._seen >= self._warmup_steps

    def _close_window(self) -> None:
        now = self._edge_now()
        begun = now if self._edge is None else self._edge
        steps, tokens, seconds = self._in_window, self._window_tokens, now - begun
        self._edge, self._in_window, self._window_tokens = now, 0, 0
        self._last = (steps, tokens, seconds)
        if self._seen > self._warmup_steps:
            self._steady_steps += steps
            self._steady_tokens += tokens
            self._steady_s += seconds

    @property
    def last_step_s(self) -> float | None:
        """Seconds per step of the last window."""
        return None if self._last is None else self._last[2] / self._last[0]

    @property
    def last_tokens_per_s(self) -> float | None:
        """Tokens per second of the last window."""
        return None if self._last is None or not self._last[2] else self._last[1] / self._last[2]

    @property
    def last_mfu(self) -> float | None:
        """MFU of the last window."""
        return self._utilization(self.model_flops, self.last_step_s)

    def reading(self) -> Reading:
        """What was seen so far; the window that is not full yet is left out.

        Warns where MFU is above 1: a device that is not waited for, or a peak of another format.
        """
        step_s = self._steady_s / self._steady_steps if self._steady_steps else None
        mfu = self._utilization(self.model_flops, step_s)
        if mfu is not None and mfu > 1:
            warnings.warn(
                f"MFU is {mfu:.0%} of {self.peak_basis}: the device is not waited for, or the FLOPs or the "
                "peak are not this step's",
                stacklevel=2,
            )
        elapsed = None if self._started is None else self._edge_now() - self._started
        return Reading(
            steps=self._steady_steps,
            excluded_steps=min(self._seen, self._warmup_steps),
            step_s=step_s,
            tokens_per_s=self._steady_tokens / self._steady_s
            if self._steady_s and self._steady_tokens
            else None,
            mfu=mfu,
            hfu=self._utilization(self.hardware_flops, step_s),
            peak_flops_per_s=self.peak_flops_per_s,
            peak_basis=self.peak_basis if self.peak_flops_per_s else "no peak known",
            devices=self.devices,
            overall_tokens_per_s=self._all_tokens / elapsed if elapsed and self._all_tokens else None,
            paused_s=dict(self._paused),
        )

    def _utilization(self, flops: int | None, step_s: float | None) -> float | None:
        if not flops or not step_s or not self.peak_flops_per_s:
            return None
        return model_flops_utilization(flops, 1 / step_s, self.peak_flops_per_s * self.devices)


def _check_number(name: str, value: Any, *, zero: bool = True) -> None:
    """Refuse what is no finite number of at least 0; without `zero`, 0 too."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise BadNumber(f"{name} is {value!r}; it must be a number {'of at least' if zero else 'above'} 0.")


def _cuda_synchronize() -> None:
    """Wait for CUDA where this process has used it."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
