"""Records a parametric tape: a few small sizes fitted, others verified.

May import: record [torch] through `record_cut`, transforms, tape, subject.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from preflop.record.subject_tape import CutTape, record_cut
from preflop.subject import Subject
from preflop.tape.events import Tape
from preflop.tape.sizes import Domain, NotPolynomial, ParametricTape, Sample, agrees, fit, grid
from preflop.transforms.depth import deepen

SubjectAt = Callable[[int, "int | None"], Subject]

_FITTED_BATCHES = (2, 3)
_FITTED_STEPS = (1, 2, 3)
"""Sequence lengths fitted, in units of `_SEQ_UNIT` beyond the least one."""
_SEQ_UNIT = 128
"""Kernels pad rows to multiples of at most this; multiples of it are always polynomial."""


def parametric_tape(
    subject_at: SubjectAt,
    *,
    has_sequence: bool = True,
    after: int = 0,
    most_seq: int | None = None,
) -> ParametricTape:
    """The parametric tape of a family of subjects.

    Args:
        subject_at: the subject at a (batch, sequence length); the latter None where there is none.
        after: sequences longer than this (a window beyond which the structure is another).
        most_seq: the longest sequence for which the structure holds, None for any.

    Raises:
        NotPolynomial: the family has no such tape; record each size by itself.
    """
    lengths = [after + step * _SEQ_UNIT for step in _FITTED_STEPS] if has_sequence else None
    cuts = {size: record_cut(subject_at(*size)) for size in grid(_FITTED_BATCHES, lengths)}
    first = next(iter(cuts.values()))
    if any(cut.stacks != first.stacks for cut in cuts.values()):
        raise NotPolynomial("the model folds otherwise at another size")
    tape = fit([Sample(*size, cut.tape) for size, cut in cuts.items()], first.stacks)
    _same_depth(tape, first)

    def holds(batch: int, seq: int | None) -> bool:
        return agrees(tape, Sample(batch, seq, record_cut(subject_at(batch, seq)).tape))

    if not has_sequence:
        if not holds(5, None):
            raise NotPolynomial("a batch that was not fitted gives another tape")
        return dataclasses.replace(tape, domain=Domain(least_batch=1 if holds(1, None) else 2))
    if not holds(5, after + 5 * _SEQ_UNIT):
        raise NotPolynomial("a size that was not fitted gives another tape")
    multiple = next(
        (m for m, seq in ((1, after + 131), (8, after + 136)) if holds(3, seq)), _SEQ_UNIT
    )
    domain = Domain(
        least_batch=1 if holds(1, after + 2 * _SEQ_UNIT) else 2,
        least_seq=after + 1 if multiple == 1 and holds(2, after + 2) else after + max(multiple, 8),
        most_seq=most_seq,
        seq_multiple=multiple,
    )
    return dataclasses.replace(tape, domain=domain)


def _same_depth(tape: ParametricTape, cut: CutTape) -> None:
    """The fold must hold for the fitted tape; raises `Refused` where it does not."""
    del tape
    whole: Tape = cut.tape
    for stack in cut.stacks:
        whole = deepen(whole, stack)
