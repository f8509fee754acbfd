"""A token folder: what `preflop data` wrote, read through memory maps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from preflop.errors import BadFile, BadSubject

SCHEMA = "preflop.data/1"
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
_SCAN_BYTES = 1 << 28
"""Files up to this size are read whole when they are opened (256 MiB): their hash, and ids beyond the
vocabulary."""
PART_BYTES = 1 << 22
"""The manifest has a hash of each part of this size (4 MiB). Of larger files `_PARTS_READ` parts, spread evenly
from the first to the last, are read when they are opened."""
_PARTS_READ = 16

Tokens = NDArray[Any]
"""Token ids, one after another, mapped and not read."""


def dtype_for(vocab: int) -> str:
    """The smallest unsigned integer that holds every id.

    >>> dtype_for(256), dtype_for(257), dtype_for(100_000)
    ('uint8', 'uint16', 'uint32')
    """
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


@dataclass(frozen=True, slots=True)
class Data:
    """A token folder: its two splits and what its manifest says."""

    folder: Path
    tokenizer: str
    vocab: int
    document_end: int
    train: Tokens
    validation: Tokens
    fingerprint: str
    """Names the tokens: two folders with equal fingerprints hold the same ones, in the same order."""

    def to_dict(self) -> dict[str, Any]:
        """What `preflop data --json` prints."""
        return {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "tokenizer": self.tokenizer,
            "vocab": self.vocab,
            "train_tokens": len(self.train),
            "validation_tokens": len(self.validation),
        }


def open_data(folder: str | Path) -> Data:
    """The token folder, its files mapped and held to the manifest.

    Raises:
        BadFile: missing, empty, damaged, of another version, or with ids beyond the vocabulary.
    """
    path = Path(folder)
    manifest = _manifest(path)
    try:
        vocab, dtype = int(manifest["vocab"]), str(manifest["dtype"])
        train, validation = (_tokens(path, manifest["splits"][split], dtype, vocab) for split in SPLITS)
        fingerprint = _fingerprint(manifest)
        tokenizer, end = str(manifest["tokenizer"]), int(manifest["document_end"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(
            f"{path / MANIFEST} is damaged ({error!r}).\n  Make the folder anew: `preflop data`."
        ) from error
    if not len(train):
        raise BadFile(
            f"{path} holds no token to train on.\n  Make it from texts that are not empty: `preflop data`."
        )
    return Data(path, tokenizer, vocab, end, train, validation, fingerprint)


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BadFile(f"no data folder {str(path)!r}.\n  Make one: `preflop data TEXT... --out {path}`.")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadFile(
            f"{path} is not a data folder: it has no {MANIFEST}.\n"
            "  Make one: `preflop data TEXT... --out DIR`."
        ) from error
    except (OSError, ValueError) as error:
        raise BadFile(
            f"cannot read {path / MANIFEST}: {error}.\n  Make the folder anew: `preflop data`."
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise BadFile(f"{path / MANIFEST} is {schema!r}, and this version reads {SCHEMA!r}.\n  Make it anew.")
    return dict(manifest)


def _tokens(path: Path, split: dict[str, Any], dtype: str, vocab: int) -> Tokens:
    """One split, mapped. Sizes and hashes are checked; ids of small files too, and of every batch later."""
    file, count = path / str(split["file"]), int(split["tokens"])
    wanted = np.dtype(dtype).newbyteorder("<")
    try:
        size = file.stat().st_size
    except OSError as error:
        raise BadFile(
            f"cannot read {file}: {error.strerror}.\n  Make the folder anew: `preflop data`."
        ) from error
    if size != count * wanted.itemsize:
        raise BadFile(
            f"{file} has {size} bytes, and the manifest says {count} tokens of {wanted.itemsize}.\n"
            "  It was cut or changed. Make the folder anew: `preflop data`."
        )
    if not count:
        return np.empty(0, dtype=wanted)
    tokens = np.memmap(file, dtype=wanted, mode="r", shape=(count,))
    _check_hashes(file, tokens, split)
    if size <= _SCAN_BYTES:
        check_ids(tokens, vocab, str(file))
    return tokens


def _check_hashes(file: Path, tokens: Tokens, split: dict[str, Any]) -> None:
    """The file is what was written: whole where it is small, else in samples (see `PART_BYTES`).

    A manifest of an older Preflop has no hashes of parts; its large files are held to their size alone.

    Raises:
        BadFile: a hash is not the manifest's.
    """
    raw = tokens.data.cast("B")
    wrong = None
    if len(raw) <= _SCAN_BYTES:
        if hashlib.sha256(raw).hexdigest() != split["sha256"]:
            wrong = "its SHA-256 is not the manifest's"
    elif parts := split.get("parts"):
        for part in np.linspace(0, len(parts) - 1, _PARTS_READ).astype(int):
            start = int(part) * PART_BYTES
            if hashlib.sha256(raw[start : start + PART_BYTES]).hexdigest() != parts[part]:
                wrong = f"the SHA-256 of its bytes from {start:,} on is not the manifest's"
    if wrong is not None:
        raise BadFile(
            f"{file} was changed: {wrong}.\n  Restore it from a copy, or make the folder anew: `preflop data`."
        )


def check_ids(ids: Tokens, vocab: int, where: str) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        BadSubject: says the id and the vocabulary.
    """
    largest = int(ids.max(initial=0))
    if largest >= vocab:
        raise BadSubject(
            f"{where} holds token id {largest}, and the vocabulary has {vocab} (ids 0 to {vocab - 1}).\n"
            "  Train with the vocabulary of the data (leave --vocab out), or make the data anew."
        )


def _fingerprint(manifest: dict[str, Any]) -> str:
    parts = [str(manifest["vocab"]), *(str(manifest["splits"][split]["sha256"]) for split in SPLITS)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
