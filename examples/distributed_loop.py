"""The loop over several processes: DDP (a copy of the model in each) or FSDP2 (a part in each).

    torchrun --nproc_per_node 2 examples/distributed_loop.py            # DDP
    torchrun --nproc_per_node 2 examples/distributed_loop.py fsdp

Gradients are exchanged in a step's last microbatch only. Both divide them by the number of processes,
so the loss is multiplied by it, because it is divided by the tokens of all processes already.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from naive_loop import NextToken, batches
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preflop

MICROBATCHES = 2


def main(shard: str) -> None:
    """Train; the first process prints the losses and what was measured."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = NextToken()
    data = batches()
    mine = data[0].tensor_split(ranks * MICROBATCHES)[0]
    account = preflop.account(plain, (mine[:, :-1], mine[:, 1:]), microbatches=MICROBATCHES)
    model = DistributedDataParallel(plain) if shard == "ddp" else fully_shard(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    meter = preflop.Meter(account, devices=ranks)
    meter.start()

    losses = []
    for tokens in data:
        whole, total = tokens[:, 1:].numel(), torch.zeros(())
        parts = tokens.tensor_split(ranks * MICROBATCHES)[rank::ranks]
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            if shard == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if shard == "ddp" and not last else nullcontext():
                loss = model(part[:, :-1], part[:, 1:]) * part[:, 1:].numel() / whole
                (loss * ranks).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item())
        meter.step()

    if rank == 0:
        print("losses", *losses)
        print(meter.reading())
    dist.barrier()  # nobody closes its connections while another still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ddp")
