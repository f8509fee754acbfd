"""Text to token ids: bytes as they are, or byte pairs learned from the text on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from preflop.errors import BadFile, PreflopError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Pairs

FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# Every byte is a token of its own before the first merge, and one more ends a document.
SMALLEST_PAIR_VOCAB = 257


class Tokenizer(Protocol):
    """What turns a piece of a document into ids and back."""

    kind: str
    vocab: int
    """Ids run from 0 to vocab - 1."""
    document_end: int
    """The id after each document."""

    def encode(self, piece: bytes) -> NDArray[np.integer]:
        """Ids of a piece of UTF-8 text (of any bytes, for the byte tokenizer)."""
        ...

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """The bytes that the ids stand for; document ends are left out."""
        ...


class Bytes:
    """A token is a byte. A document ends with byte 0, which text does not hold."""

    kind = "bytes"
    vocab = 256
    document_end = 0

    def encode(self, piece: bytes) -> NDArray[np.integer]:
        """The bytes themselves.

        >>> Bytes().encode(b"hi").tolist()
        [104, 105]
        """
        return np.frombuffer(piece, dtype=np.uint8)

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """The ids as bytes, without document ends."""
        return ids.astype(np.uint8).tobytes().replace(b"\0", b"")


class BytePairs:
    """Byte pairs merged as GPT-2 does (Sennrich et al. 2016, arXiv:1508.07909), by `tokenizers`."""

    kind = "bpe"

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._pairs.encode_special_tokens = True  # a document that holds "<|endoftext|>" does not end there
        self.vocab = int(pairs.get_vocab_size())
        end = pairs.token_to_id(END_OF_TEXT)
        if end is None:
            raise ValueError(f"it has no token {END_OF_TEXT}, which ends a document")
        self.document_end = end

    def encode(self, piece: bytes) -> NDArray[np.integer]:
        """Ids of a piece of UTF-8 text."""
        return np.asarray(self._pairs.encode(piece.decode("utf-8")).ids, dtype=np.uint32)

    def decode(self, ids: NDArray[np.integer]) -> bytes:
        """The text that the ids stand for, without document ends."""
        return str(self._pairs.decode(ids.tolist(), skip_special_tokens=True)).encode("utf-8")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, which `tokenizers` and `transformers` read."""
        self._pairs.save(str(folder / FILE))


def learn_pairs(pieces: Iterable[bytes], vocab: int) -> BytePairs:
    """A byte-pair tokenizer of at most `vocab` ids, learned from the pieces; they are read once.

    Raises:
        PreflopError: the `tokenizers` library is missing, or the vocabulary is too small.
    """
    if vocab < SMALLEST_PAIR_VOCAB:
        raise PreflopError(
            f"--vocab is {vocab}; byte pairs need at least {SMALLEST_PAIR_VOCAB} "
            "(256 bytes and the end of a text)."
        )
    library = _library()
    pairs = library.Tokenizer(library.models.BPE())
    pairs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pairs.train_from_iterator((piece.decode("utf-8") for piece in pieces), trainer)
    return BytePairs(pairs)


def load_pairs(folder: Path) -> BytePairs:
    """The tokenizer that `save` wrote.

    Raises:
        BadFile: it is missing or damaged.
    """
    library = _library()
    try:
        return BytePairs(library.Tokenizer.from_file(str(folder / FILE)))
    except Exception as error:  # tokenizers raises bare Exception
        raise BadFile(f"cannot read the tokenizer {folder / FILE}: {error}.") from error


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise PreflopError(
            "byte pairs need the `tokenizers` library, which is not installed.\n"
            "  Run `pip install 'preflop[train]'`, or use --tokenizer bytes."
        ) from error
    return tokenizers
