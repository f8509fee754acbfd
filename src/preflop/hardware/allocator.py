"""CUDA's caching allocator, simulated: what a stream of requests makes of `allocated` and `reserved`.

The rules are those of PyTorch 2.4's c10/cuda/CUDACachingAllocator.cpp (line numbers L... refer to it) with
what later releases added where said. One device, one stream, no graph capture, native backend.

Does not count: the CUDA context, NCCL's buffers, other processes (all outside the allocator), and frees
that wait for another stream (they are taken as immediate, a lower bound).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from preflop.errors import PreflopError
from preflop.hardware.allocator_settings import (
    LARGE_SEGMENT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)

# Every size rounds up to a multiple of this (kMinBlockSize, L130).
MIN_BLOCK_BYTES = 512
# Largest rounded size that the small pool serves, inclusive (kSmallSize, L132).
SMALL_BYTES = 1 << 20
# From here on a request gets a segment of its own (kMinLargeAlloc, L135) ...
OWN_SEGMENT_BYTES = 10 << 20
# ... rounded up to a multiple of this (kRoundLarge, L137).
ROUND_SEGMENT_BYTES = 2 << 20
# Address range of an expandable segment where the device's memory is not given: more than any has.
_ENDLESS_BYTES = 1 << 42


class AllocatorMisuse(PreflopError):
    """An event that no program can make: a free of what is not allocated, a negative size."""


class SimulatedOutOfMemory(PreflopError):
    """The simulated device cannot serve a request, after everything was tried that CUDA's allocator tries."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """Highest bytes ever of each count (each at its own moment)."""

    allocated_bytes: int
    """Handed out, rounding and unsplit remainders included (`memory_allocated`)."""
    requested_bytes: int
    """What was asked for."""
    reserved_bytes: int
    """Obtained from the driver (`memory_reserved`)."""


