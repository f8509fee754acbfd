"""Gradient accumulation: the tape of K microbatches from the tape of one.

The first microbatch is the recorded one. Each further one repeats its forward and backward with
tensors of its own, except where autograd stores a gradient: the parameter has one by then, so the new
one is added to it in place and let go (torch/csrc/autograd/functions/accumulate_grad.h). The loss is
divided by the number of microbatches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from preflop.collection import collection_put_off
from preflop.errors import BadNumber
from preflop.tape.events import Call, Mark, Phase, Ref, Role, Signature, Storage, Tape
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of, unborn
from preflop.tape.stack import Refused

MOST_CALLS = 10_000_000
"""Calls of one tape, about 3 GB in memory."""

# How AccumulateGrad stores the first gradient: takes it over, or copies it where its strides differ.
STORES = ("aten.detach", "aten.clone", "aten.new_empty_strided")


def accumulate(tape: Tape, *, microbatches: int) -> Tape:
    """The tape of a step of so many microbatches, each of the recorded size.

    Raises:
        BadNumber: `microbatches` is less than 1. Refused: the tape has several microbatches already,
            or keeps something from one microbatch to the next.
    """
    if microbatches < 1:
        raise BadNumber(f"microbatches is {microbatches}; it must be a whole number of at least 1.")
    if tape.subject is None or tape.subject.microbatches != 1:
        raise Refused("only a tape of one microbatch can be accumulated")
    if microbatches > 1 and (tape.subject.optimizer or "").endswith("-in-backward"):
        raise Refused("an optimizer in backward updates before the gradients of all microbatches are there")
    if microbatches == 1:
        return tape
    check_size(tape, microbatches)
    with collection_put_off():
        return _Accumulator(tape, microbatches).run()


def check_size(tape: Tape, microbatches: int) -> None:
    """Refuse what no machine has the memory to write down: a tape holds each call of each microbatch.

    Raises:
        BadNumber: it says how many microbatches can be priced.
    """
    most = max(MOST_CALLS // max(len(tape.calls), 1), 1)
    if microbatches > most:
        raise BadNumber(
            f"microbatches is {microbatches:,}, and a step of this model can be priced with {most:,} at most.\n"
            "  From the second on each adds the same FLOPs, bytes and time and leaves the peak as it is: "
            "price fewer and multiply."
        )


@dataclass
class _Accumulator:
    tape: Tape
    count: int
    tick: int = 0
    calls: list[Call] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    ids: dict[int, int] = field(default_factory=dict)
    """Of the microbatch being played, after the first: recorded storage -> new one, for what is born in it."""
    gradients: dict[int, int] = field(default_factory=dict)
    """Of the microbatch being played: call that stores a parameter's gradient -> its storage."""

    def run(self) -> Tape:
        self.signatures = list(self.tape.signatures)
        self.storages = [unborn(storage) for storage in self.tape.storages]
        self.born: list[Storage] = []
        self.divided: dict[int, int] = {}
        self.added: dict[Any, int] = {}
        events = events_of(self.tape)
        position = 0
        for begin, end in self._microbatches(events):
            self.gradients = {}
            for event in events[position:begin]:
                self._play(*event, 0)
            inside = events[begin:end]
            self.inside = {index for kind, index in inside if kind == BIRTH}
            self.dead = {index for kind, index in inside if kind == DEATH}
            self.gradients = self._gradients(inside)
            once = self._made_once(inside)
            for microbatch in range(self.count):
                self.ids = {}
                for event in inside:
                    if not (microbatch and self._belongs(event, once)):
                        self._play(*event, microbatch)
            position = end
            self.ids = {}
        self.gradients = {}
        for event in events[position:]:
            self._play(*event, 0)
        subject = self.tape.subject
        assert subject is not None
        return dataclasses.replace(
            self.tape,
            subject=dataclasses.replace(subject, microbatches=self.count),
            signatures=self.signatures,
            calls=self.calls,
            storages=self.storages,
            marks=self.marks,
        )

    def _microbatches(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """For each step, the positions between its beginning and the end of its backward."""
        spans, begin = [], 0
        for position, (kind, index) in enumerate(events):
            if kind == MARK and self.tape.marks[index].name == "step":
                begin = position + 1
            elif kind == MARK and self.tape.marks[index].name == "backward_end":
                spans.append((begin, position + 1))
        return spans

    def _gradients(self, inside: list[tuple[int, int]]) -> dict[int, int]:
        """Call that stores a parameter's gradient -> the gradient's storage."""
        found: dict[int, int] = {}
        for kind, index in inside:
            if kind != CALL:
                continue
            call = self.tape.calls[index]
            if call.phase is not Phase.BACKWARD or self.tape.signatures[call.signature].op not in STORES:
                continue
            stored = call.storages[-1]
            if (
                self.tape.storages[stored].role is Role.GRADIENT
                and stored not in self.dead
                and stored not in found.values()
            ):
                found[index] = stored
        return found

    def _made_once(self, inside: list[tuple[int, int]]) -> set[int]:
        """Calls that make what outlives the microbatch (the loss scale, a table made on first use):
        the microbatches after the first find it there.

        Raises:
            Refused: the steady step makes such a thing anew, so it is no cache.
        """
        once: set[int] = set()
        for storage in self.inside - self.dead - set(self.gradients.values()):
            kept = self.tape.storages[storage]
            call = self.tape.calls[kept.call] if kept.call >= 0 else None
            if call is None or call.step == self.tape.steps - 1:
                raise Refused(f"a tensor of {kept.bytes} bytes outlives its microbatch")
            once.add(kept.call)
        return once

    def _belongs(self, event: tuple[int, int], once: set[int]) -> bool:
        """Whether the event is one of the calls `once`, or a birth by one."""
        kind, index = event
        if kind == CALL:
            return index in once
        return kind == BIRTH and self.tape.storages[index].call in once

    # -- events ------------------------------------------------------------------------------------

    def _play(self, kind: int, index: int, microbatch: int) -> None:
        self.tick += 1
        if kind == CALL:
            self._play_call(index, microbatch)
        elif kind == MARK:
            self._play_mark(index, microbatch)
        elif kind == BIRTH:
            storage = self.storages[self._birth(index, microbatch)]
            storage.born = self.tick
            self.born.append(storage)
        else:
            self.storages[self.ids.get(index, index)].died = self.tick

    def _play_mark(self, index: int, microbatch: int) -> None:
        mark = self.tape.marks[index]
        if mark.name in ("optimizer_end", "step_end"):
            microbatch = self.count - 1
        self.marks.append(dataclasses.replace(mark, tick=self.tick, microbatch=microbatch))

    def _birth(self, index: int, microbatch: int) -> int:
        if microbatch == 0:
            return index
        storage = unborn(self.tape.storages[index])
        if storage.role is Role.GRADIENT and index not in self.dead:
            storage.role, storage.name = Role.TEMPORARY, ""
        self.ids[index] = len(self.storages)
        self.storages.append(storage)
        return self.ids[index]

    def _play_call(self, index: int, microbatch: int) -> None:
        call = self.tape.calls[index]
        number = self.count - 1 if call.phase is Phase.OPTIMIZER else microbatch
        signature = self._divided(call)
        new = self.ids.get
        storages = tuple([new(storage, storage) for storage in call.storages]) if microbatch else call.storages
        if microbatch and index in self.gradients:
            signature, storages = self._added(index)
        # Not dataclasses.replace, which takes six times as long: there may be a million of them.
        self.calls.append(
            Call(signature, storages, self.tick, call.phase, call.step, number, call.module, call.source)
        )
        for storage in self.born:
            storage.call = len(self.calls) - 1
        self.born.clear()
        if microbatch and index in self.gradients:
            gradient = self.ids.get(self.gradients[index], self.gradients[index])
            if self.storages[gradient].died is None:
                self.tick += 1
                self.storages[gradient].died = self.tick

    def _divided(self, call: Call) -> int:
        """The loss is divided by the number of microbatches."""
        signature = self.tape.signatures[call.signature]
        if signature.op != "aten.div" or signature.args[1:] != (1,):
            return call.signature
        if call.signature not in self.divided:
            self.divided[call.signature] = len(self.signatures)
            self.signatures.append(
                dataclasses.replace(signature, args=(*signature.args[:1], self.count))
            )
        return self.divided[call.signature]

    def _added(self, index: int) -> tuple[int, tuple[int, ...]]:
        """`grad += new`, in place."""
        call = self.tape.calls[index]
        old = self.tape.signatures[call.signature]
        grad, new = old.outputs[0], old.inputs[0]
        key = (grad, new)
        if key not in self.added:
            self.added[key] = len(self.signatures)
            self.signatures.append(
                Signature(
                    "aten.add_", "Tensor", (Ref(0), Ref(1)), (), (grad, new), (grad,), (0,), (0,)
                )
            )
        kept = self.gradients[index]
        return self.added[key], (kept, self.ids.get(call.storages[0], call.storages[0]), kept)
