"""`preflop dtypes`: number formats, and what a value becomes in them. Needs no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from preflop.hardware.device import Device


def command(
    value: Annotated[
        str | None, typer.Argument(help="A number to round in each format; a negative one after --.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Show the dense rate of this device of `preflop hardware`.")
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Show which devices compute in each format, fastest first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Number formats: bytes, bits, range, epsilon; with VALUE, what it becomes in each; and which devices
    compute in them, at what dense rate."""
    from preflop.dtypes import number_formats, read_value, roundings
    from preflop.report import dtypes as report

    formats = number_formats()
    found = () if value is None else roundings(read_value(value))
    shown = _devices(device, everything=devices or as_json)
    if as_json:
        typer.echo(json.dumps(report.dtypes_json(formats, found, value, shown), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(
        report.dtypes_table(formats) if value is None else report.roundings_table(formats, found, value)
    )
    if shown:
        console.print(report.rates_table(formats, shown))


def _devices(name: str | None, *, everything: bool) -> tuple[Device, ...]:
    from preflop.hardware import catalog

    if name is not None:
        from preflop.timing.this import device_with_figures

        return (device_with_figures(name),)
    return catalog.devices() if everything else ()
