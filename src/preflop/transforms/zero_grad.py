"""Where a loop lets its gradients go: after the update, before the next forward, before its backward.

The tape's loop frees them after the update. A loop that calls `zero_grad()` later holds them through
the next forward; which calls run does not change, only when the gradients die.
"""

from __future__ import annotations

from preflop.errors import PreflopError, unknown_name
from preflop.tape.events import Role, Tape
from preflop.tape.replay import DEATH, MARK, events_of, retold

WHEN = {
    "after_step": None,
    "before_forward": "step",
    "before_backward": "forward_end",
}
"""Name -> the mark of the next step after which gradients are freed (None: as recorded)."""


def zero_grad(tape: Tape, *, when: str) -> Tape:
    """The tape of the same loop with `zero_grad(set_to_none=True)` in another place.

    Args:
        when: "after_step" (as recorded), "before_forward" (first thing in the next step), or
            "before_backward" (after the next forward).

    Raises:
        PreflopError: another word.
    """
    if when not in WHEN:
        raise unknown_name(PreflopError, "place for zero_grad", when, WHEN, ", ".join(WHEN))
    place = WHEN[when]
    return tape if place is None else _moved(tape, place)


def _moved(tape: Tape, place: str) -> Tape:
    """Gradients that die between an update and the end of its step die at `place` of the next step."""
    order: list[tuple[int, int]] = []
    held: list[int] = []
    updated = False
    for kind, index in events_of(tape):
        mark = tape.marks[index] if kind == MARK else None
        if mark is not None and mark.name in ("optimizer_end", "step_end"):
            updated = mark.name == "optimizer_end"
        if kind == DEATH and updated and tape.storages[index].role is Role.GRADIENT:
            held.append(index)
            continue
        order.append((kind, index))
        if mark is not None and mark.name == place and mark.microbatch == 0:
            order.extend((DEATH, storage) for storage in held)
            held = []
    moved = retold(tape, order)
    for index in held:
        moved.storages[index].died = None
    return moved
