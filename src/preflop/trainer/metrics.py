"""RUN/metrics.csv: one row per step, in full precision, never one twice."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from preflop.errors import BadFile, PreflopError
from preflop.files import write_atomically

FILE = "metrics.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one step did. Empty where it does not apply."""

    step: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Of this step, over all processes."""
    taken: int
    """1: the parameters were updated; 0: a gradient was not finite."""
    skipped: int
    """Steps not taken so far."""
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: int | None
    seconds: float
    """Of this step."""
    scale: float | None
    """The gradient scaler's factor after the step."""
    validation_loss: float | None
    samples: str
    """Names the samples that were drawn: equal for equal ones in equal order."""


COLUMNS = [one.name for one in fields(Row)]


def _text(value: Any) -> str:
    """Floats as the shortest text that reads back to the same bits."""
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


class Metrics:
    """The run's CSV file (and TensorBoard events), appended to."""

    def __init__(self, run: Path, *, after_step: int, tensorboard: bool = False) -> None:
        """Rows after `after_step` are dropped: the run goes on from there.

        Raises:
            BadFile: the file cannot be written, or is of another kind.
        """
        self._file = run / FILE
        _truncate(self._file, after_step)
        with _told(self._file):
            self._stream: TextIO = self._file.open("a", encoding="utf-8", newline="")
        self._board = _board(run, after_step) if tensorboard else None

    def write(self, row: Row) -> None:
        """Add a row; it has left this process when this returns."""
        line = ",".join(_text(getattr(row, name)) for name in COLUMNS)
        with _told(self._file):
            self._stream.write(line + "\n")
            self._stream.flush()
        if self._board is not None:
            for name in COLUMNS[2:]:
                value = getattr(row, name)
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, row.step)

    def flush(self) -> None:
        """Rows reach the disk, before the checkpoint that counts on them."""
        with _told(self._file):
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """No more rows."""
        with contextlib.suppress(OSError):  # what could not be flushed was told when it was written
            self._stream.close()
        if self._board is not None:
            self._board.close()


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """The system's error, as ours."""
    try:
        yield
    except OSError as error:
        raise BadFile(
            f"cannot write {file}: {error.strerror}.\n"
            "  What was saved still stands: make room, or make it writable, and go on with --resume."
        ) from error


def _truncate(file: Path, after_step: int) -> None:
    """Keep the header and whole rows up to a step. A row cut short by a crash goes too."""
    header = ",".join(COLUMNS)
    kept = [header]
    if file.exists():
        with _told(file):
            lines = file.read_text("utf-8", errors="replace").splitlines()
        if lines and lines[0] != header:
            raise BadFile(
                f"{file} has other columns than this version writes.\n  Move it away, or use another --out."
            )
        for line in lines[1:]:
            cells = next(csv.reader(io.StringIO(line)), [])
            if len(cells) == len(COLUMNS) and cells[0].isdigit() and int(cells[0]) <= after_step:
                kept.append(line)
    write_atomically(file, ("\n".join(kept) + "\n").encode())


def _board(run: Path, after_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PreflopError(
            "--tensorboard needs the tensorboard package, which is not installed.\n"
            "  Run `pip install 'preflop[train]'`, or leave it out: metrics.csv holds the same numbers."
        ) from error
    return SummaryWriter(str(run / "tensorboard"), purge_step=after_step + 1)
