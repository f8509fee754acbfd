"""Whether a subject is one whose tape ships, and that tape under the subject's own words."""

from __future__ import annotations

import dataclasses

from preflop.hardware.catalog import find as find_device
from preflop.optimizers import OptimizerSpec
from preflop.subject import Subject
from preflop.tape.events import Tape
from preflop.tape.sizes import ParametricTape
from preflop.tape.stack import CutTape, Refused
from preflop.tapes.store import OPTIMIZER, Wanted, shipped_cut, shipped_parametric, shipped_tape


def shipped(subject: Subject) -> Tape | None:
    """The shipped tape of the subject, or None where it must be recorded."""
    wanted = _wanted(subject)
    tape = None if wanted is None else shipped_tape(wanted)
    return None if tape is None else _in_words_of(subject, tape)


def shipped_in_part(subject: Subject, *, lives: bool = False) -> CutTape | None:
    """As `shipped`, its stacks of blocks still cut down.

    Args:
        lives: annotated with what held its tensors (`tape.lives`), for a subject that recomputes nothing.
    """
    wanted = _wanted(subject)
    try:
        cut = None if wanted is None else shipped_cut(wanted, lives=lives)
    except Refused:
        return None
    return None if cut is None else dataclasses.replace(cut, tape=_in_words_of(subject, cut.tape))


def _in_words_of(subject: Subject, tape: Tape) -> Tape:
    """The tape, called as the subject is."""
    assert tape.subject is not None, "a shipped tape says what was recorded"
    info = dataclasses.replace(
        tape.subject, model=subject.name, precision=subject.precision.name, device=subject.device,
        batch=subject.batch_text,
    )  # fmt: skip
    return dataclasses.replace(tape, subject=info)


def shipped_at_any_size(subject: Subject) -> list[ParametricTape]:
    """The shipped parametric tapes of the subject's step at any size; none where it must be recorded."""
    wanted = _wanted(dataclasses.replace(subject, microbatches=1))
    found = [] if wanted is None else shipped_parametric(wanted)
    named = []
    for parametric in found:
        info = parametric.tape.subject
        assert info is not None, "a shipped tape says what was recorded"
        info = dataclasses.replace(
            info, model=subject.name, precision=subject.precision.name, device=subject.device
        )
        tape = dataclasses.replace(parametric.tape, subject=info)
        named.append(dataclasses.replace(parametric, tape=tape))
    return named


def _wanted(subject: Subject) -> Wanted | None:
    """What to look for; None for anything but the plain loop of a named model on a CUDA device."""
    plain = (
        subject.sizes is not None
        and subject.architecture
        and subject.loss is None
        and not subject.keep_output
        and subject.microbatches == 1
        and isinstance(subject.optimizer, OptimizerSpec)
        and subject.optimizer.name == OPTIMIZER
        and subject.device != "cpu"
    )
    recompute = subject.recompute
    if not plain or subject.sizes is None or not isinstance(recompute, str):
        return None
    capability = find_device(subject.device).compute_capability
    if capability is None:
        return None
    return Wanted(
        subject.name, subject.architecture, subject.precision.name, capability, subject.sizes, recompute
    )
