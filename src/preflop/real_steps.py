"""The way out for a model that cannot be recorded on fake tensors: its real step, recorded here.

Real steps of the model are recorded on small batches and fitted (`tape.sizes`), and the tape of the size
that was asked for is read off the fit. A size that is small itself is run as it is.

May import: record [torch], subject, tape, errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from preflop.errors import BadSubject
from preflop.record.subject_tape import record_real
from preflop.subject import Subject, batch_sizes, resolve
from preflop.tape.events import Tape
from preflop.tape.sizes import Domain, NotPolynomial, ParametricTape, Sample, agrees, fit

Sizes = tuple[int, "int | None"]
SubjectAt = Callable[[int, "int | None"], Subject]

_BATCHES = (2, 3)
_UNIT = 32
"""Positions between the lengths that are run: kernels pad rows to multiples of less."""
_LENGTHS = (_UNIT, 2 * _UNIT, 3 * _UNIT)
_VERIFIED = (4, 4 * _UNIT)
"""About the size that is run and not fitted; what is no larger is not worth a fit."""

WORDS = (
    "recorded from real steps on this CPU, not on fake tensors: operators are those that it runs, and "
    "choices by value (routing, sampling, masks) are this batch's; what an operator without a fake kernel "
    "allocates inside is not seen"
)


def tape_of_real(model: Any, batch: Any, options: dict[str, Any]) -> Tape:
    """The tape of `preflop.account`'s arguments, from real steps.

    Args:
        options: the keyword arguments of `preflop.account`.

    Raises:
        PreflopError: the arguments, or the real step; a step whose sizes are no polynomials in batch and
            sequence, which cannot be scaled.
    """
    options = {**options, "device": "cpu"}
    subject_at, asked = _family(model, batch, options)
    fitted = _fitted_sizes(asked)
    if not fitted:
        return _told(record_real(subject_at(*asked)), "at the size asked for")
    try:
        parametric = fit([_sample(subject_at, size) for size in fitted])
        _verify(parametric, subject_at, asked)
    except NotPolynomial as reason:
        raise BadSubject(
            f"the real step does not scale from small sizes: {reason}.\n"
            f"  Ask for a batch of at most {_VERIFIED[0]} and a sequence of at most {_VERIFIED[1]}, which are "
            "run as they are."
        ) from reason
    parametric = dataclasses.replace(parametric, domain=_only(*asked))
    return _told(parametric.at(*asked), f"at {_words(fitted)}, and scaled by the sizes that fit them all")


def _family(model: Any, batch: Any, options: dict[str, Any]) -> tuple[SubjectAt, Sizes]:
    """The subject at any batch and sequence, and the sizes asked for."""
    from preflop.record.prepare import make_batch
    from preflop.record.shapes import need_sizes, resized

    sizes = batch_sizes(batch)
    if sizes is not None:

        def by_sizes(count: int, length: int | None) -> Subject:
            made = {"batch_size": count} | ({} if length is None else {"sequence_length": length})
            return resolve(model, made, **options)

        return by_sizes, sizes
    given = make_batch(resolve(model, batch, **options))
    count, length = need_sizes(given)

    def from_batch(to_count: int, to_length: int | None) -> Subject:
        to = (to_count, to_length or 1)
        return resolve(model, lambda: resized(given, to, (count, length)), **options)

    return from_batch, (count, length if length > 1 else None)


def _fitted_sizes(asked: Sizes) -> list[Sizes]:
    """The sizes to run: none where the one asked for is as small."""
    batch, seq = asked
    if batch <= _VERIFIED[0] and (seq is None or seq <= _VERIFIED[1]):
        return []
    batches = (1,) if batch == 1 else _BATCHES
    lengths: tuple[int | None, ...] = (None,) if seq is None else _LENGTHS
    return [(count, length) for count in batches for length in lengths]


def _sample(subject_at: SubjectAt, size: Sizes) -> Sample:
    return Sample(*size, record_real(subject_at(*size)))


def _verify(parametric: ParametricTape, subject_at: SubjectAt, asked: Sizes) -> None:
    batch = 1 if asked[0] == 1 else _VERIFIED[0]
    # As far from a multiple of the unit as the length asked for: what pads, pads alike.
    size = (batch, None if asked[1] is None else _VERIFIED[1] - -asked[1] % _UNIT)
    if not agrees(parametric, _sample(subject_at, size)):
        raise NotPolynomial(f"the step at {_words([size])}, which was not fitted, is another")


def _only(batch: int, seq: int | None) -> Domain:
    return Domain(batch, batch, seq, seq)


def _words(sizes: list[Sizes]) -> str:
    return ", ".join(str(count) if length is None else f"{count} x {length}" for count, length in sizes)


def _told(tape: Tape, how: str) -> Tape:
    return dataclasses.replace(tape, assumptions=[*tape.assumptions, f"{WORDS}. They were run {how}."])
