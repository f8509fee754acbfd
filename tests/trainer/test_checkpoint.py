"""No lost checkpoint: killed while saving, disk full, files cut, flipped or gone, folders read-only."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from preflop.errors import PreflopError
from preflop.trainer import randomness
from preflop.trainer.checkpoint import MANIFEST, Checkpoints, Snapshot, why_invalid
from preflop.trainer.processes import Processes
from tests.trainer.runs import Server, checkpoints, differences, rows

Make = Callable[..., dict[str, Any]]


def store(run: Path, **options: Any) -> Checkpoints:
    return Checkpoints(run, keep=options.pop("keep", 2), processes=Processes(), **options)


def snapshot(step: int, size: int = 1000, validation_loss: float | None = None) -> Snapshot:
    state = {"step": step, "validation_loss": validation_loss}
    return Snapshot({"model/weight": torch.full((size,), float(step))}, state, {"torch": "00"})


def valid(run: str | Path) -> list[str]:
    return [path.name for path in checkpoints(run) if why_invalid(path) is None]


def kill_while_saving(config: dict[str, Any], server: Server, kills: int) -> None:
    """Kill after kill within a save; what was valid before each is valid after it, or has a successor."""
    chosen, newest = random.Random(kills), ""
    for _ in range(kills):
        next_save = 3 if not newest else int(newest[-8:]) + 3
        if next_save >= config["steps"]:
            break
        delay = chosen.random() * 0.05
        server.train(config, resume=True, kill_after=[f"save_begin:{next_save}:0", delay])
        now = valid(config["out"])
        assert len(now) == len(checkpoints(config["out"])), "something called a checkpoint is not valid"
        assert not newest or now[-1] >= newest
        newest = now[-1] if now else ""


def test_kills_while_saving_lose_nothing(settings: Make, server: Server) -> None:
    """12 kills within saves: the newest checkpoint stays valid, and the end is that of an unhurt run."""
    config = settings(steps=30)
    kill_while_saving(config, server, 12)
    assert server.train(config, resume=True) == 0
    whole = {**config, "out": config["out"] + "-whole"}
    assert server.train(whole) == 0
    assert differences(whole["out"], config["out"]) == []
    assert not list((Path(config["out"]) / "checkpoints").glob("*.*"))


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hundred_kills_while_saving_lose_nothing(
    settings: Make, server: Server, asynchronous: bool
) -> None:
    """100 kills within saves, at random times."""
    config = settings(steps=400, async_save=asynchronous)
    kill_while_saving(config, server, 100)
    assert server.train(config, resume=True) == 0
    assert [int(row["step"]) for row in rows(config["out"])] == list(range(1, 401))


def cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "__0_0.distcp has"),
    "flipped bit": (flip, "__0_0.distcp was changed: its SHA-256"),
    "missing shard": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "missing state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "missing manifest": (lambda path: (path / MANIFEST).unlink(), "it has no manifest.json"),
    "manifest cut": (
        lambda path: (path / MANIFEST).write_text('{"files"'),
        "its manifest.json cannot be read",
    ),
    "empty manifest": (
        lambda path: (path / MANIFEST).write_text('{"files": {}}'),
        "its manifest.json names no state.json",
    ),
    "random states cut": (lambda path: (path / "rng-0.json").write_text("{}"), "rng-0.json has 2 bytes"),
}


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, server: Server, data: Path
) -> tuple[Path, dict[str, Any]]:
    """A run of 10 steps with checkpoints at 6, 9 and 10."""
    out = tmp_path_factory.mktemp("finished") / "run"
    config = {"data": str(data), "out": str(out), "steps": 10, "batch": 2, "seq": 16, "checkpoint_every": 3,
              "keep": 3, "evaluate_every": 0, "warmup_steps": 4}  # fmt: skip
    assert server.train(config) == 0
    return out, config


def copied(finished: tuple[Path, dict[str, Any]], to: Path) -> dict[str, Any]:
    out, config = finished
    shutil.copytree(out, to)
    return {**config, "out": str(to)}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_rejected_with_its_reason(
    damage: str, finished: tuple[Path, dict[str, Any]], server: Server, tmp_path: Path
) -> None:
    """The run goes on from the one before, says which it rejected and why, and ends as it did."""
    config = copied(finished, tmp_path / "run")
    hurt, reason = DAMAGES[damage]
    hurt(checkpoints(config["out"])[-1])
    assert server.train(config, resume=True) == 0, server.log(config)
    log = server.log(config)
    assert f"Rejected checkpoint step-00000010: {reason}" in log
    assert "Resumed from step-00000009" in log
    assert differences(finished[0], config["out"]) == []


def test_when_all_are_damaged_the_run_says_what_is_wrong(
    finished: tuple[Path, dict[str, Any]], server: Server, tmp_path: Path
) -> None:
    """Nothing is trained and nothing is deleted: status 2, with each reason."""
    config = copied(finished, tmp_path / "run")
    for path in checkpoints(config["out"]):
        cut(path)
    assert server.train(config, resume=True) == 2
    log = server.log(config)
    assert "no checkpoint in" in log
    assert log.count("and 10") >= 3 or log.count("were written") >= 3
    assert len(checkpoints(config["out"])) == 3


def test_a_full_disk_keeps_the_run_and_what_was_saved(settings: Make, server: Server) -> None:
    """Saves that fail are told, training goes on, old ones stand; the last failure ends with status 2."""
    config = settings()
    assert server.train(config, kill_at="step:4:0") == -9
    before = valid(config["out"])
    assert server.train(config, resume=True, largest_file_bytes=200_000) == 2
    log = server.log(config)
    assert "NOT SAVED: the checkpoint of step 6 could not be written: File too large" in log
    assert "ERROR SaveFailed: the checkpoint of step 10 could not be written" in log
    assert valid(config["out"]) == before == ["step-00000003"]
    assert not list((Path(config["out"]) / "checkpoints").glob("*.part"))
    assert server.train(config, resume=True) == 0
    assert valid(config["out"])[-1] == "step-00000010"


def test_a_read_only_folder_is_told(settings: Make, server: Server) -> None:
    """A run folder that may not be written: status 2 and its name; a checkpoint folder: NOT SAVED."""
    config = settings()
    run = Path(config["out"])
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints").chmod(0o555)
    assert server.train(config, obey_permissions=True) == 2
    assert "NOT SAVED: the checkpoint of step 3 could not be written: Permission denied" in server.log(config)
    (run / "checkpoints").chmod(0o755)
    shutil.rmtree(run)
    run.mkdir()
    run.chmod(0o555)
    assert server.train(config, obey_permissions=True) == 2
    assert "cannot write to the run folder" in server.log(config)
    run.chmod(0o755)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "pythia-70m"}, "is of another run: model was gpt2-nano and is pythia-70m"),
        ({"seq": 8}, "seq was 16 and is 8"),
        ({"seed": 1, "batch": 3}, "batch was 2 and is 3, seed was 0 and is 1"),
        ({"precision": "bf16-mixed"}, "precision was fp32 and is bf16-mixed"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    changed: dict[str, Any],
    message: str,
    finished: tuple[Path, dict[str, Any]],
    server: Server,
    tmp_path: Path,
) -> None:
    """One clear message, status 2, and the checkpoint stays."""
    config = copied(finished, tmp_path / "run")
    assert server.train({**config, **changed}, resume=True) == 2
    assert message in server.log(config)
    assert len(valid(config["out"])) == 3


def test_other_data_is_refused(finished: tuple[Path, dict[str, Any]], server: Server, tmp_path: Path) -> None:
    """The same settings over other tokens are another run."""
    from preflop.trainer.corpus import write_data

    config = copied(finished, tmp_path / "run")
    (tmp_path / "text.txt").write_text("other words\n" * 200)
    write_data([tmp_path / "text.txt"], tmp_path / "other")
    assert server.train({**config, "data": str(tmp_path / "other")}, resume=True) == 2
    assert "was made with other data" in server.log(config)


def test_another_version_is_refused(
    finished: tuple[Path, dict[str, Any]], server: Server, tmp_path: Path
) -> None:
    """A checkpoint of another format's version: status 2 and both versions' names."""
    config = copied(finished, tmp_path / "run")
    file = checkpoints(config["out"])[-1] / MANIFEST
    file.write_text(file.read_text().replace("preflop.checkpoint/1", "preflop.checkpoint/7"))
    assert server.train(config, resume=True) == 2
    assert "'preflop.checkpoint/7', and this Preflop reads 'preflop.checkpoint/1'" in server.log(config)


def test_a_run_folder_in_use_or_used_is_refused(
    finished: tuple[Path, dict[str, Any]], server: Server, tmp_path: Path
) -> None:
    """Without --resume a folder that holds a run is left alone."""
    config = copied(finished, tmp_path / "run")
    assert server.train(config) == 2
    assert "holds a run already" in server.log(config)


# ---- the store by itself -----------------------------------------------------------------------------


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    """Of six, the last two stay and the one with the lowest validation loss."""
    saved = store(tmp_path)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.6, 2.7], start=1):
        saved.save(step, snapshot(step, validation_loss=loss))
    assert valid(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert saved.best() == saved.folder / "step-00000002"


def test_nothing_is_deleted_before_the_new_one_stands(tmp_path: Path) -> None:
    """When the first old checkpoint is deleted, the new one has its name and is valid."""
    seen: list[list[str]] = []

    def observe(moment: str) -> None:
        if moment in ("save_rename", "retire"):
            seen.append([moment, *valid(tmp_path)])

    saved = store(tmp_path, keep=1, observe=observe)
    for step in (1, 2):
        saved.save(step, snapshot(step))
    assert seen == [
        ["save_rename"],
        ["save_rename", "step-00000001"],
        ["retire", "step-00000001", "step-00000002"],
    ]


def test_a_save_beside_the_loop_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    """Parameters that change while the save is being written do not change what is saved."""
    from tests.trainer.runs import tensors

    saved = store(tmp_path, asynchronous=True)
    live = torch.ones(2_000_000)
    saved.save(1, Snapshot({"model/weight": live}, {"step": 1}, {}))
    live.zero_()
    saved.wait()
    assert bool((tensors(checkpoints(tmp_path)[-1])["model/weight"] == 1).all())


def test_a_failed_save_beside_the_loop_is_told_at_the_next(tmp_path: Path) -> None:
    """The error of the writing thread is raised where the loop next saves or waits."""
    (tmp_path / "checkpoints").write_text("in the way")
    saved = store(tmp_path, asynchronous=True)
    saved.save(1, snapshot(1))
    with pytest.raises(PreflopError, match="the checkpoint of step 1 could not be written"):
        saved.wait()
    saved.wait()


def test_random_states_round_trip() -> None:
    """Python's, NumPy's and torch's generators draw the same after a restore, through JSON."""
    import numpy as np

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.normal()),
            torch.rand(1).item(),
            torch.randn(1).item(),
        ]

    randomness.seed_all(3, 0)
    draw()
    states = json.loads(json.dumps(randomness.capture()))
    first = draw()
    assert randomness.restore(states) == []
    assert draw() == first


def test_random_states_of_missing_devices_are_named() -> None:
    """A checkpoint of two GPUs resumed on none: CPU states are restored, the others named (L27)."""
    states = randomness.capture()
    states["cuda"] = [states["torch"]] * (torch.cuda.device_count() + 2)
    first = torch.rand(1).item()
    said = randomness.restore(states)
    assert len(said) == 2
    assert "cuda:" in said[0]
    assert torch.rand(1).item() == first
    assert torch.get_rng_state().dtype is torch.uint8
