"""Token windows in the order of the run, as microbatches of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from preflop.errors import BadSubject
from preflop.trainer.order import sample_ids
from preflop.trainer.tokens import Tokens, check_ids


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward sees."""

    input_ids: torch.Tensor
    """int64 (batch, sequence)."""
    labels: torch.Tensor
    """int64 (batch, sequence): the token after each position."""
    samples: NDArray[np.int64]
    """Which windows of the data these are."""

    def to(self, device: torch.device) -> Microbatch:
        """On the device; from pinned memory the copy does not wait."""
        if device.type == "cpu":
            return self
        input_ids, labels = (tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.labels))
        return Microbatch(input_ids, labels, self.samples)

    def pin_memory(self) -> Microbatch:
        """In page-locked memory, for copies that do not wait."""
        return Microbatch(self.input_ids.pin_memory(), self.labels.pin_memory(), self.samples)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which samples each step takes: a function of the step, so a run's data position is its step."""

    windows: int
    """Samples of an epoch."""
    batch: int
    microbatches: int
    """Over all ranks."""
    seed: int
    total_samples: int | None = None
    """Where the run ends; None: never."""

    @property
    def step_samples(self) -> int:
        """Samples of a full step."""
        return self.batch * self.microbatches

    @property
    def steps(self) -> int | None:
        """Steps until the samples end, the last perhaps short."""
        return None if self.total_samples is None else -(-self.total_samples // self.step_samples)

    def samples(self, step: int, microbatch: int) -> NDArray[np.int64]:
        """Samples of one microbatch; fewer, or none, where the run ends.

        >>> plan = Plan(windows=4, batch=2, microbatches=2, seed=0, total_samples=7)
        >>> [len(plan.samples(step, microbatch)) for step in (0, 1) for microbatch in (0, 1)]
        [2, 2, 2, 1]
        """
        first = step * self.step_samples + microbatch * self.batch
        stop = first + self.batch
        if self.total_samples is not None:
            stop = max(first, min(stop, self.total_samples))
        return sample_ids(np.arange(first, stop), self.windows, self.seed)

    def consumed(self, step: int) -> int:
        """Samples drawn before this step: the data position."""
        drawn = step * self.step_samples
        return drawn if self.total_samples is None else min(drawn, self.total_samples)


class Windows(Dataset[Any]):
    """The windows of a split: window i holds tokens i * sequence and the `sequence` after it."""

    def __init__(self, tokens: Tokens, sequence: int, vocab: int) -> None:
        self.tokens, self.sequence, self.vocab = tokens, sequence, vocab
        self.count = (len(tokens) - 1) // sequence
        if self.count < 1:
            raise BadSubject(
                f"a sequence of {sequence} tokens needs {sequence + 1}, and the data holds {len(tokens)}.\n"
                "  Use a shorter sequence (--seq), or more text."
            )

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes that are not forked: the file's name and not what is in it."""
        state = dict(self.__dict__)
        if isinstance(self.tokens, np.memmap):
            state["tokens"] = None
            state["mapped"] = (str(self.tokens.filename), self.tokens.dtype.str, self.tokens.shape)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        mapped = state.pop("mapped", None)
        self.__dict__.update(state)
        if mapped is not None:
            file, dtype, shape = mapped
            self.tokens = np.memmap(file, dtype=dtype, mode="r", shape=shape)

    def __getitems__(self, samples: NDArray[np.int64]) -> Microbatch:
        """The windows as one microbatch, their ids held to the vocabulary."""
        rows = [self.tokens[one * self.sequence : (one + 1) * self.sequence + 1] for one in samples]
        ids = np.stack(rows).astype(np.int64)
        check_ids(ids, self.vocab, "the data")
        both = torch.from_numpy(ids)
        return Microbatch(both[:, :-1].contiguous(), both[:, 1:].contiguous(), np.asarray(samples))


def training_steps(
    windows: Windows, plan: Plan, *, first_step: int, rank: int, ranks: int, workers: int, pin: bool
) -> Iterator[list[Microbatch]]:
    """The microbatches of this rank for each step from `first_step` on.

    Rank r takes microbatches r, r + ranks, ... of each step. No global random state is touched.
    """
    mine = range(rank, plan.microbatches, ranks)
    fetched = _fetched(windows, _Order(plan, mine, first_step), workers, pin=pin)
    step = first_step
    while True:
        wanted = sum(1 for microbatch in mine if len(plan.samples(step, microbatch)))
        if not wanted and plan.steps is not None and step >= plan.steps:
            return
        yield [next(fetched) for _ in range(wanted)]
        step += 1


@dataclass(frozen=True)
class _Order:
    """The samples of each microbatch of one rank, in turn: what a loader's workers are told to fetch."""

    plan: Plan
    microbatches: range
    first_step: int

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        step = self.first_step
        while self.plan.steps is None or step < self.plan.steps:
            for microbatch in self.microbatches:
                samples = self.plan.samples(step, microbatch)
                if len(samples):
                    yield samples
            step += 1


def _fetched(windows: Windows, order: _Order, workers: int, *, pin: bool) -> Iterator[Microbatch]:
    """Microbatches read here, or by worker processes ahead of time."""
    if not workers:
        for samples in order:
            batch = windows.__getitems__(samples)
            yield batch.pin_memory() if pin else batch
        return
    loader: DataLoader[Any] = DataLoader(
        windows,
        batch_sampler=order,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pin,
        # An iterator draws its workers' seed; from here, so that the run's own random state stays.
        generator=torch.Generator().manual_seed(order.plan.seed),
    )
    yield from loader


def _as_it_is(batch: Microbatch) -> Microbatch:
    return batch


def validation_batches(windows: Windows, batch: int, count: int) -> list[NDArray[np.int64]]:
    """The same samples at every evaluation: up to `count` batches, spread evenly over the split."""
    wanted = min(batch * count, len(windows))
    spread = np.arange(wanted, dtype=np.int64) * len(windows) // wanted
    return [spread[start : start + batch] for start in range(0, wanted, batch)]
