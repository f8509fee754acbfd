"""What a CUDA device's allocator makes of a tape: bytes allocated and reserved, workspaces included.

The tape knows what was asked for; CUDA's caching allocator rounds it, leaves remainders unsplit and keeps
freed segments. Here the two meet: every birth and death of the recorded steps, from the parameters on, is
replayed through `hardware.allocator`, with the workspaces that kernels and cuBLAS take beside them.

May import: tape, ops, ledgers, hardware, errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from preflop.hardware.allocator import CachingAllocator, cublas_workspace_bytes
from preflop.hardware.allocator_settings import AllocatorSettings
from preflop.ledgers.memory import workspace_bytes
from preflop.ops.collective import ALL_GATHER, REDUCE_SCATTER
from preflop.tape.events import HOST, Phase, Role, Storage, Tape

# Operators that cuBLAS runs: the first one on each thread takes that thread's workspace.
_CUBLAS = frozenset(
    f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_scaled_mm")
)
_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)

# What a first all_reduce on NCCL adds to an A100 with NVLink, for two ranks and for more.
# Source: NVIDIA/nccl issue 964 (a communicator has two or three connections per channel, whatever the scale: 986).
_COMMUNICATOR_OF_TWO_BYTES, _COMMUNICATOR_BYTES = 544 << 20, 688 << 20
COMMUNICATOR_BOUNDS_BYTES = (544 << 20, 2 << 30)
"""Least and most that people report for one group of ranks. Source: the same, and issue 864 (1.6 GB)."""


def communicator_bytes(ranks: int) -> int:
    """What NCCL holds on each device for one group of so many ranks.

    >>> communicator_bytes(2) >> 20, communicator_bytes(64) >> 20
    (544, 688)
    """
    return _COMMUNICATOR_OF_TWO_BYTES if ranks == 2 else _COMMUNICATOR_BYTES


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Peaks of the steady step on a device, in bytes."""

    allocated_bytes: int
    """Most that was handed out at once, rounded (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: int
    """Most that was obtained from the driver since the start (`max_memory_reserved`)."""
    allocated_by_phase: dict[str, int]
    """The same as `allocated_bytes` within each phase: "forward" (with the loss), "backward" (with what is
    recomputed in it), "optimizer"."""


def device_memory(
    tape: Tape,
    capability: tuple[int, int],
    *,
    settings: AllocatorSettings | None = None,
) -> DeviceMemory:
    """Replay the recorded steps through CUDA's caching allocator.

    Args:
        capability: CUDA's compute capability, which decides cuBLAS's workspace.
        settings: what PYTORCH_CUDA_ALLOC_CONF sets.

    Counts: rounding to 512 bytes, remainders too small to split, segments that stay reserved, kernels'
    workspaces (`ops/workspace_cuda.py`), one cuBLAS workspace for the main thread and one for autograd's
    (handles are per thread, and workspaces stay: CublasHandlePool.cpp).
    What collectives of FSDP gather and receive is allocated on streams of their own, whose freed blocks no other
    stream uses (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py; CUDACachingAllocator.cpp, L636).
    Does not count: the CUDA context, NCCL's buffers, frees that wait for another stream (taken as immediate).
    """
    streams = _streams(tape)
    allocators = [CachingAllocator(settings) for _ in range(1 + max(streams.values(), default=0))]
    own, others = allocators[0], allocators[1:]
    handles: dict[int, int] = {}
    steady = _steady_from(tape, tape.steps - 1)
    peaks = dict.fromkeys(map(_phase_name, Phase), 0)
    runs = iter(_phase_runs(tape))
    until, phase = next(runs)
    for tick, index, size in _events(tape, cublas_workspace_bytes(capability)):
        allocator = allocators[streams.get(index, 0)] if others else own
        if size < 0:
            allocator.free(handles.pop(index))
            continue
        handle = allocator.malloc(size)
        if tick >= steady:
            while tick > until:
                until, phase = next(runs)
            allocated = own.allocated_bytes
            if others:
                allocated += sum(one.allocated_bytes for one in others)
            if allocated > peaks[phase]:
                peaks[phase] = allocated
        if index == _TRANSIENT:
            allocator.free(handle)
        else:
            handles[index] = handle
    reserved = sum(one.peak_reserved_bytes for one in allocators)
    return DeviceMemory(max(peaks.values()), reserved, {name: peak for name, peak in peaks.items() if peak})


_OWN_STREAM = {ALL_GATHER: 1, REDUCE_SCATTER: 2}
"""Collectives whose results are allocated on another stream than the step's, and its number."""


def _streams(tape: Tape) -> dict[int, int]:
    """Storage -> stream, of those that are not the step's own."""
    return {
        call.storages[-1]: _OWN_STREAM[op]
        for call in tape.calls
        if (op := tape.signatures[call.signature].op) in _OWN_STREAM
    }


_TRANSIENT = -1


def _events(tape: Tape, cublas_bytes: int) -> list[tuple[int, int, int]]:
    """(tick, storage or _TRANSIENT, bytes; negative where freed), in the order they happen."""
    events = []
    for index, storage in enumerate(tape.storages):
        if storage.bytes and not on_host(storage, tape):
            events.append((storage.born, index, storage.bytes))
            if storage.died is not None:
                events.append((storage.died, index, -storage.bytes))
    inside = workspace_bytes(tape)
    workspace = len(tape.storages)
    waiting = {True, False}
    for call in tape.calls:
        if call.signature in inside:
            events.append((call.tick, _TRANSIENT, inside[call.signature]))
        if waiting and tape.signatures[call.signature].op in _CUBLAS:
            thread = call.phase in _BACKWARD
            if thread in waiting:
                waiting.discard(thread)
                events.append((call.tick, workspace + thread, cublas_bytes))
    events.sort(key=lambda event: event[0])
    return events


def on_host(storage: Storage, tape: Tape) -> bool:
    """Whether the storage is in the host's memory: what was offloaded, and step counters, which torch's
    optimizers keep on the CPU unless they are fused or capturable (torch/optim/adamw.py, `_init_group`)."""
    if storage.device == HOST:
        return True
    fused = tape.subject is not None and "fused" in (tape.subject.optimizer or "")
    return storage.role is Role.OPTIMIZER_STATE and storage.name.endswith("step") and not fused


def _steady_from(tape: Tape, step: int) -> int:
    starts = [mark.tick for mark in tape.marks if mark.name == "step" and mark.step == step]
    return min(starts, default=0)


def _phase_runs(tape: Tape) -> list[tuple[float, str]]:
    """(Last tick, phase) of each run of calls of one phase, in order; the last run has no end."""
    names = {phase: _phase_name(phase) for phase in Phase}
    runs: list[tuple[float, str]] = []
    for call in tape.calls:
        name = names[call.phase]
        if runs and runs[-1][1] == name:
            runs.pop()
        runs.append((call.tick, name))
    last = runs.pop()[1] if runs else names[Phase.OTHER]
    return [*runs, (math.inf, last)]


def _phase_name(phase: Phase) -> str:
    return Phase.BACKWARD.value if phase is Phase.RECOMPUTE else phase.value
