"""A model ready to be priced at any choice: shipped tapes where there are, else recorded ones.

May import: tapes, subject, models.catalog, plan; record [torch] through `parametric`, when called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from preflop.models.catalog import find
from preflop.plan.choices import Choices
from preflop.subject import RECOMPUTE, Subject, resolve
from preflop.tape.sizes import ParametricTape
from preflop.tapes.choose import shipped_at_any_size

SubjectAt = Callable[[int, "int | None"], Subject]


def choices(
    model: str,
    *,
    recompute: Sequence[str] = RECOMPUTE,
    optimizer: Any = "adamw",
    precision: str = "fp32",
    device: str = "cpu",
) -> Choices:
    """A named model ready to be priced at any batch, sequence, accumulation and recomputation.

    Tapes that ship are taken (without torch); the others are recorded at a few small sizes.

    Args:
        recompute: the modes that will be asked for.
        device: whose kernels are recorded.

    Raises:
        PreflopError: a name that is not known.
        NotPolynomial: sizes of the step are no polynomials; record each size by itself.
    """
    facts = find(model)
    if facts.window is not None and facts.window < (facts.max_positions or 0):
        regimes: list[tuple[int, int | None]] = [(0, facts.window), (facts.window, facts.max_positions)]
    else:
        regimes = [(0, facts.max_positions)]

    def subject_at(mode: str) -> SubjectAt:
        def at(batch: int, seq: int | None) -> Subject:
            size = {"batch_size": batch} | ({} if seq is None else {"sequence_length": seq})
            return resolve(
                facts.name, size, recompute=mode, optimizer=optimizer, precision=precision, device=device
            )

        return at

    tapes: dict[str, list[ParametricTape]] = {}
    for mode in recompute:
        shipped = shipped_at_any_size(subject_at(mode)(2, None if facts.is_image else 128))
        tapes[mode] = shipped or _recorded(subject_at(mode), regimes, has_sequence=not facts.is_image)
    return Choices(tapes)


def _recorded(
    subject_at: SubjectAt, regimes: list[tuple[int, int | None]], *, has_sequence: bool
) -> list[ParametricTape]:
    from preflop.parametric import parametric_tapes

    return [
        tape
        for after, most in regimes
        for tape in parametric_tapes(subject_at, has_sequence=has_sequence, after=after, most_seq=most)
    ]
