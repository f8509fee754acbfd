"""Text to tokens: streamed, split, exact, and refused where it cannot be right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflop.errors import BadFile, BadSubject, PreflopError
from preflop.trainer import corpus
from preflop.trainer.batches import Plan, Windows, training_steps, validation_batches
from preflop.trainer.corpus import write_data
from preflop.trainer.order import shuffled
from preflop.trainer.tokenizer import Bytes, load_pairs
from preflop.trainer.tokens import MANIFEST, open_data

POEM = "Röslein, Röslein, Röslein rot,\nRöslein auf der Heiden. 🌹\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_bytes_are_the_text(tmp_path: Path) -> None:
    """Training and validation tokens of a document, put together, are its bytes; each ends with 0."""
    data = write_data([write(tmp_path / "a.txt", POEM * 20)], tmp_path / "out", validation_share=0.25)
    whole = data.train[:-1].tobytes() + data.validation[:-1].tobytes()
    assert whole.decode() == POEM * 20
    assert data.train[-1] == data.validation[-1] == 0
    assert len(data.validation) == pytest.approx(0.25 * len(whole), abs=len(POEM.encode()))
    assert data.train[-2] == ord("\n")


def test_byte_pairs_give_the_text_back(tmp_path: Path) -> None:
    """Encoded and decoded, the text is what it was: accents, emoji, and a literal end-of-text mark."""
    text = (POEM + "a <|endoftext|> inside\r\n\ttab\n") * 30
    data = write_data([write(tmp_path / "a.txt", text)], tmp_path / "out", tokenizer="bpe", vocab=300)
    pairs = load_pairs(tmp_path / "out")
    assert (pairs.decode(np.array(data.train)) + pairs.decode(np.array(data.validation))).decode() == text
    assert data.vocab == pairs.vocab <= 300
    assert len(data.train) < len(text.encode())
    assert data.train.dtype == np.uint16


def test_byte_pairs_learn_the_same_twice(tmp_path: Path) -> None:
    """Equal texts give equal tokenizers and equal fingerprints."""
    source = write(tmp_path / "a.txt", POEM * 50)
    one, two = (write_data([source], tmp_path / name, tokenizer="bpe", vocab=320) for name in "xy")
    assert one.fingerprint == two.fingerprint
    assert (tmp_path / "x/tokenizer.json").read_bytes() == (tmp_path / "y/tokenizer.json").read_bytes()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_pieces_never_hold_the_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """Read 64 bytes at a time, characters of several bytes and lines longer than that included: no loss."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 64)
    text = ("ü" * 300 + "\n" + POEM) * 5 + "🌹" * 100
    largest = []
    encode = Bytes.encode
    monkeypatch.setattr(
        Bytes, "encode", lambda self, piece: (largest.append(len(piece)), encode(self, piece))[1]
    )
    data = write_data([write(tmp_path / "a.txt", text)], tmp_path / "out", tokenizer=tokenizer, vocab=260)
    decoder = Bytes() if tokenizer == "bytes" else load_pairs(tmp_path / "out")
    assert (decoder.decode(np.array(data.train)) + decoder.decode(np.array(data.validation))).decode() == text
    assert max(largest, default=0) <= 128


def test_folders_are_read_in_order(tmp_path: Path) -> None:
    """Files that match, by name, at any depth; each document gives to both splits."""
    (tmp_path / "in/deep").mkdir(parents=True)
    write(tmp_path / "in/b.py", "b\n" * 10)
    write(tmp_path / "in/deep/a.py", "a\n" * 10)
    write(tmp_path / "in/c.md", "c\n" * 10)
    data = write_data([tmp_path / "in"], tmp_path / "out", files="*.py", validation_share=0.5)
    assert data.train.tobytes() == b"b\n" * 5 + b"\0" + b"a\n" * 5 + b"\0"
    assert data.validation.tobytes() == data.train.tobytes()


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    """Tokens, dtype, vocabulary, hashes and the number of texts."""
    write_data([write(tmp_path / "a.txt", POEM)], tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert (manifest["schema"], manifest["vocab"], manifest["dtype"]) == ("preflop.data/1", 256, "uint8")
    assert manifest["text_bytes"] == len(POEM.encode())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        MANIFEST,
        "train.bin",
        "validation.bin",
    ]


def spoiled(folder: Path, **changed: object) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.update(changed)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_a_bad_folder_is_refused(tmp_path: Path) -> None:
    """Missing, empty, cut, of another version, with ids beyond the vocabulary: each says which."""
    source = write(tmp_path / "a.txt", POEM * 9)
    with pytest.raises(BadFile, match="no data folder"):
        open_data(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="not a data folder: it has no manifest.json"):
        open_data(tmp_path / "empty")
    for name in "abcd":
        write_data([source], tmp_path / name)
    (tmp_path / "a/train.bin").write_bytes(b"xy")
    with pytest.raises(BadFile, match=r"has 2 bytes, and the manifest says \d+ tokens of 1"):
        open_data(tmp_path / "a")
    with pytest.raises(BadFile, match="'preflop.data/9', and this version reads 'preflop.data/1'"):
        open_data(spoiled(tmp_path / "b", schema="preflop.data/9"))
    with pytest.raises(BadSubject, match=r"holds token id \d+, and the vocabulary has 100 \(ids 0 to 99\)"):
        open_data(spoiled(tmp_path / "c", vocab=100))
    with pytest.raises(BadFile, match="is damaged"):
        open_data(spoiled(tmp_path / "d", splits={}))


def test_bad_texts_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    """Missing, empty, not UTF-8, a folder without text, an output that is in use."""
    empty, bad = write(tmp_path / "e.txt", ""), tmp_path / "bad.txt"
    bad.write_bytes(b"abc \xff\xfe\n" * 9)
    out = tmp_path / "out"
    for texts, options, message in [
        ([tmp_path / "no.txt"], {}, "no text file"),
        ([empty], {}, "all empty"),
        ([bad], {"tokenizer": "bpe"}, "bad.txt is not UTF-8"),
        ([tmp_path], {"files": "*.zip"}, "holds no file that matches '\\*.zip'"),
        ([bad], {"tokenizer": "words"}, "there are: bytes, bpe"),
        ([bad], {"tokenizer": "bpe", "vocab": 100}, "at least 257"),
        ([bad], {"validation_share": 1.0}, "below 1"),
    ]:
        with pytest.raises(PreflopError, match=message):
            write_data(texts, out, **options)
        assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
    write_data([bad], out)
    with pytest.raises(BadFile, match="holds data already"):
        write_data([bad], out)
    before = open_data(out).fingerprint
    assert write_data([write(tmp_path / "x.txt", POEM)], out, force=True).fingerprint != before
    with pytest.raises(BadFile, match="holds other files"):
        write_data([bad], tmp_path)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_shuffle_is_one_to_one(count: int, key: int) -> None:
    """Every index comes once, whatever the count and the key."""
    assert sorted(shuffled(np.arange(count), count, key).tolist()) == list(range(count))


def test_a_shuffle_shuffles() -> None:
    """Neighbours are scattered, and epochs and seeds differ: over 4,096, nearly no fixed point."""
    order = shuffled(np.arange(4096), 4096, 1)
    assert (order == np.arange(4096)).mean() < 0.01
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.05
    assert not np.array_equal(order, shuffled(np.arange(4096), 4096, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_do_not_change_the_order(data: Path, ranks: int, workers: int) -> None:
    """However many processes and workers read, the step's microbatches are the same, in the same order."""
    opened = open_data(data)
    windows = Windows(opened.train, 16, 256)
    plan = Plan(len(windows), batch=2, microbatches=6, seed=3)
    mine = [
        training_steps(windows, plan, first_step=2, rank=rank, ranks=ranks, workers=workers, pin=False)
        for rank in range(ranks)
    ]
    for step in (2, 3, 4):
        dealt = [next(one) for one in mine]
        in_order = [dealt[index % ranks][index // ranks] for index in range(6)]
        for index, batch in enumerate(in_order):
            assert batch.samples.tolist() == plan.samples(step, index).tolist()
            first = int(batch.samples[0]) * 16
            assert batch.input_ids[0].tolist() == opened.train[first : first + 16].tolist()
            assert batch.labels[0].tolist() == opened.train[first + 1 : first + 17].tolist()
    for one in mine:
        one.close()


def test_reading_touches_no_global_random_state(data: Path) -> None:
    """Making an iterator, with workers or without, draws nothing from torch's generator (L08)."""
    import torch

    windows = Windows(open_data(data).train, 16, 256)
    plan = Plan(len(windows), batch=2, microbatches=1, seed=3)
    before = torch.get_rng_state()
    for workers in (0, 1):
        steps = training_steps(windows, plan, first_step=0, rank=0, ranks=1, workers=workers, pin=False)
        next(steps)
        steps.close()
    assert torch.equal(before, torch.get_rng_state())


def test_a_sequence_longer_than_the_data_is_refused(data: Path) -> None:
    """It says what is needed and what there is."""
    with pytest.raises(BadSubject, match=r"a sequence of 5000 tokens needs 5001, and the data holds \d+"):
        Windows(open_data(data).train, 5000, 256)


def test_an_id_beyond_the_vocabulary_is_found_in_a_batch() -> None:
    """Files too large to be searched at the start are checked batch by batch."""
    windows = Windows(np.arange(100, dtype=np.uint8), 8, 50)
    with pytest.raises(BadSubject, match="token id 56, and the vocabulary has 50"):
        windows.__getitems__(np.array([6]))


def test_validation_reads_the_same_windows_every_time() -> None:
    """Spread over the split, each at most once, the last batch as short as what is left."""
    windows = Windows(np.zeros(401, dtype=np.uint8), 8, 256)
    chosen = validation_batches(windows, batch=4, count=3)
    assert [one.tolist() for one in chosen] == [[0, 4, 8, 12], [16, 20, 25, 29], [33, 37, 41, 45]]
    assert [len(one) for one in validation_batches(windows, 40, 9)] == [40, 10]


def test_windows_travel_by_their_files_name(tmp_path: Path) -> None:
    """Pickled for a worker, the tokens are a name and not a copy; read back, they are the same."""
    import pickle

    windows = Windows(write_data([write(tmp_path / "a.txt", POEM * 99)], tmp_path / "out").train, 16, 256)
    sent = pickle.dumps(windows)
    assert len(windows.tokens) > 5000
    assert len(sent) < 600
    assert np.array_equal(pickle.loads(sent).tokens, windows.tokens)


def test_large_files_are_held_to_samples_of_their_parts(tmp_path: Path, monkeypatch) -> None:
    """Above the size that is read whole, parts spread over the file are hashed, the first and last among them."""
    from preflop.trainer import corpus, tokens

    for room in (corpus, tokens):
        monkeypatch.setattr(room, "PART_BYTES", 64)
    monkeypatch.setattr(tokens, "_SCAN_BYTES", 100)
    out = tmp_path / "out"
    data = write_data([write(tmp_path / "a.txt", POEM * 40)], out)
    parts = json.loads((out / "manifest.json").read_text())["splits"]["train"]["parts"]
    assert len(parts) == -(-len(data.train) // 64) > 2 * 16
    whole = (out / "train.bin").read_bytes()
    for at in (0, len(whole) - 1):
        changed = bytearray(whole)
        changed[at] ^= 1
        (out / "train.bin").write_bytes(changed)
        with pytest.raises(BadFile, match=r"train.bin was changed: the SHA-256 of its bytes from [\d,]+ on"):
            open_data(out)
    (out / "train.bin").write_bytes(whole)
    open_data(out)
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["splits"]["train"]["parts"]  # as an older version wrote it: held to its size
    (out / "manifest.json").write_text(json.dumps(manifest))
    open_data(out)
