"""Annotated tapes: besides what a step did, what held each of its tensors.

A plain tape says when memory died, not why it lived: Python may hold a tensor, or autograd for backward.
Recomputation takes away what autograd holds, so a tape that is to be transformed (`transforms.recompute`)
says more. It says so in *notes*: calls that torch never made, of operators `life.*`, in their places among
the others. So whatever acts on calls (depth, accumulation, sizes, files) carries them along; `plain` removes
them. Ledgers want plain tapes.

    life.enter (grad, block, bytes[, directly, wanting])
                              a module's forward begins; storages: the tensors it was given; source: the
                              line that called it. Whether gradients are wanted, whether it is a repeated
                              block, and the bytes of the CPU's random state, which checkpointing copies.
                              Where some tensors are not given by position: of each whether it is, and
                              whether one of the others wants a gradient
    life.exit                 it ends; storages: what it returns
    life.save                 autograd keeps the storage for backward; module: the innermost one running
    life.drop                 nothing but autograd holds the storage any more
    life.unpack               backward asks for the first tensor of a module's call
    life.let_go               backward lets go of what it was given of a saved tensor, earlier than ...
    life.release              ... autograd gives up what it kept
    life.escape               the same, but what backward was given lives on, until its `life.gone`

May import: tape.events, tape.replay.
"""

from __future__ import annotations

import dataclasses

from preflop.tape.events import Signature, Tape
from preflop.tape.replay import CALL, events_of, retold

PREFIX = "life."
ENTER, EXIT = "life.enter", "life.exit"
SAVE, DROP, UNPACK = "life.save", "life.drop", "life.unpack"
LET_GO, RELEASE = "life.let_go", "life.release"
ESCAPE, GONE = "life.escape", "life.gone"


def note(op: str, *args: int | tuple[bool, ...]) -> Signature:
    """The signature of a note."""
    return Signature(op, "", args, (), (), (), (), ())


def given_directly(entered: Signature, tensors: int) -> tuple[tuple[bool, ...], bool]:
    """Of the tensors that a module was given, by its `life.enter`: which were given by position, and whether
    one that was not wants a gradient.

    >>> given_directly(note(ENTER, True, True, 5056), 2)
    ((True, True), False)
    """
    if len(entered.args) < 5:
        return (True,) * tensors, False
    directly, wanting = entered.args[3:]
    return tuple(directly), bool(wanting)


def annotated(tape: Tape) -> bool:
    """Whether the tape says what held its tensors."""
    return any(signature.op.startswith(PREFIX) for signature in tape.signatures)


def plain(tape: Tape) -> Tape:
    """The tape without its notes; itself where it has none."""
    if not annotated(tape):
        return tape
    kept = [n for n, signature in enumerate(tape.signatures) if not signature.op.startswith(PREFIX)]
    numbers = {number: place for place, number in enumerate(kept)}
    told = retold(
        tape, (e for e in events_of(tape) if e[0] != CALL or tape.calls[e[1]].signature in numbers)
    )  # fmt: skip
    for call in told.calls:
        call.signature = numbers[call.signature]
    return dataclasses.replace(told, signatures=[tape.signatures[number] for number in kept])
