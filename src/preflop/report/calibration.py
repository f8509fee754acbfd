"""`preflop calibrate`: what was measured, in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preflop.units import si_text

if TYPE_CHECKING:
    from preflop.measure.calibrate import Calibration


def to_dict(found: Calibration, path: str) -> dict[str, Any]:
    """JSON of `preflop calibrate`, schema "preflop.calibrate/1"."""
    return {
        "schema": "preflop.calibrate/1",
        "path": path,
        "device": {"name": found.name, "records_as": found.records_as, "threads": found.threads},
        "launch_s": found.launch_s,
        "context_bytes": found.context_bytes,
        "readings": [
            {
                "op": reading.op, "family": reading.kind.value, "dtype": reading.dtype, "flops": reading.flops,
                "moved_bytes": reading.moved, "seconds": reading.seconds,
            }
            for reading in found.readings
        ],
    }  # fmt: skip


def show(found: Calibration, path: str) -> None:
    """The best rates, the cost of a call, and where it was written."""
    from rich.console import Console

    console = Console()
    console.print(f"{found.name}, {found.threads} threads", markup=False, highlight=False)
    for kind, dtype, rate in best_rates(found):
        console.print(f"  {kind} {dtype}: up to {si_text(rate, 'FLOP/s')}", markup=False, highlight=False)
    console.print(f"  memory: up to {si_text(best_bandwidth(found), 'B/s')} (read + written)", highlight=False)
    console.print(f"  calling an operator: {found.launch_s * 1e6:.1f} us", highlight=False)
    console.print(f"{len(found.readings)} readings written to {path}", markup=False, highlight=False)
    console.print("`--device this` now predicts for this machine; `preflop verify --time` compares.")


def best_rates(found: Calibration) -> list[tuple[str, str, float]]:
    """(family, dtype, best FLOP/s) of what computes."""
    best: dict[tuple[str, str], float] = {}
    for reading in found.readings:
        if reading.flops and reading.kind.value in ("matmul", "batched", "convolution", "recurrent"):
            key = (reading.kind.value, reading.dtype)
            best[key] = max(best.get(key, 0.0), reading.flops / reading.seconds)
    return [(kind, dtype, rate) for (kind, dtype), rate in best.items()]


def best_bandwidth(found: Calibration) -> float:
    """Bytes per second of the best element-wise reading."""
    moved = [r.moved / r.seconds for r in found.readings if r.kind.value == "elementwise"]
    return max(moved, default=0.0)
