"""Recording: one training step run on fake tensors and written to a tape.

May import: torch, tape, subject, ops names, units, errors.
Does not belong here: counting (ledgers), anything about a device's speed (timing).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preflop.tape.events import Tape


class _Room(ModuleType):
    """The room is called like the function: `preflop.record(fn)` works whether it is loaded or not."""

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Tape:
        from preflop import api

        return api.record(fn, *args, **kwargs)


sys.modules[__name__].__class__ = _Room
