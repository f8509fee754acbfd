"""One ledger: rows that sum to a total, groupable by where the work comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from preflop.errors import PreflopError

GROUPS = ("op", "module", "phase", "source", "dtype")


@dataclass(frozen=True, slots=True)
class Row:
    """One priced thing. `value` is in the ledger's unit; `calls` is how often it happened."""

    op: str
    module: str
    phase: str
    source: str
    dtype: str
    value: int
    calls: int = 1


@dataclass(frozen=True)
class Ledger:
    """Rows in one unit.

    >>> ledger = Ledger("flops", (Row("aten.mm", "fc", "forward", "m.py:3", "float32", 1024),))
    >>> ledger.total(), ledger.by("op")
    (1024, {'aten.mm': 1024})
    """

    unit: str
    rows: tuple[Row, ...]
    unknown: dict[str, int] = field(default_factory=dict)
    """Operators that could not be priced, with the number of calls."""

    def total(self) -> int:
        """Sum over all rows."""
        return sum(row.value for row in self.rows)

    def by(self, group: str) -> dict[str, int]:
        """Totals per group, largest first. The values sum to `total()`.

        Args:
            group: "op", "module", "phase", "source" or "dtype".
        """
        if group not in GROUPS:
            raise PreflopError(f"no group named {group!r}; a ledger groups by {', '.join(GROUPS)}.")
        return totals((getattr(row, group), row.value) for row in self.rows)


def totals(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sum of the values per key, largest first."""
    sums: dict[str, int] = {}
    for key, value in pairs:
        sums[key] = sums.get(key, 0) + value
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))
