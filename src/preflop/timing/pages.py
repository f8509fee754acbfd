"""What memory costs that was not there before: a page fault for every page that a large tensor touches first.

A CPU's allocator gives tensors above a size pages of their own and gives them back when they die, so that each is on
new pages. From which size, and what they cost, `preflop calibrate` measures (`measure/pages.py`). Operators are
measured on pages that are there, so this comes on top of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from preflop.hardware.device import Device
from preflop.timing.step import StepTime
from preflop.timing.this import is_serial, this_table
from preflop.units import bytes_text, time_text


def _measured(device: Device) -> dict[str, Any] | None:
    found: dict[str, Any] | None = this_table().get("pages") if is_serial(device) else None
    return found


def new_pages_from_bytes(device: Device) -> int | None:
    """The size from which a tensor is on new pages; None where that is not known, or not so."""
    pages = _measured(device)
    return None if pages is None else int(pages["from_bytes"])


def new_pages_s(device: Device, born_bytes: int) -> float:
    """Seconds for the first touch of so many bytes, and for giving them back."""
    pages = _measured(device)
    return 0.0 if pages is None else born_bytes * float(pages["s_per_byte"])


def with_new_pages(timed: StepTime, born_bytes: Callable[[int], int], device: Device) -> StepTime:
    """The step's time with what its large tensors' pages cost.

    Args:
        born_bytes: from a size, the bytes of the step's tensors that are no smaller.
    """
    time, size = timed.time, new_pages_from_bytes(device)
    if size is None or time.expected_s is None or time.upper_s is None:
        return timed
    born = born_bytes(size)
    if not born:
        return timed
    seconds = new_pages_s(device, born)
    longer = time.expected_s + seconds
    factor = time.expected_s / longer
    return StepTime(
        dataclasses.replace(
            time, expected_s=longer, upper_s=time.upper_s + seconds,
            mfu=None if time.mfu is None else time.mfu * factor,
            tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s * factor,
        ),
        (
            *timed.assumptions,
            f"expected time: {bytes_text(born)} of tensors of {bytes_text(size)} and more are on new pages, which take "
            f"{time_text(seconds)}; what the allocator returns of smaller ones between steps is not priced",
        ),
    )  # fmt: skip
