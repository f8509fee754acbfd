"""Higher-order operators (flex attention): torch hands them over whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from preflop.errors import BadSubject

if TYPE_CHECKING:
    from preflop.record.recorder import Recorder


def run_higher_order(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Record a higher-order call."""
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    del recorder, args, kwargs, torch
    raise BadSubject(
        f"cannot record the higher-order operator {name}.\n"
        "  Call the plain function instead (for flex_attention: scaled_dot_product_attention)."
    )
