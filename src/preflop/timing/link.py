"""What transfers between host and device take, and a step's time with them beside it."""

from __future__ import annotations

import dataclasses
import re

from preflop.account import Time
from preflop.hardware.device import Device
from preflop.timing.step import StepTime
from preflop.units import bytes_text, time_text

LINK = "link"
# Transfers per second and lane by generation, and bits that carry data: 128 of 130 are sent up to 5.0.
# Source: PCI-SIG, PCI Express Base Specification 3.0 to 5.0, section 4.2 (8, 16 and 32 GT/s, 128b/130b).
_TRANSFERS_PER_S = {"3.0": 8e9, "4.0": 16e9, "5.0": 32e9}
_DATA_SHARE = 128 / 130
_BITS = 8


def link_bytes_per_s(device: Device) -> float | None:
    """Bytes per second one way between host and device; None where the catalog does not say.

    The usable rate where one is printed, else that of the link's generation and lanes.

    >>> from preflop.hardware.catalog import find
    >>> link_bytes_per_s(find("h100-sxm")) / 1e9, round(link_bytes_per_s(find("rtx-4090")) / 1e9, 1)
    (63.0, 31.5)
    """
    printed = device.figures.get("pcie_one_way_bytes_per_s")
    if printed is not None:
        return float(printed.value)
    link = device.figures.get("pcie")
    found = None if link is None else re.match(r"(\d\.\d) x(\d+)", str(link.value))
    if found is None or found[1] not in _TRANSFERS_PER_S:
        return None
    return _TRANSFERS_PER_S[found[1]] * int(found[2]) * _DATA_SHARE / _BITS


def beside_link(timed: StepTime, link_bytes: int, device: Device) -> StepTime:
    """The step's time where so many bytes go over the link beside its kernels.

    Assumed: transfers overlap with the kernels, and the link is used one way at a time (there in forward, back
    in backward). So the step takes no less than they do; at worst they come on top.
    """
    time = timed.time
    rate = link_bytes_per_s(device)
    if not link_bytes or time.lower_s is None:
        return timed
    if rate is None:
        said = f"the catalog has no link to the host for {device.name}: transfers are not timed"
        return StepTime(time, (*timed.assumptions, said))
    link_s = link_bytes / rate
    return StepTime(
        _stretched(time, link_s),
        (
            *timed.assumptions,
            f"{bytes_text(link_bytes)} to the host and back take {time_text(link_s)} at {rate / 1e9:.3g} GB/s, "
            "beside the kernels",
        ),
    )


def _stretched(time: Time, link_s: float) -> Time:
    before = time.lower_s if time.expected_s is None else time.expected_s
    assert time.lower_s is not None
    assert before is not None
    longer = max(before, link_s)
    factor = before / longer
    return dataclasses.replace(
        time,
        lower_s=max(time.lower_s, link_s),
        expected_s=None if time.expected_s is None else longer,
        upper_s=None if time.upper_s is None else time.upper_s + link_s,
        bound=LINK if longer > before else time.bound,
        mfu=None if time.mfu is None else time.mfu * factor,
        tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s * factor,
    )
