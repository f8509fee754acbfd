"""Two checks that a device's figures agree, each from inputs that do not know the answer.

Bandwidth is bus bits x bits per second and pin; the dense peak is units x FLOPs per clock and unit x
clock. A table with another device's bandwidth or a sparse peak fails them.
"""

from __future__ import annotations

from dataclasses import dataclass

from preflop.hardware.device import Device, Figure


@dataclass(frozen=True)
class Checksum:
    """A printed figure beside the same figure computed from others."""

    what: str
    stated: float
    computed: float
    circular: bool
    """An input was itself computed from the stated figure: agreement proves nothing."""

    @property
    def ratio(self) -> float:
        """Stated over computed; 1 where they agree."""
        return self.stated / self.computed


def bus_bytes_per_s(bus_bits: int, pin_bits_per_s: float) -> float:
    """Bytes per second of a memory bus: bits wide x bits per second and pin / 8.

    >>> bus_bytes_per_s(192, 12.5e9)          # L4; torch's table once said 3350e9
    300000000000.0
    """
    return bus_bits * pin_bits_per_s / 8


def clock_flops_per_s(units: int, flops_per_clock_per_unit: int, clock_hz: float) -> float:
    """Dense peak: units x FLOPs per clock and unit x clock.

    >>> clock_flops_per_s(132, 4096, 1.83e9) / 1e12       # H100 SXM, bf16
    989.42976
    """
    return units * flops_per_clock_per_unit * clock_hz


def bus_checksum(device: Device) -> Checksum | None:
    """Bandwidth against bus width and pin rate, or None where an input is not known."""
    bits = device.figures.get("memory_bus_bits")
    pin = device.figures.get("memory_pin_bits_per_s")
    if bits is None or pin is None:
        return None
    computed = bus_bytes_per_s(int(bits.value), float(pin.value))
    return Checksum("bandwidth", device.bandwidth_bytes_per_s, computed, _computed(bits, pin))


def clock_checksum(device: Device) -> Checksum | None:
    """Dense 16-bit peak (bf16, else fp16) against units and clock, or None where an input is missing."""
    per_clock = device.figures.get("tensor_flops_per_clock_per_unit")
    units = device.figures.get("unit_count")
    clock = device.figures.get("tensor_clock_hz") or device.figures.get("boost_clock_hz")
    peak = device.peaks.get("bfloat16") or device.peaks.get("float16")
    if per_clock is None or units is None or clock is None or peak is None:
        return None
    computed = clock_flops_per_s(int(units.value), int(per_clock.value), float(clock.value))
    return Checksum("dense 16-bit peak", float(peak.value), computed, _computed(units, clock))


def _computed(*figures: Figure) -> bool:
    return any(figure.confidence == "C" for figure in figures)


def checksums(device: Device) -> tuple[Checksum, ...]:
    """Both checks of a device, those whose inputs are known."""
    found = (bus_checksum(device), clock_checksum(device))
    return tuple(check for check in found if check is not None)
