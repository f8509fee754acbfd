"""Copies between a device and the host over their link (`transforms.offload`)."""

from __future__ import annotations

from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature

TO_HOST, TO_DEVICE = "preflop.to_host", "preflop.to_device"


@flops(TO_HOST, TO_DEVICE)
def transfer(sig: Signature) -> Work:
    """A copy engine computes nothing."""
    del sig
    return Work(0, Kind.OTHER)


@traffic(TO_HOST)
def to_host(sig: Signature) -> Moved:
    """Bytes of the device's memory: what goes is read, and written elsewhere."""
    return Moved(sig.inputs[0].bytes, 0)


@traffic(TO_DEVICE)
def to_device(sig: Signature) -> Moved:
    """Bytes of the device's memory: what comes is written."""
    return Moved(0, sig.inputs[0].bytes)
