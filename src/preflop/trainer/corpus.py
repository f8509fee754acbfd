"""Text files to a token folder, a piece at a time: a corpus may be larger than memory.

The folder appears whole or not at all. Each document gives its end to validation, so that both splits
are of the same kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from preflop.errors import BadFile, BadNumber, PreflopError
from preflop.trainer.tokenizer import BytePairs, Bytes, Tokenizer, learn_pairs
from preflop.trainer.tokens import MANIFEST, PART_BYTES, SCHEMA, SPLITS, Data, dtype_for, open_data

PIECE_BYTES = 1 << 20
"""Text that is in memory at one time."""
_NEWLINE_REACH_BYTES = 1 << 16
"""A document is cut at a line's end where one is that near."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text file and where it is cut: bytes before `cut` train, the others validate."""

    path: Path
    size_bytes: int
    cut: int

    def span(self, split: str) -> tuple[int, int]:
        """First byte of the split and the one after its last."""
        return (0, self.cut) if split == "train" else (self.cut, self.size_bytes)


def write_data(
    texts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str = "bytes",
    vocab: int = 4096,
    validation_share: float = 0.1,
    files: str = "*.txt",
    force: bool = False,
) -> Data:
    """The token folder of the texts: train.bin, validation.bin, manifest.json (and tokenizer.json).

    Args:
        texts: files, and folders whose files that match `files` are taken, in order of their names.
        tokenizer: "bytes" or "bpe".
        vocab: ids of the byte-pair tokenizer, learned from the training split.
        validation_share: of each document's bytes, from its end.
        force: replace a token folder that is there.

    Raises:
        PreflopError: no text, text that is not UTF-8 (byte pairs), a folder that cannot be written.
    """
    if not 0 <= validation_share < 1:
        raise BadNumber(f"the validation share is {validation_share}; it must be at least 0 and below 1.")
    documents = [_document(path, validation_share) for path in _paths(texts, files)]
    if not any(document.size_bytes for document in documents):
        raise BadFile(f"the {len(documents)} text files are all empty.\n  Name files that hold text.")
    target = Path(out)
    _check_target(target, force=force)
    encoder = _tokenizer(tokenizer, documents, vocab)
    try:
        _write_folder(documents, encoder, target)
    except OSError as error:
        raise BadFile(
            f"cannot write {target}: {error.strerror or error}.\n"
            "  Nothing was left there. Name a folder that may be written to and has room."
        ) from error
    return open_data(target)


