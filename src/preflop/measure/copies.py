"""Copy kernels of a real run, as torch's profiler shows them: the truth behind the copies ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from preflop.measure.operators import LABEL, LabelEachCall
from preflop.tape.events import Signature

_COPY = "aten::copy_"


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """One `aten::copy_` that ran. clone, contiguous, reshape and casts all end in one."""

    bytes: int
    """Written: elements of the target times their size."""
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str
    within: tuple[str, ...]
    """Names of the events around it, outermost first: ("aten::reshape", "aten::clone")."""


def copy_kernels(run: Callable[[], Any]) -> list[CopyKernel]:
    """Every copy kernel of a call, in no particular order.

    >>> x = torch.zeros(3, 4)
    >>> [(copy.bytes, copy.within[-1]) for copy in copy_kernels(lambda: x.t().contiguous())]
    [(48, 'aten::clone')]
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    return list(_found(profiler.profiler.kineto_results.experimental_event_tree(), ()))


def _found(events: Any, within: tuple[str, ...]) -> Iterator[CopyKernel]:
    for event in events:
        if event.name == _COPY:
            yield _kernel(event, within)
        yield from _found(event.children, (*within, event.name))


def _kernel(event: Any, within: tuple[str, ...]) -> CopyKernel:
    target, source = event.extra_fields.inputs[0], event.extra_fields.inputs[1]
    elements = 1
    for size in target.sizes:
        elements *= size
    return CopyKernel(
        bytes=elements * target.dtype.itemsize,
        shape=tuple(target.sizes),
        dtype=str(target.dtype).removeprefix("torch."),
        source_dtype=str(source.dtype).removeprefix("torch."),
        within=within,
    )


@dataclass(frozen=True, slots=True)
class CallCopies:
    """One operator call of a real run, with the copy kernels that ran inside it."""

    signature: Signature
    copies: tuple[CopyKernel, ...]


def copies_by_call(run: Callable[[], Any]) -> list[CallCopies]:
    """What every operator call of `run` copied, in order of the calls.

    >>> [pad] = copies_by_call(lambda: torch.nn.functional.pad(_ONES, (1, 1)))
    >>> pad.signature.op, [copy.bytes for copy in pad.copies]
    ('aten.constant_pad_nd', [12])
    """
    mode = LabelEachCall()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, mode:
        run()
    inside: dict[int, list[CopyKernel]] = {}
    for kernel in _found(profiler.profiler.kineto_results.experimental_event_tree(), ()):
        labels = [name for name in kernel.within if name.startswith(LABEL)]
        if labels:
            inside.setdefault(int(labels[-1].removeprefix(LABEL)), []).append(kernel)
    return [
        CallCopies(signature, tuple(inside.get(index, ()))) for index, (signature, _) in enumerate(mode.seen)
    ]


_ONES = torch.ones(3)
