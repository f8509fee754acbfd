"""The head of a model and the loss over it: what a tape says of them, and a chunked loss is recorded from."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.tape.events import TensorMeta


@dataclass(frozen=True, slots=True)
class Head:
    """A linear head whose logits go into a cross entropy."""

    hidden: TensorMeta
    """What the head reads."""
    weight: TensorMeta
    bias: TensorMeta | None
    labels: TensorMeta
    """As the batch has them."""
    next_token: bool
    """The loss shifts the labels: each position's is the next one's."""
