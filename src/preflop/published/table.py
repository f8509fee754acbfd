"""The table of errors per source, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from preflop.published.predict import Prediction
from preflop.published.summary import FIGURES, summaries


def show(predictions: Sequence[Prediction]) -> None:
    """Print errors per source and figure, and why rows were not built."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    found = summaries(predictions)
    table = Table(title="Errors against published rows, relative", title_justify="left")
    for name in ("Source", "Figure", "Rows", "n", "Median", "95 %", "Worst", "Under"):
        table.add_column(name, justify="left" if name in ("Source", "Figure") else "right", overflow="fold")
    for summary in found:
        for what, errors in summary.figures.items():
            if errors.n:
                shown = (errors.median_abs_error, errors.p95_abs_error, errors.max_abs_error)
                cells = ["" if one is None else f"{one:.2%}" for one in shown]
                under = "" if errors.under is None else f"{errors.under:.0%}"
                table.add_row(
                    summary.source, what.replace("_", " "), str(summary.rows), str(errors.n), *cells, under
                )
    console.print(table)
    for summary in found:
        if summary.built < summary.rows:
            console.print(f"{summary.source}: {summary.built} of {summary.rows} rows built", markup=False)
        for why, count in list(summary.reasons.items())[:4]:
            console.print(f"  {count} x {why}", markup=False, highlight=False)
    if not any(summary.figures[name].n for summary in found for name in FIGURES):
        console.print("No row was predicted.")
