"""`preflop models`: the list, one model, JSON, a wrong name, and that none of it imports torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from preflop.cli.main import run
from preflop.models.catalog import find, models


def test_the_list_names_every_model_with_its_published_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Each name and its parameters stand in one line of the output."""
    assert run(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for facts in models():
        assert any(line.split()[:3] == [facts.name, facts.family, f"{facts.parameters:,}"] for line in lines)


def test_json_of_all_holds_every_fact_of_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and parameters in the JSON == the catalog's."""
    assert run(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "preflop.models/1"
    found = {one["name"]: one["parameters"] for one in document["models"]}
    assert found == {facts.name: facts.parameters for facts in models()}


def test_one_model_is_shown_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """An alias shows the model's name, its count, both sources and what is built."""
    assert run(["models", "bert-base-uncased"]) == 0
    text = " ".join(capsys.readouterr().out.split())  # long lines are folded
    facts = find("bert-base")
    for words in (facts.name, "109,514,298", facts.source, facts.parameters_source, facts.note):
        assert words in text


def test_json_of_one_is_that_model(capsys: pytest.CaptureFixture[str]) -> None:
    """`preflop models NAME --json` gives one object under "model"."""
    assert run(["models", "gpt2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] == 124_439_808


def test_an_unknown_name_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, the nearest name on standard error, nothing on standard output."""
    assert run(["models", "lama-2-7b"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "llama-2-7b" in captured.err


def test_neither_the_list_nor_one_model_imports_torch() -> None:
    """After both commands in a fresh process, torch and numpy are not in sys.modules."""
    code = (
        "import sys; from preflop.cli.main import run; run(['models']); run(['models', 'gpt2']); "
        "print('imported:', {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("imported: set()")
