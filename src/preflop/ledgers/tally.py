"""Calls of the steady step counted by what they share, so that each is priced once and multiplied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from preflop.ops.arguments import call_dtype
from preflop.ops.registry import FLOPS_OF_USED
from preflop.tape.events import Call, Phase, Tape


class Origin(NamedTuple):
    """Where calls come from: what a ledger can group by, besides the operator."""

    signature: int
    phase: Phase
    module: int
    source: int


_ORIGIN = attrgetter("signature", "phase", "module", "source")


def count_by_origin(calls: Iterable[Call]) -> dict[Origin, int]:
    """Number of calls per signature, phase, module and source line."""
    return {Origin._make(key): n for key, n in Counter(map(_ORIGIN, calls)).items()}


def aliasing(storages: tuple[int, ...]) -> tuple[int, ...] | None:
    """Which tensors of a call share a storage, as the first position of each; None where none do.

    >>> aliasing((7, 9, 7)), aliasing((7, 9, 8))
    ((0, 1, 0), None)
    """
    if len(set(storages)) == len(storages):
        return None
    first: dict[int, int] = {}
    return tuple(first.setdefault(storage, index) for index, storage in enumerate(storages))


def dtypes(tape: Tape) -> list[str]:
    """The dtype each signature computes in."""
    return [call_dtype(sig) for sig in tape.signatures]


def used_outputs(tape: Tape) -> dict[int, tuple[bool, ...]]:
    """Per call of the steady step whose work depends on it (`flops_of_used`): which outputs are used.

    Keys are positions in `tape.steady()`. An output is unused when its storage dies before the next
    call begins: autograd drops a gradient that nothing wants at once.
    """
    depends = {i for i, sig in enumerate(tape.signatures) if sig.op in FLOPS_OF_USED}
    if not depends:
        return {}
    calls, found = tape.steady(), {}
    for position, call in enumerate(calls):
        if call.signature not in depends:
            continue
        following = calls[position + 1].tick if position + 1 < len(calls) else None
        outputs = call.storages[len(tape.signatures[call.signature].inputs) :]
        found[position] = tuple(_outlives(tape, storage, following) for storage in outputs)
    return found


def _outlives(tape: Tape, storage: int, tick: int | None) -> bool:
    died = tape.storages[storage].died
    return died is None or tick is None or died >= tick
