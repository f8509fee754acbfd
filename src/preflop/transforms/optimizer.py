"""Another optimizer: the update of each step replaced, everything before and after it kept.

What forward and backward do does not depend on the optimizer, except that its states are alive
meanwhile. So the events between the end of backward and the end of the update are taken from a tape of
that optimizer alone (`record.optimizer_tape`), over the same parameters and gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from preflop.tape.events import Call, Mark, Phase, Role, Storage, Tape, TensorMeta
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of, unborn
from preflop.tape.stack import Refused


def gradient_metas(tape: Tape) -> dict[str, TensorMeta]:
    """How each parameter's gradient lies in memory, in the parameters' order."""
    last = tape.steps - 1
    found: dict[str, TensorMeta] = {}
    for call in tape.calls:
        if call.phase is not Phase.BACKWARD or call.step != last:
            continue
        signature = tape.signatures[call.signature]
        for storage, meta in zip(call.storages[len(signature.inputs) :], signature.outputs):
            entry = tape.storages[storage]
            if entry.role is Role.GRADIENT and entry.name:
                found[entry.name] = meta
    return {info.name: found[info.name] for info in tape.parameters if info.name in found}


def with_optimizer(tape: Tape, update: Tape, *, name: str | None) -> Tape:
    """The tape with its updates replaced by those of `update`.

    Args:
        tape: of an unscaled precision (unscaling belongs to the update).
        update: what `record_optimizer` recorded for this tape's parameters and gradients.
        name: the optimizer's, for the report.

    Raises:
        Refused: something made in the old update is used after it, or a step has other gradients than the
            update reads.
    """
    if tape.subject is None:
        raise Refused("only the tape of a training step has an optimizer")
    splice = Splice(tape, update)
    updates = splice.updates()
    inside = False
    for kind, index in events_of(tape):
        mark = tape.marks[index] if kind == MARK else None
        if mark is not None and mark.name == "optimizer_end":
            for events in updates[mark.step]:
                splice.play_update(events, mark.step)
            inside = False
        if not inside or (kind == DEATH and splice.keeps(index)):
            splice.play(kind, index)
        if mark is not None and mark.name == "backward_end" and splice.is_last(mark):
            inside = True
            splice.note_gradients()
    return splice.tape_of(name)


class Splice:
    """Writes a tape whose optimizer is that of another: the old one's storages are left out, and updates
    are played where the caller wants them."""

    def __init__(self, tape: Tape, update: Tape) -> None:
        self.tape, self.update = tape, update
        self.tick = 0
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.storages: list[Storage] = []
        self.born: list[Storage] = []
        self.old = {n: i for i, n in enumerate(self._kept_storages())}
        self.new: dict[int, int] = {}
        self.gradients: dict[str, int] = {}
        self.read = {one.name for one in update.storages if one.role is Role.GRADIENT}
        self.signatures = [*tape.signatures, *update.signatures]
        self.sources = list(tape.sources)

    def tape_of(self, name: str | None) -> Tape:
        """What was written, with the optimizer's name."""
        assert self.tape.subject is not None
        return dataclasses.replace(
            self.tape,
            subject=dataclasses.replace(self.tape.subject, optimizer=name),
            signatures=self.signatures,
            calls=self.calls,
            storages=self.storages,
            sources=self.sources,
            marks=self.marks,
            parameters=[
                dataclasses.replace(info, storage=self.old[info.storage]) for info in self.tape.parameters
            ],
            assumptions=list(dict.fromkeys((*self.tape.assumptions, *self.update.assumptions))),
        )

    def is_last(self, mark: Mark) -> bool:
        """Whether the mark is of the step's last microbatch."""
        assert self.tape.subject is not None
        return mark.microbatch == self.tape.subject.microbatches - 1

    # -- storages ----------------------------------------------------------------------------------

    def _removed(self, number: int) -> bool:
        """Whether the storage belongs to the old optimizer."""
        storage = self.tape.storages[number]
        if storage.role is Role.OPTIMIZER_STATE:
            return True
        if storage.call < 0:
            return False
        return self.tape.calls[storage.call].phase is Phase.OPTIMIZER

    def _kept_storages(self) -> Iterator[int]:
        for number, storage in enumerate(self.tape.storages):
            if not self._removed(number):
                self.storages.append(unborn(storage))
                yield number

    def keeps(self, number: int) -> bool:
        """Whether the old tape's storage is in the new one."""
        return number in self.old

    def note_gradients(self) -> None:
        """Take the gradients that are alive now for those that the next update reads."""
        self.gradients = {
            s.name: n
            for n, s in enumerate(self.storages)
            if s.role is Role.GRADIENT and s.name and s.born > 0 and s.died is None
        }
        if self.gradients.keys() != self.read:
            raise Refused("a step has other gradients than the update reads")

    # -- events ------------------------------------------------------------------------------------

    def play(self, kind: int, index: int) -> None:
        """Write one event of the old tape.

        Raises:
            Refused: a call uses something that the old optimizer made.
        """
        if kind in (BIRTH, DEATH) and index not in self.old:
            return
        self.tick += 1
        if kind == CALL:
            call = self.tape.calls[index]
            if any(storage not in self.old for storage in call.storages):
                raise Refused("something made in the update is used outside of it")
            self._call(call, call.signature, tuple(self.old[s] for s in call.storages), call.step)
        elif kind == MARK:
            self.marks.append(dataclasses.replace(self.tape.marks[index], tick=self.tick))
        elif kind == BIRTH:
            self._birth(self.storages[self.old[index]])
        else:
            self.storages[self.old[index]].died = self.tick

    def updates(self) -> dict[int, list[list[tuple[int, int]]]]:
        """Events of each step's update; of several where each parameter has its own, in their order."""
        found: dict[int, list[list[tuple[int, int]]]] = {step: [] for step in range(self.tape.steps)}
        inside = False
        for kind, index in events_of(self.update):
            if kind == MARK:
                mark = self.update.marks[index]
                inside = mark.name == "backward_end"
                if inside:
                    found[mark.step].append([])
                    step = mark.step
            elif inside:
                found[step][-1].append((kind, index))
        return found

    def play_update(self, events: list[tuple[int, int]], step: int) -> None:
        """Write the events of one update."""
        base = len(self.tape.signatures)
        for kind, index in events:
            self.tick += 1
            if kind == CALL:
                call = self.update.calls[index]
                storages = tuple(self._updated(storage) for storage in call.storages)
                self._call(call, base + call.signature, storages, step)
            elif kind == BIRTH:
                self._birth(self.storages[self._updated(index)])
            elif kind == DEATH:
                self.storages[self._updated(index)].died = self.tick

    def _updated(self, number: int) -> int:
        """The storage of the new tape for one of the update's."""
        storage = self.update.storages[number]
        if storage.role is Role.PARAMETER:
            by_name = {info.name: info.storage for info in self.tape.parameters}
            return self.old[by_name[storage.name]]
        if storage.role is Role.GRADIENT:
            return self.gradients[storage.name]
        if number not in self.new:
            self.new[number] = len(self.storages)
            self.storages.append(unborn(storage))
        return self.new[number]

    def _birth(self, storage: Storage) -> None:
        storage.born = self.tick
        self.born.append(storage)

    def _call(self, call: Call, signature: int, storages: tuple[int, ...], step: int) -> None:
        microbatch, source, module = call.microbatch, call.source, call.module
        if signature >= len(self.tape.signatures):
            assert self.tape.subject is not None
            microbatch = self.tape.subject.microbatches - 1
            source, module = self._source(self.update.sources[call.source]), 0
        for made in self.born:
            made.call = len(self.calls)
        self.born.clear()
        self.calls.append(
            dataclasses.replace(
                call, signature=signature, storages=storages, tick=self.tick, step=step,
                microbatch=microbatch, source=source, module=module,
            )
        )  # fmt: skip

    def _source(self, text: str) -> int:
        if text not in self.sources:
            self.sources.append(text)
        return self.sources.index(text)
