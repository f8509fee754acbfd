"""The validation loss: the mean over the tokens of the same windows every time."""

from __future__ import annotations

import torch
from torch import nn

from preflop.trainer.batches import Windows, validation_batches
from preflop.trainer.processes import Processes, reshard
from preflop.trainer.step import Observer, Training, autocast


@torch.no_grad()
def evaluate(
    run: Training, windows: Windows, batch: int, batches: int, step: int, observe: Observer
) -> float:
    """Mean loss per token over up to `batches` batches, dealt out to the processes. Nothing else changes."""
    chosen = validation_batches(windows, batch, batches)
    sums = torch.zeros(2, dtype=torch.float64)
    with _evaluating(run.model):
        for index in _dealt(len(chosen), run.processes):
            observe("evaluate", step, index)
            # Every process runs as many forwards as the others, the last ones perhaps for nothing: sharded
            # parameters are gathered by all or none.
            read = windows.__getitems__(chosen[index % len(chosen)]).to(run.device)
            with autocast(run.device, run.autocast_dtype):
                summed = run.model(read.input_ids, read.labels)
            if index < len(chosen):
                sums += torch.tensor([summed.item(), read.labels.numel()], dtype=torch.float64)
    total, tokens = run.processes.sum(sums).tolist()
    return float(total / tokens)


def _dealt(count: int, processes: Processes) -> range:
    rounds = -(-count // processes.ranks)
    return range(processes.rank, rounds * processes.ranks, processes.ranks)


class _evaluating:  # noqa: N801 - used as a statement's word
    """The model in evaluation mode inside, in training mode after."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        reshard(self._model)
        self._model.train()
