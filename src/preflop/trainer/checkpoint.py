"""Checkpoints that a crash cannot hurt.

A checkpoint is a folder RUN/checkpoints/step-N: tensors as `torch.distributed.checkpoint` writes them,
`state.json` with every number beside them, the random states of each rank, and a manifest with each
file's size and SHA-256. It is written under a temporary name, flushed, read back, and only then
renamed. An old one is deleted after the new one stands, and is renamed before: so whatever is called
step-N was once complete, and what was damaged since is found by its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from preflop.errors import BadFile
from preflop.trainer.processes import Processes

# torch says so at each save and load of a single process, which is what is meant.
warnings.filterwarnings("ignore", "torch.distributed is .*single process", UserWarning)

SCHEMA = "preflop.checkpoint/1"
MANIFEST, STATE = "manifest.json", "state.json"
_PART, _DELETING = ".part", ".deleting"
_NAME = re.compile(r"step-(\d{8,})")
_READ_BYTES = 1 << 22
# torch's own is a BaseException.
_FAILURES = (Exception, CheckpointException)


class SaveFailed(BadFile):
    """A checkpoint could not be written. Those that stood before, if any, still stand."""


@dataclass(slots=True)
class Snapshot:
    """What a checkpoint holds."""

    tensors: dict[str, torch.Tensor]
    """Flat: "model/NAME", "optimizer/STATE/NAME"."""
    state: dict[str, Any]
    """JSON: progress, scheduler, scaler, config, versions."""
    random: dict[str, Any]
    """JSON: random states of this rank."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest valid checkpoint, and the newer ones that were not."""

    path: Path | None
    state: dict[str, Any] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    """A sentence each: which, and why."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run: Path,
        *,
        keep: int,
        processes: Processes,
        asynchronous: bool = False,
        observe: Callable[[str], None] = lambda moment: None,
    ) -> None:
        self.folder = run / "checkpoints"
        self._keep, self._processes, self._asynchronous = keep, processes, asynchronous
        self._observe = observe
        self._writing: threading.Thread | None = None
        self._failure: SaveFailed | None = None
        self._staging: dict[str, torch.Tensor] = {}

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Save, or begin to save beside the loop. An earlier save is waited for first.

        Raises:
            SaveFailed: this save, or the one before it, could not be written.
        """
        self.wait()
        if not self._asynchronous:
            self._save(step, snapshot)
            return
        held = Snapshot(self._copied(snapshot.tensors), snapshot.state, snapshot.random)
        self._writing = threading.Thread(target=self._save_beside, args=(step, held), name="checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            SaveFailed: the save that was waited for could not be written.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of every tensor, in memory that is kept from save to save."""
        for name, tensor in tensors.items():
            mine = self._staging.get(name)
            if mine is None or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                mine = torch.empty_like(tensor.detach(), device="cpu" if plain else None)
                self._staging[name] = mine
            mine.copy_(tensor.detach())
        return {name: self._staging[name] for name in tensors}

    def _save_beside(self, step: int, snapshot: Snapshot) -> None:
        try:
            self._save(step, snapshot)
        except SaveFailed as error:
            self._failure = error

    def _save(self, step: int, snapshot: Snapshot) -> None:
        final = self.folder / f"step-{step:08d}"
        part = final.with_name(final.name + _PART)
        try:
            self._together(lambda: self._begin(part), only_first=True)
            self._together(lambda: self._write_tensors(part, snapshot))
            self._together(lambda: self._finish(part, final, snapshot), only_first=True)
        except _FAILURES as error:
            if self._processes.first:
                shutil.rmtree(part, ignore_errors=True)
            stand = f"Nothing was deleted: older checkpoints in {self.folder} still stand."
            raise SaveFailed(
                f"the checkpoint of step {step} could not be written: {_reason(error)}.\n"
                f"  {stand if self.has_any() else 'There is no older one.'} Make room, or make the folder writable, "
                "and go on with --resume."
            ) from error

    def _together(self, work: Callable[[], None], *, only_first: bool = False) -> None:
        """Do one part of the save in each process, or in the first; where one fails, all of them do."""
        failure: BaseException | None = None
        if self._processes.first or not only_first:
            try:
                work()
            except _FAILURES as error:
                failure = error
        failed = self._processes.any(failure is not None, self._processes.checkpoint_group)
        if failure is not None:
            raise failure
        if failed:
            raise OSError(5, "another process of the run failed to write its part")

    def _begin(self, part: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        self._observe("save_begin")

    def _write_tensors(self, part: Path, snapshot: Snapshot) -> None:
        run = self._processes
        dcp.save(
            snapshot.tensors,
            storage_writer=FileSystemWriter(part, single_file_per_rank=True, sync_files=True),
            process_group=run.checkpoint_group,
        )
        self._observe("save_tensors")
        _write_json(part / f"rng-{run.rank}.json", snapshot.random)

    def _finish(self, part: Path, final: Path, snapshot: Snapshot) -> None:
        """State and manifest, everything read back; then the name, and only then old ones go."""
        _write_json(part / STATE, snapshot.state)
        self._observe("save_state")
        _write_json(part / MANIFEST, {"schema": SCHEMA, "files": _hashes(part)})
        self._observe("save_manifest")
        missing = set(snapshot.tensors) - set(saved_tensors(part))
        if missing:
            raise OSError(5, f"{len(missing)} tensors are not in what was written")
        _flush(part)
        self._observe("save_rename")
        if final.exists():  # of the same step, and damaged: a valid one is never saved again
            _delete(final)
        os.rename(part, final)
        _flush(self.folder)
        self._observe("save_renamed")
        self._retire()

    # -- keeping ----------------------------------------------------------------------------------

    def _retire(self) -> None:
        """Delete all but the newest `keep` and the best; the newest was just seen to be valid."""
        found = self._all()
        kept = {path for _, path in found[-self._keep :]}
        best = self.best()
        for _, path in found:
            if path not in kept and path != best:
                self._observe("retire")
                _delete(path)

    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss; None where none was evaluated."""
        scored = []
        for step, path in self._all():
            try:
                loss = json.loads((path / STATE).read_text("utf-8")).get("validation_loss")
            except (OSError, ValueError):
                continue
            if isinstance(loss, float) and loss == loss:  # noqa: PLR0124 - NaN is not best
                scored.append((loss, step, path))
        return min(scored)[2] if scored else None

    def has(self, step: int) -> bool:
        """True where a valid checkpoint of this step stands already."""
        path = self.folder / f"step-{step:08d}"
        return path.is_dir() and why_invalid(path) is None

    def has_any(self) -> bool:
        """True where something stands that is called a checkpoint."""
        return bool(self._all())

    def _all(self) -> list[tuple[int, Path]]:
        """(step, folder) of everything called a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match and path.is_dir())

    def clean(self) -> None:
        """Delete what an interrupted save or deletion left behind."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.endswith((_PART, _DELETING)):
                    shutil.rmtree(path, ignore_errors=True)

    # -- finding and loading ----------------------------------------------------------------------

    def find(self) -> Found:
        """The newest valid checkpoint, and why newer ones were rejected. Every file is read."""
        rejected: list[str] = []
        for _, path in reversed(self._all()):
            reason = why_invalid(path)
            if reason is None:
                _check_version(path)
                return Found(path, json.loads((path / STATE).read_text("utf-8")), tuple(rejected))
            rejected.append(f"{path.name}: {reason}")
        return Found(None, {}, tuple(rejected))


def why_invalid(path: Path) -> str | None:
    """Why a checkpoint cannot be used, in words; None where each file is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name in (STATE, ".metadata"):
        if name not in files:
            return f"its {MANIFEST} names no {name}"
    for name, (size, digest) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, and {size} were written"
        try:
            found = _sha256(file)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != digest:
            return f"{name} was changed: its SHA-256 is not the one that was written"
    return None


def _check_version(path: Path) -> None:
    schema = json.loads((path / MANIFEST).read_text("utf-8")).get("schema")
    if schema != SCHEMA:
        raise BadFile(
            f"{path} is of version {schema!r}, and this Preflop reads {SCHEMA!r}.\n"
            "  Resume with the Preflop that wrote it, or start anew with another --out."
        )


def read_random(path: Path, rank: int) -> dict[str, Any] | None:
    """The random states of a rank; None where the checkpoint was written by fewer ranks."""
    file = path / f"rng-{rank}.json"
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def saved_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor that a checkpoint holds."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items()}


def load_tensors(path: Path, into: dict[str, torch.Tensor], processes: Processes) -> None:
    """Fill the tensors, whole or sharded, from a checkpoint of any number of ranks."""
    dcp.load(
        into,
        storage_reader=FileSystemReader(path),
        process_group=processes.checkpoint_group,
    )


def _reason(error: BaseException) -> str:
    """The operating system's reason where there is one: torch wraps it."""
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return str(inner.strerror)
        inner = inner.__cause__ or inner.__context__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _hashes(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        file.name: (file.stat().st_size, _sha256(file))
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name != MANIFEST
    }


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _write_json(file: Path, value: Any) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _flush(folder: Path) -> None:
    """Names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    """Rename, then delete: what is half deleted does not look like a checkpoint."""
    gone = path.with_name(path.name + _DELETING)
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)
