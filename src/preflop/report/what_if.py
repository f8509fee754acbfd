"""`preflop what-if`: the given run and each change, as a table, a sentence and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from preflop.report import tables
from preflop.report.tables import Heading, Table
from preflop.units import time_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from preflop.plan.choice import Choice
    from preflop.plan.outcome import Outcome
    from preflop.plan.what_if import Row, WhatIf

SCHEMA = "preflop.what-if/1"


def show_what_if(found: WhatIf, headline: str) -> None:
    """Print the given run, one row for each change, and what to change first."""
    from preflop.report import terminal

    parts = [terminal.text(headline, "bold"), *what_if_parts(found)]
    terminal.print_parts(terminal.make_console(), parts)


def show_section(found: WhatIf) -> None:
    """Print it as the last section of an account."""
    from preflop.report import terminal

    parts = [terminal.heading("What if"), *what_if_parts(found)]
    terminal.print_parts(terminal.make_console(), parts)


def what_if_parts(found: WhatIf) -> Iterable[RenderableType]:
    """The table, what has no time and what could not be run, and the sentence."""
    from preflop.report import terminal

    yield terminal.table(what_if_table(found))
    refused = [row for row in found.rows if row.refused]
    untimed = found.untimed()
    judged = any(row.outcome and row.outcome.needs_bytes is not None for row in (found.given, *found.rows))
    hosted = [(row.words, row.outcome) for row in found.rows if row.outcome and row.outcome.host_bytes]
    if refused or untimed or hosted or judged:
        yield ""
    if judged:
        yield terminal.bullet(
            "needs: what the allocator reserves, with the context; a run fits where the device has as much"
        )
    for words, outcome in hosted:
        yield terminal.bullet(f"{words}: {host_words(outcome)}")
    for reason in untimed:
        yield terminal.bullet(reason, "yellow")
    for row in refused:
        yield terminal.bullet(f"{row.words}: {row.refused}", "yellow")
    yield ""
    yield terminal.text(found.advice, "bold")


def host_words(outcome: Outcome) -> str:
    """What an offloaded run needs of the host and of the link to it."""
    return (
        f"{tables.short_bytes(outcome.host_bytes)} of host memory, {tables.short_bytes(outcome.link_bytes)} over "
        "the link each step; assumed to go beside the kernels"
    )


def what_if_table(found: WhatIf) -> Table:
    """One row for each change, beside it the change in percent."""
    outcomes = [row.outcome for row in (found.given, *found.rows) if row.outcome is not None]
    timed = any(outcome.time_s is not None for outcome in outcomes)
    unit = "token" if found.given.outcome is not None and found.given.outcome.tokens else "sample"
    judged = any(outcome.needs_bytes is not None for outcome in outcomes)
    headings = [Heading("", False), Heading("peak"), Heading("")]
    headings += [Heading("needs")] * judged
    headings += [Heading("fits", False), Heading("HW FLOPs"), Heading("moved"), Heading("")]
    title = "What if: one change at a time"
    if timed:
        headings += [Heading("time"), Heading("")]
        title += f", time per {unit}"
    rows = []
    knob = ""
    for row in (found.given, *found.rows):
        if row.outcome is None:
            continue
        named = row.knob == knob or not row.knob or row.words.startswith(row.knob)
        label = row.words if named else f"{row.knob}: {row.words}"
        knob = row.knob
        rows.append(_cells(found, row, row.outcome, label, judged=judged, timed=timed))
    return Table(title, tuple(headings), tuple(rows))


def _cells(
    found: WhatIf, row: Row, outcome: Outcome, label: str, *, judged: bool, timed: bool
) -> tuple[str, ...]:
    changed = found.change(row)
    given = row is found.given
    cells = [
        label,
        tables.short_bytes(outcome.peak_bytes),
        "" if given else change_text(changed.peak),
        *(["-" if outcome.needs_bytes is None else tables.short_bytes(outcome.needs_bytes)] if judged else []),
        {True: "yes", False: "no", None: "-"}[outcome.fits],
        tables.flops_text(outcome.flops_hardware),
        tables.short_bytes(outcome.moved_bytes),
        "" if given else change_text(changed.moved),
    ]
    if timed:
        per_unit_s = outcome.per_unit_s
        given_outcome = found.given.outcome
        bound = outcome.expected_s is None and given_outcome is not None and given_outcome.expected_s is not None
        cells.append("-" if per_unit_s is None else ("at least " if bound else "") + time_text(per_unit_s))
        cells.append("" if given else change_text(changed.time))
    return tuple(cells)


def change_text(change: float | None) -> str:
    """A relative change in percent.

    >>> change_text(-0.4176), change_text(0.0002), change_text(1.92), change_text(None)
    ('-42 %', '=', '+192 %', '-')
    """
    if change is None:
        return "-"
    if abs(change) < 0.005:
        return "="
    return f"{change:+.0%}".replace("%", " %")


def what_if_json(found: WhatIf) -> dict[str, Any]:
    """The given run, the rows and the sentence. Changes are relative: -0.5 is half."""
    return {
        "schema": SCHEMA,
        "given": _row_json(found, found.given),
        "rows": [_row_json(found, row) for row in found.rows],
        "advice": found.advice,
    }


def _row_json(found: WhatIf, row: Row) -> dict[str, Any]:
    return {
        "knob": row.knob or None,
        "words": row.words,
        "choice": _choice_json(row.choice),
        "route": row.route.value,
        "keeps": row.keeps.name.lower(),
        "refused": row.refused or None,
        "outcome": None if row.outcome is None else _outcome_json(row.outcome),
        "change": dataclasses.asdict(found.change(row)),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        field.name: _plain(getattr(choice, field.name)) for field in dataclasses.fields(choice)
    }


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):
        return value
    return getattr(value, "__qualname__", type(value).__name__)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        **dataclasses.asdict(outcome),
        "moved_bytes": outcome.moved_bytes,
        "time_s": outcome.time_s,
        "per_unit_s": outcome.per_unit_s,
        "unit": "token" if outcome.tokens else "sample",
    }
