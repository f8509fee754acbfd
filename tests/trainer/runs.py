"""Starting runs, and comparing where they ended: tensors, numbers, random states, samples."""

from __future__ import annotations

import csv
import json
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from preflop.trainer.checkpoint import load_tensors, saved_tensors, why_invalid
from preflop.trainer.processes import Processes

# Columns of metrics.csv that depend on the clock and not on the run.
OF_THE_CLOCK = {"tokens_per_s", "mfu", "peak_bytes", "seconds"}


@dataclass
class Server:
    """Asks crash_server.py to train."""

    process: subprocess.Popen

    def train(self, config: dict[str, Any], **request: Any) -> int:
        """Exit status of the run: 0 done, 2 refused, -9 killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        log = str(Path(config["out"]).with_name(Path(config["out"]).name + ".log"))
        self.process.stdin.write(json.dumps({"config": config, "log": log, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the server ended"
        return int(json.loads(line)["status"])

    def log(self, config: dict[str, Any]) -> str:
        """What the runs in this folder said."""
        return Path(config["out"] + ".log").read_text("utf-8")

    def moments(self, config: dict[str, Any]) -> list[str]:
        """Moments of the last run that ended by itself, "name:step:microbatch"."""
        return json.loads(Path(config["out"] + ".log.moments").read_text("utf-8"))


def checkpoints(run: str | Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(path for path in (Path(run) / "checkpoints").glob("step-*") if "." not in path.name)


def rows(run: str | Path) -> list[dict[str, str]]:
    """metrics.csv without what depends on the clock."""
    with (Path(run) / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        return [
            {name: text for name, text in row.items() if name not in OF_THE_CLOCK}
            for row in csv.DictReader(stream)
        ]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    assert why_invalid(checkpoint) is None
    into = {
        name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in saved_tensors(checkpoint).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: "assuming a single process"
        load_tensors(checkpoint, into, Processes())
    return into


def numbers(checkpoint: Path) -> dict[str, Any]:
    """Progress, scheduler, scaler, data position and random states of a checkpoint."""
    state = json.loads((checkpoint / "state.json").read_text("utf-8"))
    state["config"].pop("out")
    state["random"] = json.loads((checkpoint / "rng-0.json").read_text("utf-8"))
    return state


def differences(one: str | Path, other: str | Path) -> list[str]:
    """What differs between the ends of two runs; nothing where they are equal bit for bit."""
    found = []
    left, right = checkpoints(one)[-1], checkpoints(other)[-1]
    if left.name != right.name:
        found.append(f"last checkpoint {left.name} and {right.name}")
    mine, theirs = tensors(left), tensors(right)
    found += [f"tensor {name} in one only" for name in mine.keys() ^ theirs.keys()]
    found += [
        f"tensor {name}" for name in mine.keys() & theirs.keys()
        if mine[name].dtype != theirs[name].dtype or not same_bits(mine[name], theirs[name])
    ]  # fmt: skip
    these, those = numbers(left), numbers(right)
    found += [f"state {name}" for name in these.keys() | those.keys() if these.get(name) != those.get(name)]
    first, second = rows(one), rows(other)
    if len(first) != len(second):
        found.append(f"{len(first)} and {len(second)} rows")
    found += [f"row {a['step']}: {a} and {b}" for a, b in zip(first, second) if a != b]
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )
