"""Records a parametric tape: a few small sizes fitted, others verified.

May import: record [torch] through `record_cut`, transforms, tape, subject.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from preflop.axes import Axis
from preflop.folding import PERIODS
from preflop.record.subject_tape import record_cut
from preflop.subject import Subject
from preflop.tape.sizes import (
    SEQUENCE,
    Domain,
    NotPolynomial,
    ParametricTape,
    Sample,
    Span,
    agrees,
    fit,
    lattice,
)
from preflop.tape.stack import CutTape, Refused
from preflop.transforms.depth import unfold

SubjectAt = Callable[..., Subject]
"""The subject at a batch and a length along each axis."""

_FITTED_BATCHES = (2, 3)
_UNIT = 128
"""Between recorded lengths, in units of their axis. Kernels pad rows to multiples of at most this; multiples of it
are always polynomial."""
_LEAST_UNIT = 32


def parametric_tapes(
    subject_at: SubjectAt, *, axes: tuple[Axis, ...] = SEQUENCE, lives: bool = False
) -> list[ParametricTape]:
    """The parametric tapes of a family of subjects: one for every batch, or one for a batch of one and
    one for all larger (a dimension of one makes views of what are copies otherwise).

    Args:
        subject_at: the subject at a batch and a length along each of the axes.
        axes: none where the batch is the only size.
        lives: annotated (see `tape.lives`), to be transformed by `transforms.recompute`.

    Raises:
        NotPolynomial: the family has no such tape; record each size by itself.
        Refused: its blocks do not repeat.
    """
    probe = _Probe(subject_at, axes, lives)
    many = probe.tape(_FITTED_BATCHES)
    if many.domain.least_batch == 1:
        return [many]
    return [probe.tape((1,)), many]


class _Probe:
    """Records samples. Lengths are in units of their axis throughout."""

    def __init__(self, subject_at: SubjectAt, axes: tuple[Axis, ...], lives: bool) -> None:
        self.subject_at, self.axes, self.lives = subject_at, axes, lives
        self.ends = [None if axis.most is None else (axis.most - axis.rest) // axis.unit for axis in axes]
        self.units = [_unit(axis, most) for axis, most in zip(axes, self.ends)]
        self.period = self._find_period()

    def record(self, batch: int, steps: tuple[int, ...]) -> CutTape:
        lengths = [axis.length(count) for axis, count in zip(self.axes, steps)]
        return record_cut(self.subject_at(batch, *lengths), self.period, lives=self.lives)

    def _find_period(self) -> int:
        """Blocks per repetition for which the fold holds; raises `Refused` where none does."""
        for period in PERIODS:
            self.period = period
            try:
                unfold(self.record(2, self.all_at(1)))
            except Refused:
                if period == PERIODS[-1]:
                    raise
            else:
                return period
        raise AssertionError("unreachable")

    def at(self, units: tuple[int, ...], extra: tuple[int, ...] = ()) -> tuple[int, ...]:
        """So many units (of ours) along each axis, and so much more."""
        more = extra or (0,) * len(self.axes)
        return tuple(
            axis.after + count * unit + one
            for axis, unit, count, one in zip(self.axes, self.units, units, more)
        )

    def all_at(self, units: int) -> tuple[int, ...]:
        """The same number of units along each axis."""
        return self.at((units,) * len(self.axes))

    def tape(self, batches: tuple[int, ...]) -> ParametricTape:
        """Fitted at the batches, verified at one that was not fitted (where there may be more)."""
        points = [self.at(tuple(1 + n for n in point)) for point in lattice(len(self.axes))]
        cuts = {(b, steps): self.record(b, steps) for b in batches for steps in points}
        first = next(iter(cuts.values()))
        if any(cut.stacks != first.stacks for cut in cuts.values()):
            raise NotPolynomial("the model folds otherwise at another size")
        tape = fit([Sample(*size, cut.tape) for size, cut in cuts.items()], first.stacks, self.axes)
        one = batches == (1,)

        def holds(batch: int, steps: tuple[int, ...]) -> bool:
            number = 1 if one else batch
            return agrees(tape, Sample(number, steps, self.record(number, steps).tape))

        if not (one and not self.axes) and not holds(5, self._far()):
            raise NotPolynomial("a size that was not fitted gives another tape")
        least, most = (1, 1) if one else (1 if holds(1, self.all_at(2)) else 2, None)
        return dataclasses.replace(tape, domain=Domain(least, most, self._spans(holds)))

    def _far(self) -> tuple[int, ...]:
        """Longer along every axis than what is fitted, and along each by another number of units."""
        return self.at(tuple(5 - n % 2 for n in range(len(self.axes))))

    def _spans(self, holds: Callable[[int, tuple[int, ...]], bool]) -> tuple[Span, ...]:
        """The lengths along each axis that were verified, with odd ones along all axes at once."""
        found = [self._span(index, holds) for index in range(len(self.axes))]
        extras = tuple(_ODD.get(span.multiple, 0) for span in found)
        if len(found) > 1 and any(extras) and not holds(3, self.at((2,) * len(found), extras)):
            raise NotPolynomial("lengths that are no multiples of what kernels pad to give another tape")
        return tuple(found)

    def _span(self, index: int, holds: Callable[[int, tuple[int, ...]], bool]) -> Span:
        axis, unit = self.axes[index], self.units[index]

        def one(steps: int) -> tuple[int, ...]:
            return tuple(steps if n == index else length for n, length in enumerate(self.all_at(1)))

        base = axis.after + unit
        multiple = next((m for m, extra in _ODD.items() if holds(3, one(base + extra))), unit)
        shortest = -(-(axis.least - axis.rest) // axis.unit)
        short = (axis.after + count for count in (multiple if multiple > 1 else 2, *_SHORT) if count < unit)
        tried = (steps for steps in short if steps >= shortest and steps % multiple == 0)
        least = next((steps for steps in tried if holds(2, one(steps))), base)
        return Span(least, self.ends[index], multiple)


_SHORT = (16, 64)
"""Lengths from which the step may have its structure, where it has another at the shortest."""
_ODD = {1: 3, 8: 8, 32: 32, 64: 64}
"""What lengths are held to be multiples of, and what is added to a multiple of the unit to see it."""


def _unit(axis: Axis, most: int | None) -> int:
    """The step between recorded lengths: `_UNIT`, or less where the model's table is short."""
    if most is None or most >= axis.after + 5 * _UNIT:
        return _UNIT
    unit = (most - axis.after) // 5 // _LEAST_UNIT * _LEAST_UNIT
    if unit < _LEAST_UNIT:
        raise NotPolynomial(f"lengths up to {most} along {axis.name} are too short to fit")
    return unit
