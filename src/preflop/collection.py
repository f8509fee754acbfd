"""Python's garbage collector, put off while many small objects are made that all stay, and before the end.

Each collection walks everything that exists, torch's modules included: writing a tape of 100,000 calls
takes three times as long with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_put_off() -> Iterator[None]:
    """No collection inside; as it was after, what was made inside counted as old.

    >>> import gc
    >>> with collection_put_off():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:
                # Moves every object to the oldest generation without looking at it; else the next object made
                # would start a collection of all that was made here.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def collection_in_a_process() -> Iterator[None]:
    """Around all that a process does: collected seldom, and not at its end, where the interpreter would walk through
    everything that is about to go away. An eighth of the time of an account that needs no torch."""
    gc.set_threshold(_SELDOM, *gc.get_threshold()[1:])
    try:
        yield
    finally:
        gc.freeze()


_SELDOM = 100_000
"""New objects from one collection to the next: 700 by default, which reading modules alone makes a hundred times."""