class _Block:
    """A piece of a segment: handed out, free, or (expandable segments) address space without memory."""

    __slots__ = ("address", "collected_at", "in_use", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, address: int, size: int, pool: _Pool, mapped: bool = True) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.mapped = mapped
        self.in_use = False
        self.requested = 0
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.collected_at = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class _Pool:
    """Free blocks ordered by (size, address), and unmapped ones by address (L636, L645)."""

    __slots__ = ("blocks", "free", "get_free_block_calls", "page_bytes", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []
        self.blocks: dict[int, _Block] = {}  # every block of the pool by address, in use or not
        self.get_free_block_calls = 0

    def insert(self, block: _Block) -> None:
        if block.mapped:
            block.collected_at = self.get_free_block_calls
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def erase(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


class CachingAllocator:
    """The allocator of one device: `malloc` gives a handle, `free` takes it back.

    Args:
        settings: what PYTORCH_CUDA_ALLOC_CONF sets.
        capacity_bytes: memory that the driver can give; None never runs out.
        memory_fraction: what `torch.cuda.set_per_process_memory_fraction` set, or None. Needs
            `capacity_bytes`; garbage collection needs it.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(11 * 2**20 + 2**19)          # 11.5 MiB: its segment of 12 is not split
    >>> allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
    (12058624, 12582912, 12582912)

    Known limitations: one stream, no private pools of graph captures, frees are immediate.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
        memory_fraction: float | None = None,
    ) -> None:
        if memory_fraction is not None and capacity_bytes is None:
            raise AllocatorMisuse(
                "a memory fraction was given but no capacity_bytes: give the device's total memory too."
            )
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = None if memory_fraction is None else int(memory_fraction * (capacity_bytes or 0))
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        """Times the driver refused and the cache was emptied (num_alloc_retries)."""
        self._small = _Pool(small=True)
        self._large = _Pool(small=False)
        self._in_use: dict[int, _Block] = {}
        # Addresses only order blocks of equal size; every segment gets the next one, as a driver would.
        self._next_address = ROUND_SEGMENT_BYTES

    @property
    def peaks(self) -> AllocatorPeaks:
        """Highest counts so far."""
        return AllocatorPeaks(self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_reserved_bytes)

    def malloc(self, requested_bytes: int) -> int:
        """A handle for that many bytes; 0 bytes give the handle 0 and take nothing (L1030-1222).

        Raises:
            SimulatedOutOfMemory: the capacity is not enough, even after the cache was emptied.
        """
        if requested_bytes < 0:
            raise AllocatorMisuse(f"asked for {requested_bytes} bytes: a size cannot be negative.")
        if requested_bytes == 0:
            return 0
        size = self.settings.round_bytes(requested_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, size)
        if block is None:
            block = self._obtain(pool, size, requested_bytes)
        self._hand_out(block, size, requested_bytes)
        return block.address

    def free(self, handle: int) -> None:
        """Give back what `malloc` gave; its bytes go to the cache, not to the driver (L1316, L2125)."""
        if handle == 0:
            return
        block = self._in_use.pop(handle, None)
        if block is None:
            raise AllocatorMisuse(f"free of {handle}, which is not allocated: freed twice, or never born?")
        block.in_use = False
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        self._free_block(block)

    def empty_cache(self) -> None:
        """Give every unsplit free block and every whole free page back to the driver (L2566)."""
        for pool in (self._small, self._large):
            for _, address in list(pool.free):
                block = pool.blocks[address]
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    # Requests

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that holds `size`, if it may be used; only one is examined (L2292)."""
        pool.get_free_block_calls += 1
        at = bisect_left(pool.free, (size, 0))
        if at == len(pool.free):
            return None
        block = pool.blocks[pool.free[at][1]]
        if self.settings.expandable_segments:
            at, block = self._least_expandable(pool, at, block)
        largest = self.settings.max_split_bytes
        if largest is not None:
            if size < largest <= block.size:
                return None
            if size >= largest and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        del pool.free[at]
        return block

    @staticmethod
    def _least_expandable(pool: _Pool, at: int, block: _Block) -> tuple[int, _Block]:
        """Move on while the next free block could grow less: spare the one that can grow (L2303)."""

        def reach_bytes(one: _Block) -> int:
            return one.size + (one.next.size if one.next is not None and not one.next.mapped else 0)

        while at + 1 < len(pool.free):
            other = pool.blocks[pool.free[at + 1][1]]
            if reach_bytes(other) >= reach_bytes(block):
                break
            at, block = at + 1, other
        return at, block

    def _obtain(self, pool: _Pool, size: int, requested_bytes: int) -> _Block:
        """A block from the driver; when it refuses, from what the cache can give back (L1060-1110)."""
        segment_bytes = self._segment_bytes(size)
        if self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        block = self._new_block(pool, size, segment_bytes)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size, segment_bytes)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_block(pool, size, segment_bytes)
        if block is None:
            limit = self.capacity_bytes if self.limit_bytes is None else self.limit_bytes
            raise SimulatedOutOfMemory(
                f"tried to allocate {segment_bytes} bytes (for a request of {requested_bytes}): of {limit} "
                f"bytes {self.reserved_bytes} are reserved, {self.allocated_bytes} of them in use.\n"
                f"  Ask for less at a time, or give the simulation more capacity."
            )
        return block

    def _segment_bytes(self, size: int) -> int:
        """What is asked of the driver for a rounded size (L2282)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < OWN_SEGMENT_BYTES:
            return self.settings.large_segment_bytes
        return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES

    def _new_block(self, pool: _Pool, size: int, segment_bytes: int) -> _Block | None:
        """A fresh segment, or grown expandable one; None where the driver or the fraction refuses (L2424)."""
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        if not self._reserve(segment_bytes):
            return None
        block = _Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        pool.blocks[block.address] = block
        return block

    def _reserve(self, count_bytes: int) -> bool:
        """Take bytes from the driver; False where it has not so many left."""
        if self.capacity_bytes is not None and self.reserved_bytes + count_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes += count_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _hand_out(self, block: _Block, size: int, requested_bytes: int) -> None:
        """Split the block if the rest is worth keeping, and count it (L1150-1222, L2272)."""
        rest = block.size - size
        if rest and self._splits(block.pool, size, rest):
            tail = _Block(block.address + size, rest, block.pool)
            self._link_after(block, tail)
            block.size = size
            block.pool.insert(tail)
        block.in_use = True
        block.requested = requested_bytes
        self._in_use[block.address] = block
        self.allocated_bytes += block.size
        self.requested_bytes += requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes

    def _splits(self, pool: _Pool, size: int, rest: int) -> bool:
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        largest = self.settings.max_split_bytes
        return rest > SMALL_BYTES and (largest is None or size < largest)

    @staticmethod
    def _link_after(block: _Block, new: _Block) -> None:
        """Put `new` between `block` and what followed it."""
        new.prev, new.next = block, block.next
        if block.next is not None:
            block.next.prev = new
        block.next = new
        block.pool.blocks[new.address] = new

    # Frees

    def _free_block(self, block: _Block) -> None:
        """Merge with free neighbours of the same kind and put it in the cache."""
        block = self._merge(block, block.prev)
        block = self._merge(block, block.next)
        block.pool.insert(block)

    @staticmethod
    def _merge(block: _Block, other: _Block | None) -> _Block:
        """The two as one block if `other` is free and as mapped as `block`; `block` is in no list (L2206)."""
        if other is None or other.in_use or other.mapped != block.mapped:
            return block
        block.pool.erase(other)
        front, back = (other, block) if other is block.prev else (block, other)
        front.size += back.size
        front.next = back.next
        if back.next is not None:
            back.next.prev = front
        del block.pool.blocks[back.address]
        return front

    def _release(self, block: _Block) -> None:
        """Give a whole free segment back to the driver."""
        block.pool.erase(block)
        del block.pool.blocks[block.address]
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Free blocks above the split limit until `size` fits; only with max_split_size_mb (L2522)."""
        largest = self.settings.max_split_bytes
        if largest is None or self.settings.expandable_segments:
            return False
        target = max(size, largest)
        at = bisect_left(pool.free, (target, 0))
        if at < len(pool.free):
            self._release_if_whole(pool.blocks[pool.free[at][1]])
            return True
        released = 0
        for block_bytes, address in reversed(list(pool.free)):
            if released >= target or block_bytes < largest:
                break
            released += self._release_if_whole(pool.blocks[address])
        return released >= target

    def _release_if_whole(self, block: _Block) -> int:
        if block.is_split:
            return 0
        self._release(block)
        return block.size

    def _collect_garbage(self) -> None:
        """Give back old unsplit free blocks of the large pool above the threshold (L2360)."""
        assert self.limit_bytes is not None
        threshold_bytes = self.settings.garbage_collection_threshold * self.limit_bytes
        target_bytes = self.reserved_bytes - threshold_bytes
        pool = self._large
        ages = {
            address: pool.get_free_block_calls - pool.blocks[address].collected_at
            for _, address in pool.free
            if not pool.blocks[address].is_split and not self.settings.expandable_segments
        }
        reclaimed_bytes = 0
        freed = True
        while target_bytes > 0 and reclaimed_bytes < target_bytes and freed and ages:
            oldest_kept = sum(ages.values()) / len(ages)
            freed = False
            for address in [address for address, age in ages.items() if age >= oldest_kept]:
                freed = True
                del ages[address]
                block = pool.blocks[address]
                reclaimed_bytes += block.size
                self._release(block)

    # Expandable segments (L395-570, L1983-2122, L2600-2700)

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """A free block of at least `size`, made by mapping pages after free address space."""
        block = self._find_expandable(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            following = block.next
            assert following is not None and not following.mapped
            mapped = self._map(following, min(size - block.size, following.size))
            if mapped is None:
                return None
            block = mapped
        pool.erase(block)
        return block

    def _find_expandable(self, pool: _Pool, size: int) -> _Block:
        """The lowest free address space that holds `size`, else a new range."""
        for address in pool.unmapped:
            block = pool.blocks[address]
            if block.prev is not None and not block.prev.in_use:
                block = block.prev
            if self._room_from(block, size) >= size:
                return block
        return self._new_range(pool)

    @staticmethod
    def _room_from(block: _Block, enough_bytes: int) -> int:
        """Contiguous bytes not in use from `block` on; stops counting at enough."""
        room = 0
        one: _Block | None = block
        while one is not None and not one.in_use and room < enough_bytes:
            room += one.size
            one = one.next
        return room

    def _new_range(self, pool: _Pool) -> _Block:
        """Address space of 1.125 x the device's memory, in whole pages, nothing mapped."""
        capacity = _ENDLESS_BYTES if self.capacity_bytes is None else self.capacity_bytes
        pages = -(-(capacity + capacity // 8) // pool.page_bytes)
        # Ranges start at whole pages, so that pages of a range can be counted by address.
        start = -(-self._next_address // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        block = _Block(start, pages * pool.page_bytes, pool, mapped=False)
        self._next_address = start + block.size
        pool.blocks[start] = block
        pool.insert(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Give memory to the first `size` bytes of an unmapped block, in whole pages; None if refused."""
        pool = block.pool
        mapped_bytes = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped_bytes):
            return None
        pool.erase(block)
        block.mapped = True
        if mapped_bytes < block.size:
            rest = _Block(block.address + mapped_bytes, block.size - mapped_bytes, pool, mapped=False)
            self._link_after(block, rest)
            pool.insert(rest)
            block.size = mapped_bytes
        block = self._merge(block, block.prev)
        block = self._merge(block, block.next)
        pool.insert(block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Take the memory from the whole pages inside a free block."""
        pool = block.pool
        page = pool.page_bytes
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.erase(block)
        self.reserved_bytes -= end - start
        if start > block.address:
            middle = _Block(start, block.address + block.size - start, pool)
            block.size = start - block.address
            self._link_after(block, middle)
            pool.insert(block)
            block = middle
        if end < block.address + block.size:
            tail = _Block(end, block.address + block.size - end, pool)
            block.size = end - start
            self._link_after(block, tail)
            pool.insert(tail)
        block.mapped = False
        block = self._merge(block, block.prev)
        block = self._merge(block, block.next)
        pool.insert(block)


def replay(
    events: Iterable[tuple[int, int, bool]],
    config: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    memory_fraction: float | None = None,
) -> AllocatorPeaks:
    """Peaks that a stream of births and deaths makes in CUDA's allocator.

    Args:
        events: (storage id, bytes, True for a birth or False for a death), in the order they happen.
        config: what PYTORCH_CUDA_ALLOC_CONF sets.
        capacity_bytes: as for `CachingAllocator`.
        memory_fraction: as for `CachingAllocator`.

    >>> replay([(1, 30 * 2**20, True), (1, 30 * 2**20, False), (2, 25 * 2**20, True)]).reserved_bytes
    31457280

    Raises:
        AllocatorMisuse: a storage is born twice or dies unborn.
        SimulatedOutOfMemory: a capacity was given and is not enough.
    """
    allocator = CachingAllocator(config, capacity_bytes=capacity_bytes, memory_fraction=memory_fraction)
    handles: dict[int, int] = {}
    for storage_id, count_bytes, birth in events:
        if birth:
            if storage_id in handles:
                raise AllocatorMisuse(f"storage {storage_id} is born twice: it must die in between.")
            handles[storage_id] = allocator.malloc(count_bytes)
        else:
            if storage_id not in handles:
                raise AllocatorMisuse(f"storage {storage_id} dies but was not alive.")
            allocator.free(handles.pop(storage_id))
    return allocator.peaks


# cuBLAS workspaces: aten/src/ATen/cuda/CublasHandlePool.cpp L85-115 (2.4.0), and its newest form.
_CUBLAS_DEFAULT = ":4096:2:16:8"
_CUBLAS_HOPPER_BYTES = 32 << 20
_HIPBLAS_BYTES = 32 << 20
_HIPBLAS_LARGE_BYTES = 128 << 20
# CUBLASLT_WORKSPACE_SIZE, in KiB, defaults to 1024: CUDABlas.cpp L183-202 (2.4.0).
CUBLASLT_WORKSPACE_BYTES = 1 << 20


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace, taken from the caching allocator per handle and stream.

    32 MiB from compute capability 9 on (2.4: only 9.0; newest: majors 9 to 12), else 8.125 MiB.
    A training process has two: autograd runs backward on its own thread, and handles are per thread.
    Until torch 2.4 it stays for the process; newer releases may give it back after each call (the
    release in which that changed is not known).

    >>> cublas_workspace_bytes((8, 0)), cublas_workspace_bytes((9, 0))
    (8519680, 33554432)

    Source: CublasHandlePool.cpp, getChosenWorkspaceSize.
    """
    if compute_capability[0] >= 9:
        return _CUBLAS_HOPPER_BYTES
    return parse_cublas_workspace_config(_CUBLAS_DEFAULT)


def hipblas_workspace_bytes(arch: str) -> int:
    """Bytes of one hipBLAS workspace: 128 MiB on gfx942 and gfx950, else 32 MiB (ROCm).

    >>> hipblas_workspace_bytes("CDNA3 gfx942")
    134217728

    Source: CublasHandlePool.cpp, getChosenWorkspaceSize, its ROCm branch.
    """
    return _HIPBLAS_LARGE_BYTES if any(g in arch for g in ("gfx942", "gfx950")) else _HIPBLAS_BYTES


def parse_cublas_workspace_config(text: str) -> int:
    """Bytes that a CUBLAS_WORKSPACE_CONFIG asks for: the sum of its KiB x count pairs.

    >>> parse_cublas_workspace_config(":4096:8"), parse_cublas_workspace_config(":16:8")
    (33554432, 131072)

    Source: CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    parts = text.split(":")
    numbers = parts[1:]
    if parts[0] != "" or not numbers or len(numbers) % 2 or not all(part.isdecimal() for part in numbers):
        raise AllocatorMisuse(
            f"CUBLAS_WORKSPACE_CONFIG is {text!r}.\n  It must be pairs of KiB and count, such as :4096:8."
        )
    return sum(int(kib) * 1024 * int(count) for kib, count in zip(numbers[::2], numbers[1::2], strict=True))
