"""Copies with their time on the device and their share of the step."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.account import Account, CopyRow
from preflop.ledgers.copies import ASKED

# Below this share of the step a copy does no harm and is only summed.
HARMLESS_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """One row of copies, priced."""

    row: CopyRow
    time_s: float | None
    """(bytes read + written) / bandwidth, a lower bound; None without a device."""
    share: float
    """Of the step's lower bound of time; without a device, of the bytes that the step moves."""

    @property
    def harmless(self) -> bool:
        """Too small to matter."""
        return self.share < HARMLESS_SHARE

    @property
    def hidden(self) -> bool:
        """Nobody asked for it by name."""
        return self.row.kind != ASKED


@dataclass(frozen=True, slots=True)
class StepCopies:
    """All copies of a step, largest share first."""

    copies: tuple[TimedCopy, ...]
    basis: str
    """What shares are of: "time" or "bytes"."""
    step_s: float | None
    step_bytes: int

    @property
    def hidden_share(self) -> float:
        """Share of the step in copies that nobody asked for by name."""
        return sum(copy.share for copy in self.copies if copy.hidden)


def step_copies(account: Account) -> StepCopies:
    """The account's copies with time and share."""
    step_bytes = account.traffic.read_bytes + account.traffic.write_bytes
    bandwidth = account.device.bandwidth_bytes_per_s if account.device is not None else None
    step_s = account.time.lower_s
    timed = []
    for row in account.copies:
        moved = row.bytes + row.read_bytes
        time_s = moved / bandwidth if bandwidth else None
        if step_s and time_s is not None:
            share = time_s / step_s
        else:
            share = moved / step_bytes if step_bytes else 0.0
        timed.append(TimedCopy(row, time_s, share))
    ordered = tuple(sorted(timed, key=lambda copy: -copy.share))
    return StepCopies(ordered, "time" if step_s and bandwidth else "bytes", step_s, step_bytes)
