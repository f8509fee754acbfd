"""Updates of parameters that are alike: recorded once for each kind, and written for all.

An optimizer that loops over its parameters does to each of them what it did to the last one of that kind: of
equal shape, dtype and layout, with such a gradient. So while it is recorded it sees the gradients of a few
(`OneOfEach`): the first, the last, of each kind the first that lies between, and of the commonest kind the
last as well, which proves that equals are treated alike. The events of the others are then written (`for_all`).

The loop visits its parameters once or more (states are made first): each visit is a *sweep*, and within it each
parameter has a *segment* of events. What a loop's variables still hold at the end of a segment dies in the next
one; therefore the first parameter and the last stand for themselves alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from preflop.optimizers import OptimizerSpec
from preflop.record.optimizers import Named
from preflop.subject import Subject
from preflop.tape.events import Call, Mark, Role, Storage, Tape
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of, unborn
from preflop.tape.stack import Refused


@dataclass(frozen=True, slots=True)
class Picked:
    """The parameters that are updated, in their order, and by which recorded one each is known."""

    stands_for: Mapping[str, str]
    """Parameter -> the one whose segments it has; the first and the last have their own."""
    proof: tuple[str, str] | None
    """Two of one kind that are both recorded."""

    @property
    def recorded(self) -> list[str]:
        """Those that the optimizer sees."""
        seen = {*self.stands_for.values(), *(self.proof or ())}
        return [name for name in self.stands_for if name in seen]


def pick(kinds: Mapping[str, Hashable]) -> Picked:
    """Which of the parameters are to be recorded.

    >>> picked = pick({"a": 1, "b": 2, "c": 2, "d": 2, "e": 2, "f": 1})
    >>> picked.recorded, picked.proof
    (['a', 'b', 'e', 'f'], ('b', 'e'))
    """
    names = list(kinds)
    between = names[1:-1]
    first: dict[Hashable, str] = {}
    for name in between:
        first.setdefault(kinds[name], name)
    proof = None
    if between:
        commonest = Counter(kinds[name] for name in between).most_common(1)[0][0]
        proof = first[commonest], next(name for name in reversed(between) if kinds[name] == commonest)
    own = {name: name for name in (*names[:1], *names[-1:])}
    return Picked({name: own.get(name) or first[kinds[name]] for name in names}, proof)


class OneOfEach(torch.optim.Optimizer):
    """Steps a looping optimizer over a few of its parameters; the others' gradients are out of its sight."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Sequence[Named]) -> None:
        super().__init__([one.parameter for one in named if one.parameter.requires_grad], {})
        self._inner = optimizer
        self._named = named
        self.state = optimizer.state
        self.picked: Picked | None = None
        """Known with the first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of those that stand for all.

        Raises:
            Refused: another step had gradients of other kinds.
        """
        del closure
        having = {one.name: one.parameter for one in self._named if one.parameter.grad is not None}
        picked = pick({name: _kind(parameter) for name, parameter in having.items()})
        if self.picked is not None and picked != self.picked:
            raise Refused("a step has gradients of other kinds than the one before")
        self.picked = picked
        seen = set(picked.recorded)
        hidden = {parameter: parameter.grad for name, parameter in having.items() if name not in seen}
        for parameter in hidden:
            parameter.grad = None
        try:
            self._inner.step()
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient


def seen_in_part(
    subject: Subject, optimizer: torch.optim.Optimizer | None, named: Sequence[Named]
) -> torch.optim.Optimizer | None:
    """The optimizer, shown one parameter of each kind where it is a known one that loops over them.

    Muon's matrices and other parameters take turns, Adafactor's variables outlive the next parameter's update, 8-bit
    states share their tables, and a scaler looks at all gradients at once: those see all.
    """
    spec = subject.optimizer
    if optimizer is None or not isinstance(spec, OptimizerSpec) or subject.precision.scaled or optimizer.state:
        return optimizer
    if spec.in_backward or spec.matrices_only or spec.factored or spec.quantised:
        return optimizer
    in_lists = optimizer.defaults.get("foreach") or optimizer.defaults.get("fused")
    return optimizer if in_lists else OneOfEach(optimizer, named)


def _kind(parameter: nn.Parameter) -> Hashable:
    """What an update may depend on."""
    assert parameter.grad is not None
    return tuple(
        (tuple(it.shape), it.stride(), it.dtype, it.storage_offset(), it.untyped_storage().nbytes())
        for it in (parameter, parameter.grad)
    )


def for_all(tape: Tape, picked: Picked | None) -> Tape:
    """The tape with the updates of every parameter.

    Args:
        tape: of the updates of `picked.recorded`.

    Raises:
        Refused: the updates do not follow from those that were recorded; record them all.
    """
    if picked is None or len(picked.recorded) == len(picked.stands_for):
        return tape
    return _Writer(tape, picked).run()


Local = tuple[Any, ...]
"""What a storage is to its parameter: ("parameter",), ("gradient", nth), ("state", name, nth), ("made", ...)."""


