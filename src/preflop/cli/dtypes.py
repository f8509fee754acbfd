"""`preflop dtypes`: number formats, and what a value becomes in them. Needs no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    value: Annotated[
        str | None, typer.Argument(help="A number to round in each format; a negative one after --.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Number formats: bytes, bits, range, epsilon; with VALUE, what it becomes in each."""
    from preflop.dtypes import number_formats, read_value, roundings
    from preflop.report.dtypes import dtypes_json, dtypes_table, roundings_table

    formats = number_formats()
    found = () if value is None else roundings(read_value(value))
    if as_json:
        typer.echo(json.dumps(dtypes_json(formats, found, value), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(dtypes_table(formats) if value is None else roundings_table(formats, found, value))
