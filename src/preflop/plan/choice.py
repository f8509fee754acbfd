"""One choice of how to run a step, and how the cost of another choice is learned."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Route(str, Enum):
    """How the cost of a changed choice is learned."""

    RESIZE = "resize"
    """By arithmetic on the tape: its sizes are polynomials, microbatches repeat."""
    RECORD = "record"
    """By another recording: the step makes other calls (autocast, kernels, the optimizer's loop)."""
    TRANSFORM = "transform"
    """By a transform of the same tape: chosen modules run again, or a small recording is put into it."""
    PRICE = "price"
    """By other rates on the same tape."""


def _by(route: Route, meaning: str) -> dict[str, Any]:
    return {"route": route, "meaning": meaning}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What can be chosen of one step. Each field's metadata has the route by which a change is priced."""

    batch: int | None = dataclasses.field(
        default=None, metadata=_by(Route.RESIZE, "samples that one forward sees")
    )
    """None where the user made the batch, which then cannot be resized."""
    seq: int | None = dataclasses.field(default=None, metadata=_by(Route.RESIZE, "positions of a sequence"))
    microbatches: int = dataclasses.field(
        default=1, metadata=_by(Route.RESIZE, "batches per optimizer step")
    )
    recompute: Any = dataclasses.field(
        default="none", metadata=_by(Route.TRANSFORM, "what backward recomputes")
    )
    """What the tape does not say (`transforms.recompute`) is recorded."""
    precision: str = dataclasses.field(default="fp32", metadata=_by(Route.RECORD, "formats of numbers"))
    optimizer: Any = dataclasses.field(
        default="adamw", metadata=_by(Route.TRANSFORM, "what updates the weights")
    )
    device: str = dataclasses.field(
        default="cpu", metadata=_by(Route.RECORD, "device that runs it; its kernels are its own")
    )

    alloc_conf: str = dataclasses.field(
        default="", metadata=_by(Route.PRICE, "what PYTORCH_CUDA_ALLOC_CONF sets")
    )

    loss_chunks: int = dataclasses.field(
        default=1, metadata=_by(Route.TRANSFORM, "parts in which head and cross entropy are made")
    )

    offload: bool = dataclasses.field(
        default=False, metadata=_by(Route.TRANSFORM, "blocks keep their activations in the host's memory")
    )

    def but(self, **changes: Any) -> Choice:
        """The same choice with some fields changed."""
        return dataclasses.replace(self, **changes)


def route_of(before: Choice, after: Choice, *, same_kernels: bool = False) -> Route:
    """How `after` is priced when `before` was: by the most expensive route of the fields that differ.

    Args:
        same_kernels: the two devices run the same kernels (one compute capability), so that the tape is
            the same and only its rates are others.

    >>> route_of(Choice(batch=8), Choice(batch=4, microbatches=2)).value
    'resize'
    >>> route_of(Choice(), Choice(precision="bf16")).value
    'record'
    """
    routes = {
        Route.PRICE if field.name == "device" and same_kernels else field.metadata["route"]
        for field in dataclasses.fields(Choice)
        if getattr(before, field.name) != getattr(after, field.name)
    }
    return next((route for route in (Route.RECORD, Route.TRANSFORM, Route.RESIZE) if route in routes), Route.PRICE)
