"""Copies of a real step beside those of its tape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import preflop
from preflop.ledgers.copies import kernels
from preflop.measure.allocations import garbage_collector_off
from preflop.measure.copies import copy_kernels
from preflop.measure.memory import build
from preflop.ops.workspace import threads
from preflop.record.subject_tape import record_subject
from preflop.subject import resolve
from preflop.tape.events import Tape
from tests.copies.models import Case


def of_profiler(case: Case) -> Counter[int]:
    """Bytes of each copy kernel in the second real step -> how many."""
    real = build(_subject(case))
    with garbage_collector_off():
        real.step()
        return Counter(kernel.bytes for kernel in copy_kernels(real.step))


def of_tape(case: Case) -> Counter[int]:
    """The same by the copies ledger."""
    return by_bytes(record_subject(_subject(case)))


def by_bytes(tape: Tape) -> Counter[int]:
    """Bytes of each copy kernel on a tape -> how many, on as many threads as run here."""
    with threads(torch.get_num_threads()):
        found: Counter[int] = Counter()
        for _, count, _, calls in kernels(tape):
            found[count] += calls
        return found


def both(function: Callable[[], Any]) -> tuple[Counter[int], Counter[int]]:
    """(profiler, tape) of any call."""
    return Counter(kernel.bytes for kernel in copy_kernels(function)), by_bytes(preflop.record(function))


def _subject(case: Case) -> Any:
    return resolve(case.model, case.batch, loss=case.loss, **{"optimizer": "adamw-loop", **case.options})
