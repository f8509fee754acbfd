"""One process or several: PyTorch's own distributed engine, behind the few calls that a step makes.

`torchrun` says how many there are. A step's microbatches are dealt out to the ranks, so the number of
processes changes neither the data's order nor the step's loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from preflop.errors import BadSubject
from preflop.record.recompute import blocks_of


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    checkpoint_group: Any = None
    """Over gloo, for checkpoints alone: their thread must not mix its messages with the step's."""

    @property
    def first(self) -> bool:
        """True in the process that prints and writes."""
        return self.rank == 0

    @property
    def gradient_factor(self) -> int:
        """DDP and FSDP divide the summed gradients by the ranks; the loss is weighted by tokens already."""
        return self.ranks

    def global_index(self, index: int) -> int:
        """Which microbatch of the step this rank's `index`-th is."""
        return index * self.ranks + self.rank

    def total(self, count: int) -> int:
        """The sum of a count over all processes."""
        return (
            count
            if self.ranks == 1
            else int(self.sum(torch.tensor(float(count), dtype=torch.float64)).item())
        )

    def sum(self, value: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The sum of a tensor over all processes."""
        if self.ranks > 1:
            on_gpu = dist.get_backend(group) == "nccl"
            value = value.to(torch.device("cuda", self.local_rank)) if on_gpu else value
            dist.all_reduce(value, group=group)
        return value

    def any(self, flag: bool, group: Any = None) -> bool:
        """True where any process says so: all of them decide alike."""
        return flag if self.ranks == 1 else bool(self.sum(torch.tensor(float(flag)), group).item())

    def synchronised(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last microbatch of a window only."""
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if last else model.no_sync()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        return nullcontext()

    def whole(self, norm: torch.Tensor) -> torch.Tensor:
        """A norm of sharded gradients as one number, the same in each process."""
        full = getattr(norm, "full_tensor", None)
        return norm if full is None else full()


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """The processes that `torchrun` started, joined; or this one alone.

    Raises:
        BadSubject: more processes than GPUs were started on this machine.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield Processes()
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        _check_gpu(local_rank)
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), ranks, local_rank, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def _check_gpu(local_rank: int) -> None:
    seen = torch.cuda.device_count()
    if local_rank >= seen:
        raise BadSubject(
            f"each process needs a GPU of its own, and process {local_rank + 1} of this machine finds {seen}.\n"
            f"  Use torchrun --nproc_per_node {seen} or less, or give --device cpu."
        )


def check_shared(shard: str | None) -> None:
    """Refuse a way to share a step among processes that was asked for where there is one process.

    Raises:
        BadSubject: torchrun did not start this process; the message says how to.
    """
    if shard is not None and "WORLD_SIZE" not in os.environ:
        raise BadSubject(
            f"--shard {shard} shares a step among several processes, and this is one by itself.\n"
            f"  Run `torchrun --nproc_per_node N --no-python preflop train ... --shard {shard}`, with "
            "--microbatches a multiple of N; or leave --shard out."
        )


def check_dealt(microbatches: int, ranks: int) -> None:
    """Every process must get as many microbatches of a step as the others.

    Raises:
        BadSubject: the number of microbatches is not a multiple of the processes.
    """
    if microbatches % ranks:
        raise BadSubject(
            f"a step has {microbatches} microbatches, and {ranks} processes share them.\n"
            f"  Use a multiple of {ranks} for --microbatches: a step is that many batches over all processes."
        )


def distribute(model: nn.Module, shard: str, run: Processes, device: torch.device) -> nn.Module:
    """The model wrapped for the processes: a copy in each (ddp), or in parts (fsdp)."""
    if run.ranks == 1:
        return model
    if shard == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (run.ranks,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def reshard(model: nn.Module) -> None:
    """Free what FSDP gathered for a forward that no backward followed: the root keeps its own otherwise."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside of DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model
