"""Python's garbage collector, put off while many small objects are made that all stay.

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
