"""`preflop shapes`: sizes as formulas, and what depends on two sizes being equal by accident."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.cli.main import run
from preflop.tape.formula import fit

POINTS = [(2, 64), (3, 7), (5, 7), (3, 11), (5, 11), (7, 13)]
whole = st.integers(-3, 9)


@given(whole, whole, whole, whole)
def test_any_formula_is_found_again(constant, batch, sequence, both):
    """A size made by a formula in batch and sequence is fitted by one that agrees everywhere."""
    sizes = [constant + batch * b + sequence * s + both * b * s for b, s in POINTS]
    found = fit(POINTS, sizes)
    assert found is not None
    for b, s in [(1, 1), (100, 3), (17, 1000)]:
        assert found.at((b, s)) == constant + batch * b + sequence * s + both * b * s


def test_what_is_no_formula_is_refused():
    """batch squared is no formula of ours."""
    assert fit(POINTS, [b * b for b, s in POINTS]) is None


SOURCE = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.linear(x) - y).pow(2).mean()

class Right(Regression):
    def forward(self, x, y):
        return (self.linear(x).squeeze(-1) - y).pow(2).mean()

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, ids, per_sample):
        return (self.embed(ids).sum(-1) * per_sample).mean()

def regression():
    return Regression()

def right():
    return Right()

def weighted():
    return Weighted()

def pairs():
    return torch.randn(8, 8), torch.randn(8)

def square():
    return torch.zeros(8, 8, dtype=torch.long), torch.randn(8)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def told(words, capsys):
    status = run([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_an_outer_broadcast_is_found(here, capsys):
    """(batch, 1) - (batch,) gives (batch, batch): no error, and the wrong loss. Status 1, with the line."""
    status, found = told(["shapes", "net.py:regression", "--batch-from", "net.py:pairs"], capsys)
    assert status == 1
    (accident,) = found["accidents"]
    assert accident["source"] == "net.py:11"
    assert accident["what"] == (
        "sub broadcasts (batch, 1) with (batch,) to (batch, batch): one axis against itself"
    )


def test_the_right_loss_passes(here, capsys):
    """Squeezed first, nothing broadcasts: status 0."""
    status, found = told(["shapes", "net.py:right", "--batch-from", "net.py:pairs"], capsys)
    assert (status, found["accidents"]) == (0, [])


def test_equal_sizes_by_accident_are_found(here, capsys):
    """(batch, seq) * (batch,) runs where both are 8 and nowhere else: status 1."""
    status, found = told(["shapes", "net.py:weighted", "--batch-from", "net.py:square"], capsys)
    assert status == 1
    assert "does not run at batch 3, sequence 7" in found["accidents"][0]["what"]


def test_a_models_shapes_are_formulas(capsys):
    """GPT-2: each module's shapes in batch and sequence."""
    status, found = told(["shapes", "gpt2", "--batch", "2", "--seq", "16"], capsys)
    assert (status, found["accidents"]) == (0, [])
    by_name = {module["name"]: module for module in found["modules"]}
    assert by_name["token_embedding"]["inputs"][0]["shape"] == "(batch, seq)"
    assert by_name["blocks.0.feed_forward.up"]["outputs"][0]["shape"] == "(batch, seq, 3072)"
    assert by_name["lm_head"]["outputs"][0]["shape"] == "(batch, seq, 50257)"
