"""`preflop what-if`: the table, the JSON, bad input, exit statuses."""

from __future__ import annotations

import json

import pytest

from preflop.cli.main import run

GIVEN = "what-if gpt2-nano --batch 4 --seq 32 --precision bf16-mixed --device h100-sxm --devices h200-sxm"


@pytest.mark.long
def test_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every knob has a row; the given run stands first; both forms end with the same advice."""
    assert run([*GIVEN.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    knobs = {row["knob"] for row in found["rows"]}
    assert knobs == {"batch", "recompute", "loss", "offload", "precision", "optimizer", "device"}
    assert found["given"]["change"] == {"peak": 0.0, "flops": 0.0, "moved": 0.0, "time": 0.0}
    assert run(GIVEN.split()) == 0
    shown = capsys.readouterr().out
    assert "as given" in shown
    assert " ".join(shown.split()).endswith(found["advice"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch 8 --seq 16 --split 3", "cannot be split into 3 equal microbatches"),
        ("--batch 8 --seq 16 --split 0", "--split"),
        ("--batch 8 --seq 16 --devices h100-smx", "no device named 'h100-smx'"),
        ("--batch 8 --seq 300", "gpt2-nano has 256 positions"),
        ("--batch 8 --seq 16 --recompute all", "recompute is 'all'"),
        ("--seq 16", "batch"),
    ],
)
def test_bad_input_is_one_message(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, nothing printed, and what to do."""
    assert run(["what-if", "gpt2-nano", *words.split()]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_recording_cannot_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """A .tape: named, with what can be done instead."""
    assert run(["what-if", "run.tape"]) == 2
    assert "is a recording" in capsys.readouterr().err
