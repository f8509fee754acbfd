"""A calibration as the TOML that `timing.this` reads: peaks, curves, surfaces and grids, as shares of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from statistics import median

import torch

from preflop.measure.calibrate import Calibration, Reading
from preflop.timing.kernels import own_name, size_of
from preflop.timing.this import SCHEMA


def calibration_text(found: Calibration) -> str:
    """The calibration as TOML. Peaks are the best rates measured; curves are shares of them."""
    peaks = {
        dtype: max(r.flops / r.seconds for r in found.readings if r.kind.computes and r.dtype == dtype)
        for dtype in dict.fromkeys(r.dtype for r in found.readings if r.kind.computes)
    }
    bandwidth = max(r.moved / r.seconds for r in found.readings if not r.kind.computes)
    lines = [
        f'schema = "{SCHEMA}"',
        f'measured_at = "{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}"',
        "",
        "[device]",
        f'name = "{found.name}"',
        f'vendor = "{found.vendor}"',
        f'arch = "{found.records_as}"',
        f'records_as = "{found.records_as}"',
        f"serial = {str(found.is_cpu).lower()}",
        f"threads = {found.threads}",
        "",
        "[figures]",
        f"torch_total_memory_bytes = {found.memory_bytes}",
        f"memory_bandwidth_bytes_per_s = {bandwidth:.6g}",
    ]
    if found.context_bytes is not None:
        lines.append(f"context_bytes = {found.context_bytes}")
    lines += ["", "# The best rate measured of each dtype, FLOP/s.", "[peaks]"]
    lines += [f"{dtype} = {rate:.6g}" for dtype, rate in peaks.items()]
    if "float32" not in peaks:
        lines.append(f"float32 = {max(peaks.values()):.6g}")
    lines += ["", "[launch]", f"launch_s = {found.launch_s:.4g}"]
    lines.append(f"smallest_kernel_s = {0.0 if found.is_cpu else found.launch_s / 4:.4g}")
    if found.optimizer_launch_s is not None:
        lines.append(f"optimizer_launch_s = {found.optimizer_launch_s:.4g}")
    if found.reference_s is not None:
        lines += ["", "# Of a matmul that says how fast the machine is.", "[speed]"]
        lines.append(f"reference_s = {found.reference_s:.4g}")
    if found.pages is not None:
        lines += ["", "# Tensors of so many bytes and more are on new pages whenever they are made.", "[pages]"]
        lines += [f"from_bytes = {found.pages.from_bytes}", f"s_per_byte = {found.pages.s_per_byte:.4g}"]
    return "\n".join([*lines, "", *_curves(found, peaks, bandwidth)]) + "\n"


def _curves(found: Calibration, peaks: dict[str, float], bandwidth: float) -> Iterator[str]:
    moving = [reading for reading in found.readings if not reading.kind.computes]
    yield "# [bytes, share of the best]; sizes as in timing/curves.toml."
    yield "[curves]"
    yield 'source = "preflop calibrate"'
    for name, readings in _grouped(moving, lambda reading: reading.kind.value):
        yield _curve(name, [r for r in readings if r.dtype == "float32"] or readings, bandwidth)
    yield ""
    yield "# Of one operator (and variant) in one dtype, and of a family in one dtype."
    yield "[curves.ops]"
    for name, readings in _grouped(moving, lambda reading: own_name(reading.op, reading.variant, reading.dtype)):
        yield _curve(f'"{name}"', readings, bandwidth)
    for name, readings in _grouped(moving, lambda reading: f"{reading.kind.value} {reading.dtype}"):
        yield _curve(f'"{name}"', readings, bandwidth)
    computing = [reading for reading in found.readings if reading.kind.computes]
    yield ""
    yield "# [FLOPs, bytes, share of the best] of single calls."
    yield "[curves.surfaces]"
    for name, readings in _grouped(computing, lambda reading: f"{reading.kind.value} {reading.dtype}"):
        yield _surface(name, readings, peaks)
    for name, readings in _grouped(computing, lambda reading: f"{reading.op} {reading.dtype}"):
        yield _surface(name, readings, peaks)
    yield ""
    yield "# [rows, inner size, columns, share of the best] of single products."
    yield "[curves.products]"
    single = [reading for reading in computing if reading.product is not None]
    for name, readings in _grouped(single, lambda reading: own_name(reading.op, reading.variant, reading.dtype)):
        yield _grid(name, readings, peaks)


def _grouped(
    readings: Iterable[Reading], key: Callable[[Reading], str]
) -> Iterator[tuple[str, list[Reading]]]:
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    yield from found.items()


def _curve(name: str, readings: Sequence[Reading], bandwidth: float) -> str:
    points: dict[float, list[float]] = {}
    for reading in readings:
        each = reading.moved / reading.tensors
        size = float(f"{size_of(reading.kind, reading.flops, each):.3g}")
        points.setdefault(size, []).append(reading.seconds * bandwidth / reading.moved)
    shown = ", ".join(f"[{size:.4g}, {1 / median(taken):.4g}]" for size, taken in sorted(points.items()))
    return f"{name} = [{shown}]"


def _surface(name: str, readings: Sequence[Reading], peaks: dict[str, float]) -> str:
    points: dict[tuple[int, int], list[float]] = {}
    for reading in readings:
        times_the_least = reading.seconds * peaks[reading.dtype] / reading.flops
        points.setdefault((reading.flops, reading.moved), []).append(times_the_least)
    shown = ", ".join(
        f"[{flops:.4g}, {moved:.4g}, {1 / median(taken):.4g}]"
        for (flops, moved), taken in sorted(points.items())
    )
    return f'"{name}" = [{shown}]'


def _grid(name: str, readings: Sequence[Reading], peaks: dict[str, float]) -> str:
    shown = ", ".join(
        f"[{', '.join(map(str, reading.product or ()))}, {reading.flops / reading.seconds / peaks[reading.dtype]:.4g}]"
        for reading in readings
    )
    return f'"{name}" = [{shown}]'
