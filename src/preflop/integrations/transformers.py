"""A `transformers.TrainerCallback` that measures tokens/s and MFU beside what the account predicted.

    trainer = Trainer(..., callbacks=[PreflopCallback(device="h100-sxm")])

The figures go through `Trainer.log`'s own road, so they reach whatever the trainer reports to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import preflop
from preflop.accounting import Account
from preflop.errors import BadSubject
from preflop.measure.utilization import Meter
from preflop.trainer import randomness


class PreflopCallback(TrainerCallback):  # type: ignore[misc]
    """Adds preflop/tokens_per_s, preflop/mfu, preflop/step_s and predictions to the trainer's logs."""

    def __init__(self, *, device: str = "cpu", account: Account | None = None, warmup_steps: int = 2) -> None:
        """Args:
        device: of `preflop hardware`, or "cpu": where the step is priced.
        account: of one device's step; None: recorded from the trainer's first batch.
        """
        self.account, self._device, self._warmup_steps = account, device, warmup_steps
        self.meter: Meter | None = None
        self._pause: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Price the step on the first batch's shapes, and start the meter."""
        if self.account is None:
            batch = _example(kwargs["train_dataloader"], args.per_device_train_batch_size)
            self.account = preflop.account(  # type: ignore[assignment]
                kwargs["model"], batch, precision=_precision(args), device=self._device,
                microbatches=args.gradient_accumulation_steps,
            )  # fmt: skip
        self.meter = Meter(self.account, devices=args.world_size, warmup_steps=self._warmup_steps)
        self.meter.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimizer step has ended."""
        self._resume()
        if self.meter is not None:
            self.meter.step()
        if control.should_evaluate or control.should_save:
            self._stop("evaluation and saving")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What lay between two steps, evaluation and saving, is over."""
        self._resume()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last pause is over, too."""
        self._resume()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The trainer logs: put our figures among its own, and into the history that it saves."""
        if self.meter is None or self.account is None or logs is None or "loss" not in logs:
            return
        reading, expected = self.meter.reading(), self.account.time.expected_s
        found = {
            "preflop/tokens_per_s": reading.tokens_per_s,
            "preflop/mfu": reading.mfu,
            "preflop/step_s": reading.step_s,
            "preflop/predicted_step_s": expected,
            "preflop/predicted_peak_bytes": self.account.memory.peak_bytes,
        }
        known = {name: value for name, value in found.items() if value is not None}
        logs.update(known)
        if state.log_history:
            state.log_history[-1].update(known)

    def _stop(self, what: str) -> None:
        if self.meter is not None and self._pause is None:
            self._pause = self.meter.paused(what)
            self._pause.__enter__()

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None


def _example(loader: Any, batch_size: int) -> dict[str, torch.Tensor]:
    """A batch of the loader's shapes, made from its first samples: its order and random states stay."""
    dataset = loader.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadSubject(
            "the training data is a stream: pricing the step would take a batch of it away.\n"
            "  Give PreflopCallback(account=preflop.account(model, batch, ...))."
        )
    states = randomness.capture()
    try:
        batch: Mapping[str, Any] = loader.collate_fn(
            [dataset[index] for index in range(min(batch_size, len(dataset)))]
        )
    finally:
        randomness.restore(states)
    return {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _precision(args: TrainingArguments) -> str:
    return "bf16-mixed" if args.bf16 else "fp16-mixed" if args.fp16 else "fp32"
