"""Prices 1,000 choices of one model and prints the seconds it took, then records a sample and compares.

`python bench/choices.py [MODEL] [--sample 50]`: batch, sequence length, accumulation and recomputation
vary; each choice is priced to peak, FLOPs, bytes and time. Making the parametric tapes (recording, where
none ships) and compiling them is timed apart.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from preflop.accounting import find_device
from preflop.choosing import choices

DEVICE = "h100-sxm"
PRECISION = "bf16-mixed"
MODES = ("none", "block", "selective")


def main() -> None:
    """Print seconds for making, compiling and evaluating, and how many of the sample agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gpt2")
    parser.add_argument("--choices", type=int, default=1000)
    parser.add_argument("--sample", type=int, default=0, help="choices to record and compare")
    options = parser.parse_args()
    device = find_device(DEVICE)
    start = time.perf_counter()
    model = choices(options.model, recompute=MODES, precision=PRECISION, device=DEVICE)
    print(f"tapes of {options.model}: {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    wanted = some(model, options.choices)
    one_of_each = {(choice[0] > 1, choice[2] > 1, choice[3]): choice for choice in wanted}
    for batch, seq, microbatches, mode in one_of_each.values():
        model.evaluate(batch, seq, microbatches=microbatches, recompute=mode, device=device)
    print(f"compiled: {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    for batch, seq, microbatches, mode in wanted:
        model.evaluate(batch, seq, microbatches=microbatches, recompute=mode, device=device)
    print(f"{len(wanted)} choices: {time.perf_counter() - start:.2f} s")
    for batch, seq, microbatches, mode in random.Random(1).sample(wanted, options.sample):
        check(options.model, model, batch, seq, microbatches, mode)


def some(model: Any, count: int) -> list[tuple[int, int, int, str]]:
    """So many choices (batch, sequence, microbatches, recomputation) that the tapes hold for."""
    draw = random.Random(0)
    found: list[tuple[int, int, int, str]] = []
    while len(found) < count:
        batch, seq, mode = draw.randint(1, 64), 128 * draw.randint(1, 8), draw.choice(MODES)
        if model.holds(batch, seq, recompute=mode):
            found.append((batch, seq, draw.choice((1, 2, 4, 8, 16)), mode))
    return found


def check(name: str, model: Any, batch: int, seq: int, microbatches: int, mode: str) -> None:
    """Record one choice in full and print whether every figure is the same."""
    from preflop.api import account
    from preflop.plan.outcome import outcome_of

    recorded = outcome_of(
        account(
            name, {"batch_size": batch, "sequence_length": seq}, precision=PRECISION, recompute=mode,
            microbatches=microbatches, device=DEVICE,
        )
    )  # fmt: skip
    device = find_device(DEVICE)
    found = model.evaluate(batch, seq, microbatches=microbatches, recompute=mode, device=device)
    counted = ("peak_bytes", "flops_model", "flops_hardware", "flops_total", "read_bytes", "write_bytes")
    wrong = [part for part in counted if getattr(found, part) != getattr(recorded, part)]
    off = abs(found.expected_s / recorded.expected_s - 1)
    said = f"{wrong or 'equal'}, time off by {off:.0e}"
    print(f"  {batch} x {seq}, {microbatches} microbatches, {mode}: {said}")


if __name__ == "__main__":
    main()
