"""How much of a device's peak and bandwidth kernels were measured to reach (`achieved.toml`).

Where nobody measured a device, its vendor's median stands in, and the basis says so. Where nobody
measured the vendor, there is no figure.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

from preflop.hardware.device import Device, MissingFigure, peak_name
from preflop.tape.events import Phase
from preflop.timing.this import is_this, this_table

if sys.version_info >= (3, 11) or TYPE_CHECKING:
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Achieved:
    """A measured share of what the data sheet prints, from 0 to 1, and where it stands."""

    ratio: float
    basis: str
    caution: str = ""
    """What the figure was not measured for, where it stands in."""


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = (resources.files("preflop.timing") / "achieved.toml").read_text("utf-8")
    return tomllib.loads(text)


def launch_s(device: Device | None = None) -> float:
    """Seconds the host needs to launch one kernel, back to back. Source: `achieved.toml`.

    Args:
        device: this machine, calibrated, has a measured figure of its own.
    """
    return _of_launching("launch_s", device)


def phase_launch_s(device: Device, phase: str) -> float:
    """Seconds the host needs per kernel in a phase of the step: on this machine, calibrated, an optimizer's loop
    was measured apart from layers and autograd."""
    if phase == Phase.OPTIMIZER.value and is_this(device):
        own = this_table()["launch"].get("optimizer_launch_s")
        if own is not None:
            return float(own)
    return launch_s(device)


def smallest_kernel_s(device: Device | None = None) -> float:
    """Seconds that a kernel takes on the device however little it does. Source: `achieved.toml`."""
    return _of_launching("smallest_kernel_s", device)


def _of_launching(name: str, device: Device | None) -> float:
    if device is not None and is_this(device):
        return float(this_table()["launch"][name])
    return float(_table()["launch"][name]["value"])


def achieved_matmul(device: Device, dtype: str) -> Achieved | None:
    """Share of the dense peak that the best measured matmul of this dtype reached on the device.

    Else of the device's bfloat16 (or first) matmul, else the median of its vendor's devices. Medians of two
    formats are of different devices; one of TF32 is therefore held against the one of float32 (`_tf32_at_least`).
    """
    name = peak_name(dtype)
    if is_this(device):
        return Achieved(1.0, f"{name} matmuls as `preflop calibrate` measured them here, the best of them")
    own = _table()["devices"].get(_measured(device), {}).get("matmul", {})
    for candidate in (name, "bfloat16", *own):
        if candidate in own:
            basis = _basis(f"{device.name} {candidate} matmul", own[candidate])
            caution = f"nobody measured {name} matmuls on it: {candidate}'s share stands in"
            return _typical(own[candidate], basis, "" if candidate == name else caution)
    found = _borrowed(device, name)
    return _tf32_at_least(device, found) if found and name == "tf32" else found


def _borrowed(device: Device, name: str) -> Achieved | None:
    return _vendor_median(device, "matmul", name) or _vendor_median(device, "matmul", "bfloat16")


def _tf32_at_least(device: Device, found: Achieved) -> Achieved:
    """A borrowed share of the TF32 peak, with which matmuls take no longer than float32's borrowed share says.

    TF32 is a permission ("whether TensorFloat-32 tensor cores may be used", torch.backends.cuda.matmul.allow_tf32):
    cuBLAS may run the float32 kernel all the same, so that the faster of the two is expected.
    """
    plain = _borrowed(device, "float32")
    try:
        peaks = device.peak_flops_per_s("float32"), device.peak_flops_per_s("tf32")
    except MissingFigure:
        return found
    if plain is None or plain.ratio * peaks[0] <= found.ratio * peaks[1]:
        return found
    ratio = min(1.0, plain.ratio * peaks[0] / peaks[1])
    words = (
        f"{plain.basis}; TF32's, {found.ratio:.1%} of its peak, would make it slower than float32, whose kernels "
        "may run as well: the faster is expected"
    )
    return Achieved(ratio, words, found.caution)


def achieved_bandwidth(device: Device) -> Achieved | None:
    """Share of the memory bandwidth as sold that a copy reached, else the vendor's median."""
    if is_this(device):
        return Achieved(1.0, "bandwidth as `preflop calibrate` measured it here")
    own = _table()["devices"].get(_measured(device), {}).get("bandwidth")
    if own:
        return Achieved(own["ratio"], _basis(f"{device.name} memory", own))
    return _vendor_median(device, "bandwidth", None)


def _measured(device: Device) -> str:
    """The device itself, or the one with the same die whose measurements stand in."""
    table = _table()
    if device.id in table["devices"]:
        return device.id
    return str(table["same_die"].get(device.id, device.id))


def _typical(figure: dict[str, Any], basis: str, caution: str) -> Achieved:
    """A measured share; where the figure is the best of many shapes, what shapes of models reach of it."""
    typical = _table()["typical"]
    if figure["source"] not in typical["of"]:
        return Achieved(figure["ratio"], basis, caution)
    share = typical["share"]
    words = (
        f"{basis}, the best of many shapes; those of models reach {share:.1%} of that ({typical['source']})"
    )
    return Achieved(figure["ratio"] * share, words, caution)


def _basis(what: str, figure: dict[str, Any]) -> str:
    source = _table()["sources"][figure["source"]]
    return f"{what} measured at {figure['rate']} = {figure['ratio']:.1%} of the sheet ({source})"


def _vendor_median(device: Device, kind: str, dtype: str | None) -> Achieved | None:
    rows = [row for row in _table()["devices"].values() if row["vendor"] == device.vendor and kind in row]
    figures = [row[kind] if dtype is None else row[kind].get(dtype) for row in rows]
    ratios = [figure["ratio"] for figure in figures if figure]
    if not ratios:
        return None
    what = "memory bandwidth" if dtype is None else f"{dtype} matmuls"
    middle = median(ratios)
    return Achieved(
        middle,
        f"nobody measured {device.name}: {what} at the median of {len(ratios)} other {device.vendor} "
        f"device{'s' if len(ratios) > 1 else ''}, {middle:.1%}",
    )
