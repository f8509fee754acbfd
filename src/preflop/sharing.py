"""What `gpus=` and `shard=` say: over how many ranks a step is shared, and how.

A leaf but for the transforms, which act on the recorded step of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.errors import NotYet, PreflopError, unknown_name
from preflop.quantity import whole

if TYPE_CHECKING:
    from preflop.tape.events import Tape

NONE = "none"
SHARDS = (NONE, "ddp", "zero2", "fsdp")
"""ddp: every rank keeps everything (DistributedDataParallel). fsdp: parts of weights, gradients and states
(fully_shard). zero2: fully_shard whose weights stay whole from forward to backward (`reshard_after_forward=False`)."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a step is shared among ranks."""

    gpus: int = 1
    shard: str = NONE

    def applied(self, tape: Tape) -> Tape:
        """The tape of rank 0.

        Raises:
            NotYet: an optimizer whose update needs more of a parameter than a rank's part.
        """
        if self.gpus == 1:
            return tape
        from preflop.transforms.data_parallel import data_parallel
        from preflop.transforms.fully_sharded import Sharded, fully_sharded

        if self.shard == "ddp":
            return data_parallel(tape, degree=self.gpus)
        _check_optimizer(tape)
        return fully_sharded(tape, degree=self.gpus, how=Sharded(regathers=self.shard == "fsdp"))


def parse(gpus: object, shard: str) -> Sharing:
    """What the words mean.

    >>> parse(8, "fsdp")
    Sharing(gpus=8, shard='fsdp')

    Raises:
        BadNumber: gpus is no whole number of at least 1. PreflopError: an unknown word, or one without the other.
    """
    count = whole("gpus", gpus)
    if shard not in SHARDS:
        raise unknown_name(PreflopError, "way to share a step", shard, SHARDS, ", ".join(SHARDS))
    if (count == 1) != (shard == NONE):
        raise PreflopError(
            f"gpus={count}, shard={shard!r}: one device is not shared, and several must be told how.\n"
            "  Give both, as --gpus 8 --shard fsdp (or ddp, zero2), or leave both out."
        )
    return Sharing(count, shard)


def _check_optimizer(tape: Tape) -> None:
    """Only updates that look at one number at a time run on parts as they were recorded."""
    from preflop.optimizers import find_optimizer

    name = tape.subject.optimizer if tape.subject is not None else None
    try:
        spec = find_optimizer(name) if name else None
    except PreflopError:
        return  # a user's own: the transform's assumption says on what it stands
    if spec is not None and (spec.factored or spec.quantised or spec.matrices_only or spec.in_backward):
        raise NotYet(
            f"{name} does not update one number at a time: what it sends between parts is not priced.\n"
            "  Take adamw, sgd or another of its kind, or --shard ddp."
        )
