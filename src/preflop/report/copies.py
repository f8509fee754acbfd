"""`preflop copies`: what a step copies, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from preflop.account import Account
from preflop.report.json import account_to_dict
from preflop.timing.copies import StepCopies, TimedCopy
from preflop.units import bytes_text, time_text


def copies_json(account: Account, found: StepCopies, fail_over: float | None = None) -> dict[str, Any]:
    """Every copy with its share; the harmless ones are marked and summed."""
    whole = account_to_dict(account)
    small = [copy for copy in found.copies if copy.harmless]
    return {
        "schema": "preflop.copies/1",
        "subject": whole["subject"],
        "device": whole["device"],
        "step": {"time_s": found.step_s, "moved_bytes": found.step_bytes},
        "share_of": found.basis,
        "share": found.hidden_share,
        "fail_over": fail_over,
        "passes": fail_over is None or found.hidden_share <= fail_over,
        "harmless": {
            "calls": sum(copy.row.calls for copy in small),
            "bytes": sum(copy.row.bytes for copy in small),
            "share": sum(copy.share for copy in small),
        },
        "copies": [_copy_json(copy) for copy in found.copies],
        "assumptions": whole["assumptions"],
    }


def _copy_json(copy: TimedCopy) -> dict[str, Any]:
    row = copy.row
    return {
        "kind": row.kind,
        "source": row.source,
        "module": row.module,
        "phase": row.phase,
        "calls": row.calls,
        "bytes": row.bytes,
        "read_bytes": row.read_bytes,
        "time_s": copy.time_s,
        "share": copy.share,
        "harmless": copy.harmless,
        "kernel": row.kernel,
        "reason": row.reason,
        "instead": row.instead,
    }


def headline(found: StepCopies) -> str:
    """How much of the step is copying."""
    hidden = [copy for copy in found.copies if copy.hidden]
    bytes_written = sum(copy.row.bytes for copy in hidden)
    of = "of the step's time" if found.basis == "time" else "of the bytes that the step moves"
    return (
        f"copies that nobody asked for: {found.hidden_share:.1%} {of}, {bytes_text(bytes_written)} written "
        f"by {sum(copy.row.calls for copy in hidden):,} copies"
    )


def copy_line(copy: TimedCopy) -> str:
    """How much one copy takes."""
    row = copy.row
    time = "" if copy.time_s is None else f"{time_text(copy.time_s):>9}  "
    calls = f"{row.calls:>5} x"
    return f"{copy.share:>6.1%}  {time}{bytes_text(row.bytes):>11}  {calls}  {row.kind}, {row.phase}"


def details(copy: TimedCopy) -> list[tuple[str, str]]:
    """Where it is, why, and what to write instead."""
    row = copy.row
    found = [("at", f"{row.source or '(no line)'}   {row.module or '(model)'}"), ("because", row.reason)]
    if row.instead is not None:
        found.append(("instead", row.instead))
    return found


def harmless_line(copies: Sequence[TimedCopy]) -> str | None:
    """The copies that do no harm, in one line."""
    if not copies:
        return None
    calls = sum(copy.row.calls for copy in copies)
    total = sum(copy.row.bytes for copy in copies)
    share = sum(copy.share for copy in copies)
    return f"{share:>6.1%}  {calls:,} more copies under 0.1 % each, {bytes_text(total)} in all"


def show_copies(account: Account, found: StepCopies, top: int) -> None:
    """Print the copies, largest share first."""
    from preflop.report import tables, terminal

    parts = [terminal.text(tables.headline(account), "bold"), terminal.text(headline(found))]
    harmful = [copy for copy in found.copies if not copy.harmless]
    for copy in harmful[:top]:
        parts.extend([terminal.text(copy_line(copy)), _grid(details(copy))])
    parts.extend(terminal.text(line) for line in _rest(found, harmful[top:], len(harmful)))
    terminal.print_parts(terminal.make_console(), parts)


def _grid(pairs: Sequence[tuple[str, str]]) -> Any:
    """Words and what they say, the second wrapped in a column of its own."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    for word, says in pairs:
        grid.add_row(Text(word), Text(says))
    return Padding(grid, (0, 0, 0, 8))


def _rest(found: StepCopies, rest: Sequence[TimedCopy], count: int) -> Iterable[str]:
    if rest:
        share = sum(copy.share for copy in rest)
        yield f"{share:>6.1%}  {len(rest)} more places: --top {count}"
    last = harmless_line([copy for copy in found.copies if copy.harmless])
    if last is not None:
        yield last
