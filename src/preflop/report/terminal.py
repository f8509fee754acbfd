"""The account in a terminal or a pipe: an answer, in the order in which it is asked."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from preflop.report import tables
from preflop.report.evidence import evidence_sentences
from preflop.report.tables import Table

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console, RenderableType

    from preflop.account import Account

PIPE_WIDTH = 100
"""Columns where there is no terminal to ask and COLUMNS does not say."""


def show(account: Account, *, top: int = 10, file: TextIO | None = None) -> None:
    """Print the account.

    Args:
        top: how many operators to list.
    """
    print_parts(make_console(file), _parts(account, top))


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print each part; into a pipe without the blanks that fill up lines."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().splitlines()
    console.file.write("\n".join(line.rstrip() for line in lines) + "\n")


def print_lines(words: str, *, file: TextIO | None = None) -> None:
    """Print lines of text, each wrapped at the console's width, its further lines indented below it."""
    stream = file or sys.stdout
    stream.write(wrapped(words, _width(stream)) + "\n")
    stream.flush()


def _width(stream: TextIO) -> int:
    """Columns, as `make_console` has them. Without rich, which draws from Python's random state when it is
    loaded: a trainer that prints must leave that as it is."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else PIPE_WIDTH
    except (OSError, ValueError):  # a terminal that does not say, a stream without a number
        return PIPE_WIDTH


def wrapped(words: str, width: int) -> str:
    r"""Lines folded at blanks so that none is wider, where that can be; what has no blank is left whole.

    >>> print(wrapped("fits:\n  batch 8 of a model with a long name", 24))
    fits:
      batch 8 of a model
        with a long name
    """
    lines = []
    for line in words.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False, drop_whitespace=True,
        ) or [""]  # fmt: skip
    return "\n".join(lines)


def make_console(file: TextIO | None = None) -> Console:
    """A console as wide as the terminal; colours only where there is one."""
    from rich.console import Console

    stream = file or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def _parts(account: Account, top: int) -> Iterable[RenderableType]:
    yield text(tables.headline(account), "bold")
    yield heading("Memory")
    yield text(tables.peak_sentence(account))
    yield table(tables.columns_table(account.memory.columns))
    yield table(tables.peak_table(account.memory.at_peak, account.memory.peak_bytes))
    allocated, fits = tables.allocated_sentence(account), tables.fits_sentence(account)
    if allocated is not None or fits is not None:
        yield ""
    if allocated is not None:
        yield text(allocated)
    if fits is not None:
        yield text(fits, "bold green" if account.memory.fits else "bold red")
    yield heading("Compute")
    yield text(tables.six_nd_sentence(account))
    yield table(tables.flops_table(account.flops))
    if (why := tables.six_nd_table(account)) is not None:
        yield table(why)
    yield heading("Operators")
    yield text(tables.traffic_sentence(account))
    yield table(tables.operators_table(account.operators, top))
    yield heading("Verdict")
    if (time := tables.time_sentence(account)) is not None:
        yield text(time)
    yield text(account.verdict, "bold")
    for sentence in evidence_sentences(account.evidence):
        yield bullet(sentence)
    yield from _fine_print(account)


def _fine_print(account: Account) -> Iterable[RenderableType]:
    unknown = tables.unknown_sentence(account)
    if unknown is not None or account.assumptions:
        yield heading("Assumed, or not known")
    if unknown is not None:
        yield bullet(unknown, "yellow")
    for assumption in account.assumptions:
        yield bullet(assumption)


def heading(words: str) -> RenderableType:
    """A section's name."""
    from rich.text import Text

    return _after_blank_line(Text(words.upper(), "bold cyan"))


def text(words: str, style: str = "") -> RenderableType:
    """A paragraph, wrapped at the console's width."""
    from rich.text import Text

    return Text(words, style)


def bullet(words: str, style: str = "") -> RenderableType:
    """One item of a list, its further lines indented."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 1))
    grid.add_row("-", Text(words, style))
    return grid


def table(content: Table) -> RenderableType:
    """A table without lines; numbers to the right, the total under a rule."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(
        title=content.title, title_justify="left", title_style="italic", box=_ruled(), show_edge=False,
        pad_edge=False, padding=(0, 0, 0, 1), header_style="dim",
    )  # fmt: skip
    for index, column in enumerate(content.headings):
        grid.add_column(
            column.text,
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
            min_width=12 if index == 0 else None,
        )
    for number, row in enumerate(content.rows):
        last = number == len(content.rows) - 1
        grid.add_row(*map(Text, row), end_section=last and content.total is not None)
    if content.total is not None:
        grid.add_row(*map(Text, content.total), style="bold")
    return _after_blank_line(grid)


def _ruled() -> Box:
    """A rule under the headings and above the total, nothing else."""
    from rich.box import Box

    rule, none = " \u2500\u2500 \n", "    \n"
    return Box(none + none + rule + none + rule + rule + none + none)


def _after_blank_line(renderable: RenderableType) -> RenderableType:
    from rich.console import Group

    return Group("", renderable)
