"""Prediction beside measurement, and why they differ most where they do."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.account import Account
from preflop.measure.utilization import Reading

_OTHER_PACE = 0.1
"""From which difference on a machine's own speed is named as the reason."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One quantity. None where nobody predicted, or nobody measured."""

    what: str
    unit: str
    """"bytes", "s", "tokens/s" or "share"."""
    predicted: float | None
    measured: float | None
    reason: str
    """Why the two differ, or why one is missing."""

    @property
    def difference(self) -> float | None:
        """Measured over predicted, less 1."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted - 1


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the account says of the step, over all processes. None where it does not say."""

    peak_bytes: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None


def predicted(account: Account | None, tokens: int) -> Predicted:
    """The figures that are shown beside readings.

    Args:
        tokens: of one step, over all processes.
    """
    if account is None:
        return Predicted()
    timed = account.time
    step_s = timed.expected_s if timed.expected_s is not None else timed.lower_s
    return Predicted(account.memory.peak_bytes, step_s, tokens / step_s if step_s else None, timed.mfu)


def compare(
    expected: Predicted,
    reading: Reading,
    measured_peak_bytes: int | None,
    *,
    on_gpu: bool,
    sharded: bool,
    pace: float | None = None,
) -> tuple[Compared, ...]:
    """Every quantity that is predicted or measured.

    Args:
        pace: of this machine now, as `measure.speed.pace` gives it; None where it was not calibrated.
    """
    no_time = "nobody measured this CPU's rates: `preflop calibrate` does" if expected.step_s is None else ""
    slower = no_time or _why_slower(on_gpu, pace)
    memory = (
        "each process holds its part of parameters, gradients and states: the priced one holds them all"
        if sharded
        else "the step was too short to be read (three steps are needed)"
        if measured_peak_bytes is None
        else "the loop holds all of a step's batches at once, and clips: the priced loop holds one"
    )
    return (
        Compared("peak memory", "bytes", expected.peak_bytes, measured_peak_bytes, memory),
        Compared("step time", "s", expected.step_s, reading.step_s, slower),
        Compared("tokens per second", "tokens/s", expected.tokens_per_s, reading.tokens_per_s, slower),
        Compared("MFU", "share", expected.mfu, reading.mfu, no_time or "as the step time"),
    )


def _why_slower(on_gpu: bool, pace: float | None) -> str:
    if pace is not None and abs(pace - 1) > _OTHER_PACE:
        return f"this machine is not as it was calibrated: a reference matmul now takes {pace:.2f} times as long"
    if on_gpu:
        return "kernels are priced at measured rates; the host's launches, data and clipping come on top"
    return "the host and what runs beside it: kernels are priced alone, at rates measured for large ones"


def largest_difference(rows: tuple[Compared, ...]) -> Compared | None:
    """The quantity that is furthest off; None where nothing can be compared."""
    known = [row for row in rows if row.difference is not None]
    return max(known, key=lambda row: abs(row.difference or 0.0), default=None)