def _paths(texts: Sequence[str | os.PathLike[str]], files: str) -> list[Path]:
    """Every text file, folders opened."""
    found: list[Path] = []
    for text in texts:
        path = Path(text)
        if path.is_dir():
            inside = sorted(one for one in path.rglob(files) if one.is_file())
            if not inside:
                raise BadFile(
                    f"the folder {path} holds no file that matches {files!r}.\n"
                    "  Say which files are text with --files, for example --files '*.py'."
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise BadFile(f"no text file {str(path)!r}.\n  Name files or folders that exist.")
    return found


def _document(path: Path, validation_share: float) -> Document:
    size = path.stat().st_size
    wanted = size - int(size * validation_share)
    if wanted >= size:
        return Document(path, size, size)
    with path.open("rb") as stream:
        stream.seek(wanted - 1)  # a share below 1 leaves at least one byte before it
        around = stream.read(_NEWLINE_REACH_BYTES)
    line_end = around.find(b"\n")
    return Document(path, size, wanted + (line_end if line_end >= 0 else _character_start(around[1:])))


def _character_start(text: bytes) -> int:
    """Bytes to skip to the next first byte of a UTF-8 character (continuations are 10xxxxxx)."""
    return next((index for index, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)


def _pieces(document: Document, split: str) -> Iterator[bytes]:
    """The split's text of one document, cut after a line's end, else between characters."""
    start, stop = document.span(split)
    with document.path.open("rb") as stream:
        stream.seek(start)
        left, carried = stop - start, b""
        while left:
            read = stream.read(min(PIECE_BYTES, left))
            if not read:
                raise BadFile(f"{document.path} became shorter while it was read.")
            left -= len(read)
            piece = carried + read
            cut = len(piece) if not left else _cut(piece)
            yield piece[:cut]
            carried = piece[cut:]


def _cut(piece: bytes) -> int:
    line_end = piece.rfind(b"\n")
    if line_end >= 0:
        return line_end + 1
    cut = len(piece)
    while cut > max(len(piece) - 4, 1) and piece[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if cut > 1 and piece[cut - 1] >= 0xC0 else cut


def _utf8(document: Document, split: str) -> Iterator[bytes]:
    for piece in _pieces(document, split):
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFile(
                f"{document.path} is not UTF-8: {error.reason}.\n"
                "  Convert it, leave it out, or use --tokenizer bytes, which takes any bytes."
            ) from error
        yield piece


def _tokenizer(kind: str, documents: list[Document], vocab: int) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return learn_pairs((piece for one in documents for piece in _utf8(one, "train")), vocab)
    raise PreflopError(f"no tokenizer named {kind!r}; there are: bytes, bpe.")


def _check_target(target: Path, *, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise BadFile(f"{target} is a file; --out names the folder to make.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not (target / MANIFEST).exists():
        raise BadFile(f"the folder {target} holds other files.\n  Name a new folder.")
    if not force:
        raise BadFile(f"{target} holds data already.\n  Name another folder, or replace it with --force.")


def _write_folder(documents: list[Document], encoder: Tokenizer, target: Path) -> None:
    """Write beside the target, then take its place."""
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.absolute().parent))
    try:
        part.chmod(0o755)
        splits = {split: _write_split(documents, encoder, split, part) for split in SPLITS}
        if isinstance(encoder, BytePairs):
            encoder.save(part)
        manifest = {
            "schema": SCHEMA,
            "tokenizer": encoder.kind,
            "vocab": encoder.vocab,
            "document_end": encoder.document_end,
            "dtype": dtype_for(encoder.vocab),
            "documents": len(documents),
            "text_bytes": sum(document.size_bytes for document in documents),
            "splits": splits,
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if target.exists() and any(target.iterdir()):
            old = part.with_suffix(".old")
            os.rename(target, old)
            os.rename(part, target)
            shutil.rmtree(old)
        else:
            os.replace(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_split(
    documents: list[Document], encoder: Tokenizer, split: str, folder: Path
) -> dict[str, Any]:
    """One split's file, and what the manifest says of it."""
    dtype = np.dtype(dtype_for(encoder.vocab)).newbyteorder("<")
    end = np.array([encoder.document_end], dtype=dtype).tobytes()
    digest, tokens, largest = _Hashes(), 0, 0
    name = f"{split}.bin"
    with (folder / name).open("wb") as stream:
        for document in documents:
            start, stop = document.span(split)
            if start == stop:
                continue
            pieces = _pieces(document, split) if encoder.kind == "bytes" else _utf8(document, split)
            for piece in pieces:
                ids = encoder.encode(piece)
                raw = ids.astype(dtype).tobytes()
                stream.write(raw)
                digest.update(raw)
                tokens += len(ids)
                largest = max(largest, int(ids.max(initial=0)))
            stream.write(end)
            digest.update(end)
            tokens += 1
        stream.flush()
        os.fsync(stream.fileno())
    return {"file": name, "tokens": tokens, "largest": largest, **digest.found()}


class _Hashes:
    """SHA-256 of what a file holds, and of each part of `PART_BYTES` of it."""

    def __init__(self) -> None:
        self._whole, self._part, self._room = hashlib.sha256(), hashlib.sha256(), PART_BYTES
        self._parts: list[str] = []

    def update(self, raw: bytes) -> None:
        """More of the file."""
        self._whole.update(raw)
        view = memoryview(raw)
        while view:
            taken = view[: self._room]
            self._part.update(taken)
            self._room -= len(taken)
            view = view[len(taken) :]
            if not self._room:
                self._close()

    def _close(self) -> None:
        self._parts.append(self._part.hexdigest())
        self._part, self._room = hashlib.sha256(), PART_BYTES

    def found(self) -> dict[str, Any]:
        """What the manifest says: "sha256" and "parts"."""
        if self._room < PART_BYTES:
            self._close()
        return {"sha256": self._whole.hexdigest(), "parts": self._parts}
