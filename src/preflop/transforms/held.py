"""Playing an annotated tape anew while counting what holds each storage: memory dies with its last hold.

What recomputation and offload share. Each says what it makes of a call and of a note.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from preflop.tape import lives
from preflop.tape.events import Call, Mark, Role, Signature, Storage, Tape
from preflop.tape.replay import BIRTH, DEATH, MARK, events_of, uncommitted, without_storages
from preflop.tape.stack import Refused

Key = tuple[int, int]
"""(module, storage) of a tensor that autograd keeps."""


def key_of(note: Call) -> Key:
    """Of a note on a kept tensor."""
    return note.module, note.storages[0]


def is_note(op: str) -> bool:
    """Whether an operator's calls are notes."""
    return op.startswith(lives.PREFIX)


def inside(tape: Tape, module: int, outer: int) -> bool:
    """Whether a module is another, or within it."""
    return module == outer or tape.modules[module].startswith(tape.modules[outer] + ".")


def random_state(nbytes: int) -> Storage:
    """A copy of the CPU's random state."""
    return Storage(nbytes, "uint8", (nbytes,), 0, None, Role.TEMPORARY)


class Holds:
    """Storages of a new tape, alive as long as something holds them."""

    def __init__(self, storages: list[Storage]) -> None:
        self.storages = [uncommitted(storage) for storage in storages]
        self.tick = 0
        self.counts = {number: 1 for number, storage in enumerate(storages) if storage.born == 0}
        self.unmade: list[int] = []
        """Born for the next call."""

    def born(self, number: int, *, made: bool) -> None:
        """A storage begins to live, held once."""
        self.tick += 1
        self.storages[number].born = self.tick
        self.counts[number] = 1
        if made:
            self.unmade.append(number)

    def new(self, like: Storage, *, made: bool) -> int:
        """A storage more, held once."""
        self.storages.append(uncommitted(like))
        self.born(len(self.storages) - 1, made=made)
        return len(self.storages) - 1

    def hold(self, number: int) -> int:
        """One more holds it."""
        if number not in self.counts:
            raise Refused("a tensor is kept that would be gone")
        self.counts[number] += 1
        return number

    def release(self, number: int) -> None:
        """One less; with the last one it dies."""
        self.counts[number] -= 1
        if not self.counts[number]:
            del self.counts[number]
            self.tick += 1
            self.storages[number].died = self.tick


class Played:
    """Plays the recorded events in order; a subclass says what becomes of calls and notes."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.ops = [signature.op for signature in tape.signatures]
        kept = [number for number, op in enumerate(self.ops) if not is_note(op)]
        self.signatures = [tape.signatures[number] for number in kept]
        self.numbers = {number: place for place, number in enumerate(kept)}
        """Recorded signature -> its number on the new tape."""
        self._added: dict[Signature, int] = {}
        self.holds = Holds(tape.storages)
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.python = set(self.holds.counts)
        """Recorded storages that Python, or anything but autograd's saving, still holds."""

    def run(self) -> Tape:
        """The new tape."""
        for kind, index in events_of(self.tape):
            self.play(kind, index)
        made = dataclasses.replace(
            self.tape, signatures=self.signatures, calls=self.calls, storages=self.holds.storages,
            marks=self.marks,
        )  # fmt: skip
        never = {
            number
            for number, recorded in enumerate(self.tape.storages)
            if recorded.born > 0 and not made.storages[number].born
        }
        return without_storages(made, never) if never else made

    def play(self, kind: int, index: int) -> None:
        """One event."""
        if kind == MARK:
            self.mark(self.tape.marks[index])
        elif kind == BIRTH:
            self.birth(index)
        elif kind == DEATH:
            self.python_lets_go(index)
        elif is_note(self.ops[self.tape.calls[index].signature]):
            self.note(self.tape.calls[index])
        else:
            self.call(index)

    def mark(self, mark: Mark) -> None:
        """A moment of the loop; at the end of forward what lives is kept for backward."""
        self.holds.tick += 1
        self.marks.append(dataclasses.replace(mark, tick=self.holds.tick))
        if mark.name == "forward_end":
            for number in self.holds.counts:
                if self.holds.storages[number].role is Role.TEMPORARY:
                    self.holds.storages[number].role = Role.ACTIVATION

    def birth(self, number: int) -> None:
        """A recorded storage begins to live."""
        self.holds.born(number, made=self.tape.storages[number].call >= 0)
        self.python.add(number)

    def python_lets_go(self, number: int) -> None:
        """Nothing but autograd holds the storage any more."""
        if number in self.python:
            self.python.remove(number)
            self.holds.release(number)

    def call(self, index: int) -> None:
        """What becomes of a call."""
        raise NotImplementedError

    def note(self, call: Call) -> None:
        """What becomes of a note."""
        raise NotImplementedError

    def within(self, module: int, outer: int) -> bool:
        """Whether a module is another, or inside it."""
        return inside(self.tape, module, outer)

    def number_of(self, signature: Signature) -> int:
        """The number of a signature that the recorded tape may not have."""
        if signature not in self._added:
            self._added[signature] = len(self.signatures)
            self.signatures.append(signature)
        return self._added[signature]

    def write(
        self, call: Call, storages: tuple[int, ...], *, signature: int | None = None, **changed: Any
    ) -> None:
        """A call of the new tape, changed from a recorded one.

        Args:
            signature: its number on the new tape; None: the recorded one's.
        """
        holds = self.holds
        holds.tick += 1
        for number in holds.unmade:
            holds.storages[number].call = len(self.calls)
        holds.unmade.clear()
        number = self.numbers[call.signature] if signature is None else signature
        self.calls.append(
            dataclasses.replace(call, signature=number, storages=storages, tick=holds.tick, **changed)
        )
