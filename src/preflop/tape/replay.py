"""What happened on a tape, in order; and whether two tapes tell the same story."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator

from preflop.tape.events import Call, Role, Storage, Tape

BIRTH, CALL, DEATH, MARK = 0, 1, 2, 3


def events_of(tape: Tape) -> list[tuple[int, int]]:
    """Every event by tick: (BIRTH | CALL | DEATH | MARK, index of the storage, call or mark)."""
    ordered: list[tuple[int, int, int]] = []
    for number, storage in enumerate(tape.storages):
        if storage.born > 0:
            ordered.append((storage.born, BIRTH, number))
        if storage.died is not None:
            ordered.append((storage.died, DEATH, number))
    ordered.extend((call.tick, CALL, number) for number, call in enumerate(tape.calls))
    ordered.extend((mark.tick, MARK, number) for number, mark in enumerate(tape.marks))
    ordered.sort()
    return [(kind, index) for _, kind, index in ordered]


def retold(tape: Tape, events: Iterable[tuple[int, int]]) -> Tape:
    """The tape of these events, in this order, with consecutive ticks.

    Args:
        events: as of `events_of`: all births, deaths and marks of the tape, and the calls to be kept (each that
            makes a storage among them).
    """
    storages = [dataclasses.replace(storage) for storage in tape.storages]
    calls: list[Call] = []
    marks = list(tape.marks)
    places = {-1: -1}
    for tick, (kind, index) in enumerate(events, 1):
        if kind == CALL:
            places[index] = len(calls)
            calls.append(dataclasses.replace(tape.calls[index], tick=tick))
        elif kind == BIRTH:
            storages[index].born = tick
        elif kind == DEATH:
            storages[index].died = tick
        else:
            marks[index] = dataclasses.replace(marks[index], tick=tick)
    for storage in storages:
        storage.call = places[storage.call]
    return dataclasses.replace(tape, calls=calls, storages=storages, marks=marks)


def without_storages(tape: Tape, left_out: Collection[int]) -> Tape:
    """The tape without storages that no call of it uses."""
    kept = [number for number in range(len(tape.storages)) if number not in left_out]
    numbers = {number: place for place, number in enumerate(kept)}
    return dataclasses.replace(
        tape,
        storages=[tape.storages[number] for number in kept],
        calls=[
            dataclasses.replace(call, storages=tuple(numbers[storage] for storage in call.storages))
            for call in tape.calls
        ],
        parameters=[
            dataclasses.replace(info, storage=numbers[info.storage]) for info in tape.parameters
        ],
    )


def unborn(it: Storage, role: Role | None = None) -> Storage:
    """The storage as a transform begins to write it: neither born (unless it was there before) nor dead.

    Args:
        role: instead of its own.
    """
    return Storage(
        it.bytes, it.dtype, it.shape, min(it.born, 0), None, it.role if role is None else role, it.name, -1,
        it.device,
    )  # fmt: skip


def uncommitted(it: Storage) -> Storage:
    """As `unborn`, where the transform itself sees what is kept for backward: an activation is not one yet."""
    return unborn(it, Role.TEMPORARY if it.role is Role.ACTIVATION else None)


def story(tape: Tape, *, without: Collection[str] = ()) -> list[Hashable]:
    """The events without our own numbering: two tapes are the same step when their stories are equal.

    Storages are numbered by their first appearance; a signature is given by its content. Deaths with
    nothing between them have no order. At the end stands what was there throughout and in no event.

    Args:
        without: operators whose calls are left out.
    """
    return list(_runs_sorted(_named(tape, without)))


def _named(tape: Tape, without: Collection[str]) -> Iterator[tuple[Hashable, ...]]:
    numbers: dict[int, int] = {}

    def number(storage: int) -> int:
        return numbers.setdefault(storage, len(numbers))

    for kind, index in events_of(tape):
        if kind == CALL:
            call = tape.calls[index]
            if tape.signatures[call.signature].op in without:
                continue
            yield (
                CALL, tape.signatures[call.signature], tuple(number(s) for s in call.storages),
                call.phase, call.step, call.microbatch, tape.modules[call.module],
                tape.sources[call.source],
            )  # fmt: skip
        elif kind == MARK:
            mark = tape.marks[index]
            yield MARK, mark.name, mark.step, mark.microbatch
        else:
            storage = tape.storages[index]
            yield kind, number(index), storage.bytes, storage.role, storage.name, storage.dtype
    unused = (storage for index, storage in enumerate(tape.storages) if index not in numbers)
    yield from sorted((DEATH, -1, it.bytes, it.role, it.name, it.dtype) for it in unused)


def _runs_sorted(events: Iterator[tuple[Hashable, ...]]) -> Iterator[Hashable]:
    run: list[tuple[Hashable, ...]] = []
    for event in events:
        if event[0] == DEATH:
            run.append(event)
            continue
        yield from sorted(run, key=repr)
        run = []
        yield event
    yield from sorted(run, key=repr)
