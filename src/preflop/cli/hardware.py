"""`preflop hardware`: the devices Preflop knows, with a source for each figure. Needs no torch."""

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
        str | None, typer.Argument(help="An id, an alias, or what torch reports.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The devices Preflop knows; with NAME, every figure of one with its source."""
    if name is None:
        _list(as_json)
    else:
        _one(name, as_json)


def _list(as_json: bool) -> None:
    from preflop.hardware.catalog import devices
    from preflop.report.hardware_table import LEGEND, devices_json, devices_table

    if as_json:
        typer.echo(json.dumps(devices_json(devices()), indent=2))
        return
    console = _console()
    console.print(devices_table(devices()))
    console.print(LEGEND, highlight=False, markup=False)


def _one(name: str, as_json: bool) -> None:
    from preflop.hardware.catalog import find
    from preflop.hardware.checksum import checksums
    from preflop.report.hardware_table import (
        check_text,
        device_json,
        device_text,
        figures_table,
        peaks_table,
        sources_text,
    )

    device = find(name)
    checks = checksums(device)
    if as_json:
        typer.echo(json.dumps(device_json(device, checks), indent=2))
        return
    console = _console()
    for part in (device_text(device), peaks_table(device), figures_table(device)):
        console.print(part, highlight=False, markup=False)
    console.print("\n".join((*map(check_text, checks), sources_text(device))), highlight=False, markup=False)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_COLUMNS_OFF_TERMINAL)
