"""What a step keeps in the host's memory and sends over the link between host and device."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.ops.transfer import TO_DEVICE, TO_HOST
from preflop.tape.events import HOST, Tape


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the steady step."""

    peak_bytes: int
    """Most that waits on the host at once."""
    to_host_bytes: int
    to_device_bytes: int

    @property
    def link_bytes(self) -> int:
        """Both ways together."""
        return self.to_host_bytes + self.to_device_bytes


def host_memory(tape: Tape) -> HostMemory:
    """What waits on the host, and what goes there and back.

    >>> host_memory(Tape(subject=None))
    HostMemory(peak_bytes=0, to_host_bytes=0, to_device_bytes=0)

    Does not count: states of optimizers that torch keeps on the host (step counters).
    """
    moved = {TO_HOST: 0, TO_DEVICE: 0}
    ops = [signature.op for signature in tape.signatures]
    for call in tape.steady():
        if ops[call.signature] in moved:
            moved[ops[call.signature]] += tape.signatures[call.signature].inputs[0].bytes
    changes: list[tuple[int, int]] = []
    for storage in tape.storages:
        if storage.device == HOST:
            changes.append((storage.born, storage.bytes))
            if storage.died is not None:
                changes.append((storage.died, -storage.bytes))
    alive = peak = 0
    for _, change in sorted(changes):
        alive += change
        peak = max(peak, alive)
    return HostMemory(peak, moved[TO_HOST], moved[TO_DEVICE])
