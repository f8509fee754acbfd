"""How much memory a recorded call needs beyond what was there before it."""

from __future__ import annotations

from preflop.tape.events import Phase, Role, Storage, Tape


def new_storages(tape: Tape) -> list[Storage]:
    """Storages that the recorded call made."""
    return [storage for storage in tape.storages if storage.born > 0]


def new_peak(tape: Tape, phases: tuple[Phase, ...] | None = None) -> int:
    """Most bytes alive at once among those that the call made; only while calls of `phases` run."""
    return max((bytes_ for _, bytes_ in curve(tape, phases)), default=0)


def curve(tape: Tape, phases: tuple[Phase, ...] | None = None) -> list[tuple[int, int]]:
    """(tick, new bytes alive) after each birth and death."""
    changes: dict[int, int] = {}
    for storage in new_storages(tape):
        changes[storage.born] = changes.get(storage.born, 0) + storage.bytes
        if storage.died is not None:
            changes[storage.died] = changes.get(storage.died, 0) - storage.bytes
    points, alive = [], 0
    for tick in sorted(changes):
        alive += changes[tick]
        points.append((tick, alive))
    if phases is None:
        return points
    ticks = [call.tick for call in tape.calls if call.phase in phases]
    return [point for point in points if ticks and ticks[0] <= point[0] <= ticks[-1]]


def left_alive(tape: Tape) -> int:
    """Bytes that the call made and that its result still holds when it returns."""
    end = next(mark.tick for mark in tape.marks if mark.name == "step_end")
    return sum(s.bytes for s in new_storages(tape) if s.born <= end and (s.died is None or s.died > end))


def parameters(tape: Tape) -> tuple[int, int]:
    """(elements, bytes) of the distinct parameters."""
    held = {info.storage for info in tape.parameters}
    elements = 0
    for info in tape.parameters:
        count = 1
        for size in info.shape:
            count *= size
        elements += count
    return elements, sum(tape.storages[number].bytes for number in held)


def of_role(tape: Tape, role: Role) -> int:
    """Bytes of all storages of one role."""
    return sum(storage.bytes for storage in tape.storages if storage.role is role)
