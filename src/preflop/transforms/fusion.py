"""Fusion: chains of element-wise operators as one kernel, as torch.compile would make of them.

An assumption, and the weakest of the transforms: what the compiler really fuses depends on its version
and on the graph. Fused here is only what is safe to claim: element-wise calls that follow each other in
one phase, work on equally many elements, and pass what they make to each other. What one makes and only
the others read is never written to memory. Reductions, casts into matmuls and what backward keeps are
left as they are. FLOPs stay equal, bytes moved never grow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from preflop.ops.fused import FUSABLE, FUSED
from preflop.ops.moved import is_view
from preflop.ops.pricing import work
from preflop.tape.events import Call, Mark, Signature, Tape, TensorMeta
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of

ASSUMPTION = (
    "fused: chains of element-wise operators are taken as one kernel each, as torch.compile may join them"
)


def fuse(tape: Tape) -> Tape:
    """The tape with element-wise chains joined; says so in its assumptions."""
    return _Fusion(tape).run()


@dataclass
class Group:
    """Calls that become one kernel."""

    calls: list[int]
    elements: int
    made: set[int]
    """Storages that its calls have made."""


@dataclass
class _Fusion:
    tape: Tape
    tick: int = 0
    calls: list[Call] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    known: dict[Signature, int] = field(default_factory=dict)
    born: list[int] = field(default_factory=list)

    def run(self) -> Tape:
        groups = [group for group in self._groups() if len(group.calls) > 1]
        self.member = {call: group for group in groups for call in group.calls}
        self.storages = [dataclasses.replace(storage) for storage in self.tape.storages]
        self.signatures = list(self.tape.signatures)
        self.inside = self._intermediates(groups)
        self.held: list[int] = []
        for kind, index in events_of(self.tape):
            self._play(kind, index)
        kept = [n for n in range(len(self.storages)) if n not in self.inside]
        number = {old: new for new, old in enumerate(kept)}
        calls = [
            dataclasses.replace(call, storages=tuple(number[s] for s in call.storages))
            for call in self.calls
        ]
        return dataclasses.replace(
            self.tape,
            signatures=self.signatures,
            calls=calls,
            storages=[self.storages[old] for old in kept],
            marks=self.marks,
            parameters=[
                dataclasses.replace(info, storage=number[info.storage]) for info in self.tape.parameters
            ],
            assumptions=[*self.tape.assumptions, ASSUMPTION],
        )

    # -- what joins --------------------------------------------------------------------------------

    def _groups(self) -> list[Group]:
        """Maximal runs of element-wise calls, each reading what the run has made."""
        groups: list[Group] = []
        current: Group | None = None
        previous: Call | None = None
        for index, call in enumerate(self.tape.calls):
            signature = self.tape.signatures[call.signature]
            if is_view(signature):
                if current is not None and not current.made.isdisjoint(call.storages):
                    current = None
                continue
            if signature.op not in FUSABLE or len(signature.outputs) != 1:
                current = None
                continue
            elements = signature.outputs[0].elements
            made = call.storages[-1]
            same_place = previous is not None and (call.phase, call.step, call.microbatch) == (
                previous.phase, previous.step, previous.microbatch,
            )  # fmt: skip
            previous = call
            if (
                current is not None
                and same_place
                and elements == current.elements
                and not current.made.isdisjoint(call.storages[: len(signature.inputs)])
            ):
                current.calls.append(index)
                current.made.add(made)
            else:
                current = Group([index], elements, {made})
                groups.append(current)
        return groups

    def _intermediates(self, groups: list[Group]) -> set[int]:
        """Storages that only their group touches: they are never written."""
        users: dict[int, set[int]] = {}
        for index, call in enumerate(self.tape.calls):
            for storage in call.storages:
                users.setdefault(storage, set()).add(index)
        found: set[int] = set()
        for group in groups:
            own = set(group.calls)
            result = self.tape.calls[group.calls[-1]].storages[-1]
            for storage in group.made - {result}:
                entry = self.tape.storages[storage]
                if entry.born > 0 and entry.died is not None and users[storage] <= own:
                    found.add(storage)
        return found

    # -- writing -----------------------------------------------------------------------------------

    def _play(self, kind: int, index: int) -> None:
        if kind == MARK:
            self.tick += 1
            self.marks.append(dataclasses.replace(self.tape.marks[index], tick=self.tick))
        elif kind == BIRTH:
            self._birth(index)
        elif kind == DEATH:
            self._death(index)
        elif kind == CALL:
            self._call(index)

    def _birth(self, index: int) -> None:
        group = self.member.get(self.tape.storages[index].call)
        if index in self.inside:
            return
        if group is not None:
            self.held.append(index)  # the kernel makes it, at its own time
            return
        self.tick += 1
        self.storages[index].born = self.tick
        self.born.append(index)

    def _death(self, index: int) -> None:
        if index in self.inside:
            return
        if self.open is not None:
            self.waiting.append(index)  # the kernel still reads it
            return
        self.tick += 1
        self.storages[index].died = self.tick

    open: Group | None = None
    waiting: list[int] = field(default_factory=list)

    def _call(self, index: int) -> None:
        group = self.member.get(index)
        call = self.tape.calls[index]
        if group is None:
            self._write(call, call.signature, call.storages)
            return
        self.open = group
        if index != group.calls[-1]:
            return
        for storage in self.held:
            self.tick += 1
            self.storages[storage].born = self.tick
            self.born.append(storage)
        self.held = []
        signature, storages = self._kernel(group)
        self._write(call, signature, storages)
        self.open = None
        for storage in self.waiting:
            self.tick += 1
            self.storages[storage].died = self.tick
        self.waiting = []

    def _write(self, call: Call, signature: int, storages: tuple[int, ...]) -> None:
        self.tick += 1
        for storage in self.born:
            self.storages[storage].call = len(self.calls)
        self.born.clear()
        self.calls.append(
            dataclasses.replace(call, signature=signature, storages=storages, tick=self.tick)
        )

    def _kernel(self, group: Group) -> tuple[int, tuple[int, ...]]:
        """Signature and storages of the joined kernel."""
        total = 0
        reads: dict[tuple[int, TensorMeta], None] = {}
        results: dict[int, TensorMeta] = {}
        written: dict[int, TensorMeta] = {}
        made: set[int] = set()
        for index in group.calls:
            call = self.tape.calls[index]
            signature = self.tape.signatures[call.signature]
            priced = work(signature)
            total += 0 if priced is None else priced.flops
            for storage, meta in zip(call.storages, signature.inputs):
                if storage not in made and storage not in self.inside:
                    reads.setdefault((storage, meta))
            result, meta = call.storages[-1], signature.outputs[0]
            if signature.aliases[0] is None:
                made.add(result)
                if result not in self.inside:
                    results[result] = meta
            elif result not in made and result not in self.inside:
                written[result] = meta
        inputs = list(reads)
        places = {storage: n for n, (storage, _) in reversed(list(enumerate(inputs)))}
        signature = Signature(
            FUSED, "", (total,), (),
            tuple(meta for _, meta in inputs), tuple(results.values()),
            tuple(None for _ in results), tuple(places[s] for s in written if s in places),
        )  # fmt: skip
        number = self.known.setdefault(signature, len(self.signatures))
        if number == len(self.signatures):
            self.signatures.append(signature)
        return number, (*(storage for storage, _ in inputs), *results)



