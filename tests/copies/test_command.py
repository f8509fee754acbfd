"""`preflop copies`: rows with shares, a limit for CI, JSON."""

from __future__ import annotations

import json

import pytest

import preflop
from preflop.cli.main import run
from preflop.timing.copies import HARMLESS_SHARE, step_copies
from tests.tapes import linear_step

MODEL = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.project(x).view(b, s, 3, 4, 16).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, s, 64)

def model():
    return Attention()

def batch():
    return torch.randn(2, 32, 64)
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    (tmp_path / "attention.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return [
        "copies", "attention.py:model", "--batch-from", "attention.py:batch", "--optimizer", "none",
        "--device", "h100-sxm",
    ]  # fmt: skip


def test_rows_name_line_reason_and_remedy(words, capsys):
    """The reshape that merges heads is listed with its line, shape, strides, bytes and what to write."""
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    merges = [row for row in found["copies"] if row["kind"] == "reshape" and row["phase"] == "forward"]
    assert merges[0]["source"] == "attention.py:14"
    assert merges[0]["bytes"] == 2 * 32 * 64 * 4
    assert merges[0]["reason"] == (
        "(2, 32, 4, 16) with strides (2048, 16, 512, 1) cannot be viewed as (2, 32, 64)"
    )
    assert "scaled_dot_product_attention" in merges[0]["instead"]
    moved = merges[0]["bytes"] + merges[0]["read_bytes"]
    assert merges[0]["time_s"] == pytest.approx(moved / 3.35e12, rel=0.01)
    assert merges[0]["share"] == pytest.approx(merges[0]["time_s"] / found["step"]["time_s"])


def test_text_says_why_and_what_instead(words, capsys):
    """For people: how much, where, because, instead."""
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "copies that nobody asked for:" in text
    for word in ("at      attention.py:14", "because (2, 32, 4, 16) with strides", "instead"):
        assert word in text


def test_fail_over_is_for_ci(words, capsys):
    """More than the limit: status 1. Less: status 0. No share: status 2."""
    assert run([*words, "--fail-over", "1%", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passes"] is False
    assert run([*words, "--fail-over", "100%"]) == 0
    assert run([*words, "--fail-over", "often"]) == 2


def test_without_a_device_shares_are_of_bytes(words, capsys):
    """A CPU has no bandwidth in the catalog: shares are of the bytes moved, and times are absent."""
    assert run([*words[:-2], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["share_of"] == "bytes"
    assert {row["time_s"] for row in found["copies"]} == {None}


def test_rows_sum_to_the_ledger():
    """The account's rows sum to the copies ledger, and harmless rows are those under 0.1 %."""
    account = preflop.account("gpt2", {"batch_size": 1, "sequence_length": 64}, device="a100")
    ledger = preflop.copies_ledger(account.tape)
    assert sum(row.bytes for row in account.copies) == ledger.total()
    found = step_copies(account)
    assert [copy.harmless for copy in found.copies] == [copy.share < HARMLESS_SHARE for copy in found.copies]
    assert found.hidden_share == pytest.approx(sum(copy.share for copy in found.copies if copy.hidden))


def test_a_tape_needs_no_torch_to_be_read():
    """The copies of a tape made by hand: the optimizer's clone is not in the steady step, nothing is."""
    assert preflop.copies_ledger(linear_step()).total() == 0
