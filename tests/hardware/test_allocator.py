"""CUDA's caching allocator, simulated: worked numbers, rules one by one, laws for any stream of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflop.errors import NotYet
from preflop.hardware.allocator import (
    CUBLASLT_WORKSPACE_BYTES,
    AllocatorMisuse,
    CachingAllocator,
    SimulatedOutOfMemory,
    cublas_workspace_bytes,
    hipblas_workspace_bytes,
    parse_cublas_workspace_config,
    replay,
)
from preflop.hardware.allocator_settings import AllocatorSettings, BadAllocatorSetting
from preflop.hardware.catalog import find

KIB, MIB, GIB = 2**10, 2**20, 2**30
FREE = -1


def after(*events: int, conf: str = "", **limits: int | float) -> CachingAllocator:
    """The allocator after these requests; FREE gives the last one back."""
    allocator = CachingAllocator(AllocatorSettings.parse(conf), **limits)  # type: ignore[arg-type]
    handles: list[int] = []
    for event in events:
        if event == FREE:
            allocator.free(handles.pop())
        else:
            handles.append(allocator.malloc(event))
    return allocator


# events, settings, allocated, reserved: the sequences of the allocator notes, section 9.
WORKED = [
    ((1,), "", 512, 2 * MIB),
    ((MIB, MIB), "", 2 * MIB, 2 * MIB),
    ((MIB + 1,), "", 1_049_088, 20 * MIB),
    ((19 * MIB // 2, 19 * MIB // 2), "", 20 * MIB, 20 * MIB),
    ((10 * MIB,), "", 10 * MIB, 10 * MIB),
    ((10 * MIB + 1,), "", 10_486_272, 12 * MIB),
    ((23 * MIB // 2,), "", 12 * MIB, 12 * MIB),
    ((8_519_680,), "", 8_519_680, 20 * MIB),
    ((30 * MIB, FREE, 25 * MIB), "", 25 * MIB, 30 * MIB),
    ((25 * MIB,), "expandable_segments:True", 25 * MIB, 40 * MIB),
]


@pytest.mark.parametrize(("events", "conf", "allocated_bytes", "reserved_bytes"), WORKED)
def test_the_worked_numbers(
    events: tuple[int, ...], conf: str, allocated_bytes: int, reserved_bytes: int
) -> None:
    """Sequences on an empty cache, by hand from the rules of CUDACachingAllocator.cpp."""
    allocator = after(*events, conf=conf)
    assert allocator.allocated_bytes == allocated_bytes
    assert allocator.reserved_bytes == reserved_bytes


def test_a_scalar_takes_512_bytes_and_a_thousand_floats_4096() -> None:
    """Case M22: sizes round up to 512 (pytorch#74443)."""
    assert after(4).allocated_bytes == 512
    assert after(1000 * 4).allocated_bytes == 4096


def test_an_unsplit_remainder_is_allocated_but_not_requested() -> None:
    """Case M22: 4 + 4 + 7.5 MiB leave 4.5 MiB of a 20 MiB segment; 4 MiB there are charged 4.5 MiB."""
    allocator = after(4 * MIB, 4 * MIB, 4 * 480 * 1024 * 4)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.reserved_bytes - allocator.allocated_bytes == 4_718_592
    before = allocator.allocated_bytes
    allocator.malloc(4_194_304)
    assert allocator.allocated_bytes - before == 4_194_304 + 524_288
    assert allocator.requested_bytes == 4 * MIB * 3 + 4 * 480 * 1024 * 4
    assert allocator.reserved_bytes == 20 * MIB


def test_the_first_matmul_on_an_ampere_takes_8519680_bytes() -> None:
    """Case M23: ':4096:2:16:8', the constant that is often taken for a leak (pytorch#95668)."""
    workspace_bytes = cublas_workspace_bytes((8, 0))
    assert workspace_bytes == 2 * 4096 * 1024 + 8 * 16 * 1024 == 8_519_680
    assert after(workspace_bytes).allocated_bytes == 8_519_680
    assert after(workspace_bytes).reserved_bytes == 20 * MIB


@pytest.mark.parametrize(
    ("capability", "mebibytes"),
    [((7, 0), 8.125), ((8, 9), 8.125), ((9, 0), 32), ((10, 0), 32), ((12, 0), 32)],
)
def test_a_cublas_workspace_by_compute_capability(capability: tuple[int, int], mebibytes: float) -> None:
    """Case M23: 32 MiB from Hopper on, 8.125 MiB before."""
    assert cublas_workspace_bytes(capability) == mebibytes * MIB


def test_the_workspace_of_every_cuda_device_is_known() -> None:
    """A device's capability leads to its workspace; AMD's by its gfx name."""
    h100 = find("h100").compute_capability
    assert h100 is not None
    assert cublas_workspace_bytes(h100) == 33_554_432
    assert hipblas_workspace_bytes(find("mi300x").arch) == 128 * MIB
    assert hipblas_workspace_bytes(find("mi210").arch) == 32 * MIB
    assert CUBLASLT_WORKSPACE_BYTES == MIB


@pytest.mark.parametrize(
    ("text", "count_bytes"), [(":4096:8", 33_554_432), (":16:8", 131_072), (":4096:2:16:8", 8_519_680)]
)
def test_a_cublas_workspace_config_is_a_sum_of_pairs(text: str, count_bytes: int) -> None:
    """KiB x count, summed."""
    assert parse_cublas_workspace_config(text) == count_bytes


@pytest.mark.parametrize("text", ["", "4096:8", ":4096", ":4096:8:16", ":a:b", ":-1:8"])
def test_a_malformed_cublas_workspace_config_is_refused(text: str) -> None:
    """It says what it got and what it needs."""
    with pytest.raises(AllocatorMisuse, match="pairs of KiB and count"):
        parse_cublas_workspace_config(text)


# The rules, one by one


def test_nothing_takes_nothing() -> None:
    """0 bytes give a null handle, which can be freed as often as one likes."""
    allocator = CachingAllocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.reserved_bytes == 0


def test_a_freed_block_is_used_again_and_not_returned() -> None:
    """A free gives bytes to the cache: reserved stays, and the next request takes them."""
    allocator = after(30 * MIB, FREE)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 30 * MIB)
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB


