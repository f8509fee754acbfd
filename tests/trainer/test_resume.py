"""Exact resume: killed anywhere, gone on with, a run ends as one that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import Server, checkpoints, differences, rows, tensors

# Dropout, shuffling over an epoch's end, accumulation, evaluation; and in turn both 16-bit paths, data
# workers, asynchronous saves and recomputation.
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-workers": {"precision": "bf16-mixed", "workers": 2},
    "fp16-async": {"precision": "fp16-mixed", "async_save": True},
    "master-recompute": {"precision": "bf16-master", "recompute": "block", "microbatches": 2},
}
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """Variant -> the folder of its run that was not interrupted, and that run's moments."""
    return {}


def never_interrupted(
    variant: str, straight: dict, server: Server, settings: Make, where: Path
) -> tuple[str, list[str]]:
    if variant not in straight:
        config = settings(**VARIANTS[variant], out=str(where / variant))
        assert server.train(config) == 0, server.log(config)
        straight[variant] = (config["out"], server.moments(config))
    return straight[variant]


def kill_twice_and_finish(config: dict[str, Any], server: Server, first: int | str, second: int) -> None:
    """Killed at moment `first`, resumed, killed `second` moments later, resumed to the end."""
    assert server.train(config, kill_at=first) == -9
    status = server.train(config, resume=True, kill_at=second)
    assert status in (0, -9), server.log(config)
    if status:
        assert server.train(config, resume=True) == 0, server.log(config)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("point", range(5))
def test_a_run_killed_at_random_ends_as_if_it_was_not(
    variant: str, point: int, straight: dict, server: Server, settings: Make, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """20 random moments, each with a second kill: every parameter, moment, scaler and scheduler value,
    random state, drawn sample and logged loss is equal, bit for bit."""
    whole, moments = never_interrupted(variant, straight, server, settings, tmp_path_factory.mktemp("whole"))
    chosen = random.Random(f"{variant} {point}")
    config = settings(**VARIANTS[variant])
    kill_twice_and_finish(
        config, server, chosen.randint(1, len(moments)), chosen.randint(1, len(moments) // 2)
    )
    assert differences(whole, config["out"]) == []


@pytest.mark.parametrize(
    "moment",
    ["microbatch:4:1", "backward_end:4:1", "optimizer_end:5:2", "evaluate:6:1", "save_begin:6:0",
     "save_tensors:6:0", "save_state:6:0", "save_manifest:6:0", "save_rename:6:0", "save_renamed:6:0",
     "retire:9:0", "step_end:6:0"],
)  # fmt: skip
def test_a_run_killed_at_a_worst_moment_ends_as_if_it_was_not(
    moment: str, straight: dict, server: Server, settings: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the middle of accumulation, of evaluation, and at each stage of a save: equal bit for bit."""
    whole, moments = never_interrupted("fp32", straight, server, settings, tmp_path_factory.mktemp("whole"))
    assert moment in moments
    config = settings()
    kill_twice_and_finish(config, server, moment, 5)
    assert differences(whole, config["out"]) == []


@pytest.mark.long
@pytest.mark.parametrize("point", range(200))
def test_two_hundred_random_kills(
    point: int, straight: dict, server: Server, settings: Make, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same at 200 more moments, over all variants."""
    variant = list(VARIANTS)[point % len(VARIANTS)]
    whole, moments = never_interrupted(variant, straight, server, settings, tmp_path_factory.mktemp("whole"))
    chosen = random.Random(f"long {point}")
    config = settings(**VARIANTS[variant])
    kill_twice_and_finish(config, server, chosen.randint(1, len(moments)), chosen.randint(1, len(moments)))
    assert differences(whole, config["out"]) == []


def test_the_comparison_can_fail(straight: dict, server: Server, settings: Make, tmp_path: Path,
                                 tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    """A run with another seed differs in tensors, random states, samples and losses: the test sees it."""
    whole, _ = never_interrupted("fp32", straight, server, settings, tmp_path_factory.mktemp("whole"))
    config = settings(seed=8)
    assert server.train(config) == 0
    found = " ".join(differences(whole, config["out"]))
    assert "tensor model/" in found
    assert "tensor optimizer/exp_avg/" in found
    assert "state random" in found
    assert "row 1" in found


def test_sigterm_saves_and_ends_cleanly(straight: dict, server: Server, settings: Make,
                                        tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    """SIGTERM in the middle of step 5: the step is finished and saved, status 0, and resume is exact."""
    whole, _ = never_interrupted("fp32", straight, server, settings, tmp_path_factory.mktemp("whole"))
    config = settings()
    assert server.train(config, kill_at="microbatch:4:1", signal="SIGTERM") == 0
    assert checkpoints(config["out"])[-1].name == "step-00000005"
    assert "Stopped by SIGTERM at step 5 of 10" in server.log(config)
    assert server.train(config, resume=True) == 0
    assert differences(whole, config["out"]) == []


def test_every_sample_comes_once_an_epoch(settings: Make, server: Server, data: Path) -> None:
    """Over two epochs with a kill in each, each sample is drawn once per epoch, in another order (L09)."""
    from preflop.trainer.batches import Plan, Windows
    from preflop.trainer.tokens import open_data

    windows = Windows(open_data(data).train, 16, 256)
    plan = Plan(len(windows), batch=2, microbatches=3, seed=7, total_samples=2 * len(windows))
    drawn = [int(one) for step in range(plan.steps) for part in range(3) for one in plan.samples(step, part)]
    first, second = drawn[: len(windows)], drawn[len(windows) :]
    assert sorted(first) == sorted(second) == list(range(len(windows)))
    assert first != second
    config = settings(steps=None, epochs=2)
    assert server.train({**config, "out": config["out"] + "-whole"}) == 0
    kill_twice_and_finish(config, server, "microbatch:3:0", 30)
    assert rows(config["out"]) == rows(config["out"] + "-whole")
    assert len(rows(config["out"])) == plan.steps


def test_the_last_short_window_is_weighted_by_its_tokens(settings: Make, server: Server) -> None:
    """Two epochs do not divide into steps of 20 samples: the last step is short, none is lost (L03)."""
    config = settings(steps=None, epochs=2, batch=4, microbatches=5)
    assert server.train(config) == 0
    tokens = [int(row["tokens"]) for row in rows(config["out"])]
    assert set(tokens[:-1]) == {20 * 16}
    assert 0 < tokens[-1] < 20 * 16
    assert len(tokens) == -(-sum(tokens) // (20 * 16))


def test_without_a_checkpoint_resume_begins_at_step_0(settings: Make, server: Server) -> None:
    """Killed before the first save: --resume begins anew, says so, and metrics hold each step once."""
    config = settings()
    assert server.train(config, kill_at="step:2:0") == -9
    assert server.train(config, resume=True) == 0
    assert "starting at step 0" in server.log(config)
    assert [int(row["step"]) for row in rows(config["out"])] == list(range(1, 11))


def test_optimizer_steps_are_loaded_by_name(settings: Make, server: Server) -> None:
    """States are saved under parameter names, the tied weight once (L24)."""
    config = settings(steps=3)
    assert server.train(config) == 0
    names = set(tensors(checkpoints(config["out"])[-1]))
    model = {name.removeprefix("model/") for name in names if name.startswith("model/")}
    for state in ("exp_avg", "exp_avg_sq", "step"):
        assert {name.removeprefix(f"optimizer/{state}/") for name in names if f"/{state}/" in name} == model
    assert not any("lm_head" in name for name in model)
