"""The devices Preflop knows: one TOML file each in `catalog/`, found by id, alias, name or torch's name.

Matching is exact after folding case and dropping blanks, hyphens and underscores. Never by substring:
"NVIDIA RTX A4000" holds "A40", and "NVIDIA L40S" holds "L4".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from preflop.errors import BadFile, UnknownDevice, described, nearest
from preflop.hardware.device import CONFIDENCE, Device, Figure
from preflop.units import GIB

if sys.version_info >= (3, 11) or TYPE_CHECKING:
    import tomllib
else:
    import tomli as tomllib

ADD = "To add it: one file in hardware/catalog/, see docs/add-a-gpu.md."

# How much less than the sold capacity (read as GiB) a driver may report: ECC and firmware take up to
# 8.2 % (devices with GDDR6 and ECC on). More than that is another card, or a slice of one.
_LARGEST_SHORTFALL = 0.09


def normalize(name: str) -> str:
    """A name as it is compared: case folded, blanks, hyphens and underscores dropped.

    >>> normalize("RTX 4090") == normalize("rtx_4090") == normalize("rtx4090")
    True
    """
    return re.sub(r"[\s_-]+", "", name.casefold())


@cache
def _texts() -> dict[str, str]:
    """TOML text of every device, by id."""
    folder = resources.files("preflop.hardware") / "catalog"
    files = {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}
    return {device_id: files[device_id].read_text("utf-8") for device_id in sorted(files)}


@cache
def _heads() -> dict[str, dict[str, Any]]:
    """Top-level keys of every device (names and aliases), without parsing its figures."""
    return {device_id: tomllib.loads(text.split("\n[", 1)[0]) for device_id, text in _texts().items()}


@cache
def _ids_by_name() -> dict[str, tuple[str, ...]]:
    """Ids of the devices that a normalised name means; more than one only for a shared torch name."""
    found: dict[str, list[str]] = {}
    for device_id, head in _heads().items():
        for name in (head["id"], head["name"], *head["aliases"], *head["torch_names"]):
            ids = found.setdefault(normalize(name), [])
            if device_id not in ids:
                ids.append(device_id)
    return {name: tuple(ids) for name, ids in found.items()}


def parse(text: str, where: str) -> Device:
    """The device that a TOML text describes.

    Raises:
        BadFile: the text is no TOML, lacks a key, or has a figure without a source or confidence.
    """
    try:
        data = tomllib.loads(text)
        sources = data["sources"]
        return Device(
            id=data["id"],
            name=data["name"],
            vendor=data["vendor"],
            arch=data["arch"],
            aliases=tuple(data["aliases"]),
            torch_names=tuple(data["torch_names"]),
            figures=_figures(data["figures"], sources, where),
            peaks=_figures(data["peaks"], sources, where),
            alias_note=data.get("alias_note", ""),
            torch_names_basis=data["torch_names_basis"],
            accumulate=data.get("accumulate", ""),
        )
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{where} is not valid TOML: {error}.\n  See docs/add-a-gpu.md.") from error
    except KeyError as error:
        raise BadFile(f"{where} lacks {error}.\n  See docs/add-a-gpu.md for what a device needs.") from error


def _figures(table: dict[str, Any], sources: dict[str, str], where: str) -> Mapping[str, Figure]:
    figures: dict[str, Figure] = {}
    for name, row in table.items():
        if row.get("source") not in sources or row.get("confidence") not in CONFIDENCE:
            raise BadFile(
                f"{where}: figure {name!r} needs a source named under [sources] and a confidence of "
                f"{', '.join(CONFIDENCE)}; it has {row.get('source')!r} and {row.get('confidence')!r}."
            )
        figures[name] = Figure(row["value"], sources[row["source"]], row["confidence"], row.get("note", ""))
    return MappingProxyType(figures)


@cache
def _load(device_id: str) -> Device:
    return parse(_texts()[device_id], f"hardware/catalog/{device_id}.toml")


def devices() -> tuple[Device, ...]:
    """Every device of the catalog, by id."""
    return tuple(_load(device_id) for device_id in sorted(_texts()))


def find(name: Any) -> Device:
    """The device of that id, alias, name or torch name.

    >>> find("h100").id, find("RTX 4090").id, find("NVIDIA L40S").id
    ('h100-sxm5-80gb', 'rtx-4090', 'l40s')

    Raises:
        UnknownDevice: no device, or more than one, has that name.
    """
    ids = _ids_by_name().get(normalize(name), ()) if isinstance(name, str) else ()
    if len(ids) == 1:
        return _load(ids[0])
    if ids:
        raise _ambiguous(name, ids)
    raise _unknown(name)


def match_torch_name(reported: str, total_memory_bytes: int | None = None) -> Device:
    """The device that torch reports by that name, e.g. `torch.cuda.get_device_name()`.

    Args:
        reported: the name, exactly as torch gives it (blanks and case do not matter).
        total_memory_bytes: `torch.cuda.get_device_properties(0).total_memory`. It tells cards that share
            a name apart, and refuses a card of this name with another memory (a variant, or a MIG slice).

    Raises:
        UnknownDevice: no device reports that name, several do, or its memory is another's.
    """
    wanted = normalize(reported)
    ids = [i for i, head in _heads().items() if wanted in map(normalize, head["torch_names"])]
    if not ids:
        raise _unknown(reported)
    fitting = ids
    # Apple's unified memory comes in several sizes per chip, so it tells nothing apart.
    if total_memory_bytes is not None and wanted != "mps":
        fitting = [i for i in ids if _memory_agrees(_load(i), total_memory_bytes)]
    if len(fitting) == 1:
        return _load(fitting[0])
    if fitting:
        raise _ambiguous(reported, fitting)
    known = ", ".join(f"{i} ({_load(i).memory_bytes} bytes)" for i in ids)
    raise UnknownDevice(
        f"{reported!r} with {total_memory_bytes} bytes of memory is not in the catalog.\n"
        f"  By that name there is {known}: another variant, or a slice of it?\n  {ADD}"
    )


def _memory_agrees(device: Device, total_memory_bytes: int) -> bool:
    """Whether a total that torch reports can be this device's."""
    sold = device.figures.get("memory_sold_gib") or device.figures["memory_sold_gb"]
    sold_as_gib_bytes = float(sold.value) * GIB
    largest_bytes = sold_as_gib_bytes
    for name in ("torch_total_memory_bytes", "nvidia_smi_total_bytes"):
        if name in device.figures:
            largest_bytes = max(largest_bytes, float(device.figures[name].value))
    smallest_bytes = (1 - _LARGEST_SHORTFALL) * sold_as_gib_bytes
    return smallest_bytes <= total_memory_bytes <= 1.01 * largest_bytes


def _known_names() -> list[str]:
    """Every name one can type, as written."""
    heads = _heads().values()
    return sorted({name for head in heads for name in (head["id"], *head["aliases"], *head["torch_names"])})


def _unknown(name: Any) -> UnknownDevice:
    if not isinstance(name, str):
        return UnknownDevice(
            f"a device is named by text, and this is {described(name)}.\n"
            "  Give a name of `preflop hardware`, or 'cpu', or 'this' for this machine as calibrated."
        )
    if normalize(name) == "cpu":
        return UnknownDevice(
            "cpu has no figures in the catalog: CPUs differ too much for one data sheet to stand for them.\n"
            "  Measure this machine with `preflop calibrate` and say --device this, or name a device of "
            "`preflop hardware`."
        )
    near = nearest(name, _known_names())
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    return UnknownDevice(f"no device named {name!r}.\n  {hint}All: `preflop hardware`.\n  {ADD}")


def _ambiguous(name: str, ids: Iterable[str]) -> UnknownDevice:
    return UnknownDevice(
        f"{name!r} is what several devices are called: {', '.join(ids)}.\n  Say which one, by its id."
    )
