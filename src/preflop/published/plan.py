"""What a row is recorded as: a subject, a device, and how its reading is taken from the tape."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from preflop.errors import UnknownDevice
from preflop.hardware.catalog import find as find_device
from preflop.hardware.device import Device
from preflop.published.rows import Row
from preflop.subject import Subject
from preflop.timing.collective import Collective, Ranks, Sharding
from preflop.transforms.fully_sharded import Sharded


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Over how many devices each column is divided; static, as ZeRO and FSDP divide it."""

    parameters: int = 1
    gradients: int = 1
    states: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to record for a row, and what to read."""

    key: tuple[Any, ...]
    """Rows with the same key have the same tape."""
    subject: Subject
    device: Device | None
    """Whose rates give the time; None: see `no_time`."""
    no_time: str = ""
    """Why the step's time is not predicted."""
    no_memory: str = ""
    memory: str = "allocated"
    """"allocated", "reserved", "used" (reserved and context), "first" (of the first step), "kept" (for
    backward), "forward" or "static" (parameters, gradients and states)."""
    forward_peaks: bool = False
    kernels: str = ""
    """The attention kernel of the run, where its software is not today's: "flash" or "efficient"."""
    phases: tuple[str, ...] = ("forward", "backward", "recompute", "optimizer")
    """Phases of the tape that the measured time includes."""
    microbatches: int = 1
    sharding: Sharding | None = None
    """Weights are gathered and gradients scattered unit by unit, in every microbatch."""
    ranks: Ranks = field(default_factory=lambda: Ranks(count=1))
    synced: tuple[tuple[Collective, float, bool], ...] = ()
    """Collectives once a step: what, bytes, and whether the last backward hides it."""
    copied_bytes: int = 0
    """Bytes that one microbatch's backward moves outside of the tape: gradients copied into flat ones and cast."""
    optimizer_bytes: int = 0
    """Bytes that an optimizer outside of the tape moves, on this device's shard."""
    static_bytes: int = 0
    """Bytes of parameters, gradients and states that live outside of the tape."""
    drop_gradients: bool = False
    """The tape's gradients are added to an outer buffer at once and freed."""
    shards: Shards = field(default_factory=Shards)
    extra_bytes: int = 0
    context_bytes: int | None = None
    """CUDA context that the source itself measured."""
    fused: bool = False
    """The step was compiled: element-wise chains are taken as one kernel each."""
    fully_sharded: Sharded | None = None
    """The memory is FSDP2's, over `ranks`."""
    settled: bool = False
    """What made the row's collectors doubt it (its grade) is settled by the source's own code."""
    assumed: tuple[str, ...] = ()


_GPU = re.compile(r"^([a-z]+\d+[a-z]?)_(\d+)g[ib]+(?:_[0-9]+w)?$", re.IGNORECASE)


def device_of(row: Row) -> tuple[Device | None, str]:
    """The row's device, or None and why."""
    text = row.text("gpu") or row.text("device")
    words = text.replace("_", " ").strip()
    names = [text, words]
    found = _GPU.match(text)
    if found:
        names += [
            f"{found[1]}-{found[2]}gb",
            f"{found[1]}-sxm4-{found[2]}gb",
            f"{found[1]}-sxm5-{found[2]}gb",
        ]
    for name in names:
        try:
            return find_device(name), ""
        except UnknownDevice:
            continue
    return None, f"the catalog has no {text or 'named device'}"
