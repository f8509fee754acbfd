"""The two checks of a device's figures against others that do not know the answer."""

from __future__ import annotations

import pytest

from preflop.hardware.catalog import devices, find
from preflop.hardware.checksum import (
    bus_bytes_per_s,
    bus_checksum,
    checksums,
    clock_checksum,
    clock_flops_per_s,
)
from preflop.hardware.device import Device

EVERY = {device.id: device for device in devices()}
every_device = pytest.mark.parametrize("device", EVERY.values(), ids=EVERY)

BUS_TOLERANCE = 0.002
CLOCK_TOLERANCE = 0.012
# Stated over computed, with the reason.
CLOCK_EXCEPTIONS = {
    # 2250e12 implies 1.856 GHz; the clock is the driver's maximum, 1.965 GHz.
    "b200-sxm-180gb": 0.944,
    # The same: 2450e12 implies 1.967 GHz, the driver's maximum is 2.070 GHz.
    "gb300-279gb": 0.9505,
}
# A clock or a unit count was itself computed from the peak.
CIRCULAR = {"a10", "a10g", "a30", "l40", "gb200-186gb", "gb300-279gb", "h100-pcie-80gb"}


@every_device
def test_bus_times_pin_rate_is_the_bandwidth(device: Device) -> None:
    """Bus bits x bits per second and pin / 8 is the stated bandwidth within 0.2 %."""
    check = bus_checksum(device)
    if check is not None:
        assert check.ratio == pytest.approx(1, abs=BUS_TOLERANCE)


@every_device
def test_units_times_clock_is_the_dense_peak(device: Device) -> None:
    """Units x FLOPs per clock x clock is the stated dense peak within 1.2 %, but for named exceptions."""
    check = clock_checksum(device)
    if check is not None:
        expected = CLOCK_EXCEPTIONS.get(device.id)
        tolerance = CLOCK_TOLERANCE if expected is None else 0.001
        assert check.ratio == pytest.approx(expected or 1, abs=tolerance)
        assert check.circular == (device.id in CIRCULAR)


def test_the_checks_cover_most_of_what_has_a_clock() -> None:
    """At least 15 buses and 35 clocks are checked, so the tests above are not empty."""
    assert sum(bus_checksum(device) is not None for device in EVERY.values()) >= 15
    assert sum(clock_checksum(device) is not None for device in EVERY.values()) >= 35


def test_the_check_catches_a_sparse_peak_and_another_cards_bandwidth() -> None:
    """torch's own table once gave the L4 the H100's 3350 GB/s and a sparse 242 TFLOP/s: both checks fail."""
    l4 = find("l4")
    units, clock_hz = int(l4.figure("unit_count").value), float(l4.figure("boost_clock_hz").value)
    bits, pin = l4.figure("memory_bus_bits").value, l4.figure("memory_pin_bits_per_s").value
    assert abs(3350e9 / bus_bytes_per_s(int(bits), float(pin)) - 1) > 10 * BUS_TOLERANCE
    assert abs(242e12 / clock_flops_per_s(units, 1024, clock_hz) - 1) > 10 * CLOCK_TOLERANCE
    assert l4.peak_flops_per_s("bfloat16") == pytest.approx(121e12)
    assert l4.bandwidth_bytes_per_s == pytest.approx(300e9)


def test_the_datasheets_gb200_peak_is_rounded_up() -> None:
    """152 SMs x 8192 x 1.965 GHz is 2447e12: the datasheet's 2500e12 is 1.022 of it, so 2450e12 is used."""
    computed = clock_flops_per_s(152, 8192, 1.965e9)
    assert 2500e12 / computed == pytest.approx(1.022, abs=0.001)
    assert find("gb200").peak_flops_per_s("bfloat16") == pytest.approx(2450e12)


def test_a_device_without_inputs_has_no_check() -> None:
    """A TPU states neither bus nor units: no check, rather than a check of nothing."""
    assert checksums(find("tpu-v5p")) == ()
    assert len(checksums(find("l4"))) == 2
