"""Bytes read and written in the steady step: what ideal, unfused kernels move.

May import: tape, ops, ledgers.ledger, errors. Never torch, never a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from preflop.ledgers.ledger import Ledger, Row
from preflop.ledgers.tally import Origin, aliasing, dtypes
from preflop.ops.moved import UNTOUCHED, is_view
from preflop.ops.pricing import moved
from preflop.ops.registry import Moved
from preflop.tape.events import Tape, require_tape


@dataclass(frozen=True)
class TrafficLedger(Ledger):
    """Bytes moved. A row's value is read + written; the two sums are given apart."""

    read: int = 0
    written: int = 0

    def read_bytes(self) -> int:
        """Bytes read, over all rows."""
        return self.read

    def write_bytes(self) -> int:
        """Bytes written, over all rows."""
        return self.written


def traffic_ledger(tape: Tape) -> TrafficLedger:
    """Bytes that the steady step moves, by operator, module, phase, line and dtype.

    Counts: per call, each distinct storage range it reads or writes, once; gathered rows, not whole
    tables. Does not count: views, caches, what a kernel spills, data moved between devices.
    """
    require_tape(tape, "traffic_ledger")
    kinds = dtypes(tape)
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    read = written = 0
    for origin, calls, bytes_moved in bytes_by_origin(tape):
        one = bytes_moved.read_bytes + bytes_moved.write_bytes
        if not one:
            continue
        key = (
            tape.signatures[origin.signature].op,
            tape.modules[origin.module],
            origin.phase.value,
            tape.sources[origin.source],
            kinds[origin.signature],
        )
        row = rows.setdefault(key, [0, 0])
        row[0] += one * calls
        row[1] += calls
        read += bytes_moved.read_bytes * calls
        written += bytes_moved.write_bytes * calls
    ordered = tuple(Row(*key, value=value, calls=calls) for key, (value, calls) in rows.items())
    return TrafficLedger("bytes", ordered, {}, read, written)


def bytes_by_origin(tape: Tape) -> Iterator[tuple[Origin, int, Moved]]:
    """Each group of like calls of the steady step, their number, and the bytes one of them moves.

    Alike means: the same signature, and the same tensors sharing storage.
    """
    still = [is_view(sig) or sig.op in UNTOUCHED for sig in tape.signatures]
    counts = Counter(
        (call.signature, aliasing(call.storages), call.phase, call.module, call.source)
        for call in tape.steady()
        if not still[call.signature]
    )
    prices: dict[tuple[int, tuple[int, ...] | None], Moved] = {}
    for (signature, shared, phase, module, source), calls in counts.items():
        if (signature, shared) not in prices:
            prices[signature, shared] = moved(tape.signatures[signature], shared)
        yield Origin(signature, phase, module, source), calls, prices[signature, shared]
