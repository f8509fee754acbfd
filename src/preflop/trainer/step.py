"""One optimizer step: the loop of the whole project, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from preflop.models.loss import IGNORED_LABEL
from preflop.trainer.batches import Microbatch
from preflop.trainer.processes import Processes
from preflop.trainer.randomness import seed_microbatch
from preflop.trainer.schedule import Scheduler

Observer = Callable[[str, int, int], None]
"""Called at each moment of a run with its name, the step and the microbatch."""


@dataclass(slots=True)
class Training:
    """What a step works on."""

    model: nn.Module
    """From ids and labels to the summed loss; wrapped for several processes where there are."""
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    scaler: torch.amp.GradScaler
    """Does nothing where the precision needs none."""
    processes: Processes
    device: torch.device
    autocast_dtype: torch.dtype | None
    clip: float
    seed: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did."""

    loss: float
    """Mean over the step's tokens, of all processes."""
    grad_norm: float
    """Of all gradients together, before clipping."""
    learning_rate: float
    tokens: int
    """Labelled tokens, of all processes."""
    taken: bool
    """False: a gradient was not finite, and nothing was changed."""


def train_step(
    run: Training, microbatches: Sequence[Microbatch], step: int, observe: Observer
) -> StepOutcome:
    """Forward and backward of each microbatch, weighted by tokens, then one update or none.

    Nothing is changed where a gradient is not finite: not parameters, states, decay or rate. The
    gradients are dropped and the scaler's factor falls, as it should.
    """
    tokens = run.processes.total(sum(_labelled(batch) for batch in microbatches))
    loss = torch.zeros((), device=run.device)
    for index, batch in enumerate(microbatches):
        observe("microbatch", step, index)
        seed_microbatch(run.seed, step, run.processes.global_index(index))
        last = index == len(microbatches) - 1
        with run.processes.synchronised(run.model, last=last):
            with autocast(run.device, run.autocast_dtype):  # anew for each forward: it caches cast weights
                summed = run.model(batch.input_ids, batch.labels)
            observe("forward_end", step, index)
            share = summed / tokens
            run.scaler.scale(share * run.processes.gradient_factor).backward()
        loss += share.detach()
        del summed, share
        observe("backward_end", step, index)
    run.scaler.unscale_(run.optimizer)
    norm = run.processes.whole(clipped_norm(run.model.parameters(), run.clip))
    rate, taken = run.scheduler.rate, bool(torch.isfinite(norm))
    if taken:
        run.scaler.step(run.optimizer)
        run.scheduler.step()
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    observe("optimizer_end", step, len(microbatches) - 1)
    return StepOutcome(run.processes.sum(loss).item(), norm.item(), rate, tokens, taken)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast to the dtype; nothing where the precision has none."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _labelled(batch: Microbatch) -> int:
    return int((batch.labels != IGNORED_LABEL).sum())


def clipped_norm(
    parameters: Iterable[nn.Parameter], clip: float, *, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all gradients; they are scaled down to `clip` where it is larger and above 0.

    Args:
        foreach: None: as torch chooses, which is lists for plain tensors.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    return nn.utils.clip_grad_norm_(with_gradient, clip if clip > 0 else float("inf"), foreach=foreach)
