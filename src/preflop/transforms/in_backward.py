"""Optimizer in backward: each parameter updated as soon as its gradient is complete, which is then freed.

The calls are those of the update at the end, one parameter at a time; they move to where the gradient is
stored, and no two gradients wait for the optimizer at once.
"""

from __future__ import annotations

from preflop.tape.events import Phase, Role, Tape
from preflop.tape.replay import CALL, DEATH, MARK, events_of
from preflop.tape.stack import Refused
from preflop.transforms.accumulation import STORES
from preflop.transforms.optimizer import Splice


def update_in_backward(tape: Tape, update: Tape, *, name: str) -> Tape:
    """The tape of the same step whose parameters are updated in backward.

    Args:
        tape: of one microbatch, with any optimizer at its end.
        update: what `record_optimizer` recorded of an optimizer in backward, over this tape's parameters
            and gradients.
        name: the optimizer's, for the report.

    Raises:
        Refused: a tape of several microbatches, whose gradients are complete only after the last; or of a
            step that uses gradients after backward in another way.
    """
    if tape.subject is None or tape.subject.microbatches != 1:
        raise Refused("gradients of several microbatches are not complete before the last one's backward")
    splice = Splice(tape, update)
    updates = {
        (step, _gradient_of(update, events)): events
        for step, each in splice.updates().items()
        for events in each
    }
    after = _stored_by(tape)
    inside = False
    freed: set[int] = set()
    for kind, index in events_of(tape):
        mark = tape.marks[index] if kind == MARK else None
        if mark is not None and mark.name == "optimizer_end":
            inside = False
        if kind == DEATH and index in freed:
            continue
        if not inside or (kind == DEATH and splice.keeps(index)):
            splice.play(kind, index)
        if kind == CALL and index in after:
            gradient, step = after[index], tape.calls[index].step
            splice.gradients = {tape.storages[gradient].name: splice.old[gradient]}
            splice.play_update(updates[step, tape.storages[gradient].name], step)
            splice.play(DEATH, gradient)
            freed.add(gradient)
        if mark is not None and mark.name == "backward_end":
            inside = True
    return splice.tape_of(name)


def _gradient_of(update: Tape, events: list[tuple[int, int]]) -> str:
    """Name of the parameter whose gradient the events read."""
    for kind, index in events:
        if kind == CALL:
            for storage in update.calls[index].storages:
                if update.storages[storage].role is Role.GRADIENT:
                    return update.storages[storage].name
    raise Refused("an update that reads no gradient")


def _stored_by(tape: Tape) -> dict[int, int]:
    """Call that stores a parameter's gradient -> the gradient's storage."""
    found: dict[int, int] = {}
    for index, call in enumerate(tape.calls):
        stored = tape.storages[call.storages[-1]] if call.storages else None
        if (
            stored is not None
            and call.phase is Phase.BACKWARD
            and tape.signatures[call.signature].op in STORES
            and stored.role is Role.GRADIENT
            and stored.name
        ):
            found[index] = call.storages[-1]
    return _first_of_each(found)


def _first_of_each(found: dict[int, int]) -> dict[int, int]:
    """Where several calls show one gradient, the last of them has stored it."""
    last = {gradient: index for index, gradient in found.items()}
    return {index: gradient for gradient, index in last.items()}
