"""`preflop hardware`: all devices in one table, or one with every figure's source; and both as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from preflop.hardware.checksum import Checksum
from preflop.hardware.device import CONFIDENCE, Device, Figure
from preflop.units import bytes_text

if TYPE_CHECKING:
    from rich.table import Table

_LISTED_PEAKS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
# Ending of a figure's name -> (what to divide by, unit shown). The longest ending that fits counts.
_SHOWN_AS: dict[str, tuple[float, str]] = {
    "_flops_per_s": (1e12, "TFLOP/s"),
    "_bytes_per_s": (1e9, "GB/s"),
    "_bits_per_s": (1e9, "Gbit/s"),
    "_hz": (1e6, "MHz"),
    "_gb": (1, "GB"),
    "_gib": (1, "GiB"),
    "_mb": (1, "MB"),
    "_kb": (1, "KB"),
    "_bits": (1, "bit"),
    "_w": (1, "W"),
}

LEGEND = (
    "Peaks are dense TFLOP/s, a multiply-add counted as two; - is no figure, not zero.\n"
    "Memory is what torch reports; * marks capacity as sold, where that is not known.\n"
    "Every figure with its source: preflop hardware NAME"
)


def devices_json(devices: Sequence[Device]) -> dict[str, Any]:
    """Every device with the figures that Preflop computes with."""
    return {"schema": "preflop.hardware/1", "devices": [_device_summary(device) for device in devices]}


def device_json(device: Device, checks: Sequence[Checksum]) -> dict[str, Any]:
    """One device: its summary, every figure with its source, and the two checks."""
    return {
        "schema": "preflop.hardware/1",
        "device": {
            **_device_summary(device),
            "figures": {name: asdict(figure) for name, figure in device.figures.items()},
            "peaks": {name: asdict(figure) for name, figure in device.peaks.items()},
            "checks": [{**asdict(check), "ratio": check.ratio} for check in checks],
        },
    }


def _device_summary(device: Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": device.name,
        "vendor": device.vendor,
        "arch": device.arch,
        "compute_capability": device.compute_capability,
        "aliases": device.aliases,
        "alias_note": device.alias_note,
        "torch_names": device.torch_names,
        "torch_names_basis": device.torch_names_basis,
        "accumulate": device.accumulate,
        "memory_bytes": device.memory_bytes,
        "memory_basis": device.memory_basis,
        "memory_sold_bytes": device.memory_sold_bytes,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "context_bytes": device.context_bytes,
        "peak_flops_per_s": {name: float(figure.value) for name, figure in device.peaks.items()},
    }


def figure_text(name: str, value: float | int | str) -> str:
    """A figure as people read it; its name's ending says its unit.

    >>> figure_text("memory_bandwidth_bytes_per_s", 3352e9), figure_text("tdp_w", 700)
    ('3352 GB/s', '700 W')
    """
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return bytes_text(value)
    for ending in sorted(_SHOWN_AS, key=len, reverse=True):
        if name.endswith(ending):
            divisor, unit = _SHOWN_AS[ending]
            return f"{value / divisor:.10g} {unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def memory_text(device: Device) -> str:
    """Memory of a device in a list: what torch reports, else as sold with a star.

    >>> from preflop.hardware.catalog import find
    >>> memory_text(find("h100")), memory_text(find("gb200"))
    ('79.19 GiB', '186 GB*')
    """
    if "torch_total_memory_bytes" in device.figures:
        return bytes_text(device.memory_bytes)
    name = "memory_sold_gib" if "memory_sold_gib" in device.figures else "memory_sold_gb"
    return f"{figure_text(name, device.figure(name).value)}*"


def devices_table(devices: Sequence[Device]) -> Table:
    """One row per device, vendor by vendor: memory, bandwidth, dense peaks, other names."""
    table = _table("Device", "Memory", "GB/s", *_LISTED_PEAKS.values())
    table.add_column("Also called", overflow="fold", ratio=1)
    rows = sorted(devices, key=lambda device: device.vendor)
    for number, device in enumerate(rows):
        if number and rows[number - 1].vendor != device.vendor:
            table.add_section()
        table.add_row(
            device.id,
            memory_text(device),
            f"{device.bandwidth_bytes_per_s / 1e9:.4g}",
            *(_peak_text(device, name) for name in _LISTED_PEAKS),
            ", ".join(device.aliases),
        )
    return table


def _peak_text(device: Device, name: str) -> str:
    return f"{float(device.peaks[name].value) / 1e12:.4g}" if name in device.peaks else "-"


def device_text(device: Device) -> str:
    """What one device is called, and what its figures stand on, in lines."""
    capability = device.compute_capability
    facts = (
        ("id", device.id),
        ("also called", ", ".join(device.aliases)),
        ("which", device.alias_note),
        ("torch reports", f"{', '.join(device.torch_names)} ({device.torch_names_basis})"),
        ("compute capability", ".".join(map(str, capability)) if capability else ""),
        ("memory", f"{bytes_text(device.memory_bytes)}: {device.memory_basis}"),
        ("accumulation", device.accumulate),
    )
    lines = [f"{device.name}, {device.vendor}, {device.arch}"]
    return "\n".join(lines + [f"  {label}: {text}" for label, text in facts if text])


def peaks_table(device: Device) -> Table:
    """Dense peaks of one device, each with the number of its source."""
    return _figures_table("Dense peak", "_flops_per_s", device.peaks, _source_numbers(device))


def figures_table(device: Device) -> Table:
    """All other figures of one device, each with the number of its source."""
    return _figures_table("Figure", "", device.figures, _source_numbers(device))


def sources_text(device: Device) -> str:
    """The sources that the tables number, one a line, and what the letters of trust mean."""
    lines = [f"[{number}] {source}" for source, number in _source_numbers(device).items()]
    trust = "; ".join(f"{letter} {words}" for letter, words in CONFIDENCE.items())
    return "\n".join((*lines, f"Trust: {trust}."))


def _source_numbers(device: Device) -> dict[str, int]:
    sources = dict.fromkeys(f.source for f in (*device.peaks.values(), *device.figures.values()))
    return {source: number for number, source in enumerate(sources, start=1)}


def _figures_table(
    heading: str, ending: str, figures: Mapping[str, Figure], source_numbers: Mapping[str, int]
) -> Table:
    from rich.text import Text

    table = _table(heading, "Value", "Trust", "Source")
    table.add_column("Note", overflow="fold", ratio=1)
    for name, figure in figures.items():
        value = figure_text(name + ending, figure.value)
        source = f"[{source_numbers[figure.source]}]"
        # As Text: a note is words, and may hold brackets that would read as markup.
        table.add_row(name, *map(Text, (value, figure.confidence, source, figure.note)))
    return table


def _table(first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def check_text(check: Checksum) -> str:
    """One check in a line.

    >>> check_text(Checksum("bandwidth", 300e9, 300e9, circular=False))
    'Check of bandwidth: stated 300, computed 300 GB/s, ratio 1.000'
    """
    divisor, unit = (1e9, "GB/s") if check.what == "bandwidth" else (1e12, "TFLOP/s")
    proof = " (proves nothing: an input was computed from it)" if check.circular else ""
    return (
        f"Check of {check.what}: stated {check.stated / divisor:.5g}, computed "
        f"{check.computed / divisor:.5g} {unit}, ratio {check.ratio:.3f}{proof}"
    )
