"""Collectives between ranks, and the copies that bring tensors into one flat one and out of it."""

from __future__ import annotations

from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "preflop.all_gather", "preflop.reduce_scatter", "preflop.all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
"""Their first scalar argument is the number of ranks."""
COPY_IN, COPY_OUT = "preflop.copy_in", "preflop.copy_out"


@flops(*COLLECTIVES, COPY_IN, COPY_OUT)
def collective(sig: Signature) -> Work:
    """Sums of a reduction are not counted: they run where the links end."""
    del sig
    return Work(0, Kind.OTHER)


@traffic(*COLLECTIVES)
def sent(sig: Signature) -> Moved:
    """Bytes of this device's memory: its own tensor is read, what comes is written. `timing` knows the links."""
    return Moved(sum(meta.bytes for meta in sig.inputs), sum(meta.bytes for meta in sig.outputs))


@traffic(COPY_IN, COPY_OUT)
def copied(sig: Signature) -> Moved:
    """Each tensor once, in its own dtype."""
    return Moved(sum(meta.bytes for meta in sig.inputs), sum(meta.bytes for meta in sig.outputs))
