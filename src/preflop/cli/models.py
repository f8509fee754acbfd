"""`preflop models`: the models Preflop knows by name. Needs no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

# What is no terminal (a file, a pipe) has no width of its own: the table needs this much.
_COLUMNS_OFF_TERMINAL = 100


def command(
    name: Annotated[
        str | None, typer.Argument(help="A name or an alias, as on Hugging Face.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The models Preflop knows by name; with NAME, every fact of one with its source."""
    if name is None:
        _list(as_json)
    else:
        _one(name, as_json)


def _list(as_json: bool) -> None:
    from preflop.models.catalog import models
    from preflop.report.models_table import LEGEND, models_json, models_table

    if as_json:
        typer.echo(json.dumps(models_json(models()), indent=2))
        return
    console = _console()
    console.print(models_table(models()))
    console.print(LEGEND, highlight=False, markup=False)


def _one(name: str, as_json: bool) -> None:
    from preflop.models.catalog import find
    from preflop.report.models_table import model_json, model_text
    from preflop.report.terminal import print_lines

    facts = find(name)
    if as_json:
        typer.echo(json.dumps(model_json(facts), indent=2))
    else:
        print_lines(model_text(facts))


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_COLUMNS_OFF_TERMINAL)
