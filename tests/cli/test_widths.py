"""No command prints wider lines than the 100 columns that it is given."""

from __future__ import annotations

import shlex

import pytest

from preflop.cli.main import run

COMMANDS = """
account gpt2 --batch 8 --seq 1024 --device h100-sxm --precision bf16-mixed
account gpt2-nano --batch 2 --seq 32 --optimizer adafactor --precision fp16-mixed --microbatches 3
roofline gpt2 --batch 8 --seq 1024 --device h100-sxm
time --params 70.123456789e9 --tokens 15.23456789e12 --gpus 1024 --device tpu-v5e --mfu 0.5
fit --device h100-sxm --gpus 8 --optimizer adafactor --precision bf16-master
fit gpt2 --device a100 --seq 1024 --what batch,member
models
models bert-base
hardware
hardware mi300x
copies gpt2 --batch 8 --seq 1024 --device h100-sxm
einsum "b s d, d f -> b s f" b=8 s=2048 d=4096 f=16384
einsum "batch seq dim, dim head h, head h out -> batch seq out" batch=8 seq=9 dim=9 head=3 h=3 out=9 --device t4
einsum "b s (h d) -> b h s d" b=8 s=2048 h=32 d=128 --device a100
shapes gpt2-nano --batch 2 --seq 64
precision
precision gpt2 --batch 8 --seq 1024 --device h100-sxm
dtypes
dtypes 0.1
dtypes 1e-8 --device h100-sxm
dtypes --devices
"""


def too_wide(printed: str, width: int = 100) -> list[str]:
    """Lines that are wider."""
    return [line for line in printed.splitlines() if len(line) > width]


@pytest.mark.parametrize("command", COMMANDS.strip().splitlines())
def test_no_line_is_wider_than_100_columns(command: str, capsys, monkeypatch) -> None:
    """At COLUMNS=100 every line of the answer fits."""
    monkeypatch.setenv("COLUMNS", "100")
    assert run(shlex.split(command)) in (0, 1)
    assert too_wide(capsys.readouterr().out) == []


def test_a_wide_line_is_found() -> None:
    """The check can fail."""
    assert too_wide("short\n" + "x" * 101) == ["x" * 101]
