"""The roofline of one operator: what bounds it on a device, and the time it cannot beat."""

from __future__ import annotations

from dataclasses import dataclass, replace

from preflop.account import OperatorRow
from preflop.formulas.roofline import ridge_point
from preflop.hardware.device import Device, MissingFigure, peak_name

MATMUL_LIKE = frozenset({"matmul", "attention", "convolution"})
COMPUTE = "compute"
BANDWIDTH = "bandwidth"

# A complex multiply-add is counted in its real operations, which run at the real dtype's rate.
_REAL_DTYPE = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}
_FP8 = "float8"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The peak that one operator's FLOPs run against."""

    dtype: str
    flops_per_s: float | None
    """None: the device prints no such peak."""


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """One operator on the roofline. Times are for all its calls together."""

    row: OperatorRow
    """With `bound` and `time_s` filled in."""
    ceiling: Ceiling
    compute_s: float
    """FLOPs / peak; 0 where there is no peak for it."""
    bandwidth_s: float
    """Bytes / bandwidth."""
    flops: int = 0
    """What `compute_s` is of: only attended pairs of attention."""


def runs_cudnn(kind: str, op: str) -> bool:
    """Whether an NVIDIA GPU computes the operator with cuDNN, whose float32 is TF32 unless told otherwise.

    Source: torch.backends.cudnn.allow_tf32, True by default, for convolutions and recurrent layers
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    return kind == "convolution" or op.startswith("aten._cudnn_rnn")


def ceiling(device: Device, kind: str, dtype: str, tf32: bool = False, op: str = "") -> Ceiling:
    """The dense peak for an operator: the matrix units' for matmul-like work, else the vector units'.

    Matmuls of float32 run at the float32 peak, or at TF32's when the precision asks for it or the operator
    `runs_cudnn` and the device has it. Everything else runs at the float32 rate of the vector units, whatever
    its dtype (torch computes element-wise operators of half precision in float32).
    """
    if kind not in MATMUL_LIKE:
        return Ceiling("float32", _peak(device, "float32"))
    peak = _peak(device, "tf32")
    by_default = runs_cudnn(kind, op) and device.vendor == "NVIDIA" and peak is not None
    real = peak_dtype(dtype, tf32 or by_default)
    if real == "tf32":
        return Ceiling("tf32", peak)
    try:
        return Ceiling(real, device.matmul_peak_flops_per_s(real))
    except MissingFigure:
        return Ceiling(real, None)


def peak_dtype(dtype: str, tf32: bool) -> str:
    """The dtype whose dense peak matmuls of `dtype` run at.

    >>> peak_dtype("complex64", False), peak_dtype("float32", True), peak_dtype("float8_e5m2", False)
    ('float32', 'tf32', 'float8')
    """
    real = _FP8 if peak_name(dtype) == _FP8 else _REAL_DTYPE.get(dtype, dtype)
    return "tf32" if tf32 and real == "float32" else real


def bandwidth_bytes_per_s(device: Device) -> float | None:
    """Bytes per second of the device's own memory, None where the catalog has no figure."""
    try:
        return device.bandwidth_bytes_per_s
    except MissingFigure:
        return None


def on_roofline(row: OperatorRow, device: Device, tf32: bool = False) -> RooflineRow:
    """The operator priced on a device: max(FLOPs / peak, bytes / bandwidth), and which of them it is.

    An operator without a peak on this device is priced by its bytes alone, still a lower bound; its
    `bound` is then None.
    """
    top = ceiling(device, row.kind, row.dtype, tf32, row.op)
    bandwidth = bandwidth_bytes_per_s(device)
    flops = row.flops if row.attended_flops is None else min(row.flops, row.attended_flops)
    compute_s = flops / top.flops_per_s if top.flops_per_s else 0.0
    bandwidth_s = (row.read_bytes + row.write_bytes) / bandwidth if bandwidth else 0.0
    known = bandwidth is not None and (top.flops_per_s is not None or row.kind not in MATMUL_LIKE)
    bound = COMPUTE if compute_s > bandwidth_s else BANDWIDTH
    priced = replace(
        row,
        bound=bound if known and max(compute_s, bandwidth_s) > 0 else None,
        time_s=max(compute_s, bandwidth_s) if bandwidth else None,
    )
    return RooflineRow(priced, top, compute_s, bandwidth_s, flops)


def device_ridge_point(device: Device, dtype: str) -> float | None:
    """FLOPs per byte from which matmuls of this dtype are bound by compute; None where not known."""
    bandwidth = bandwidth_bytes_per_s(device)
    peak = ceiling(device, "matmul", dtype).flops_per_s if dtype != "tf32" else _peak(device, "tf32")
    return ridge_point(peak, bandwidth) if peak and bandwidth else None


def _peak(device: Device, dtype: str) -> float | None:
    try:
        return device.peak_flops_per_s(dtype)
    except MissingFigure:
        return None
