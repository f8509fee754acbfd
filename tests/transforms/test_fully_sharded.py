"""FSDP2's transform against torch's own FSDP2 over a process group that sends nothing: the same bytes."""

from __future__ import annotations

import gc
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import preflop
from preflop.errors import BadNumber
from preflop.ledgers.memory import memory
from preflop.ops.collective import ALL_GATHER, REDUCE_SCATTER
from preflop.tape.stack import Refused
from preflop.transforms.fully_sharded import Sharded, blocks_of, fully_sharded
from tests.transforms.ranks import peak_of_events, trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 510), nn.Linear(510, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four blocks, a matrix before and one row after: sizes that three ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


X = (16, 128)


def measured(count: int, microbatches: int, *, regathers: bool | None = None) -> int:
    """Peak of a third step of torch's FSDP2 on the CPU, in bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model, x = init_device_mesh("cpu", (count,)), Model(), torch.randn(*X)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=regathers)
    fully_shard(model, mesh=mesh)
    step = trained(model, x, microbatches)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    peak = peak_of_events(profiler)
    parts = [p.to_local() for p in model.parameters()]  # type: ignore[attr-defined]
    kept = sum(4 * part.numel() for part in parts)
    return 3 * kept + 4 * len(parts) + x.nbytes + peak  # with AdamW's two states and its counter of steps


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_peak_is_fsdp2s_to_the_byte(count: int, microbatches: int, ranks: Any) -> None:
    """predicted == measured, less the padding of parts that rank 0 holds whole."""
    ranks(count)
    tape = preflop.account(Model(), torch.randn(*X), optimizer="adamw-loop", microbatches=microbatches).tape
    assert memory(fully_sharded(tape, degree=count)).peak_bytes == measured(count, microbatches)


def test_weights_that_are_kept_after_forward(ranks: Any) -> None:
    """reshard_after_forward=False: the same peak as torch's, and each block is gathered once."""
    ranks(2)
    tape = preflop.account(Model(), torch.randn(*X), optimizer="adamw-loop").tape
    kept = fully_sharded(tape, degree=2, how=Sharded(regathers=False))
    assert memory(kept).peak_bytes == measured(2, 1, regathers=False)
    ops = [kept.signatures[call.signature].op for call in kept.steady()]
    assert (ops.count(ALL_GATHER), ops.count(REDUCE_SCATTER)) == (5, 5)


def test_parts_of_all_ranks_are_the_whole_up_to_padding() -> None:
    """Columns of parameters, gradients and states: a rank's times the ranks, padded along the first dimension."""
    step = preflop.account(Model(), torch.randn(*X), optimizer="adamw-loop")
    shared = memory(fully_sharded(step.tape, degree=3)).columns
    padded = sum(
        3 * prod((-(-parameter.shape[0] // 3), *parameter.shape[1:])) * 4 for parameter in step.tape.parameters
    )
    assert 3 * shared.parameters.bytes == 3 * shared.gradients.bytes == padded
    assert padded >= step.memory.columns.parameters.bytes


def test_one_rank_is_the_tape_itself() -> None:
    """Degree 1 is the identity; 0 is no number of ranks."""
    tape = preflop.account(Model(), torch.randn(*X)).tape
    assert fully_sharded(tape, degree=1) is tape
    with pytest.raises(BadNumber, match="degree is 0"):
        fully_sharded(tape, degree=0)
    with pytest.raises(Refused, match="dtype"):
        fully_sharded(tape, degree=2, how=Sharded(kept_dtype="float32"))


def test_blocks_are_those_that_recomputation_chooses() -> None:
    """The outermost lists' members of one class; a block within a block is part of it."""
    tape = preflop.account("gpt2", {"batch_size": 1, "sequence_length": 8}).tape
    assert len(blocks_of(tape)) == 12
    assert blocks_of(preflop.account(nn.Linear(4, 4), torch.randn(2, 4)).tape) == ()
