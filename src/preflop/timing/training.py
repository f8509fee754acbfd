"""A whole training run on a device, by 6ND and an assumed utilization."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.errors import PreflopError, UnknownPrecision, unknown_name
from preflop.formulas.training_time import DAY_S, training_days
from preflop.formulas.work import six_nd
from preflop.hardware.device import Device, peak_name
from preflop.precision import PRECISIONS, find_precision


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """How long, and everything it follows from."""

    parameters: int
    tokens: int
    gpus: int
    device_id: str
    device_name: str
    precision: str
    """As asked: a precision or a dtype."""
    compute_dtype: str
    """The dtype whose dense peak was used."""
    peak_flops_per_s: float
    """Dense, of one GPU."""
    peak_source: str
    model_flops_utilization: float
    flops: int
    """6ND."""
    days: float

    @property
    def training_s(self) -> float:
        """Seconds of the run."""
        return self.days * DAY_S

    @property
    def gpu_hours(self) -> float:
        """Hours times GPUs."""
        return self.days * 24 * self.gpus


def training_time(
    parameters: int,
    tokens: int,
    gpus: int,
    device: Device,
    model_flops_utilization: float,
    precision: str = "bf16",
) -> TrainingTime:
    """The run's time: 6·N·D over what `gpus` devices do at this utilization of their dense peak.

    Args:
        precision: a precision ("bf16-mixed", by the format its matmuls run in) or a dtype ("int8").

    >>> from preflop.hardware.catalog import find
    >>> run = training_time(70 * 10**9, 15 * 10**12, 1024, find("h100-sxm"), 0.5)
    >>> round(run.days, 1), run.compute_dtype
    (143.9, 'bfloat16')

    Raises:
        UnknownPrecision: neither a precision nor a dtype of the device.
        MissingFigure: the device has no dense peak for it.
        BadNumber: a number that is not positive and finite.
    """
    dtype = compute_dtype(precision, device)
    peak_flops_per_s = device.peak_flops_per_s(dtype)
    return TrainingTime(
        parameters=parameters,
        tokens=tokens,
        gpus=gpus,
        device_id=device.id,
        device_name=device.name,
        precision=precision,
        compute_dtype=dtype,
        peak_flops_per_s=peak_flops_per_s,
        peak_source=device.peaks[dtype].source,
        model_flops_utilization=model_flops_utilization,
        flops=six_nd(parameters, tokens),
        days=training_days(parameters, tokens, gpus, peak_flops_per_s, model_flops_utilization),
    )


def compute_dtype(precision: str, device: Device) -> str:
    """The name, among the device's peaks, of the format that matmuls run in.

    >>> from preflop.hardware.catalog import find
    >>> compute_dtype("bf16-master", find("h100-sxm")), compute_dtype("fp8", find("h100-sxm"))
    ('bfloat16', 'float8')

    Raises:
        UnknownPrecision: neither a precision nor a dtype the device has a peak for.
        MissingFigure: a precision whose dtype the device has no peak for.
    """
    try:
        dtype = find_precision(precision).compute_dtype
    except UnknownPrecision:
        dtype = peak_name(precision.strip())
        if dtype not in device.peaks:
            raise _unknown(precision, device) from None
    device.peak_flops_per_s(dtype)
    return peak_name(dtype)


def _unknown(precision: str, device: Device) -> PreflopError:
    known = [*PRECISIONS, *(name for name in device.peaks if name not in PRECISIONS)]
    what = f"precision or dtype of {device.id}"
    return unknown_name(UnknownPrecision, what, precision, known, ", ".join(known))
