"""The time of a whole step: a bound it cannot beat, an expectation, a bound it should not exceed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preflop.account import Time
from preflop.formulas.utilization import model_flops_utilization
from preflop.hardware.device import Device
from preflop.timing.achieved import launch_s, phase_launch_s, smallest_kernel_s
from preflop.timing.alignment import unaligned
from preflop.timing.kernels import family
from preflop.timing.rates import KernelRate, Named, kernel_rate
from preflop.timing.roofline import BANDWIDTH, COMPUTE, MATMUL_LIKE, RooflineRow, runs_cudnn
from preflop.timing.this import is_serial, this_table
from preflop.timing.tiles import result_of

LAUNCH = "launch"
NO_TIME = Time(None, None, None, None, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step's time and, in words, what it stands on."""

    time: Time
    assumptions: tuple[str, ...]


def step_time(
    rows: Sequence[RooflineRow], device: Device, *, model_flops: int, tokens: int | None
) -> StepTime:
    """Seconds of one step on one device.

    lower_s: sum over operators of max(FLOPs / peak, bytes / bandwidth): every kernel perfect.
    expected_s: the same at the rates that were measured for kernels of that family and size, no kernel
        shorter than the smallest one measured; or, where that is longer, what the host needs to launch the
        kernels one by one.
    upper_s: at the measured rates without any overlap: compute + bytes + a launch for every kernel.

    Args:
        model_flops: what MFU counts, of the step.
        tokens: of the step; None where there are none.
    """
    if not rows or any(row.row.time_s is None for row in rows):
        return StepTime(NO_TIME, (_no_bandwidth(device),) if rows else ())
    lower = sum(max(row.compute_s, row.bandwidth_s) for row in rows)
    missing = sorted({row.ceiling.dtype for row in rows if _unpriced(row)})
    rates = [_rate(row, device) for row in rows]
    dominating = _dominating(rows)
    peak = dominating.ceiling.flops_per_s if dominating else None
    expected = upper = None
    bound = _bound(rows)
    if all(rate is not None for rate in rates) and not missing:
        priced = [(row, rate) for row, rate in zip(rows, rates) if rate is not None]
        expected, upper, launch_bound = _expected(priced, lower, device)
        bound = LAUNCH if launch_bound else bound
    time_s = lower if expected is None else expected
    mfu = None
    if peak and model_flops and time_s:
        mfu = model_flops_utilization(model_flops, 1 / time_s, peak)
    return StepTime(
        Time(
            lower_s=lower,
            expected_s=expected,
            upper_s=upper,
            bound=bound,
            mfu=mfu,
            mfu_basis=None if mfu is None else ("lower_s" if expected is None else "expected_s"),
            tokens_per_s=tokens / time_s if tokens and time_s else None,
            peak_flops_per_s=peak,
            peak_dtype=dominating.ceiling.dtype if dominating else None,
        ),
        (*_cudnn_tf32(rows), *unaligned(rows, device), *_assumptions(device, rates, missing, expected)),
    )


def _cudnn_tf32(rows: Iterable[RooflineRow]) -> Iterable[str]:
    if any(runs_cudnn(row.row.kind, row.row.op) and row.ceiling.dtype == "tf32" for row in rows):
        yield (
            "float32 convolutions and recurrent layers run in TF32 on this GPU, which is torch's default "
            "(torch.backends.cudnn.allow_tf32)"
        )


def _unpriced(row: RooflineRow) -> bool:
    return row.row.kind in MATMUL_LIKE and row.row.flops > 0 and row.ceiling.flops_per_s is None


def _rate(row: RooflineRow, device: Device) -> KernelRate | None:
    named = Named(row.row.op, row.row.variant, row.row.dtype)
    return kernel_rate(device, family(row.row.op, row.row.kind), row.ceiling.dtype, named)


def _dominating(rows: Iterable[RooflineRow]) -> RooflineRow | None:
    """A row of the dtype in which most of the matmul-like FLOPs run."""
    flops: dict[str, int] = {}
    example: dict[str, RooflineRow] = {}
    for row in rows:
        if row.row.kind in MATMUL_LIKE and row.row.flops:
            flops[row.ceiling.dtype] = flops.get(row.ceiling.dtype, 0) + row.row.flops
            example.setdefault(row.ceiling.dtype, row)
    return example[max(flops, key=lambda dtype: flops[dtype])] if flops else None


def _bound(rows: Iterable[RooflineRow]) -> str | None:
    """What most of `lower_s` is made of."""
    compute = sum(row.compute_s for row in rows if row.row.bound == COMPUTE)
    bandwidth = sum(row.bandwidth_s for row in rows if row.row.bound == BANDWIDTH)
    if compute == bandwidth == 0:
        return None
    return COMPUTE if compute > bandwidth else BANDWIDTH


def _expected(
    priced: Iterable[tuple[RooflineRow, KernelRate]], lower: float, device: Device
) -> tuple[float, float, bool]:
    """(expected seconds, upper seconds, whether launching is what takes the time)."""
    floor = smallest_kernel_s(device)
    device_s = apart_s = 0.0
    launching_s = 0.0
    serial = is_serial(device)
    for row, rate in priced:
        moved = row.row.read_bytes + row.row.write_bytes
        if moved == 0:
            continue  # a view: no kernel runs
        calls = row.row.calls
        result = result_of(row.row.shapes) if rate.by_result else None
        compute_s = row.compute_s / rate.compute_share(row.flops / calls, moved / calls, result)
        parts = row.row.tensors if serial else 1  # a GPU's foreach kernel takes a list at once
        bytes_s = row.bandwidth_s / rate.moving_share(moved / calls / parts)
        launching_s += phase_launch_s(device, row.row.phase) * calls
        device_s += max(compute_s, bytes_s, floor * calls)
        apart_s += max(compute_s + bytes_s, floor * calls)
    if serial:
        device_s += launching_s  # the host computes itself: calling and computing take turns
    expected = max(device_s, launching_s, lower)
    return expected, max(apart_s + launching_s, expected), launching_s > max(device_s, lower)


def _assumptions(
    device: Device, rates: Sequence[KernelRate | None], missing: Sequence[str], expected: float | None
) -> Iterable[str]:
    for dtype in missing:
        yield (
            f"{device.name} prints no dense peak for {dtype}: its matmuls are priced by bytes alone in "
            "lower_s, and there is no expected time"
        )
    if expected is None and not missing:
        yield f"nobody measured what {device.vendor}'s kernels reach: no expected time, MFU from lower_s"
    if expected is not None:
        if is_serial(device):
            yield f"expected time: with {this_table()['device']['threads']} threads of torch, as it was calibrated"
        bases = [words for rate in rates if rate is not None for words in rate.bases]
        for words in dict.fromkeys(bases):
            yield f"expected time: {words}"
        yield (
            f"expected time: the host launches a kernel every {launch_s(device) * 1e6:.2g} us and no kernel "
            f"is shorter than {smallest_kernel_s(device) * 1e6:.2g} us"
        )


def _no_bandwidth(device: Device) -> str:
    return f"the catalog has no memory bandwidth for {device.name}: nothing is timed"
