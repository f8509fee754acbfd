"""The roofline: ridge points and the operators under the roof, as text, JSON and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preflop.errors import PreflopError
from preflop.report import tables
from preflop.report.json import account_to_dict
from preflop.report.tables import Heading, Table
from preflop.units import si_text

if TYPE_CHECKING:
    from preflop.account import Account, DeviceFacts


def need_device(device: DeviceFacts | None) -> DeviceFacts:
    """The device, if it has a roof.

    Raises:
        PreflopError: it has none, or one without a bandwidth: there is no roof then.
    """
    if device is None:
        raise PreflopError(
            "a roofline needs a device with a peak and a bandwidth; a CPU has neither in the catalog.\n"
            "  Name one: --device h100-sxm (all: `preflop hardware`); or measure this machine with "
            "`preflop calibrate` and say --device this."
        )
    if device.bandwidth_bytes_per_s is None:
        raise PreflopError(
            f"the catalog has no memory bandwidth for {device.name}: there is no roofline.\n"
            "  To add it: docs/add-a-gpu.md."
        )
    return device


def roofs_table(account: Account) -> Table:
    """The device's dense peaks and from which intensity each is the bound."""
    device = need_device(account.device)
    bandwidth = device.bandwidth_bytes_per_s or 0.0
    rows = tuple(
        (dtype, si_text(peak, "FLOP/s"), f"{peak / bandwidth:.1f}")
        for dtype, peak in device.peak_flops_per_s.items()
    )
    return Table(
        f"{device.name}: {si_text(bandwidth, 'B/s')}",
        (Heading("dtype", False), Heading("dense peak"), Heading("ridge, FLOPs per byte")),
        rows,
    )


def show_roofline(account: Account, *, top: int = 20) -> None:
    """Print the roofs and the operators under them, longest first."""
    from preflop.report import terminal

    parts = [
        terminal.text(tables.headline(account), "bold"),
        terminal.table(roofs_table(account)),
        terminal.table(tables.operators_table(account.operators, top)),
        "",
    ]
    if (time := tables.time_sentence(account)) is not None:
        parts.append(terminal.text(time))
    parts.append(terminal.text(account.verdict, "bold"))
    terminal.print_parts(terminal.make_console(), parts)


def roofline_json(account: Account) -> dict[str, Any]:
    """The roofs and the operators, in the names of the account's JSON."""
    device = need_device(account.device)
    whole = account_to_dict(account)
    bandwidth = device.bandwidth_bytes_per_s or 0.0
    return {
        "schema": "preflop.roofline/1",
        "subject": whole["subject"],
        "device": whole["device"],
        "ridge_points": {dtype: peak / bandwidth for dtype, peak in device.peak_flops_per_s.items()},
        "time": whole["time"],
        "operators": whole["operators"],
        "verdict": account.verdict,
        "assumptions": whole["assumptions"],
    }


def drawing(account: Account, suffix: str) -> bytes:
    """The content of a .svg, .png or .html file."""
    if suffix == ".html":
        from preflop.report.html import account_html

        return account_html(account).encode()
    from preflop.report.plots import picture

    return picture(account, suffix)
