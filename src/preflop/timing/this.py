"""This machine, as `preflop calibrate` measured it: a device of its own, with its curves.

The file lies in the user's data folder (`calibration_path`); PREFLOP_CALIBRATION names another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preflop.errors import BadFile
from preflop.hardware.catalog import find
from preflop.hardware.device import Device, Figure

if sys.version_info >= (3, 11) or TYPE_CHECKING:
    import tomllib
else:
    import tomli as tomllib

THIS = "this"
SCHEMA = "preflop.calibration/3"
_HOW = "Run `preflop calibrate` first."


def calibration_path() -> Path:
    """Where the calibration of this machine lies, written or not."""
    named = os.environ.get("PREFLOP_CALIBRATION")
    if named:
        return Path(named)
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "preflop" / "this.toml"


def is_this(device: Device) -> bool:
    """Whether the device is this machine, calibrated."""
    return device.id == THIS


def is_serial(device: Device) -> bool:
    """Whether the host runs the kernels itself, as a calibrated CPU does."""
    return is_this(device) and bool(this_table()["device"].get("serial"))


def recorded_as(device: Device) -> str:
    """The id by whose rules a step for the device is recorded: "cpu" for a calibrated CPU."""
    return str(this_table()["device"]["records_as"]) if is_this(device) else device.id


def this_device() -> Device:
    """This machine as a device: its best measured rates stand where a catalog has data-sheet figures.

    Raises:
        BadFile: it was never calibrated, or the file cannot be read.
    """
    table = calibration(calibration_path(), _stamp(calibration_path()))
    head, source = table["device"], f"log: preflop calibrate, {table['measured_at']}"
    figures = {name: Figure(value, source, "L") for name, value in table["figures"].items()}
    peaks = {name: Figure(value, source, "L") for name, value in table["peaks"].items()}
    return Device(
        id=THIS,
        name=head["name"],
        vendor=head["vendor"],
        arch=head["arch"],
        aliases=(THIS,),
        torch_names=(),
        figures=figures,
        peaks=peaks,
    )


def device_with_figures(name: Any) -> Device:
    """The device of that name, for what cannot be answered without its figures: of the catalog, or "this".

    Raises:
        UnknownDevice: no such device, or "cpu", which has no figures. BadFile: "this", not calibrated.
    """
    return this_device() if isinstance(name, str) and name.casefold() == THIS else find(name)


def this_table() -> dict[str, Any]:
    """The calibration as written.

    Raises:
        BadFile: it was never calibrated, or the file cannot be read.
    """
    return calibration(calibration_path(), _stamp(calibration_path()))


def other_threads(threads: int) -> str | None:
    """Why times measured on this machine's CPU hold for no run with so many threads; None where they do.

    Raises:
        BadFile: it was never calibrated, or the file cannot be read.
    """
    head = this_table()["device"]
    if head["records_as"] != "cpu" or head["threads"] == threads:
        return None
    return (
        f"torch uses {threads} threads, and `preflop calibrate` ran with {head['threads']}.\n"
        "  Set OMP_NUM_THREADS to that number, or calibrate again."
    )


def this_curves() -> Mapping[str, Any]:
    """The measured curves of this machine."""
    found: Mapping[str, Any] = this_table()["curves"]
    return found


@lru_cache(maxsize=4)
def calibration(path: Path, stamp: int) -> dict[str, Any]:
    """A calibration file; `stamp` is its time of change, so that a newer file is read anew."""
    del stamp
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadFile(f"this machine was not calibrated: no file {path}.\n  {_HOW}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadFile(f"{path} cannot be read: {error}.\n  {_HOW}") from error
    if table.get("schema") != SCHEMA:
        raise BadFile(f"{path} is no calibration of this version ({SCHEMA}).\n  {_HOW}")
    return table


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
