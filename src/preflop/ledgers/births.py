"""Memory that the steady step makes anew, by size.

May import: tape. Never torch, never a device.
"""

from __future__ import annotations

from preflop.tape.events import HOST, Tape


def born_bytes(tape: Tape, at_least_bytes: int) -> int:
    """Bytes of the storages born in the steady step that have so many bytes or more, each counted whole."""
    last = tape.steps - 1
    first = min((mark.tick for mark in tape.marks if mark.name == "step" and mark.step == last), default=0)
    return sum(
        storage.bytes
        for storage in tape.storages
        if storage.born >= first and storage.bytes >= at_least_bytes and storage.device != HOST
    )
