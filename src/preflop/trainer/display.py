"""What a run shows: a live line in a terminal, plain lines in a pipe, nothing as a library."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from preflop.report.terminal import print_lines
from preflop.trainer.compare import Compared, Predicted, largest_difference
from preflop.trainer.metrics import Row
from preflop.units import bytes_text

if TYPE_CHECKING:
    from rich.live import Live

    from preflop.accounting import Account


# Below this a difference needs no reason.
_AGREES = 0.005
# In a pipe: of so few steps each has a line; of more, one comes when the last is so old.
_SHORT_STEPS = 20
_LINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What is shown of one step."""

    row: Row
    steps: int
    """Of the whole run."""
    expected: Predicted


class Display(Protocol):
    """Where a run tells what it does."""

    def account(self, account: Account) -> None:
        """The price of the step, before anything runs."""
        ...

    def say(self, text: str) -> None:
        """A sentence: where the run goes on, what was rejected, skipped or saved."""
        ...

    def step(self, moment: Moment) -> None:
        """A step has ended."""
        ...

    def close(self, compared: tuple[Compared, ...], summary: str) -> None:
        """The run has ended."""
        ...

    def stop(self) -> None:
        """Nothing more is shown, however the run ended: leave the terminal as it was."""
        ...


class Silent:
    """Shows nothing."""

    def account(self, account: Account) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, moment: Moment) -> None:
        """Nothing."""

    def close(self, compared: tuple[Compared, ...], summary: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, or one line that is written over again where there is a terminal."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lines on a stream.

        Args:
            every: steps between lines in a pipe; None: all steps of a short run, of a longer one about a line a
                second.
        """
        self._stream = stream or sys.stdout
        self._every = every
        self._clock = clock
        self._all = False
        self._last_s: float | None = None
        self._live: Live | None = None

    def account(self, account: Account) -> None:
        """The account, as `preflop account` shows it, without the list of operators."""
        account.show(top=1)
        self.say("\nEach step: what was measured, and in brackets what was predicted.")

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        if self._live is not None:
            with _random_kept():
                self._live.console.print(text, markup=False, highlight=False)
        else:
            print_lines(text, file=self._stream)

    def step(self, moment: Moment) -> None:
        """The live line; in a pipe a line of its own, where it is due."""
        if self._stream.isatty():
            with _random_kept():
                self._write_over(step_text(moment))
        elif self._is_due(moment):
            self._last_s = self._clock()
            print(step_text(moment), file=self._stream, flush=True)  # one line, however long: for grep

    def _is_due(self, moment: Moment) -> bool:
        """The first step seen, the last, those skipped or evaluated after always; of the others as `every` says."""
        row = moment.row
        if self._last_s is None:
            self._all = moment.steps - row.step < _SHORT_STEPS
            return True
        if row.step == moment.steps or not row.taken or row.validation_loss is not None:
            return True
        if self._every is not None:
            return row.step % self._every == 0
        return self._all or self._clock() - self._last_s >= _LINE_S

    def _write_over(self, text: str) -> None:
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream, highlight=False), auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self, compared: tuple[Compared, ...], summary: str) -> None:
        """The table of what was predicted and measured."""
        self.stop()
        for line in closing_lines(compared) if compared else ():
            self.say(line)
        self.say(summary)

    def stop(self) -> None:
        """End the live line; the terminal's cursor comes back."""
        if self._live is not None:
            with _random_kept():
                self._live.stop()
            self._live = None


@contextmanager
def _random_kept() -> Iterator[None]:
    """Python's random state afterwards as before: rich draws from it, and it belongs to the run."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def step_text(moment: Moment) -> str:
    """One step in one line; what was predicted stands in brackets beside what was measured."""
    row, expected = moment.row, moment.expected
    parts = [
        f"step {row.step}/{moment.steps}",
        f"loss {row.loss:.4f}",
        f"lr {row.learning_rate:.3g}",
        f"norm {row.grad_norm:.3g}",
        f"tokens/s {_beside(row.tokens_per_s, expected.tokens_per_s, '{:,.0f}'.format)}",
        f"MFU {_beside(row.mfu, expected.mfu, '{:.1%}'.format)}",
        f"peak {_beside(row.peak_bytes, expected.peak_bytes, lambda value: bytes_text(int(value)))}",
    ]
    if row.validation_loss is not None:
        parts.insert(2, f"validation {row.validation_loss:.4f}")
    if not row.taken:
        parts.append(f"SKIPPED: a gradient is not finite ({row.skipped} so far)")
    elif row.skipped:
        parts.append(f"skipped {row.skipped}")
    return "  ".join(parts)


def _beside(measured, expected, text) -> str:  # type: ignore[no-untyped-def]
    """What was measured and, in brackets, predicted; a dash where nobody knows."""
    shown = "-" if measured is None else text(measured)
    return shown if expected is None else f"{shown} [{text(expected)}]"


def closing_lines(compared: tuple[Compared, ...]) -> list[str]:
    """Predicted against measured, and the reason for the largest difference."""
    lines = ["", f"{'':<20}{'predicted':>16}{'measured':>16}{'difference':>12}"]
    for row in compared:
        off = "-" if row.difference is None else f"{row.difference:+.1%}"
        lines.append(
            f"{row.what:<20}{_figure(row, row.predicted):>16}{_figure(row, row.measured):>16}{off:>12}"
        )
    largest = largest_difference(compared)
    if largest is not None and abs(largest.difference or 0.0) < _AGREES:
        lines.append(f"What could be compared agrees within {_AGREES:.1%}.")
    elif largest is not None:
        lines.append(f"Largest difference, {largest.what}: {largest.reason}.")
    lines += sorted(
        {f"No prediction of {row.what}: {row.reason}." for row in compared[:2] if row.predicted is None}
    )
    return lines


def _figure(row: Compared, value: float | None) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return bytes_text(int(value))
    return {"s": f"{value:.4g} s", "tokens/s": f"{value:,.0f}", "share": f"{value:.1%}"}[row.unit]
