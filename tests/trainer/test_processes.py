"""Several processes: the same data in the same order, the same losses, checkpoints for any number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from preflop.errors import BadSubject
from preflop.trainer.processes import Processes, check_dealt
from tests.trainer.runs import Server, checkpoints, rows, tensors

Make = Callable[..., dict[str, Any]]
TWO = {"microbatches": 4, "steps": 6, "decay_steps": 6}


@pytest.fixture(scope="module")
def alone(server: Server, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of one process."""
    out = str(tmp_path_factory.mktemp("alone") / "run")
    config = {"data": str(data), "out": out, "batch": 2, "seq": 16, "checkpoint_every": 3,
              "evaluate_batches": 2, "warmup_steps": 4, "dropout": 0.1, "seed": 7, **TWO}  # fmt: skip
    assert server.train(config) == 0
    return out


def assert_same_run(one: str, other: str) -> None:
    """Same samples in the same order; losses, validation losses and parameters equal to 1e-5."""
    first, second = rows(one), rows(other)
    assert [row["samples"] for row in first] == [row["samples"] for row in second]
    assert [row["tokens"] for row in first] == [row["tokens"] for row in second]
    for a, b in zip(first, second, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), abs=1e-5)
        assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-4)
        if a["validation_loss"]:
            assert float(a["validation_loss"]) == pytest.approx(float(b["validation_loss"]), abs=1e-5)
    mine, theirs = tensors(checkpoints(one)[-1]), tensors(checkpoints(other)[-1])
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-4


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_two_processes_equal_one(shard: str, alone: str, settings: Make, server: Server) -> None:
    """DDP and FSDP2 on two processes: same data order, losses equal to 1e-5, dropout included."""
    config = settings(shard=shard, **TWO)
    assert server.train(config, ranks=2) == 0, server.log(config)
    assert_same_run(alone, config["out"])


@pytest.mark.parametrize(
    ("before", "after", "shard"), [(2, 1, "ddp"), (1, 2, "ddp"), (2, 1, "fsdp"), (1, 2, "fsdp")]
)
def test_a_run_goes_on_with_another_number_of_processes(
    before: int, after: int, shard: str, alone: str, settings: Make, server: Server
) -> None:
    """2 -> 1 and 1 -> 2, whole and sharded: same data order, losses equal to 1e-5."""
    config = settings(shard=shard, **TWO)
    assert server.train({**config, "steps": 3}, ranks=before) == 0, server.log(config)
    assert server.train(config, ranks=after, resume=True) == 0, server.log(config)
    assert "Resumed from step-00000003" in server.log(config)
    assert f"The checkpoint was made by {before} processes" in server.log(config)
    assert_same_run(alone, config["out"])


def test_two_processes_stop_together(settings: Make, server: Server) -> None:
    """SIGTERM to each in the middle of a step: both save the same step and end with status 0."""
    config = settings(async_save=True, **TWO)
    assert server.train(config, ranks=2, kill_at="microbatch:3:1", signal="SIGTERM") == 0, server.log(config)
    assert checkpoints(config["out"])[-1].name == "step-00000004"
    assert server.train(config, ranks=2, resume=True) == 0


def test_a_failed_save_fails_in_both(settings: Make, server: Server) -> None:
    """A full disk under two processes: told, nothing hangs, status 2 at the end."""
    config = settings(**TWO)
    assert server.train(config, ranks=2, largest_file_bytes=100_000) == 2
    assert "NOT SAVED: the checkpoint of step 3" in server.log(config)
    assert not checkpoints(config["out"])


def test_microbatches_are_dealt_out_evenly() -> None:
    """Three microbatches over two processes are refused, with what to do."""
    with pytest.raises(BadSubject, match="3 microbatches, and 2 processes share them"):
        check_dealt(3, 2)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_in_the_last_microbatch_only() -> None:
    """Of four backward passes one calls the reduction: accumulation without needless all-reduce."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    reduced = []

    def hook(state, bucket):
        reduced.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    run = Processes()
    for index in range(4):
        with run.synchronised(model, last=index == 3):
            model(torch.ones(1, 4)).sum().backward()
    assert reduced == [0]
