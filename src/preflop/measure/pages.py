"""Memory that the system hands out anew: what its first touch costs, from which size on it is new each time.

A page that a process touches for the first time is cleared and mapped by the kernel: a fault per page. glibc gives
tensors above a threshold pages of their own, and gives those back at once; it raises the threshold to what it sees
freed, up to 32 MiB. Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from statistics import median

import torch

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_DYNAMIC_LIMIT_BYTES = 32 * 2**20
"""What glibc raises its threshold to at most: DEFAULT_MMAP_THRESHOLD_MAX (malloc/malloc.c), 64-bit."""
_NEVER_TRIM_BYTES = 2**31 - 1
"""The largest that `mallopt` takes."""
_PROBED_BYTES = tuple(2**exponent for exponent in range(20, 28))
_TOUCHED_BYTES = 16 * 2**20
_TIMES = 5


@dataclass(frozen=True, slots=True)
class FreshPages:
    """What memory costs that was not there before."""

    from_bytes: int
    """A tensor of so many bytes and more is on new pages whenever it is made."""
    s_per_byte: float
    """Of touching them first and giving them back, beyond what warm memory takes."""


def fresh_pages() -> FreshPages | None:
    """Measured here; None where a system does not count page faults or every size stays mapped."""
    size = _new_each_time_from()
    return None if size is None else FreshPages(size, _first_touch_s_per_byte())


def _new_each_time_from() -> int | None:
    """The smallest size probed whose third tensor, made after the second was freed, is on new pages.

    Sizes rise, as they do for an allocator that learns from what is freed.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    found = None
    for size in _PROBED_BYTES:
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.empty(size, dtype=torch.uint8).fill_(1)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        if faults * resource.getpagesize() < size / 2:
            found = None
        elif found is None:
            found = size
    return found


def _first_touch_s_per_byte() -> float:
    """By torch's own threads, which fault side by side."""
    taken = []
    for _ in range(_TIMES):
        memory = mmap.mmap(-1, _TOUCHED_BYTES)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        begun = time.perf_counter()
        tensor.fill_(1)
        first = time.perf_counter()
        tensor.fill_(2)
        second = time.perf_counter()
        del tensor
        memory.close()
        taken.append((first - begun) - (second - first) + (time.perf_counter() - second))
    return max(median(taken), 0.0) / _TOUCHED_BYTES


def keep_freed_memory(*, of_every_size: bool = False) -> bool:
    """Let this process keep the memory that it frees, so that the next step finds its pages mapped.

    By itself glibc returns the top of its heap after each step's backward and maps it again in the next step's
    forward. The resident size stays at its highest; the number of bytes that tensors hold is the same.

    Args:
        of_every_size: also of tensors above 32 MiB, which glibc else maps and unmaps singly.

    Returns:
        Whether the C library took it: not where it is no glibc, or the user has set its limits by the environment.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return False
    taken = mallopt(_M_MMAP_THRESHOLD, _DYNAMIC_LIMIT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM_BYTES)
    if taken and of_every_size:
        taken = mallopt(_M_MMAP_MAX, 0)
    return bool(taken)
