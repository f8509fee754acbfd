"""What `preflop.no_copies` costs a CPU step: CPU time, the least of several steps with and without it.

python bench/no_copies.py
"""

from __future__ import annotations

import time

import torch

import preflop
from tests.zoo.architectures import Decoder

STEPS = 25


def main() -> None:
    """Print seconds of a step, and what the guard adds."""
    model = Decoder()
    ids = torch.randint(1000, (4, 128))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(ids).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def guarded() -> None:
        with preflop.no_copies():
            step()

    spent: dict[str, list[float]] = {"plain": [], "guarded": []}
    step()
    for _ in range(STEPS):
        for name, run in (("plain", step), ("guarded", guarded)):
            begun = time.process_time()
            run()
            spent[name].append(time.process_time() - begun)
    plain, guard = min(spent["plain"]), min(spent["guarded"])
    added = guard / plain - 1
    print(f"step {plain * 1e3:.2f} ms of CPU time, in no_copies {guard * 1e3:.2f} ms: {added:+.1%}")


if __name__ == "__main__":
    main()
