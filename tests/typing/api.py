"""Real use of the public names, for mypy to read (it is never run): what users write must type-check."""

from __future__ import annotations

import preflop
from preflop.dtypes import Rounding, roundings
from preflop.hardware.catalog import find
from preflop.optimizers import find_optimizer
from preflop.plan.fit import LargestModel, largest_model
from preflop.precision import find_precision
from preflop.timing.training import TrainingTime, training_time

step: preflop.Account = preflop.account("gpt2", {"batch_size": 8, "sequence_length": 1024}, device="h100-sxm")
peak_bytes: int = step.memory.peak_bytes
tape: preflop.Tape = preflop.record(sum, [1, 2])
ledger: preflop.Ledger = preflop.flops_ledger(tape)
by_module: dict[str, int] = ledger.by("module")

run: TrainingTime = training_time(70 * 10**9, 15 * 10**12, 1024, find("h100-sxm"), 0.5)
days: float = run.days
napkin: LargestModel = largest_model(find("a100"), 8, find_optimizer("adamw"), find_precision("fp32"))
becomes: tuple[Rounding, ...] = roundings(napkin.parameters)  # type: ignore[arg-type]  # an int is no Fraction

written: int = preflop.copies_ledger(tape, kernels_only=True).total()
product_flops: int = preflop.einsum_cost("b d, d f -> b f", b=1, d=2, f=3, dtype="fp32").forward.flops
with preflop.no_copies(allow=lambda place: place.startswith("model.py")):
    pass
