"""The way out for a model that cannot be recorded on fake tensors: its real step, recorded here.

Real steps of the model are recorded on small batches and fitted (`tape.sizes`), and the tape of the size
that was asked for is read off the fit. A size that is small itself is run as it is.

May import: record [torch], subject, tape, errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from preflop.axes import SEQ
from preflop.errors import BadSubject, PreflopError
from preflop.record.subject_tape import record_real
from preflop.subject import Subject, resized, resolve
from preflop.tape.events import SubjectInfo, Tape
from preflop.tape.sizes import SEQUENCE, Domain, NotPolynomial, Sample, Span, agrees, fit

Sizes = tuple[int, "int | None"]
SubjectAt = Callable[[int, "int | None"], Subject]

_BATCHES = (2, 3)
_UNIT = 32
"""Positions between the lengths that are run: kernels pad rows to multiples of less."""
_LENGTHS = (_UNIT, 2 * _UNIT, 3 * _UNIT)
_VERIFIED = (4, 4 * _UNIT)
"""About the size that is run and not fitted; what is no larger is not worth a fit."""
_SMALL = f"a batch of at most {_VERIFIED[0]} and a sequence of at most {_VERIFIED[1]}, which are run as they are"

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
    assumed = subject_at(*asked).assumptions
    probes = _probes(asked)
    if probes is None:
        return _told(record_real(subject_at(*asked)), "at the size asked for", assumed)
    try:
        samples = [_sample(subject_at, size, probes, asked) for size in probes.sizes]
        parametric = fit(samples, axes=SEQUENCE if samples[0].steps else ())
        if not agrees(parametric, _sample(subject_at, probes.verified, probes, asked)):
            raise NotPolynomial(f"the step at {_words([probes.verified])}, which was not fitted, is another")
    except NotPolynomial as reason:
        raise BadSubject(
            f"the real step does not scale from small sizes: {reason}.\n"
            f"  Ask for {_SMALL}."
        ) from reason
    at = (asked[0], None if probes.length is not None else asked[1])
    tape = dataclasses.replace(parametric, domain=_only(*at)).at(*at)
    tape = dataclasses.replace(tape, subject=_as_asked(tape.subject, model, batch, options))
    return _told(tape, f"at {_words(probes.sizes)}, and scaled by the sizes that fit them all", assumed)


def _as_asked(info: SubjectInfo | None, model: Any, batch: Any, options: dict[str, Any]) -> SubjectInfo | None:
    """What is told of the subject, with the batch in the words of one that was recorded as it is."""
    from preflop.record.prepare import batch_text, count_samples, make_batch

    if info is None:
        return None
    subject = resolve(model, batch, **options)
    made = make_batch(subject)
    samples, tokens = count_samples(made)
    return dataclasses.replace(
        info, batch=subject.batch_text or batch_text(made), samples=samples,
        tokens=tokens if subject.tokens is None else subject.tokens,
    )  # fmt: skip


def _family(model: Any, batch: Any, options: dict[str, Any]) -> tuple[SubjectAt, Sizes]:
    """The subject at any batch and sequence, and the sizes asked for."""
    from preflop.record.prepare import make_batch
    from preflop.record.shapes import need_sizes
    from preflop.record.shapes import resized as resized_tensors

    subject = resolve(model, batch, **options)
    if subject.sizes is not None:
        axes = subject.regimes[0]
        count, lengths = subject.sizes[0], subject.sizes[1:]
        scales = [axis.name for axis in axes] == [SEQ] and len(lengths) == 1

        def by_sizes(to_count: int, to_length: int | None) -> Subject:
            # Lengths of other axes are run as they are; the batch is scaled.
            to = (to_length,) if scales and to_length is not None else lengths
            return resolve(model, resized(batch, axes, to_count, to), **options)

        return by_sizes, (count, lengths[0] if scales else None)
    given = make_batch(subject)
    count, length = need_sizes(given)

    def from_batch(to_count: int, to_length: int | None) -> Subject:
        to = (to_count, to_length or 1)
        return dataclasses.replace(subject, make_batch=lambda: resized_tensors(given, to, (count, length)))

    return from_batch, (count, length if length > 1 else None)


@dataclass(frozen=True, slots=True)
class _Probes:
    """The sizes that are run, none larger than the one asked for: what the model takes it takes there."""

    batches: tuple[int, ...]
    lengths: tuple[int | None, ...]
    verified: Sizes
    """Run and not fitted."""
    length: int | None
    """Of every run, where the length asked for is short itself; sizes are fitted in the batch alone."""

    @property
    def sizes(self) -> list[Sizes]:
        """Those that are fitted, as they are run."""
        return [(count, length) for count in self.batches for length in self.lengths]


def _probes(asked: Sizes) -> _Probes | None:
    """The sizes to run; None where the one asked for is as small.

    >>> _probes((7, 200)).sizes, _probes((7, 16)).sizes, _probes((3, 200)).sizes, _probes((4, 128))
    ([(2, 32), (2, 64), (2, 96), (3, 32), (3, 64), (3, 96)], [(2, 16), (3, 16)], [(3, 32), (3, 64), (3, 96)], None)
    """
    batch, seq = asked
    few, short = batch <= _VERIFIED[0], seq is None or seq <= _VERIFIED[1]
    if few and short:
        return None
    batches = (batch,) if few else _BATCHES
    if seq is None or short:
        return _Probes(batches, (seq,), (_VERIFIED[0], seq), seq)
    # As far from a multiple of the unit as the length asked for: what pads, pads alike.
    last = _VERIFIED[1] - -seq % _UNIT
    return _Probes(batches, _LENGTHS, (min(batch, _VERIFIED[0]), last), None)


def _sample(subject_at: SubjectAt, size: Sizes, probes: _Probes, asked: Sizes) -> Sample:
    """The real step at a size of ours.

    Raises:
        PreflopError: it does not run; the message says whose size it was.
    """
    try:
        tape = record_real(subject_at(*size))
    except PreflopError as error:
        raise type(error)(
            f"{error}\n  This was a step at {_words([size])}, a size that Preflop chose to scale to "
            f"{_words([asked])} from. Ask for {_SMALL}."
        ) from error
    count, length = size
    return Sample(count, () if probes.length is not None or length is None else (length,), tape)


def _only(batch: int, seq: int | None) -> Domain:
    return Domain(batch, batch, () if seq is None else (Span(seq, seq),))


def _words(sizes: list[Sizes]) -> str:
    return ", ".join(str(count) if length is None else f"{count} x {length}" for count, length in sizes)


def _told(tape: Tape, how: str, assumed: tuple[str, ...]) -> Tape:
    return dataclasses.replace(tape, assumptions=[*tape.assumptions, *assumed, f"{WORDS}. They were run {how}."])
