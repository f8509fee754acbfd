"""`preflop dtypes`: number formats and what a value becomes in them, as JSON and as a table."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from preflop.dtypes import Effect, NumberFormat, Rounding
from preflop.hardware.device import Device
from preflop.timing.formats import rates
from preflop.units import si_text

if TYPE_CHECKING:
    from rich.table import Table

FASTEST_SHOWN = 3

# What the table says of each effect; `{largest}` is the format's.
_WORDS = {
    Effect.EXACT: "exact",
    Effect.ROUNDED: "rounded",
    Effect.SUBNORMAL: "subnormal, fewer bits",
    Effect.UNDERFLOW: "underflows to 0",
    Effect.OVERFLOW: "overflows, largest is {largest:.5g}",
    Effect.UNSIGNED: "has no such number",
}


def dtypes_json(
    formats: tuple[NumberFormat, ...],
    roundings: tuple[Rounding, ...] = (),
    asked: str | None = None,
    devices: tuple[Device, ...] = (),
) -> dict[str, Any]:
    """Every format's figures; with a value, what it becomes in each.

    `dense_flops_per_s` holds the rate of each of `devices` that computes in the format, fastest first.
    An infinite result is the text "inf" or "-inf": JSON has no infinity.
    """
    found: dict[str, Any] = {
        "schema": "preflop.dtypes/1",
        "formats": [
            {**asdict(number_format), "dense_flops_per_s": rates(devices, number_format)}
            for number_format in formats
        ],
    }
    if asked is not None:
        found["value"] = asked
        found["roundings"] = [_rounding_json(rounding) for rounding in roundings]
    return found


def _rounding_json(rounding: Rounding) -> dict[str, Any]:
    value = rounding.value
    infinite = value is not None and math.isinf(value)
    return {
        "format": rounding.format,
        "value": str(value) if infinite else value,
        "effect": rounding.effect.value,
        "relative_error": rounding.relative_error,
    }


def dtypes_table(formats: tuple[NumberFormat, ...]) -> Table:
    """One row per format."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("format", no_wrap=True)
    for header in ("bytes", "bits", "largest", "least normal", "least", "epsilon"):
        table.add_column(header, justify="right", no_wrap=True)
    for f in formats:
        values = (f.largest, f.smallest_normal, f.smallest_subnormal, f.epsilon)
        table.add_row(f.name, f"{f.bytes:g}", _bits_text(f), *map(_value_text, values))
    table.caption = "bits: sign + exponent + mantissa"
    return table


def rates_table(formats: tuple[NumberFormat, ...], devices: tuple[Device, ...]) -> Table:
    """Which devices compute in each format, and the fastest with their dense rates."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("format", no_wrap=True)
    if len(devices) > 1:
        table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("dense rate")
    for number_format in formats:
        found = rates(devices, number_format)
        shown = ", ".join(
            f"{name} {si_text(rate, 'FLOP/s')}" for name, rate in list(found.items())[:FASTEST_SHOWN]
        )
        cells = [number_format.name] + ([str(len(found))] if len(devices) > 1 else [])
        table.add_row(*cells, shown or "none in the catalog")
    if len(devices) > FASTEST_SHOWN:
        table.caption = f"of {len(devices)} devices, the fastest {FASTEST_SHOWN}; --json has all"
    return table


def _bits_text(number_format: NumberFormat) -> str:
    """Sign, exponent and mantissa bits: "1+8+7"."""
    sign = number_format.bits - number_format.exponent_bits - number_format.mantissa_bits
    return f"{sign}+{number_format.exponent_bits}+{number_format.mantissa_bits}"


def _value_text(value: float | None) -> str:
    """Four digits, but small whole numbers in full.

    >>> _value_text(65504.0), _value_text(2.0**-24), _value_text(None)
    ('65504', '5.96e-08', '')
    """
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and value < 1e6 else f"{value:.4g}"


def roundings_table(formats: tuple[NumberFormat, ...], roundings: tuple[Rounding, ...], asked: str) -> Table:
    """One row per format: what the value becomes, and in words what happened."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("format", no_wrap=True)
    table.add_column(f"{asked} becomes", justify="right", no_wrap=True)
    table.add_column("relative error", justify="right", no_wrap=True)
    table.add_column("what happens", no_wrap=True)
    for number_format, rounding in zip(formats, roundings, strict=True):
        value = "none" if rounding.value is None else f"{rounding.value:.8g}"
        error = "" if rounding.relative_error is None else f"{rounding.relative_error:.2g}"
        words = _WORDS[rounding.effect].format(largest=_end(number_format, rounding))
        table.add_row(number_format.name, value, error, words)
    return table


def _end(number_format: NumberFormat, rounding: Rounding) -> float:
    """The end of the range that the value went past."""
    negative = rounding.value is not None and rounding.value < 0
    return number_format.smallest if negative else number_format.largest
