"""Which devices compute in a number format, and at what dense rate."""

from __future__ import annotations

from preflop.dtypes import NumberFormat
from preflop.hardware.device import Device, peak_name

# AMD's CDNA3 multiplies the "fnuz" kind of fp8; every later device, and NVIDIA's and Intel's, the OCP kind.
# Source: AMD CDNA3 ISA reference, "FP8 and BF8"; OCP 8-bit Floating Point Specification, 2023.
_FNUZ_ARCH = "gfx942"


def dense_flops_per_s(device: Device, number_format: NumberFormat) -> float | None:
    """The device's dense rate for matrix products in a format; None where it has none in the catalog.

    >>> from preflop.dtypes import number_formats
    >>> from preflop.hardware.catalog import find
    >>> formats = {f.name: f for f in number_formats()}
    >>> dense_flops_per_s(find("h100-sxm"), formats["bf16"]) / 1e12
    989.4
    >>> dense_flops_per_s(find("h100-sxm"), formats["fp8-e4m3fnuz"]) is None
    True
    """
    name = number_format.name
    if name == "fp8-e8m0fnu":
        return None  # holds the scales of other formats
    if name.startswith("fp8") and name.endswith("fnuz") != (_FNUZ_ARCH in device.arch):
        return None
    kind = peak_name(number_format.torch_name or name)
    for peak in (f"{kind}_tensor", kind):
        if peak in device.peaks:
            return float(device.peaks[peak].value)
    return None


def rates(devices: tuple[Device, ...], number_format: NumberFormat) -> dict[str, float]:
    """Device id -> dense FLOP/s in a format, fastest first."""
    found = {device.id: dense_flops_per_s(device, number_format) for device in devices}
    known = {name: rate for name, rate in found.items() if rate is not None}
    return dict(sorted(known.items(), key=lambda item: (-item[1], item[0])))
