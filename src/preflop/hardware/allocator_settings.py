"""What PYTORCH_CUDA_ALLOC_CONF (newer name PYTORCH_ALLOC_CONF) sets of the caching allocator."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from preflop.errors import NotYet, PreflopError, described, nearest
from preflop.units import MIB

# Segment asked for when the small pool is empty (kSmallBuffer, L133); page of its expandable segments.
SMALL_SEGMENT_BYTES = 2 << 20
# Segment for requests between 1 and 10 MiB (kLargeBuffer, L60); page of the large expandable segments.
LARGE_SEGMENT_BYTES = 20 << 20
# Intervals of roundup_power2_divisions: 1 MiB to 64 GiB (CUDAAllocatorConfig.cpp L42-58).
INTERVALS = 16
_FIRST_INTERVAL_LOG2 = 20
# A multiple of this is the smallest step there is (kMinBlockSize, L130).
_MIN_BLOCK_BYTES = 512

_KEYS = (
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "expandable_segments",
    "large_segment_size_mb",
    "backend",
)
# These change speed, host memory or failure, and no byte on the device.
_WITHOUT_EFFECT = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "throw_on_cudamalloc_oom",
    "graph_capture_record_stream_reuse",
)


EXPANDABLE = "expandable_segments:True"
"""The setting with which segments grow, so that freed memory between blocks is used again."""


class BadAllocatorSetting(PreflopError):
    """A PYTORCH_CUDA_ALLOC_CONF that torch would not take, or that is not simulated."""


def no_such_allocator(text: str, where: str) -> BadAllocatorSetting:
    """The refusal of settings for a device without that allocator.

    Args:
        where: which device, in words: "the device is the CPU".
    """
    return BadAllocatorSetting(
        f"allocator settings {text!r} are CUDA's, and {where}.\n"
        "  Leave them out, or name a CUDA device of `preflop hardware`."
    )


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of the caching allocator; the defaults are torch's.

    >>> AllocatorSettings.parse("max_split_size_mb:128,expandable_segments:True").max_split_bytes
    134217728
    """

    max_split_bytes: int | None = None
    """Blocks of this size and more are never split; None splits all."""
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than a request above `max_split_bytes` its block may be."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Steps between two powers of two, by interval from 1 MiB; 0 and 1 round to 512 bytes."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which old free blocks are given back; 0 is off."""
    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """Segment for requests between 1 and 10 MiB (a setting in newer torch only)."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Settings from a PYTORCH_CUDA_ALLOC_CONF text.

        Raises:
            BadAllocatorSetting: an unknown key, or a value torch would refuse.
            NotYet: another backend than `native`.
        """
        if not isinstance(text, str):
            raise BadAllocatorSetting(
                f"alloc_conf is {described(text)}; it must be text, as PYTORCH_CUDA_ALLOC_CONF takes it: "
                "'expandable_segments:True'."
            )
        settings = cls()
        for key, value in _pairs(text):
            settings = _apply(settings, key, value)
        return settings

    def round_bytes(self, requested_bytes: int) -> int:
        """The size of the block that a request gets, before any unsplit remainder (L1836).

        >>> AllocatorSettings().round_bytes(1), AllocatorSettings().round_bytes(4000)
        (512, 4096)
        """
        if requested_bytes < _MIN_BLOCK_BYTES:
            return _MIN_BLOCK_BYTES
        interval = requested_bytes.bit_length() - 1 - _FIRST_INTERVAL_LOG2
        divisions = self.roundup_power2_divisions[min(max(interval, 0), INTERVALS - 1)]
        if divisions > 1 and requested_bytes > _MIN_BLOCK_BYTES * divisions:
            return _next_division(requested_bytes, divisions)
        return -(-requested_bytes // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES


def _next_division(requested_bytes: int, divisions: int) -> int:
    """The next of `divisions` equal steps between two powers of two (L1816)."""
    if requested_bytes & (requested_bytes - 1) == 0:
        return requested_bytes
    power = 1 << (requested_bytes.bit_length() - 1)
    step = power >> (divisions.bit_length() - 1)
    if step == 0:
        return power << 1
    return -(-requested_bytes // step) * step


def _pairs(text: str) -> list[tuple[str, str]]:
    """("key", "value") of a text such as "a:1,b:[256:1,>:4]"; blanks are ignored."""
    plain = re.sub(r"\s+", "", text)
    pairs: list[tuple[str, str]] = []
    for part in re.split(r",(?![^\[]*\])", plain):
        if not part:
            continue
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise BadAllocatorSetting(f"in PYTORCH_CUDA_ALLOC_CONF {text!r}, {part!r} is no key:value.")
        pairs.append((key, value))
    return pairs


def _apply(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    if key in _WITHOUT_EFFECT:
        return settings
    if key == "max_split_size_mb":
        return replace(settings, max_split_bytes=_mebibytes(key, value, above=20))
    if key == "max_non_split_rounding_mb":
        return replace(settings, max_non_split_rounding_bytes=_mebibytes(key, value, above=20))
    if key == "large_segment_size_mb":
        return replace(settings, large_segment_bytes=_mebibytes(key, value, above=0))
    if key == "garbage_collection_threshold":
        return replace(settings, garbage_collection_threshold=_share(key, value))
    if key == "expandable_segments":
        return replace(settings, expandable_segments=_truth(key, value))
    if key == "roundup_power2_divisions":
        return replace(settings, roundup_power2_divisions=_divisions(value))
    if key == "backend":
        if value != "native":
            raise NotYet(f"allocator backend {value!r} is not simulated; only native is.")
        return settings
    near = ", ".join(nearest(key, (*_KEYS, *_WITHOUT_EFFECT)))
    raise BadAllocatorSetting(
        f"no allocator setting named {key!r}.\n  Nearest: {near or 'none'}. Simulated: {', '.join(_KEYS)}."
    )


def _mebibytes(key: str, value: str, above: int) -> int:
    if not value.isdecimal() or int(value) <= above:
        raise BadAllocatorSetting(f"{key} is {value!r}; it must be a whole number of MiB above {above}.")
    return int(value) * MIB


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise BadAllocatorSetting(f"{key} is {value!r}; it must be between 0 and 1.")
    return share


def _truth(key: str, value: str) -> bool:
    if value.casefold() not in ("true", "false"):
        raise BadAllocatorSetting(f"{key} is {value!r}; it must be True or False.")
    return value.casefold() == "true"


def _divisions(value: str) -> tuple[int, ...]:
    """Divisions per interval from "4" or "[256:1,512:2,>:8]" (MiB:divisions).

    As in torch, the first number holds for all smaller intervals too, and ">" from the last one named
    on, that one included (CUDAAllocatorConfig.cpp, parseRoundUpPower2Divisions).
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = 0
    for number, part in enumerate(value.strip("[]").split(",")):
        mebibytes, _, count = part.partition(":")
        if mebibytes == ">":
            divisions[last:] = [_power_of_two(count)] * (INTERVALS - last)
            continue
        last = min(_power_of_two(mebibytes, least=1).bit_length() - 1, INTERVALS - 1)
        if number == 0:
            divisions[:last] = [_power_of_two(count)] * last
        divisions[last] = _power_of_two(count)
    return tuple(divisions)


def _power_of_two(value: str, least: int = 0) -> int:
    number = int(value) if value.isdecimal() else -1
    if number < least or number & (number - 1):
        raise BadAllocatorSetting(
            f"roundup_power2_divisions has {value!r}; it must be a power of two"
            f"{' or 0' if least == 0 else ''}."
        )
    return number
