"""The time of a step from arrays: `step.step_time` for rows whose figures change and whose kinds do not.

Thousands of sizes of one step are timed with it; the rules are those of `roofline` and `step`, and
`tests/plan/test_evaluate.py` holds the two to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.hardware.device import Device
from preflop.timing.achieved import (
    achieved_bandwidth,
    achieved_matmul,
    launch_s,
    smallest_kernel_s,
)
from preflop.timing.roofline import MATMUL_LIKE, bandwidth_bytes_per_s, ceiling

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Seconds:
    """Bounds of a step's time and what is expected, as in `account.Time`; None where not known."""

    lower_s: float | None
    expected_s: float | None
    upper_s: float | None


@dataclass(frozen=True, slots=True)
class RowRates:
    """What each row of a step runs against on one device."""

    flops_per_s: np.ndarray
    """Dense peak; infinite where there is none, so that the row is priced by its bytes."""
    compute_ratio: np.ndarray
    """Share of that peak that kernels reach."""
    bytes_per_s: float | None
    bandwidth_ratio: float
    expects: bool
    """Whether every rate was measured, so that there is an expectation."""


def row_rates(kinds: Sequence[str], dtypes: Sequence[str], device: Device, *, tf32: bool) -> RowRates:
    """The rates of rows of these kinds and dtypes.

    Args:
        kinds: per row: matmul, attention, convolution or other; "" for a row that does no arithmetic.
    """
    import numpy as np

    tops = [ceiling(device, kind, dtype, tf32) for kind, dtype in zip(kinds, dtypes)]
    matmul_like = [kind in MATMUL_LIKE for kind in kinds]
    reached = {top.dtype: achieved_matmul(device, top.dtype) for top, m in zip(tops, matmul_like) if m}
    bandwidth = achieved_bandwidth(device)
    missing = any(m and top.flops_per_s is None for top, m in zip(tops, matmul_like))
    ratios = []
    for top, matmul in zip(tops, matmul_like):
        rate = reached.get(top.dtype) if matmul else None
        ratios.append(rate.ratio if rate else 1.0)
    return RowRates(
        np.array([top.flops_per_s or np.inf for top in tops], np.float64),
        np.array(ratios, np.float64),
        bandwidth_bytes_per_s(device),
        bandwidth.ratio if bandwidth else 1.0,
        not missing and bandwidth is not None and all(rate is not None for rate in reached.values()),
    )


def row_seconds(rates: RowRates, flops: np.ndarray, moved: np.ndarray, calls: np.ndarray) -> Seconds:
    """The step's time, as `step.step_time` gives it.

    Args:
        flops: per row, of all its calls; only attended pairs.
        moved: bytes read and written, per row.
        calls: number of calls, per row.
    """
    import numpy as np

    if rates.bytes_per_s is None or not len(flops):
        return Seconds(None, None, None)
    compute_s = flops / rates.flops_per_s
    bytes_s = moved / rates.bytes_per_s
    lower = float(np.maximum(compute_s, bytes_s).sum())
    if not rates.expects:
        return Seconds(lower, None, None)
    runs = moved > 0
    compute_s, bytes_s, calls = compute_s[runs], bytes_s[runs], calls[runs]
    compute_s = compute_s / rates.compute_ratio[runs]
    bytes_s = bytes_s / rates.bandwidth_ratio
    floor_s = smallest_kernel_s() * calls
    device_s = float(np.maximum(np.maximum(compute_s, bytes_s), floor_s).sum())
    apart_s = float(np.maximum(compute_s + bytes_s, floor_s).sum())
    launching_s = launch_s() * float(calls.sum())
    expected = max(device_s, launching_s, lower)
    return Seconds(lower, expected, max(apart_s + launching_s, expected))
