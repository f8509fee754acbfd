"""What the trainer's tests share: small data, small runs, and a server that runs them to be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preflop.trainer.corpus import write_data
from tests.trainer.runs import Server


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 windows of 16 bytes, and a few to validate."""
    folder = tmp_path_factory.mktemp("tokens")
    text = folder / "text.txt"
    text.write_text("".join(f"line {number} of {number * number}\n" for number in range(45)))
    out = folder / "data"
    write_data([text], out, validation_share=0.2)
    return out


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Trains in children that may be killed."""
    script = Path(__file__).with_name("crash_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield Server(process)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def settings(data: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings of a small run, some of them changed."""

    def make(**changed: Any) -> dict[str, Any]:
        return {
            "data": str(data), "out": str(tmp_path / "run"), "steps": 10, "batch": 2, "seq": 16,
            "microbatches": 3, "checkpoint_every": 3, "keep": 2, "evaluate_batches": 2, "warmup_steps": 4,
            "dropout": 0.1, "seed": 7, "log_every": 1, **changed,
        }  # fmt: skip

    return make
