"""The tape of a subject, its stacks of equal blocks recorded once: where recording meets `deepen`.

May import: record [torch], transforms, tape, subject, errors.
"""

from __future__ import annotations

import dataclasses

from preflop.errors import PreflopError
from preflop.record.subject_tape import record_cut, record_subject
from preflop.subject import Subject
from preflop.tape.events import Tape
from preflop.tape.replay import story
from preflop.tape.stack import CutTape, Refused
from preflop.transforms.accumulation import accumulate, check_size
from preflop.transforms.depth import unfold

PERIODS = (1, 2)
"""Blocks per repetition that are tried: blocks that look alike may be treated alike in pairs only."""


def tape_of(subject: Subject) -> Tape:
    """The tape of two optimizer steps: folded where the blocks are proved to repeat, else in full.

    A stack that is left whole is named, with the reason, in the tape's assumptions.

    Raises:
        PreflopError: the subject cannot be built or run.
    """
    refused: Refused | None = None
    for period in PERIODS:
        try:
            cut = record_cut(subject, period)
        except PreflopError:
            # It may only be the cut model that does not run; if not, the next line raises the error.
            return record_subject(subject)
        try:
            return unfold(cut)
        except Refused as reason:
            refused = refused or reason
    tape = record_subject(subject)
    tape.assumptions.append(f"recorded in full, not folded: {refused}")
    return tape


PROVED = 2
"""Microbatches of the recording that a repetition is held to."""
FEW = 3
"""So many microbatches are recorded as they are: to prove a repetition, three are recorded anyway."""


def tape_of_many(subject: Subject) -> Tape:
    """As `tape_of`; where there are many microbatches, one is repeated, if that is proved to be the same.

    The proof: the step of one microbatch, repeated once, is event by event the recorded step of two, and
    assumes the same. Where it is not (a model that does something else the second time), all are recorded.

    Raises:
        PreflopError: the subject cannot be built or run.
        BadNumber: more microbatches than a tape can hold.
    """
    if subject.microbatches <= FEW:
        return tape_of(subject)
    one = tape_of(dataclasses.replace(subject, microbatches=1))
    check_size(one, subject.microbatches)
    two = tape_of(dataclasses.replace(subject, microbatches=PROVED))
    try:
        repeated = accumulate(one, microbatches=PROVED)
        if one.assumptions == two.assumptions and story(repeated) == story(two):
            return accumulate(one, microbatches=subject.microbatches)
    except Refused:
        return tape_of(subject)
    return tape_of(subject)


def annotated_of(subject: Subject) -> CutTape:
    """The annotated tape of a subject that recomputes nothing, its stacks cut where they fold.

    Raises:
        PreflopError: the subject cannot be built or run with autograd's saved tensors followed.
        Refused: what holds its tensors cannot be said.
    """
    for period in PERIODS:
        cut = record_cut(subject, period, lives=True)
        try:
            unfold(cut)
        except Refused:
            continue
        return cut
    return CutTape(record_subject(subject, lives=True), (), ())
