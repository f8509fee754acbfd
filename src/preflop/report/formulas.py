"""`preflop account --formulas`: operators as formulas in batch and lengths, as a section and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preflop.report.tables import short_op

if TYPE_CHECKING:
    from rich.console import RenderableType

    from preflop.choosing import Formulas
    from preflop.plan.formulas import FormulaRow

NO_POLYNOMIAL = "no polynomial in the sizes"


def formulas_json(found: Formulas) -> dict[str, Any]:
    """Every row, numbers and the model's own names, and where the formulas hold."""
    return {
        "holds": found.holds,
        "axes": {"B": "batch", **found.letters, **found.names},
        "operators": [dataclasses.asdict(row) for row in found.rows],
    }


def show_formulas(found: Formulas, *, top: int) -> None:
    """Print the largest operators as formulas of one call."""
    from preflop.report import terminal

    terminal.print_parts(terminal.make_console(), _parts(found, top))


def _parts(found: Formulas, top: int) -> Iterable[RenderableType]:
    from preflop.report import terminal

    yield terminal.heading("Operators as formulas")
    names = "".join(f", {size} {name}" for name, size in found.names.items())
    letters = "".join(f", {letter} {words}" for letter, words in found.letters.items())
    yield terminal.text(f"B batch{letters}{names}. They hold for {found.holds}. Each is of one call; most FLOPs first.")
    for row in found.rows[:top]:
        yield ""
        yield terminal.text("\n".join(_lines(row)))


def _lines(row: FormulaRow) -> Iterable[str]:
    line = (row.source or "").rpartition("/")[2]
    place = "  ".join(part for part in (row.module, line) if part)
    yield f"{short_op(row.op)} ({row.phase})  x {row.calls}  {place}"
    yield f"  {row.shapes} {row.dtype}"
    yield f"  FLOPs    {row.flops or NO_POLYNOMIAL}"
    yield f"  read     {row.read_bytes or NO_POLYNOMIAL}"
    yield f"  written  {row.write_bytes or NO_POLYNOMIAL}"