def test_the_best_fit_is_the_smallest_block_that_holds_the_request() -> None:
    """With 30 and 26 MiB free, 26 MiB come from the smaller."""
    allocator = CachingAllocator()
    first, second = allocator.malloc(30 * MIB), allocator.malloc(26 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.malloc(26 * MIB) == second


def test_neighbours_merge_when_both_are_free() -> None:
    """Two halves of a segment become one block again, that serves the whole size."""
    allocator = CachingAllocator()
    whole = allocator.malloc(40 * MIB)
    allocator.free(whole)
    halves = [allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)]
    assert allocator.reserved_bytes == 40 * MIB
    for half in halves:
        allocator.free(half)
    assert allocator.malloc(40 * MIB) == whole
    assert allocator.reserved_bytes == 40 * MIB


def test_a_live_neighbour_keeps_a_segment_from_the_driver() -> None:
    """Fragmentation: after emptying the cache, a segment with a live piece stays reserved in full."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(8 * MIB)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB


def test_small_and_large_never_share_a_segment() -> None:
    """1 MiB comes from the small pool, one byte more from the large one."""
    assert after(MIB, MIB + 1).reserved_bytes == 22 * MIB


def test_emptying_the_cache_returns_whole_free_segments() -> None:
    """Without live pieces, everything goes back."""
    allocator = after(30 * MIB, FREE, 1, FREE)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_block_above_the_split_limit_serves_only_requests_near_its_size() -> None:
    """max_split_size_mb: neither a small request nor one 20 MiB smaller takes an oversize block."""
    conf = "max_split_size_mb:32"
    assert after(40 * MIB, FREE, 24 * MIB, conf=conf).reserved_bytes == 64 * MIB
    assert after(60 * MIB, FREE, 40 * MIB, conf=conf).reserved_bytes == 100 * MIB
    near = after(60 * MIB, FREE, 41 * MIB, conf=conf)
    assert near.reserved_bytes == 60 * MIB
    assert near.allocated_bytes == 60 * MIB  # taken whole: it may not be split


def test_only_one_candidate_is_examined() -> None:
    """A rejected best fit is a miss even if a later free block would do."""
    conf = "max_split_size_mb:32"
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    small, large = allocator.malloc(33 * MIB), allocator.malloc(70 * MIB)
    allocator.free(small)
    allocator.free(large)
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == (34 + 70 + 30) * MIB


@pytest.mark.parametrize(
    ("divisions", "requested_bytes", "rounded_bytes"),
    [
        ("4", 1200 * KIB, 1280 * KIB),  # steps of 256 KiB between 1 and 2 MiB
        ("4", 1024 * KIB, 1024 * KIB),  # a power of two stays
        ("4", 1000, 1024),  # not above 512 x 4: to 512
        ("1", 1200 * KIB + 1, 1200 * KIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 600 * MIB, 768 * MIB),
        ("[256:1,512:2,1024:4,>:8]", 300 * MIB + 1, 300 * MIB + 512),
        ("[256:1,512:2,1024:4,>:8]", 1100 * MIB, 1152 * MIB),  # as in torch, > covers the last named too
        ("[256:1,512:2,1024:4,>:8]", 5 * GIB + 1, 5 * GIB + 512 * MIB),
        ("[256:4,>:1]", 3 * MIB + 1, 7 * MIB // 2),  # below the first interval its divisions hold too
        ("[256:4,>:1]", 600 * MIB + 1, 600 * MIB + 512),
    ],
)
def test_rounding_to_divisions_of_a_power_of_two(
    divisions: str, requested_bytes: int, rounded_bytes: int
) -> None:
    """roundup_power2_divisions, one number or by interval."""
    settings_ = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    assert settings_.round_bytes(requested_bytes) == rounded_bytes


def test_the_driver_refuses_and_the_cache_is_emptied_once() -> None:
    """At capacity, free segments go back to the driver and the request is tried again."""
    allocator = after(60 * MIB, FREE, 30 * MIB, FREE, capacity_bytes=100 * MIB)
    allocator.malloc(90 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 90 * MIB


def test_oversize_blocks_go_before_the_cache_is_emptied() -> None:
    """With max_split_size_mb, one large free block makes room without a retry."""
    allocator = after(60 * MIB, FREE, conf="max_split_size_mb:32", capacity_bytes=100 * MIB)
    allocator.malloc(24 * MIB)
    assert allocator.reserved_bytes == 84 * MIB
    allocator.malloc(30 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (0, 54 * MIB)


def test_out_of_memory_says_what_was_tried_and_what_is_held() -> None:
    """The error names the segment asked for, the reserved and the capacity."""
    allocator = after(60 * MIB, capacity_bytes=100 * MIB)
    with pytest.raises(SimulatedOutOfMemory, match=r"tried to allocate 44040192 bytes.*of 104857600"):
        allocator.malloc(41 * MIB)


def test_a_memory_fraction_refuses_above_its_share() -> None:
    """set_per_process_memory_fraction(0.5) of 100 MiB allows 50."""
    allocator = after(40 * MIB, capacity_bytes=100 * MIB, memory_fraction=0.5)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(12 * MIB)
    with pytest.raises(AllocatorMisuse, match="capacity_bytes"):
        CachingAllocator(memory_fraction=0.5)


def test_garbage_collection_returns_the_older_half() -> None:
    """Above the threshold, free blocks of at least average age go back; younger ones stay cached."""
    conf = "garbage_collection_threshold:0.5"
    allocator = CachingAllocator(AllocatorSettings.parse(conf), capacity_bytes=200 * MIB, memory_fraction=1.0)
    old, young = allocator.malloc(60 * MIB), allocator.malloc(50 * MIB)
    allocator.free(old)
    for _ in range(4):
        allocator.free(allocator.malloc(1))
    allocator.malloc(64 * MIB)  # 110 MiB reserved > 100: the 60 MiB block is collected first
    assert allocator.reserved_bytes == (50 + 2 + 64) * MIB
    allocator.free(young)


def test_expandable_segments_grow_by_pages_and_follow_the_high_water_mark() -> None:
    """20 MiB pages: 25 MiB map 40, a further 25 map 20 more; a gap too small for a request is grown over."""
    conf = "expandable_segments:True"
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    first = allocator.malloc(25 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    second = allocator.malloc(25 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(second)
    third = allocator.malloc(35 * MIB)
    assert third == second
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB  # the first whole page is unmapped, the shared one is not
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_expandable_segments_do_not_fragment_where_fixed_ones_do() -> None:
    """Growing sizes one after another: fixed segments pile up, an expandable one is reused."""
    sizes = [mebibytes * MIB for mebibytes in range(21, 121, 3)]
    events = [event for size in sizes for event in (size, FREE)]
    assert after(*events).reserved_bytes > 5 * sizes[-1]
    assert after(*events, conf="expandable_segments:True").reserved_bytes == 120 * MIB


def test_expandable_segments_split_off_every_512_bytes() -> None:
    """No unsplit remainder: allocated is the rounded size, also where a fixed segment would not split."""
    assert after(23 * MIB // 2, conf="expandable_segments:True").allocated_bytes == 23 * MIB // 2


# Settings


def test_settings_are_read_as_torch_reads_them() -> None:
    """Blanks are ignored, keys without effect on bytes are taken, values become bytes."""
    parsed = AllocatorSettings.parse(
        " max_split_size_mb : 128 , garbage_collection_threshold:0.8,expandable_segments:true,"
        "max_non_split_rounding_mb:40,backend:native,pinned_num_register_threads:8"
    )
    assert parsed == AllocatorSettings(
        max_split_bytes=128 * MIB,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        max_non_split_rounding_bytes=40 * MIB,
    )
    assert AllocatorSettings.parse("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:20", "above 20"),
        ("max_split_size_mb:x", "whole number"),
        ("max_split_size:128", "Nearest: max_split_size_mb"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("expandable_segments:yes", "True or False"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:4]", "power of two"),
        ("expandable_segments", "no key:value"),
    ],
)
def test_a_setting_that_torch_would_refuse_is_an_error(text: str, message: str) -> None:
    """It names the key, what it got and what it needs."""
    with pytest.raises(BadAllocatorSetting, match=message):
        AllocatorSettings.parse(text)


def test_another_allocator_is_not_simulated() -> None:
    """cudaMallocAsync is a different allocator altogether."""
    with pytest.raises(NotYet, match="cudaMallocAsync"):
        AllocatorSettings.parse("backend:cudaMallocAsync")


# Replay, and laws for any events


def test_replay_gives_the_peaks_of_a_stream_of_births_and_deaths() -> None:
    """Three counts, each with its own moment."""
    peaks = replay(
        [(1, 30 * MIB, True), (2, 1000, True), (1, 30 * MIB, False), (3, 25 * MIB, True), (2, 1000, False)]
    )
    assert peaks.requested_bytes == 30 * MIB + 1000
    assert peaks.allocated_bytes == 30 * MIB + 1024
    assert peaks.reserved_bytes == 32 * MIB


@pytest.mark.parametrize("events", [[(1, 5, True), (1, 5, True)], [(1, 5, False)]])
def test_replay_refuses_what_no_program_does(events: list[tuple[int, int, bool]]) -> None:
    """A storage is born once and dies after it was born."""
    with pytest.raises(AllocatorMisuse):
        replay(events)


def test_misuse_is_refused() -> None:
    """A second free and a negative size are errors."""
    allocator = CachingAllocator()
    handle = allocator.malloc(5)
    allocator.free(handle)
    with pytest.raises(AllocatorMisuse, match="not allocated"):
        allocator.free(handle)
    with pytest.raises(AllocatorMisuse, match="negative"):
        allocator.malloc(-1)


CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:21",
        "max_split_size_mb:64,max_non_split_rounding_mb:30",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:[256:1,>:4],expandable_segments:True",
    ]
)
SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(MIB - 600, MIB + 600),
    st.integers(MIB, 12 * MIB),
    st.integers(MIB, 90 * MIB),
)


@settings(max_examples=60, deadline=None)
@given(conf=CONFS, sizes=st.lists(SIZES, max_size=60), seed=st.integers(0, 2**32))
def test_counts_are_consistent_for_any_events(conf: str, sizes: list[int], seed: int) -> None:
    """requested <= allocated <= reserved always; when all is freed and emptied, nothing is left."""
    choose = random.Random(seed)
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    live: dict[int, int] = {}
    for size in sizes:
        handle = allocator.malloc(size)
        if size:
            live[handle] = size
        if live and choose.random() < 0.5:
            gone = choose.choice(list(live))
            allocator.free(gone)
            del live[gone]
        if choose.random() < 0.05:
            allocator.empty_cache()
        assert allocator.requested_bytes == sum(live.values())
        assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    ends = sorted((handle, handle + size) for handle, size in live.items())
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    counts = (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes)
    assert counts == (0, 0, 0)


@settings(max_examples=30, deadline=None)
@given(conf=CONFS, sizes=st.lists(SIZES, max_size=40), seed=st.integers(0, 2**32))
def test_the_same_events_again_reserve_nothing_more(conf: str, sizes: list[int], seed: int) -> None:
    """Capacity at the peak is enough for the same stream: the driver is never refused more."""
    choose = random.Random(seed)
    events: list[tuple[int, int, bool]] = []
    live: list[int] = []
    for number, size in enumerate(sizes):
        events.append((number, size, True))
        live.append(number)
        if choose.random() < 0.5:
            events.append((live.pop(choose.randrange(len(live))), 0, False))
    config = AllocatorSettings.parse(conf)
    free = replay(events, config)
    bounded = replay(events, config, capacity_bytes=max(free.reserved_bytes, 1))
    assert bounded == free


def test_a_long_stream_leaves_the_free_lists_in_order() -> None:
    """A long random stream ends with free blocks, live blocks and unmapped pages covering every segment."""
    choose = random.Random(7)
    for conf in ("", "expandable_segments:True"):
        allocator = CachingAllocator(AllocatorSettings.parse(conf))
        live: list[int] = []
        for _ in range(20_000):
            if live and choose.random() < 0.5:
                allocator.free(live.pop(choose.randrange(len(live))))
            else:
                live.append(allocator.malloc(choose.randrange(1, 40 * MIB)))
        for pool in (allocator._small, allocator._large):
            assert pool.free == sorted(pool.free)
            free = {address for _, address in pool.free} | set(pool.unmapped)
            assert free == {address for address, block in pool.blocks.items() if not block.in_use}