@dataclass(slots=True)
class _Segment:
    """Events of one parameter in one sweep."""

    name: str
    events: list[tuple[int, int]] = field(default_factory=list)
    left: list[Local] = field(default_factory=list)
    """What was made in it and dies in the next one."""


class _Read:
    """The updates of a tape, cut into sweeps and segments."""

    def __init__(self, tape: Tape, picked: Picked) -> None:
        self.tape = tape
        self.order = {name: place for place, name in enumerate(picked.recorded)}
        self.owner: dict[int, str] = {}
        self.local: dict[int, Local] = {}
        self.storage: dict[str, dict[Local, int]] = defaultdict(dict)
        """Parameter -> what each of its storages is to it -> that storage."""
        for number, entry in enumerate(tape.storages):
            self._own_by_name(number, entry, picked)
        self.spans: dict[int, int] = {}
        """Position of an update's first event among all -> of the first after it."""
        self.events = events_of(tape)
        self.updates = self._updates()
        for sweeps in self.updates.values():
            for sweep in sweeps:
                self._find_left(sweep)

    def _own_by_name(self, number: int, entry: Storage, picked: Picked) -> None:
        if entry.role is Role.PARAMETER and entry.name in picked.stands_for:
            self._own(number, entry.name, ("parameter",))
        elif entry.role is Role.GRADIENT and entry.name in picked.stands_for:
            self._own(number, entry.name, ("gradient",))
        elif entry.role is Role.OPTIMIZER_STATE:
            name = entry.name
            while name and name not in picked.stands_for:
                name = name.rpartition(".")[0]
            if name:
                self._own(number, name, ("state", entry.name[len(name) :]))

    def _own(self, number: int, name: str, local: Local) -> None:
        nth = sum(known[:-1] == local for known in self.storage[name])
        self.owner[number] = name
        self.local[number] = mine = (*local, nth)
        self.storage[name][mine] = number

    def _updates(self) -> dict[int, list[list[_Segment]]]:
        """Position of each update's first event among all -> its sweeps."""
        found: dict[int, list[list[_Segment]]] = {}
        events, begin = self.events, None
        for position, (kind, index) in enumerate(events):
            name = self.tape.marks[index].name if kind == MARK else ""
            if name == "backward_end":
                begin = position + 1
            elif name == "optimizer_end" and begin is not None:
                found[begin] = self._sweeps(events[begin:position], step=len(found))
                self.spans[begin] = position
        return found

    def _sweeps(self, events: list[tuple[int, int]], step: int) -> list[list[_Segment]]:
        sweeps: list[list[_Segment]] = []
        now: _Segment | None = None
        owners = self._owners([index for kind, index in events if kind == CALL])
        for kind, index in events:
            name = None if kind == DEATH else owners[index if kind == CALL else self._maker(index)]
            if name is not None and (now is None or name != now.name):
                if now is None or self.order[name] < self.order[now.name]:
                    sweeps.append([])
                now = _Segment(name)
                sweeps[-1].append(now)
            if now is None:
                raise Refused("something is freed before the first update")
            if kind == BIRTH and index not in self.owner:
                self._own(index, now.name, ("made", step, len(sweeps)))
            now.events.append((kind, index))
        for sweep in sweeps:
            if [segment.name for segment in sweep] != list(self.order):
                raise Refused("the optimizer does not visit its parameters one after the other")
        return sweeps

    def _maker(self, number: int) -> int:
        if self.tape.storages[number].call < 0:
            raise Refused("an update has memory that no call made")
        return self.tape.storages[number].call

    def _owners(self, calls: list[int]) -> dict[int, str]:
        """The parameter of each call: of what it uses; a call that uses nothing is made for the next one."""
        found: dict[int, str] = {}
        made: dict[int, str] = {}
        waiting: list[int] = []
        for index in calls:
            used = self.tape.calls[index].storages
            owners = {owner for one in used if (owner := self.owner.get(one) or made.get(one)) is not None}
            if len(owners) > 1:
                raise Refused("a call of an update belongs to several parameters")
            waiting.append(index)
            if owners:
                name = owners.pop()
                for one in waiting:
                    found[one] = name
                    made |= {s: name for s in self.tape.calls[one].storages if self.tape.storages[s].call == one}
                waiting = []
        if waiting:
            raise Refused("a call of an update belongs to no parameter")
        return found

    def _find_left(self, sweep: list[_Segment]) -> None:
        """What dies in the segment of the next parameter: as much of each."""
        if self._foreign(sweep[0]):
            raise Refused("an update frees what is not its own")
        for one, following in zip(sweep, sweep[1:]):
            dying = self._foreign(following)
            if any(self.owner.get(index) != one.name for index in dying):
                raise Refused("an update frees what is not its own")
            one.left = [self.local[index] for index in dying]
        if len({len(segment.left) for segment in sweep[:-1]}) > 1:
            raise Refused("updates leave different variables behind")

    def _foreign(self, segment: _Segment) -> list[int]:
        """What is freed in a segment and is not its parameter's."""
        return [index for kind, index in segment.events if kind == DEATH and self.owner.get(index) != segment.name]


