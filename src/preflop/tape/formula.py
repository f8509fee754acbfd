"""A size as a formula in batch and sequence, fitted to what was seen at several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Point = tuple[int, int]
"""Batch and sequence."""


@dataclass(frozen=True, slots=True)
class SizeFormula:
    """constant + batch·B + sequence·S + both·B·S, whole numbers or fractions."""

    constant: Fraction
    batch: Fraction
    sequence: Fraction
    both: Fraction

    @property
    def depends(self) -> bool:
        """Whether the size changes with batch or sequence."""
        return bool(self.batch or self.sequence or self.both)

    def at(self, point: Point) -> Fraction:
        """The size at a batch and a sequence."""
        batch, sequence = point
        return self.constant + self.batch * batch + self.sequence * sequence + self.both * batch * sequence

    @property
    def text(self) -> str:
        """As people read it.

        >>> SizeFormula(Fraction(1), Fraction(0), Fraction(2), Fraction(0)).text
        '2*seq + 1'
        """
        terms = [(self.both, "batch*seq"), (self.batch, "batch"), (self.sequence, "seq")]
        written = [name if factor == 1 else f"{factor}*{name}" for factor, name in terms if factor]
        if self.constant or not written:
            written.append(str(self.constant))
        return " + ".join(written).replace("+ -", "- ")


def fit(points: Sequence[Point], sizes: Sequence[int]) -> SizeFormula | None:
    """The formula through all the points, the simplest first; None where there is none.

    >>> points = [(2, 5), (3, 5), (2, 7), (3, 7), (5, 11)]
    >>> fit(points, [b * s for b, s in points]).text, fit(points, [s + 1 for b, s in points]).text
    ('batch*seq', 'seq + 1')
    >>> fit(points, [b * b for b, s in points]) is None
    True

    Args:
        points: at least one; a sequence that is the same at all of them is taken as a constant.
    """
    batches, sequences = len({b for b, _ in points}) > 1, len({s for _, s in points}) > 1
    columns: list[tuple[str, ...]] = [()]
    if batches:
        columns.append(("batch",))
    if sequences:
        columns.append(("sequence",))
    if batches and sequences:
        columns.extend([("both",), ("batch", "both"), ("sequence", "both"), ("batch", "sequence")])
        columns.append(("batch", "sequence", "both"))
    for names in columns:
        found = _solve(points, sizes, names)
        if found is not None:
            return found
    return None


def _value(name: str, point: Point) -> int:
    return {"batch": point[0], "sequence": point[1], "both": point[0] * point[1]}[name]


def _solve(points: Sequence[Point], sizes: Sequence[int], names: tuple[str, ...]) -> SizeFormula | None:
    """Least unknowns that pass through every point, by elimination; None where none do."""
    rows = [
        [Fraction(1), *(Fraction(_value(name, point)) for name in names), Fraction(size)]
        for point, size in zip(points, sizes, strict=True)
    ]
    width = len(names) + 1
    solved = 0
    for column in range(width):
        pivot = next((row for row in range(solved, len(rows)) if rows[row][column]), None)
        if pivot is None:
            return None
        rows[solved], rows[pivot] = rows[pivot], rows[solved]
        rows[solved] = [value / rows[solved][column] for value in rows[solved]]
        for other in range(len(rows)):
            if other != solved and rows[other][column]:
                factor = rows[other][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[solved], strict=True)]
        solved += 1
    if any(row[-1] for row in rows[solved:]):
        return None
    values = dict(zip(("constant", *names), (row[-1] for row in rows[:width]), strict=True))
    zero = Fraction(0)
    return SizeFormula(
        values["constant"], values.get("batch", zero), values.get("sequence", zero), values.get("both", zero)
    )
