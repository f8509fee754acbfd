"""DDP's transform against torch's own DDP on the CPU: the same bytes."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import preflop
from preflop.errors import BadNumber
from preflop.ledgers.communication import communication
from preflop.ledgers.memory import memory
from preflop.tape.events import Role
from preflop.transforms.data_parallel import buckets_of, data_parallel
from tests.transforms.ranks import left_by_events, peak_of_events, trained


def model() -> nn.Sequential:
    """3.4 MB in three layers: the last fills the first bucket of one MiB alone."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 640), nn.ReLU(), nn.Linear(640, 513))


X = (16, 512)


def measured(microbatches: int, *, wraps: bool) -> tuple[int, int]:
    """(bytes that wrapping and two steps left, peak of a third step above them) on the CPU."""
    alone = model()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as before:
        wrapped, step = _started(alone, microbatches, wraps=wraps)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    del wrapped
    return left_by_events(before), peak_of_events(profiler)


def _started(alone: nn.Module, microbatches: int, *, wraps: bool) -> tuple[nn.Module, Callable[[], None]]:
    wrapped: nn.Module = alone
    if wraps:
        wrapped = DistributedDataParallel(alone)
        wrapped.register_comm_hook(None, lambda _, bucket: _completed(bucket.buffer()))
    return wrapped, trained(wrapped, torch.randn(*X), microbatches)


def _completed(value: Tensor) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(value)
    return done


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_peak_is_ddps_to_the_byte(microbatches: int, ranks: Any) -> None:
    """What DDP adds to a measured step == what the transform adds to the recorded one: all gradients once more, kept
    from step to step. (The sums return at once: gloo ends its work on threads of its own, whose frees the profiler
    does not see.)"""
    ranks(2)
    step = preflop.account(model(), torch.randn(*X), optimizer="adamw-loop", microbatches=microbatches)
    added = memory(data_parallel(step.tape, degree=2)).peak_bytes - step.memory.peak_bytes
    (left, peak), (left_alone, peak_alone) = (measured(microbatches, wraps=wraps) for wraps in (True, False))
    assert added == step.memory.columns.parameters.bytes
    assert left - left_alone == added
    assert peak == peak_alone


def test_m33_the_wrapper_keeps_a_second_copy_of_all_gradients() -> None:
    """Case M33: P of buckets beside w, g, m and v, P each: 5 P for 4 P with AdamW in fp32."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 4096, bias=False), nn.Linear(4096, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    step = preflop.account(Narrow(), torch.randn(1, 64), device="h100-sxm", gpus=8, shard="ddp")
    held = (64 + 8) * 4096 * 4
    columns = step.memory.columns
    states = columns.optimizer_states.bytes - 4 * 2  # with two counters
    assert [columns.parameters.bytes, columns.gradients.bytes, columns.buffers.bytes, states] == [
        held, held, held, 2 * held,
    ]  # fmt: skip
    sent = communication(step.tape)
    assert (sent.ranks, sent.bytes) == (8, held)
    assert step.memory.communicator_bytes == 688 << 20


def test_buckets_are_closed_as_torch_closes_them() -> None:
    """The first at one MiB, in the order of gradients: the last layer's come first."""
    step = preflop.account(model(), torch.randn(*X))
    names = [[step.tape.parameters[n].name for n in bucket.parameters] for bucket in buckets_of(step.tape)]
    assert [set(one) for one in names] == [
        {"4.weight", "4.bias"}, {"2.weight", "2.bias", "0.weight", "0.bias"},
    ]  # fmt: skip


def test_one_rank_is_the_tape_itself_and_more_change_no_birth() -> None:
    """Degree 1 is the identity; events keep their order, buckets come before them all."""
    tape = preflop.account(model(), torch.randn(*X)).tape
    assert data_parallel(tape, degree=1) is tape
    with pytest.raises(BadNumber, match="degree is 0"):
        data_parallel(tape, degree=0)
    shared = data_parallel(tape, degree=4)
    ticks = [call.tick for call in shared.calls]
    assert ticks == sorted(set(ticks))
    own = [s for s in shared.storages if s.name.startswith("DDP bucket")]
    assert all(s.role is Role.BUFFER and s.born == 0 and s.died is None for s in own)
    assert [dataclasses.replace(s, born=0, died=None) for s in shared.storages[: len(tape.storages)]] == [
        dataclasses.replace(s, born=0, died=None) for s in tape.storages
    ]
