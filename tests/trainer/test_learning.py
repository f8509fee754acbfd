"""It learns: bytes of Python's own standard library, which is on every machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from preflop.trainer.config import TrainConfig
from preflop.trainer.corpus import write_data
from preflop.trainer.loop import train
from preflop.trainer.tokens import Data, open_data


def validation_loss(tmp_path: Path, steps: int, batch: int) -> float:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    write_data(sources, tmp_path / "data")
    config = TrainConfig(
        data=str(tmp_path / "data"), out=str(tmp_path / "run"), steps=steps, batch=batch, seq=64,
        learning_rate=4e-3, warmup_steps=steps // 10, checkpoint_every=0, evaluate_every=steps,
        evaluate_batches=20, seed=1,
    )  # fmt: skip
    loss = train(config, price=False).validation_loss
    assert loss is not None
    return loss


def frequencies_loss(data: Data) -> float:
    """Nats a byte of a model that knows only how often each byte comes."""
    counts = np.bincount(data.train, minlength=256) + 1
    return float(-np.log(counts / counts.sum())[np.array(data.validation)].mean())


def test_it_begins_to_learn(tmp_path: Path) -> None:
    """100 steps of 512 bytes below 2.85 nats a byte, well past what frequencies alone give."""
    loss = validation_loss(tmp_path, 100, 8)
    assert loss < 2.85
    assert loss < frequencies_loss(open_data(tmp_path / "data")) - 0.3


@pytest.mark.long
def test_it_learns(tmp_path: Path) -> None:
    """400 steps of 768 bytes (40 s of one core): below 2.3 nats a byte."""
    assert validation_loss(tmp_path, 400, 12) < 2.3