class _Writer:
    """Writes the tape anew, with every parameter's segments."""

    def __init__(self, tape: Tape, picked: Picked) -> None:
        self.tape = tape
        self.picked = picked
        self.read = _Read(tape, picked)
        self.tick = 0
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.storages = [unborn(storage) for storage in tape.storages]
        self.born: list[Storage] = []
        self.twins: dict[str, list[str]] = defaultdict(list)
        """Recorded parameter -> those that were not, for which it stands."""
        for name, source in picked.stands_for.items():
            if name not in self.read.order:
                self.twins[source].append(name)
        if picked.proof is not None:
            self._prove(*picked.proof)

    def run(self) -> Tape:
        position, events = 0, self.read.events
        while position < len(events):
            sweeps = self.read.updates.get(position)
            if sweeps is not None:
                for sweep in sweeps:
                    self._sweep(sweep)
                position = self.read.spans[position]
            self._outside(*events[position])
            position += 1
        return dataclasses.replace(self.tape, calls=self.calls, storages=self.storages, marks=self.marks)

    def _prove(self, one: str, other: str) -> None:
        """Both were recorded: their segments must be equal event by event."""
        for sweeps in self.read.updates.values():
            for sweep in sweeps:
                alike = [
                    [self._told(event, segment.name) for event in segment.events]
                    for segment in sweep
                    if segment.name in (one, other)
                ]
                if alike[0] != alike[-1]:
                    raise Refused("the optimizer treats equal parameters differently")

    def _told(self, event: tuple[int, int], name: str) -> Hashable:
        kind, index = event
        if kind != CALL:
            own = self.read.owner.get(index) == name
            return kind, self._meant(index, name), self.tape.storages[index].bytes if own else None
        call = self.tape.calls[index]
        meant = tuple(self._meant(storage, name) for storage in call.storages)
        return kind, call.signature, call.phase, call.module, call.source, meant

    def _meant(self, storage: int, name: str) -> Hashable:
        """What a storage is to a parameter."""
        owner = self.read.owner.get(storage)
        if owner == name:
            return self.read.local[storage]
        return storage if owner is None else ("the one before",)

    # -- events ------------------------------------------------------------------------------------

    def _outside(self, kind: int, index: int) -> None:
        """An event that is of no update; what is freed then of an update's is freed of all."""
        if kind == CALL:
            self._call(index, self.tape.calls[index].storages)
        elif kind == MARK:
            self.tick += 1
            self.marks.append(dataclasses.replace(self.tape.marks[index], tick=self.tick))
        elif kind == BIRTH:
            self._birth(index, index)
        else:
            self._death(index)
            local = self.read.local.get(index, ("",))
            if local[0] in ("made", "state"):
                for twin in self.twins[self.read.owner[index]]:
                    self._death(self.read.storage[twin][local])

    def _sweep(self, sweep: list[_Segment]) -> None:
        by_name = {segment.name: segment for segment in sweep}
        before: list[int] = []
        for name, source in self.picked.stands_for.items():
            segment = by_name[source]
            self._segment(segment, name, before)
            own = self.read.storage[name]
            before = [own[local] for local in segment.left]

    def _segment(self, segment: _Segment, name: str, before: list[int]) -> None:
        left = iter(before)
        for kind, index in segment.events:
            if kind == DEATH and self.read.owner.get(index) != segment.name:
                self._death(next(left))
            elif kind == DEATH:
                self._death(self._mine(index, name))
            elif kind == BIRTH:
                self._birth(self._mine(index, name), index)
            else:
                self._call(index, tuple(self._mine(storage, name) for storage in self.tape.calls[index].storages))

    def _mine(self, storage: int, name: str) -> int:
        """The parameter's own storage for one of the recorded parameter."""
        owner = self.read.owner.get(storage)
        if owner is None or owner == name:
            return storage
        local, own = self.read.local[storage], self.read.storage[name]
        if local not in own:
            if local[0] in ("parameter", "gradient"):
                raise Refused("a parameter has no such gradient")
            like = unborn(self.tape.storages[storage])
            own[local] = len(self.storages)
            self.storages.append(
                dataclasses.replace(like, name=name + like.name[len(owner) :] if like.name else "")
            )
        return own[local]

    def _birth(self, number: int, recorded: int) -> None:
        self.tick += 1
        self.storages[number].born = self.tick
        if self.tape.storages[recorded].call >= 0:
            self.born.append(self.storages[number])

    def _death(self, number: int) -> None:
        self.tick += 1
        self.storages[number].died = self.tick

    def _call(self, index: int, storages: tuple[int, ...]) -> None:
        call = self.tape.calls[index]
        self.tick += 1
        for made in self.born:
            made.call = len(self.calls)
        self.born.clear()
        self.calls.append(
            Call(
                call.signature, storages, self.tick, call.phase, call.step, call.microbatch, call.module, call.source
            )
        )
