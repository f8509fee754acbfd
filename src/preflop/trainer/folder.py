"""The run's folder: new, or gone on with; one process at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preflop.errors import BadFile
from preflop.files import write_atomically
from preflop.trainer import metrics
from preflop.trainer.config import FILE, TrainConfig, to_toml

_LOCK = ".lock"


def check_folder(config: TrainConfig, *, resume: bool) -> None:
    """Refuse a folder that cannot be the run's, before anything is priced or made.

    Raises:
        BadFile: it is a file, or holds a run and `resume` was not asked for.
    """
    run = Path(config.out)
    if run.exists() and not run.is_dir():
        raise BadFile(f"{run} is a file; --out names the run's folder.")
    held = any((run / "checkpoints").glob("step-*")) or (run / metrics.FILE).exists()
    if held and not resume:
        raise BadFile(
            f"{run} holds a run already.\n  Go on with it: --resume. Or name another folder with --out."
        )


def make_folder(config: TrainConfig) -> Path:
    """The run's folder, made if need be.

    Raises:
        BadFile: it cannot be made.
    """
    run = Path(config.out)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(
            f"cannot make the run folder {run}: {error.strerror}.\n  Name another with --out."
        ) from error
    return run


def save_config(run: Path, config: TrainConfig) -> None:
    """The settings, beside what they make; where the data is, from everywhere."""
    told = dataclasses.replace(config, data=str(Path(config.data).absolute()), out=str(run.absolute()))
    write_atomically(run / FILE, to_toml(told).encode())


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Nobody else trains in this folder. The lock goes with the process, however it ends.

    Raises:
        BadFile: somebody does.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    try:
        stream = (run / _LOCK).open("w", encoding="ascii")
    except OSError as error:
        raise BadFile(
            f"cannot write to the run folder {run}: {error.strerror}.\n  Name another with --out."
        ) from error
    with stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadFile(
                f"another process is training in {run}.\n  Wait for it, or name another folder with --out."
            ) from error
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield
