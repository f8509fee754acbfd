"""The tape's file format: exact round trips, and a clear refusal of everything else."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preflop.errors import BadFile, BadTape
from preflop.files import write_atomically
from preflop.tape.events import (
    Call,
    Mark,
    ParameterInfo,
    Phase,
    Ref,
    Role,
    Signature,
    Storage,
    SubjectInfo,
    Tape,
    TensorMeta,
)
from preflop.tape.file import load, save
from preflop.units import DTYPE_BYTES
from tests.tapes import linear_step

dtypes = st.sampled_from(sorted(DTYPE_BYTES))
small = st.integers(0, 2**40)
shapes = st.lists(st.integers(0, 2**20), max_size=4).map(tuple)
arguments = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.builds(Ref, small),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
metas = st.builds(TensorMeta, shapes, shapes, small, dtypes, st.sampled_from(["cpu", "cuda:0"]))
signatures = st.builds(
    Signature,
    op=st.text(),
    overload=st.text(),
    args=st.lists(arguments, max_size=3).map(tuple),
    kwargs=st.lists(st.tuples(st.text(), arguments), max_size=2).map(tuple),
    inputs=st.lists(metas, max_size=2).map(tuple),
    outputs=st.lists(metas, max_size=2).map(tuple),
    aliases=st.lists(st.none() | st.integers(0, 3), max_size=2).map(tuple),
    writes=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    attended_pairs=st.none() | small,
)


@st.composite
def tapes(draw):
    sigs = draw(st.lists(signatures, min_size=1, max_size=3))
    ticks = sorted(draw(st.lists(st.integers(0, 1000), max_size=5)))
    storages = [
        Storage(
            draw(small), draw(dtypes), draw(shapes), born, draw(st.none() | st.integers(born, 2000)),
            draw(st.sampled_from(Role)), draw(st.text()),
            draw(st.integers(-1, len(ticks) - 1)), draw(st.sampled_from(["cpu", "meta"])),
        )
        for born in draw(st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    ]  # fmt: skip
    calls = [
        Call(
            draw(st.integers(0, len(sigs) - 1)),
            tuple(draw(st.lists(st.integers(0, len(storages) - 1), max_size=3))),
            tick, draw(st.sampled_from(Phase)), 0, draw(st.integers(0, 3)), 0, 0,
        )
        for tick in ticks
    ]  # fmt: skip
    subject = SubjectInfo("m", "fp32", None, 1, "none", "1 x 8 tokens", 8, None, "cpu")
    return Tape(
        subject=draw(st.none() | st.just(subject)),
        signatures=sigs,
        calls=calls,
        storages=storages,
        modules=["", draw(st.text())],
        module_types=["A", "B"],
        sources=[""],
        marks=draw(st.lists(st.builds(Mark, small, st.text(), small, small), max_size=2)),
        parameters=draw(
            st.lists(
                st.builds(ParameterInfo, st.text(), shapes, dtypes, st.booleans(), small, st.text()),
                max_size=2,
            )
        ),
        assumptions=draw(st.lists(st.text(), max_size=2)),
        steps=draw(st.integers(1, 3)),
    )


@settings(deadline=None, max_examples=60)
@given(tapes())
def test_load_undoes_save(tmp_path_factory, tape):
    """load(save(tape)) == tape, for any tape."""
    path = tmp_path_factory.mktemp("tapes") / "a.tape"
    save(tape, path)
    assert load(path) == tape


def test_same_tape_same_bytes(tmp_path):
    """Saving twice writes the same bytes: no clock in the file."""
    save(linear_step(), tmp_path / "a.tape")
    save(linear_step(), tmp_path / "b.tape")
    assert (tmp_path / "a.tape").read_bytes() == (tmp_path / "b.tape").read_bytes()


def test_nan_survives(tmp_path):
    """A NaN among an operator's arguments comes back as a NaN."""
    tape = linear_step()
    old = tape.signatures[0]
    tape.signatures[0] = Signature(
        old.op, old.overload, (float("nan"),), (), old.inputs, old.outputs, old.aliases, old.writes
    )
    save(tape, tmp_path / "a.tape")
    (value,) = load(tmp_path / "a.tape").signatures[0].args
    assert math.isnan(value)


def _gz(document: object) -> bytes:
    return gzip.compress(json.dumps(document).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a tape"),
        (b"PK\x03\x04rest", "not a tape"),
        (b"\x1f\x8bgarbage", "damaged or cut short"),
        (gzip.compress(b"\x00\xff\xfe", mtime=0), "compressed, but not a tape"),
        (_gz([1, 2]), "its schema is None"),
        (_gz({"schema": "other/1"}), "'other/1'"),
        (_gz({"schema": "preflop.tape/9", "preflop": "7.0"}), "written by Preflop 7.0"),
        (_gz({"schema": "preflop.tape/1"}), "damaged tape"),
    ],
)
def test_what_is_no_tape_is_refused_in_words(tmp_path, content, says):
    """Empty, foreign, garbled, newer and hollow files each raise BadTape that says what is wrong."""
    path = tmp_path / "x.tape"
    path.write_bytes(content)
    with pytest.raises(BadTape, match=says):
        load(path)


def test_every_truncation_is_refused(tmp_path):
    """A tape cut short anywhere raises BadTape, never another error."""
    path = tmp_path / "a.tape"
    save(linear_step(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(BadTape):
            load(path)


@pytest.mark.parametrize(
    ("table", "column", "value", "says"),
    [
        ("calls", "signature", 99, "signature"),
        ("calls", "module", -1, "module"),
        ("storages", "bytes", -5, "negative"),
        ("storages", "dtype", "float7", "float7"),
        ("storages", "role", "x", "TypeError"),
    ],
)
def test_a_tape_with_impossible_content_is_refused(tmp_path, table, column, value, says):
    """An index outside its table, a negative size, an unknown dtype: BadTape, not a wrong number."""
    path = tmp_path / "a.tape"
    save(linear_step(), path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    document[table][column][0] = value
    path.write_bytes(_gz(document))
    with pytest.raises(BadTape, match=says):
        load(path)


def test_missing_file(tmp_path):
    """A file that is not there: BadTape with its name."""
    with pytest.raises(BadTape, match=r"nowhere\.tape"):
        load(tmp_path / "nowhere.tape")


def test_failed_write_leaves_what_stood_there(tmp_path):
    """A write that fails (here: a missing folder, a folder as target) leaves no file behind."""
    with pytest.raises(BadFile, match="No such file"):
        write_atomically(tmp_path / "no" / "a.html", b"x")
    with pytest.raises(BadFile, match="folder"):
        write_atomically(tmp_path, b"x")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_what_stood_there(tmp_path):
    """With no room for the new file the old one stays whole and no temporary file is left."""
    code = (
        "import resource, sys; from preflop.files import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: write_atomically(sys.argv[1], b'x' * 1000)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    target = tmp_path / "a.html"
    target.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("BadFile cannot write"), done
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_a_device_is_written_to_and_never_replaced():
    """/dev/full is written to directly: the error is that it is full, and it is still a device."""
    import os
    import stat

    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(BadFile, match="No space left"):
        write_atomically("/dev/full", b"x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_reading_a_tape_imports_no_torch(tmp_path):
    """load() and the memory ledger run without importing torch."""
    path = tmp_path / "a.tape"
    save(linear_step(), path)
    code = (
        "import sys; from preflop.tape.file import load; from preflop.ledgers.memory import memory\n"
        "print(memory(load(sys.argv[1])).peak_bytes, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1835008", "False"]
