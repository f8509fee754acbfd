"""A Lightning callback that measures tokens/s and MFU beside what the account predicted.

    trainer = Trainer(..., callbacks=[PreflopCallback(preflop.account(model, batch, device="h100-sxm"))])

The figures go through the module's own `log_dict`, so they reach whatever logger the trainer has.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[no-redef]

from preflop.accounting import Account
from preflop.measure.utilization import Meter


class PreflopCallback(Callback):  # type: ignore[misc]
    """Logs preflop/tokens_per_s, preflop/mfu and preflop/step_s at each optimizer step after warm-up."""

    def __init__(self, account: Account, *, warmup_steps: int = 2) -> None:
        """Args:
        account: of one device's step, all of its microbatches.
        """
        self.account, self._warmup_steps = account, warmup_steps
        self.meter: Meter | None = None
        self._steps = 0
        self._pause: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the meter."""
        self.meter = Meter(self.account, devices=trainer.world_size, warmup_steps=self._warmup_steps)
        self._steps = trainer.global_step
        self.meter.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has ended; a step has where the optimizer was called."""
        if self.meter is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.meter.step()
        reading = self.meter.reading()
        found = {"tokens_per_s": reading.tokens_per_s, "mfu": reading.mfu, "step_s": reading.step_s}
        known = {f"preflop/{name}": float(value) for name, value in found.items() if value is not None}
        pl_module.log_dict(known, on_step=True, on_epoch=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is not the step's time."""
        if self.meter is not None and self._pause is None:
            self._pause = self.meter.paused("validation")
            self._pause.__enter__()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training goes on."""
        if self._pause is not None:
            self._pause.__exit__(None, None, None)
            self._pause = None
