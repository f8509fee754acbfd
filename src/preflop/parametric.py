"""Records a parametric tape: a few small sizes fitted, others verified.

May import: record [torch] through `record_cut`, transforms, tape, subject.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from preflop.folding import PERIODS, unfold
from preflop.record.subject_tape import CutTape, record_cut
from preflop.subject import Subject
from preflop.tape.sizes import Domain, NotPolynomial, ParametricTape, Sample, agrees, fit
from preflop.tape.stack import Refused

SubjectAt = Callable[[int, "int | None"], Subject]

_FITTED_BATCHES = (2, 3)
_FITTED_STEPS = (1, 2, 3)
"""Sequence lengths fitted, in units of `_SEQ_UNIT` beyond the least one."""
_SEQ_UNIT = 128
"""Kernels pad rows to multiples of at most this; multiples of it are always polynomial."""
_LEAST_UNIT = 32


def parametric_tapes(
    subject_at: SubjectAt,
    *,
    has_sequence: bool = True,
    after: int = 0,
    most_seq: int | None = None,
    lives: bool = False,
) -> list[ParametricTape]:
    """The parametric tapes of a family of subjects: one for every batch, or one for a batch of one and
    one for all larger (a dimension of one makes views of what are copies otherwise).

    Args:
        subject_at: the subject at a (batch, sequence length); the latter None where there is none.
        after: sequences longer than this (a window beyond which the structure is another).
        most_seq: the longest sequence for which the structure holds, None for any.
        lives: annotated (see `tape.lives`), to be transformed by `transforms.recompute`.

    Raises:
        NotPolynomial: the family has no such tape; record each size by itself.
        Refused: its blocks do not repeat.
    """
    probe = _Probe(subject_at, has_sequence, after, most_seq, lives)
    many = probe.tape(_FITTED_BATCHES)
    if many.domain.least_batch == 1:
        return [many]
    return [probe.tape((1,)), many]


class _Probe:
    """Records samples and remembers them."""

    def __init__(
        self, subject_at: SubjectAt, has_sequence: bool, after: int, most_seq: int | None, lives: bool
    ) -> None:
        self.subject_at = subject_at
        self.lives = lives
        self.after, self.most_seq = after, most_seq
        self.unit = _unit(after, most_seq) if has_sequence else None
        self.period = self._find_period()

    def record(self, batch: int, seq: int | None) -> CutTape:
        return record_cut(self.subject_at(batch, seq), self.period, lives=self.lives)

    def _find_period(self) -> int:
        """Blocks per repetition for which the fold holds; raises `Refused` where none does."""
        for period in PERIODS:
            self.period = period
            try:
                unfold(self.record(2, self.length(1)))
            except Refused:
                if period == PERIODS[-1]:
                    raise
            else:
                return period
        raise AssertionError("unreachable")

    def length(self, units: int, extra: int = 0) -> int | None:
        return None if self.unit is None else self.after + units * self.unit + extra

    def tape(self, batches: tuple[int, ...]) -> ParametricTape:
        """Fitted at the batches, verified at one that was not fitted (where there may be more)."""
        units = _FITTED_STEPS if self.unit is not None else (0,)
        cuts = {(b, self.length(u)): self.record(b, self.length(u)) for b in batches for u in units}
        first = next(iter(cuts.values()))
        if any(cut.stacks != first.stacks for cut in cuts.values()):
            raise NotPolynomial("the model folds otherwise at another size")
        tape = fit([Sample(*size, cut.tape) for size, cut in cuts.items()], first.stacks)
        one = batches == (1,)

        def holds(batch: int, seq: int | None) -> bool:
            return agrees(tape, Sample(1 if one else batch, seq, self.record(1 if one else batch, seq).tape))

        if not (one and self.unit is None) and not holds(5, self.length(5)):
            raise NotPolynomial("a size that was not fitted gives another tape")
        least, most = (1, 1) if one else (1 if holds(1, self.length(2)) else 2, None)
        if self.unit is None:
            return dataclasses.replace(tape, domain=Domain(least, most))
        multiple = next((m for m, x in ((1, 3), (8, 8)) if holds(3, self.length(1, x))), self.unit)
        least_seq = self.after + (multiple if multiple > 1 else 2)
        if not holds(2, least_seq):
            least_seq = self.after + self.unit
        domain = Domain(least, most, least_seq, self.most_seq, multiple)
        return dataclasses.replace(tape, domain=domain)


def _unit(after: int, most_seq: int | None) -> int:
    """The step between recorded lengths: `_SEQ_UNIT`, or less where the model's table is short."""
    if most_seq is None or most_seq >= after + 5 * _SEQ_UNIT:
        return _SEQ_UNIT
    unit = (most_seq - after) // 5 // _LEAST_UNIT * _LEAST_UNIT
    if unit < _LEAST_UNIT:
        raise NotPolynomial(f"sequences up to {most_seq} are too short to fit")
    return unit
