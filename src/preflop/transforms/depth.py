"""Depth: the tape of N equal blocks from the tape of a few.

A stack of equal blocks does the same thing block after block, so the events of a recorded step fall
into *sweeps* over the stack: forward visits the blocks in order, backward in reverse, the optimizer in
order, `zero_grad` in order. Within a sweep each block has a *segment* of events. With the blocks
numbered 0..3, the segments of 1 and 2 must be equal event by event (same calls, same births, same
deaths, storages named relative to the block, or the very same storage): then every further inner
block repeats them, and the tape of N blocks is 0, 1, then 2 repeated, then the last.

Nothing is assumed: where segments differ, or data flows further than to the next block, the fold is
refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from preflop.collection import collection_put_off
from preflop.tape.events import Call, Mark, ParameterInfo, Phase, Ref, Signature, Storage, Tape
from preflop.tape.lives import DROP
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of, unborn
from preflop.tape.stack import RECORDED, CutTape, Refused, Stack

_CHECKED, _TEMPLATE, _LAST = 1, 2, 3
_BACK = (Phase.BACKWARD, Phase.OPTIMIZER)

@dataclass(slots=True)
class Segment:
    """Consecutive events: of one instance in one sweep, or (instance -1) of none."""

    instance: int
    sweep: int
    events: list[tuple[int, int]] = field(default_factory=list)
    """(kind, index): storage for births and deaths, call for calls, mark for marks."""


def deepen(tape: Tape, stack: Stack) -> Tape:
    """The tape of `stack.instances` instances from one of `RECORDED`.

    Raises:
        Refused: the recorded blocks do not repeat.
    """
    with collection_put_off():
        return _Unfold(tape, stack).run()


def unfold(cut: CutTape) -> Tape:
    """The tape of the whole model from that of the cut one.

    Raises:
        Refused: the blocks do not repeat.
    """
    tape = cut.tape
    for stack in cut.stacks:
        tape = deepen(tape, stack)
    left = [f"recorded in full, not folded: {reason}" for reason in cut.reasons]
    return dataclasses.replace(tape, assumptions=[*tape.assumptions, *left])


class _Unfold:
    def __init__(self, tape: Tape, stack: Stack) -> None:
        self.tape = tape
        self.stack = stack
        self.extra = stack.instances - RECORDED
        self.place = [stack.locate(path) for path in tape.modules]
        self.owner: list[int] = [-1] * len(tape.storages)
        """Instance that each storage belongs to, -1 for none."""
        self.local: list[int] = [-1] * len(tape.storages)
        """Number of each storage within its instance; equal numbers correspond."""
        self.segments: list[Segment] = []
        ops = [signature.op for signature in tape.signatures]
        self.drop = ops.index(DROP) if DROP in ops else -1

    def run(self) -> Tape:
        if self.extra < 0:
            raise Refused("fewer blocks than are recorded")
        self._own_what_has_a_name()
        self._cut()
        self._name()
        self._check()
        return _Writer(self).write()

    # -- 1. cut into segments --------------------------------------------------------------------

    def _own_what_has_a_name(self) -> None:
        for number, storage in enumerate(self.tape.storages):
            if storage.name:
                place = self.stack.locate(storage.name)
                self.owner[number] = -1 if place is None else place[0]

    def _cut(self) -> None:
        events = events_of(self.tape)
        runs, bulk_until = self._runs_of_deaths(events), 0
        current = Segment(-1, -1)
        self.segments = [current]
        sweep, direction = -1, 0
        for position in range(len(events)):
            if position in runs:
                run = events[position : runs[position]]
                if {self.owner[self._freed(*event)] for event in run} >= set(range(RECORDED)):
                    # They have no order among them: block after block.
                    events[position : runs[position]] = sorted(run, key=lambda e: self.owner[self._freed(*e)])
                    bulk_until = runs[position]
                    current = Segment(-1, -1)
                    self.segments.append(current)
            kind, index = events[position]
            if kind == MARK:
                current = Segment(-1, -1)
                self.segments.append(current)
                current.events.append((kind, index))
                continue
            label = self._label(kind, index, position < bulk_until)
            if kind == BIRTH and self.tape.storages[index].call < 0:
                label = self._label_of_next_call(events, position)
            if label == _MANY:
                if current.instance != -1:
                    current = Segment(-1, -1)
                    self.segments.append(current)
            elif label is not None and label != current.instance:
                step = label - current.instance
                if current.instance >= 0 and step in (1, -1) and direction in (0, step):
                    direction = step
                else:
                    sweep, direction = sweep + 1, 0
                current = Segment(label, sweep)
                self.segments.append(current)
            current.events.append((kind, index))
            if kind == BIRTH and not self.tape.storages[index].name:
                self.owner[index] = self._birth_owner(index, current)

    def _label(self, kind: int, index: int, bulk: bool) -> int | None:
        freed = self._freed(kind, index)
        if freed >= 0:
            return self.owner[freed] if bulk and self.owner[freed] >= 0 else None
        if kind == BIRTH:
            call = self.tape.storages[index].call
            if call < 0:
                return None
            label = self.call_label(call)
            if label == _MANY:
                part = self._part_of_list(call, index)
                return part if part >= 0 else None
            return label
        return self.call_label(index)

    def _label_of_next_call(self, events: list[tuple[int, int]], position: int) -> int | None:
        """Of memory that no call made (a copy of the random state): a checkpointed block begins with it."""
        for kind, index in events[position:]:
            if kind == MARK or (kind == CALL and self.tape.calls[index].phase in _BACK):
                return None
            label = self.call_label(index) if kind == CALL else None
            if label is not None:
                return label
        return None

    def call_label(self, index: int) -> int | None:
        """Which instance of the stack a call belongs to; None where to none."""
        call = self.tape.calls[index]
        if call.phase is not Phase.OPTIMIZER:
            place = self.place[call.module]
            return None if place is None else place[0]
        inputs = len(self.tape.signatures[call.signature].inputs)
        owners = {self.owner[storage] for storage in call.storages[:inputs]} - {-1}
        if not owners:
            return None
        return owners.pop() if len(owners) == 1 else _MANY

    def _part_of_list(self, call_index: int, storage: int) -> int:
        """The instance of one result of a call over lists: that of its place in the list."""
        call = self.tape.calls[call_index]
        signature = self.tape.signatures[call.signature]
        outputs = call.storages[len(signature.inputs) :]
        position = outputs.index(storage)
        for lists in _lists(signature.args):
            if len(lists) == len(outputs):
                return self.owner[call.storages[lists[position]]]
        raise Refused(f"{signature.op} over lists gives results of another number")

    def _birth_owner(self, index: int, current: Segment) -> int:
        call = self.tape.storages[index].call
        if call >= 0 and self.call_label(call) == _MANY:
            return self._part_of_list(call, index)
        return current.instance

    def _freed(self, kind: int, index: int) -> int:
        """The storage that dies, or that all but autograd let go of, in an event; -1 where none does."""
        if kind == CALL and self.tape.calls[index].signature == self.drop:
            return self.tape.calls[index].storages[0]
        return index if kind == DEATH else -1

    def _runs_of_deaths(self, events: list[tuple[int, int]]) -> dict[int, int]:
        """Start -> end of the runs of deaths that may free something of every instance in order:
        `zero_grad`, lists of temporaries, autocast's cache."""
        runs: dict[int, int] = {}
        start = 0
        for position in range(len(events) + 1):
            if position < len(events) and self._freed(*events[position]) >= 0:
                continue
            if position - start >= RECORDED:
                runs[start] = position
            start = position + 1
        return runs

    # -- 2. name storages relative to their instance -----------------------------------------------

    def _name(self) -> None:
        tables: list[dict[Any, int]] = [{} for _ in range(RECORDED)]
        common: dict[Any, int] = {}
        counts: list[dict[Any, int]] = [{} for _ in range(RECORDED)]
        sweep_of = {
            index: segment.sweep
            for segment in self.segments
            for kind, index in segment.events
            if kind == BIRTH
        }
        # By birth, not by number: an optimizer's update may be written for parameters that were not recorded
        # (record/one_of_each.py), and then its memory is numbered after all else.
        by_birth = sorted(enumerate(self.tape.storages), key=lambda numbered: numbered[1].born)
        for number, storage in by_birth:
            instance = self.owner[number]
            if instance < 0:
                continue
            key: Any
            place = self.stack.locate(storage.name)
            if place is not None:
                key = ("named", place[1], place[2])
            else:
                key = (self._segment_sweep(number, sweep_of), *self._birth_key(storage))
            nth = counts[instance].get(key, 0)
            counts[instance][key] = nth + 1
            key = (*key, nth)
            self.local[number] = common.setdefault(key, len(common))
            tables[instance][self.local[number]] = number
        self.tables = tables

    def _segment_sweep(self, number: int, sweep_of: dict[int, int]) -> int:
        return sweep_of.get(number, -2)

    def _birth_key(self, storage: Storage) -> tuple[Any, ...]:
        if storage.call < 0:
            return ("outside", storage.bytes)
        call = self.tape.calls[storage.call]
        place = self.place[call.module]
        return (
            self.tape.signatures[call.signature].op,
            call.phase.value,
            None if place is None else place[1:],
            storage.bytes,
        )

    # -- 3. prove that 1 and 2 are alike ------------------------------------------------------------

    def _check(self) -> None:
        sweeps: dict[int, list[int]] = {}
        for segment in self.segments:
            if segment.instance >= 0:
                sweeps.setdefault(segment.sweep, []).append(segment.instance)
        for visited in sweeps.values():
            if visited not in ([0, 1, 2, 3], [3, 2, 1, 0]):
                raise Refused("the step does not visit the blocks one after the other")
        by_place = {(s.sweep, s.instance): s for s in self.segments if s.instance >= 0}
        self.absolute: set[tuple[int, int]] = set()
        for sweep in sweeps:
            self._compare(by_place[sweep, _CHECKED], by_place[sweep, _TEMPLATE])
        if set(self.tables[_CHECKED]) != set(self.tables[_TEMPLATE]):
            raise Refused("the blocks do not hold the same tensors")
        for segment in self.segments:
            self._check_reach(segment)

    def _compare(self, one: Segment, two: Segment) -> None:
        if len(one.events) != len(two.events):
            raise Refused("blocks make different numbers of calls")
        calls, storages = self.tape.calls, self.tape.storages
        for (kind, a), (other, b) in zip(one.events, two.events):
            if kind != other:
                raise Refused("blocks make calls in different order")
            if kind != CALL:
                if not self._corresponds(a, b) or storages[a].role != storages[b].role:
                    raise Refused("blocks make or free different tensors")
                continue
            first, second = calls[a], calls[b]
            alike = (
                first.signature == second.signature
                and first.phase == second.phase
                and first.source == second.source
                and self._rest(first) == self._rest(second)
                and all(self._corresponds(x, y) for x, y in zip(first.storages, second.storages))
            )
            if not alike:
                raise Refused(f"blocks differ in {self.tape.signatures[first.signature].op}")

    def _rest(self, call: Call) -> Any:
        place = self.place[call.module]
        return call.module if place is None else place[1:]

    def _corresponds(self, a: int, b: int) -> bool:
        """Whether storage `a` is to block 1 what `b` is to block 2."""
        if a == b:
            return True
        return (
            self.owner[a] >= 0
            and self.owner[b] == self.owner[a] + 1
            and self.local[a] == self.local[b]
            and self.owner[a] - _CHECKED in (-1, 0, 1)
        )

    def _check_reach(self, segment: Segment) -> None:
        """What is outside the stack, first or last may only look at its neighbours."""
        if segment.instance in (_CHECKED, _TEMPLATE):
            return
        near = {-1: {0, _LAST}, 0: {0, 1, _LAST}, _LAST: {0, _TEMPLATE, _LAST}}[segment.instance]
        for kind, index in segment.events:
            if kind == MARK:
                continue
            many = kind == CALL and self.call_label(index) == _MANY
            if many:
                continue
            used = self.tape.calls[index].storages if kind == CALL else (index,)
            for storage in used:
                if self.owner[storage] >= 0 and self.owner[storage] not in near:
                    raise Refused("data flows between blocks that are not neighbours")


