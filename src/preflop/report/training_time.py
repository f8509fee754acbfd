"""`preflop time`: a run's days, as JSON and as lines."""

from __future__ import annotations

from typing import Any

from preflop.report.counts import count_text, short_dtype
from preflop.timing.training import TrainingTime
from preflop.units import si_text


def training_time_json(run: TrainingTime) -> dict[str, Any]:
    """The run's time with everything it follows from."""
    return {
        "schema": "preflop.time/1",
        "days": run.days,
        "training_s": run.training_s,
        "gpu_hours": run.gpu_hours,
        "flops": run.flops,
        "parameters": run.parameters,
        "tokens": run.tokens,
        "gpus": run.gpus,
        "device": {"id": run.device_id, "name": run.device_name},
        "precision": run.precision,
        "dtype": run.compute_dtype,
        "peak_flops_per_s": run.peak_flops_per_s,
        "peak_kind": "dense",
        "peak_source": run.peak_source,
        "mfu": run.model_flops_utilization,
    }


def training_time_text(run: TrainingTime) -> str:
    """The same in four lines, the answer first."""
    gpus = f"{run.gpus:,} x {run.device_name}"
    peak = f"{si_text(run.peak_flops_per_s, 'FLOP/s')} dense {short_dtype(run.compute_dtype)}"
    return "\n".join(
        (
            f"{_days_text(run.days)} ({run.gpu_hours:,.0f} GPU hours)",
            f"  work  6ND = 6 x {count_text(run.parameters)} parameters x {count_text(run.tokens)} tokens"
            f" = {run.flops:.3g} FLOPs",
            f"  rate  {gpus} x {peak} x MFU {run.model_flops_utilization:g}",
            f"  peak  {run.peak_source}",
        )
    )


def _days_text(days: float) -> str:
    """Days with one decimal, shorter runs in hours, minutes or seconds.

    >>> _days_text(143.93), _days_text(0.2), _days_text(1e-4)
    ('143.9 days', '4.8 hours', '8.64 seconds')
    """
    if days >= 1:
        return f"{days:,.1f} days"
    for per_day, unit in ((24, "hours"), (24 * 60, "minutes"), (86_400, "seconds")):
        if days * per_day >= 1 or unit == "seconds":
            return f"{days * per_day:.3g} {unit}"
    raise AssertionError("unreachable")
