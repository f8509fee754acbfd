"""The time of a step from arrays: `step.step_time` for rows whose figures change and whose kinds do not.

Thousands of sizes of one step are timed with it; the rules are those of `roofline` and `step`, and
`tests/plan/test_evaluate.py` holds the two to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.hardware.device import Device
from preflop.timing.achieved import phase_launch_s, smallest_kernel_s
from preflop.timing.kernels import Family, family
from preflop.timing.rates import KernelRate, Named, kernel_rate
from preflop.timing.roofline import MATMUL_LIKE, bandwidth_bytes_per_s, ceiling
from preflop.timing.this import is_serial, is_this

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
    device: Device
    bytes_per_s: float | None
    kernels: tuple[tuple[np.ndarray, KernelRate], ...]
    """Rows, and what kernels of their family reach."""
    expects: bool
    """Whether every rate was measured, so that there is an expectation."""
    no_peak: tuple[str, ...]
    """Dtypes of matmul-like rows for which the device has no dense peak."""
    launch_s: np.ndarray
    """Per row, of the host for one kernel."""
    parts: np.ndarray
    """Per row, the tensors that one call works through one by one; 1 on a GPU, which takes a list at once."""


def row_rates(
    ops: Sequence[str],
    kinds: Sequence[str],
    dtypes: Sequence[str],
    device: Device,
    *,
    tf32: bool,
    variants: Sequence[str] = (),
    tensors: Sequence[int] = (),
    phases: Sequence[str] = (),
) -> RowRates:
    """The rates of rows of these operators, kinds and dtypes.

    Args:
        kinds: per row: matmul, attention, convolution or other; "" for a row that does no arithmetic.
        variants, tensors, phases: per row, as in `account.OperatorRow`; left out: "", 1 and "".
    """
    import numpy as np

    tops = [ceiling(device, kind, dtype, tf32, op) for op, kind, dtype in zip(ops, kinds, dtypes)]
    missing = {t.dtype for kind, t in zip(kinds, tops) if kind in MATMUL_LIKE and t.flops_per_s is None}
    alike: dict[tuple[Family, str, Named], list[int]] = {}
    which = variants or [""] * len(ops)
    for index, (op, kind, top) in enumerate(zip(ops, kinds, tops)):
        named = Named(op, which[index], dtypes[index]) if is_this(device) else Named()
        alike.setdefault((family(op, kind), top.dtype, named), []).append(index)
    rates = [(np.array(rows), kernel_rate(device, *key)) for key, rows in alike.items()]
    return RowRates(
        np.array([top.flops_per_s or np.inf for top in tops], np.float64),
        device,
        bandwidth_bytes_per_s(device),
        tuple((rows, rate) for rows, rate in rates if rate is not None),
        not missing and all(rate is not None for _, rate in rates),
        tuple(sorted(missing)),
        np.array([phase_launch_s(device, phase) for phase in phases or [""] * len(ops)], np.float64),
        np.array(tensors if tensors and is_serial(device) else [1] * len(ops), np.float64),
    )


def row_seconds(
    rates: RowRates,
    flops: np.ndarray,
    moved: np.ndarray,
    calls: np.ndarray,
    results: np.ndarray | None = None,
    new_pages_s: float = 0.0,
) -> Seconds:
    """The step's time, as `step.step_time` gives it.

    Args:
        flops: per row, of all its calls; only attended pairs.
        moved: bytes read and written, per row.
        calls: number of calls, per row.
        results: products, rows and columns of what a matmul writes, per row; zeros where it is none.
        new_pages_s: what the step's large tensors' pages cost (`timing.pages`).
    """
    import numpy as np

    if rates.bytes_per_s is None or not len(flops):
        return Seconds(None, None, None)
    compute_s = flops / rates.flops_per_s
    bytes_s = moved / rates.bytes_per_s
    lower = float(np.maximum(compute_s, bytes_s).sum())
    if not rates.expects:
        return Seconds(lower, None, None)
    each_flops = np.divide(flops, calls, out=np.zeros_like(compute_s), where=calls > 0)
    each_moved = np.divide(moved, calls, out=np.zeros_like(compute_s), where=calls > 0)
    for rows, rate in rates.kernels:
        compute_s[rows] /= rate.compute_shares(
            each_flops[rows], each_moved[rows], None if results is None else results[rows]
        )
        bytes_s[rows] /= rate.moving_shares(each_moved[rows] / rates.parts[rows])
    runs = moved > 0
    compute_s, bytes_s, calls = compute_s[runs], bytes_s[runs], calls[runs]
    floor_s = smallest_kernel_s(rates.device) * calls
    device_s = float(np.maximum(np.maximum(compute_s, bytes_s), floor_s).sum())
    apart_s = float(np.maximum(compute_s + bytes_s, floor_s).sum())
    launching_s = float((rates.launch_s[runs] * calls).sum())
    if is_serial(rates.device):
        device_s += launching_s
    expected = max(device_s, launching_s, lower)
    upper = max(apart_s + launching_s, expected)
    return Seconds(lower, expected + new_pages_s, upper + new_pages_s)
