"""Every byte that torch's CPU allocator hands out and takes back while a callable runs.

The readings are the allocator's own events, as torch's profiler keeps them: exact, not sampled. What is
counted is what passes through `c10::GetAllocator(CPU)`: tensors, and the scratch that kernels (oneDNN,
fused attention) ask of it. Not counted: memory that a library takes from malloc by itself, and tensors
made before the run (their release is not an event either).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True)
class Span:
    """What the allocator held between the begin and the end of one named span of the run."""

    name: str
    start_bytes: int
    """Alive when the span began."""
    peak_bytes: int
    """Largest number of bytes alive at one time during it, those alive before included."""
    end_bytes: int
    """Alive when it ended."""


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Reference cycles are collected before and after, never during: the reading is repeatable."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def spans_of(run: Callable[[], Any], names: Callable[[str], bool]) -> tuple[list[Span], Any]:
    """The spans that `run` marked with `torch.profiler.record_function`, in order of their start.

    Args:
        run: called once, without arguments, garbage collector off.
        names: which of the marked spans are wanted. They may nest, and may not straddle threads.

    Returns:
        The spans, and what `run` returned.
    """
    with garbage_collector_off():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run()
    return _replay(profiler, names), result


def _replay(profiler: profile, names: Callable[[str], bool]) -> list[Span]:
    """Run through the profiler's events in time order, keeping the number of bytes alive."""
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    # (time, order at equal times, what): a span opens before and closes after what it contains.
    moments: list[tuple[int, int, int, str]] = []
    opened: list[tuple[str, int, int]] = []
    for event in events:
        name = event.name()
        if name == _MEMORY_EVENT:
            if event.device_type() == torch.autograd.DeviceType.CPU:
                moments.append((event.start_ns(), 1, event.nbytes(), ""))
        elif names(name):
            opened.append((name, event.start_ns(), event.end_ns()))
    for index, (_, start_ns, end_ns) in enumerate(opened):
        moments.append((start_ns, 0, index, "open"))
        moments.append((end_ns, 2, index, "close"))
    moments.sort(key=lambda moment: moment[:2])
    return _spans([name for name, _, _ in opened], moments)


def _spans(names: list[str], moments: list[tuple[int, int, int, str]]) -> list[Span]:
    alive = 0
    start: dict[int, int] = {}
    peak: dict[int, int] = {}
    done: dict[int, Span] = {}
    for _, _, value, kind in moments:
        if kind == "open":
            start[value] = peak[value] = alive
        elif kind == "close":
            done[value] = Span(names[value], start.pop(value), peak.pop(value), alive)
        else:
            alive += value
            for index in peak:
                peak[index] = max(peak[index], alive)
    return [done[index] for index in sorted(done)]


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes that the CPU allocator held at most, over what it held before, while `run` ran.

    >>> peak_bytes(lambda: torch.zeros(1000).relu())
    8000

    What `run` returns is let go first; what it leaves elsewhere stays.
    """
    label = "preflop.peak"

    def labelled() -> None:
        with record_function(label):
            run()

    spans, _ = spans_of(labelled, lambda name: name == label)
    return spans[0].peak_bytes