_MANY = -9


def _lists(args: Any) -> Iterator[list[int]]:
    """The lists of tensors among arguments, as input indices."""
    for value in args:
        if isinstance(value, tuple) and value and all(isinstance(item, Ref) for item in value):
            yield [item.index for item in value]
        elif isinstance(value, tuple):
            yield from _lists(value)


@dataclass(slots=True)
class _Program:
    """The events of an inner segment, for any copy: base storage ids, whether they move with the copy, and
    ticks and calls counted from the segment's begin."""

    ticks: int
    calls: list[tuple[Call, int, int, int]] = field(default_factory=list)
    """(call, tick, where its storages begin in `ids`, and where they end)."""
    ids: list[tuple[int, bool]] = field(default_factory=list)
    """(id, whether it moves) of every storage that a call names, one call after the other."""
    births: list[tuple[int, bool, int, int]] = field(default_factory=list)
    """(id, whether it moves, tick, call)."""
    deaths: list[tuple[int, bool, int]] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)


class _Writer:
    """Writes the unfolded tape."""

    def __init__(self, plan: _Unfold) -> None:
        self._born: list[Storage] = []
        self.plan = plan
        self.tape = plan.tape
        self.extra = plan.extra
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self.marks: list[Mark] = []
        self.modules: list[str] = list(plan.tape.modules)
        self.module_types = list(plan.tape.module_types)
        self.module_ids = {path: number for number, path in enumerate(self.modules)}
        self.signatures = list(plan.tape.signatures)
        self.wide: dict[int, int] = {}
        self.tick = 0
        self.modules_of: dict[tuple[int, int], int] = {}

    def write(self) -> Tape:
        self._enter_storages()
        groups = _grouped(self.plan.segments)
        for group in groups:
            if group[0].instance < 0:
                self._play(group[0], -1)
                continue
            for segment in group:
                if segment.instance != _TEMPLATE:
                    self._play(segment, -1)
                    continue
                copies = range(self.extra + 1)
                forward = group[0].instance == 0
                for copy in copies if forward else reversed(copies):
                    self._play(segment, copy)
        return dataclasses.replace(
            self.tape,
            signatures=self.signatures,
            calls=self.calls,
            storages=self.storages,
            modules=self.modules,
            module_types=self.module_types,
            marks=self.marks,
            parameters=self._parameters(),
        )

    # -- storages ----------------------------------------------------------------------------------

    def _enter_storages(self) -> None:
        """Every storage of the new tape, unborn: the recorded ones, then the template's copies."""
        plan = self.plan
        for number, storage in enumerate(self.tape.storages):
            twin = unborn(storage)
            if twin.name and plan.owner[number] == _LAST:
                twin.name = self._renamed(twin.name, _LAST + self.extra)
            self.storages.append(twin)
        locals_ = sorted(plan.tables[_TEMPLATE])
        self.local_rank = {local: rank for rank, local in enumerate(locals_)}
        self.copy_base = len(self.storages)
        self.copy_count = len(locals_)
        originals = [unborn(self.tape.storages[plan.tables[_TEMPLATE][local]]) for local in locals_]
        places = [plan.stack.locate(one.name) if one.name else None for one in originals]
        path_of = plan.stack.path_of
        for instance in range(_TEMPLATE + 1, _TEMPLATE + 1 + self.extra):
            self.storages += [
                Storage(
                    one.bytes, one.dtype, one.shape, one.born, None, one.role,
                    one.name if place is None else path_of(instance, *place[1:]), -1, one.device,
                )
                for one, place in zip(originals, places)
            ]  # fmt: skip

    def _renamed(self, name: str, instance: int) -> str:
        place = self.plan.stack.locate(name)
        return name if place is None else self.plan.stack.path_of(instance, *place[1:])

    def _copy_id(self, local: int, copy: int) -> int:
        """The storage that is `local` in copy number `copy` of the template (0: the recorded one)."""
        if copy == 0:
            return self.plan.tables[_TEMPLATE][local]
        return self.copy_base + (copy - 1) * self.copy_count + self.local_rank[local]

    def resolve(self, storage: int, at: int, copy: int) -> int:
        """The new storage for one that a segment of instance `at` names.

        `copy` is the copy of the template that is being played, or -1.
        """
        plan = self.plan
        owner = plan.owner[storage]
        if owner < 0:
            return storage
        local = plan.local[storage]
        if copy < 0:
            if owner == _TEMPLATE and at == _LAST:
                return self._copy_id(local, self.extra)
            return storage
        offset = owner - _TEMPLATE
        if storage in self.fixed:
            return storage
        target = copy + offset
        if target < 0:
            return plan.tables[_CHECKED][local] if offset == -1 else storage
        if target > self.extra:
            return plan.tables[_LAST][local]
        return self._copy_id(local, target)

    # -- events ------------------------------------------------------------------------------------

    def _play(self, segment: Segment, copy: int) -> None:
        """Write a segment's events: as they were recorded (copy -1), or for a copy of the template."""
        if copy > 1 and copy < self.extra:
            self._play_inner(segment, copy)
            return
        self.fixed = self._fixed(segment) if copy >= 0 else frozenset()
        for kind, index in segment.events:
            self.tick += 1
            if kind == CALL:
                self._play_call(index, segment.instance, copy)
            elif kind == MARK:
                self.marks.append(dataclasses.replace(self.tape.marks[index], tick=self.tick))
            else:
                storage = self.storages[self.resolve(index, segment.instance, copy)]
                if kind == BIRTH:
                    storage.born = self.tick
                    self._born.append(storage)
                else:
                    storage.died = self.tick

    def _play_inner(self, segment: Segment, copy: int) -> None:
        """As `_play` for a copy whose neighbours are copies too: every storage is a constant plus the
        copy's offset, so the events are compiled once."""
        program = self._compiled(segment)
        shift = (copy - 1) * self.copy_count
        tick, first, storages = self.tick, len(self.calls), self.storages
        modules = {module: self._module(module, _TEMPLATE, copy) for module in program.modules}
        for storage in self._born:
            storage.call = first
        self._born.clear()
        ids = [where + shift if moves else where for where, moves in program.ids]
        self.calls += [
            Call(
                call.signature, tuple(ids[begin:end]), tick + after, call.phase, call.step, call.microbatch,
                modules[call.module], call.source,
            )
            for call, after, begin, end in program.calls
        ]  # fmt: skip
        for where, moves, after, call in program.births:
            storage = storages[where + shift if moves else where]
            storage.born, storage.call = tick + after, first + call
        for where, moves, after in program.deaths:
            storages[where + shift if moves else where].died = tick + after
        self.tick += program.ticks

    def _compiled(self, segment: Segment) -> _Program:
        cache: dict[int, _Program] = self.__dict__.setdefault("_programs", {})
        program = cache.get(id(segment))
        if program is None:
            self.fixed = self._fixed(segment)
            program = cache[id(segment)] = _Program(ticks=len(segment.events))
            for after, (kind, index) in enumerate(segment.events, start=1):
                self._compile(program, after, kind, index)
        return program

    def _compile(self, program: _Program, after: int, kind: int, index: int) -> None:
        if kind == CALL:
            call = self.tape.calls[index]
            begin = len(program.ids)
            program.ids += [self._base(storage) for storage in call.storages]
            program.calls.append((call, after, begin, len(program.ids)))
            program.modules.add(call.module)
        elif kind == BIRTH:
            # What is born is the result of the call that comes next.
            program.births.append((*self._base(index), after, len(program.calls)))
        else:
            program.deaths.append((*self._base(index), after))

    def _base(self, storage: int) -> tuple[int, bool]:
        owner = self.plan.owner[storage]
        if owner < 0 or storage in self.fixed:
            return storage, False
        rank = self.local_rank[self.plan.local[storage]]
        return self.copy_base + (owner - _TEMPLATE) * self.copy_count + rank, True

    def _fixed(self, segment: Segment) -> frozenset[int]:
        """Storages that the checked and the template segment both name: the same for every copy."""
        key = (segment.sweep, _CHECKED)
        cache: dict[tuple[int, int], frozenset[int]] = self.__dict__.setdefault("_fixed_cache", {})
        if key not in cache:
            other = next(s for s in self.plan.segments if (s.sweep, s.instance) == key)
            cache[key] = frozenset(self._named(segment) & self._named(other)) - {
                storage
                for pair in self._pairs(other, segment)
                for storage in pair
                if pair[0] != pair[1]
            }
        return cache[key]

    def _named(self, segment: Segment) -> set[int]:
        named: set[int] = set()
        for kind, index in segment.events:
            if kind == CALL:
                named.update(self.tape.calls[index].storages)
            elif kind != MARK:
                named.add(index)
        return named

    def _pairs(self, one: Segment, two: Segment) -> Iterator[tuple[int, int]]:
        for (kind, a), (_, b) in zip(one.events, two.events):
            if kind == CALL:
                yield from zip(self.tape.calls[a].storages, self.tape.calls[b].storages)
            elif kind != MARK:
                yield a, b

    def _play_call(self, index: int, at: int, copy: int) -> None:
        call = self.tape.calls[index]
        if self.plan.call_label(index) == _MANY:
            signature, storages = self._widened(call)
        else:
            signature = call.signature
            storages = tuple(self.resolve(storage, at, copy) for storage in call.storages)
        number = len(self.calls)
        self.calls.append(
            Call(
                signature, storages, self.tick, call.phase, call.step, call.microbatch,
                self._module(call.module, at, copy), call.source,
            )
        )
        for storage in self._born:
            storage.call = number
        self._born.clear()

    def _module(self, module: int, at: int, copy: int) -> int:
        place = self.plan.place[module]
        if place is None:
            return module
        instance = place[0]
        if copy > 0:
            instance += copy
        elif instance == _LAST:
            instance += self.extra
        elif at == _LAST and instance == _TEMPLATE:
            instance += self.extra
        if instance == place[0]:
            return module
        known = self.modules_of.get((module, instance))
        if known is not None:
            return known
        path = self.plan.stack.path_of(instance, *place[1:])
        number = self.module_ids.get(path)
        if number is None:
            number = self.module_ids[path] = len(self.modules)
            self.modules.append(path)
            self.module_types.append(self.module_types[module])
        self.modules_of[module, instance] = number
        return number

    # -- calls over lists (foreach, fused) -----------------------------------------------------------

    def _order(self, indices: list[int], call: Call) -> list[tuple[int, int]]:
        """(input index, copy) for each element of a list, the template's elements repeated."""
        order: list[tuple[int, int]] = []
        owners = [self.plan.owner[call.storages[index]] for index in indices]
        position = 0
        while position < len(indices):
            if owners[position] != _TEMPLATE:
                order.append((indices[position], -1))
                position += 1
                continue
            end = position
            while end < len(indices) and owners[end] == _TEMPLATE:
                end += 1
            for copy in range(self.extra + 1):
                order.extend((index, copy) for index in indices[position:end])
            position = end
        return order

    def _widened(self, call: Call) -> tuple[int, tuple[int, ...]]:
        """A call over lists of every instance's tensors, with the template's repeated."""
        old = self.tape.signatures[call.signature]
        inputs: list[tuple[int, int]] = []

        def walk(value: Any) -> Any:
            if isinstance(value, Ref):
                inputs.append((value.index, -1))
                return Ref(len(inputs) - 1)
            if isinstance(value, tuple) and value and all(isinstance(i, Ref) for i in value):
                wide = self._order([item.index for item in value], call)
                inputs.extend(wide)
                return tuple(Ref(len(inputs) - len(wide) + n) for n in range(len(wide)))
            if isinstance(value, tuple):
                return self._scalars(tuple(walk(item) for item in value), old, call)
            return value

        args = tuple(walk(value) for value in old.args)
        kwargs = tuple((name, walk(value)) for name, value in old.kwargs)
        outputs = self._wide_outputs(old, call)
        storages = [self._list_storage(call.storages[i], copy) for i, copy in inputs]
        storages += [
            self._list_storage(call.storages[len(old.inputs) + i], copy) for i, copy in outputs
        ]
        if call.signature not in self.wide:
            position = {pair: n for n, pair in reversed(list(enumerate(inputs)))}
            written = set(old.writes)
            aliases = []
            for i, copy in outputs:
                alias = old.aliases[i]
                aliases.append(None if alias is None else position.get((alias, copy)))
            self.wide[call.signature] = len(self.signatures)
            self.signatures.append(
                Signature(
                    old.op, old.overload, args, kwargs,
                    tuple(old.inputs[i] for i, _ in inputs),
                    tuple(old.outputs[i] for i, _ in outputs),
                    tuple(aliases),
                    tuple(n for n, (i, _) in enumerate(inputs) if i in written),
                    old.attended_pairs,
                )
            )
        return self.wide[call.signature], tuple(storages)

    def _scalars(self, values: tuple[Any, ...], old: Signature, call: Call) -> tuple[Any, ...]:
        """A list of numbers beside a list of tensors (foreach with a number per tensor) grows alike."""
        lengths = {len(indices): indices for indices in _lists(old.args)}
        indices = lengths.get(len(values))
        if indices is None or any(isinstance(value, (Ref, tuple)) for value in values):
            return values
        by_index = dict(zip(indices, values))
        return tuple(by_index[index] for index, _ in self._order(indices, call))

    def _wide_outputs(self, old: Signature, call: Call) -> list[tuple[int, int]]:
        if not old.outputs:
            return []
        for indices in _lists(old.args):
            if len(indices) == len(old.outputs):
                place = {index: n for n, index in enumerate(indices)}
                return [(place[index], copy) for index, copy in self._order(indices, call)]
        return [(n, -1) for n in range(len(old.outputs))]

    def _list_storage(self, storage: int, copy: int) -> int:
        if copy <= 0:
            return storage
        return self._copy_id(self.plan.local[storage], copy)

    # -- parameters ----------------------------------------------------------------------------------

    def _parameters(self) -> list[ParameterInfo]:
        """Every parameter in the model's order."""
        stack, plan = self.plan.stack, self.plan
        before: list[ParameterInfo] = []
        template: list[ParameterInfo] = []
        after: list[ParameterInfo] = []
        for info in self.tape.parameters:
            place = stack.locate(info.name)
            instance = -1 if place is None else place[0]
            renamed = dataclasses.replace(
                info,
                name=self._renamed(info.name, _LAST + self.extra) if instance == _LAST else info.name,
            )
            if instance == _TEMPLATE:
                template.append(renamed)
            elif template:
                after.append(renamed)
            else:
                before.append(renamed)
        copies = [
            dataclasses.replace(
                info,
                name=self._renamed(info.name, _TEMPLATE + copy),
                storage=self._copy_id(plan.local[info.storage], copy),
            )
            for copy in range(1, self.extra + 1)
            for info in template
        ]
        return before + template + copies + after


def _grouped(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Segments outside the stack one by one, those of one sweep together."""
    group: list[Segment] = []
    for segment in segments:
        if group and (segment.instance < 0 or segment.sweep != group[0].sweep):
            yield group
            group = []
        if segment.instance < 0:
            yield [segment]
        else:
            group.append(segment)
    if group:
        yield group

