"""How long Preflop takes to account a step, beside what people use now. Prints times and ratios.

    python bench/recording.py [flops] [memory] [depth] [start] [--repeats N]

flops   Llama-3-8B, 1 x 2048: Preflop's account (two AdamW steps, every ledger) against FlopCounterMode
        alone, one forward and backward under FakeTensorMode.
memory  GPT-2 and ResNet-50: Preflop's account against MemTracker's two AdamW steps.
depth   Llama-3-405B, 1 x 8192: recording all 126 layers (folded) against 4, the same with every ledger, and
        the peak memory of the process.
start   Commands from a cold start.

Contestants alternate in one process, on the same reference models. Tapes that ship with the package
are not used but by `start`: everything else is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH, SEQUENCE, LONG = 1, 2048, 8192


@dataclasses.dataclass(frozen=True)
class Took:
    """Seconds by the clock, and seconds of computing: the same where nothing else runs."""

    wall_s: float
    cpu_s: float


def took(act: Callable[[], Any]) -> Took:
    """What one call took; what the last one made is gone when the clock is read."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def median(found: list[Took]) -> Took:
    return Took(statistics.median(t.wall_s for t in found), statistics.median(t.cpu_s for t in found))


def alternate(repeats: int, *acts: Callable[[], Took]) -> list[Took]:
    """Medians of each act, the acts taking turns; a first turn that is not counted."""
    times: list[list[Took]] = [[] for _ in acts]
    for turn in range(repeats + 1):
        for act, found in zip(acts, times):
            one = act()
            if turn:
                found.append(one)
    return [median(found) for found in times]


def report(what: str, ours: Took, theirs: str, other: Took) -> None:
    print(
        f"{what}: Preflop {ours.wall_s:.2f} s ({ours.cpu_s:.2f} s computing), "
        f"{theirs} {other.wall_s:.2f} s ({other.cpu_s:.2f} s), "
        f"ratio {ours.wall_s / other.wall_s:.2f} ({ours.cpu_s / other.cpu_s:.2f})",
        flush=True,
    )


def preflop_account(name: str, batch: int, sequence: int | None) -> Took:
    """One whole account of a named model on the CPU, recorded, and every ledger read."""
    import preflop

    size = {"batch_size": batch} | ({} if sequence is None else {"sequence_length": sequence})
    return took(lambda: preflop.account(name, size).ledgers)


def fake_model(name: str, batch: int, sequence: int | None) -> tuple[Any, dict[str, Any]]:
    """The reference model and its batch; call it under FakeTensorMode."""
    import torch

    from preflop.models.build import build, example_batch
    from preflop.models.catalog import find

    facts = find(name)
    model = build(facts)
    return model, {
        key: torch.empty_like(value) for key, value in example_batch(facts, batch, sequence).items()
    }


def flop_counter(name: str, batch: int, sequence: int | None) -> Took:
    """One forward and backward under FlopCounterMode, model and batch made before the clock starts."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = fake_model(name, batch, sequence)

        def act() -> None:
            with FlopCounterMode(display=False):
                model(**inputs).loss.backward()

        return took(act)


def mem_tracker(name: str, batch: int, sequence: int | None) -> Took:
    """Two AdamW steps under MemTracker, model and batch made before the clock starts."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = fake_model(name, batch, sequence)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *inputs.values())

        def act() -> None:
            with tracker:
                for step in range(2):
                    model(**inputs).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    if step == 0:
                        tracker.reset_mod_stats()

        return took(act)


def flops(repeats: int) -> None:
    ours, theirs = alternate(
        repeats,
        lambda: preflop_account("llama-3-8b", BATCH, SEQUENCE),
        lambda: flop_counter("llama-3-8b", BATCH, SEQUENCE),
    )
    report("llama-3-8b 1 x 2048", ours, "FlopCounterMode", theirs)


def memory(repeats: int) -> None:
    for name, batch, sequence in (("gpt2", 4, 512), ("resnet-50", 8, None)):
        ours, theirs = alternate(
            repeats,
            lambda: preflop_account(name, batch, sequence),  # noqa: B023, called before the next turn
            lambda: mem_tracker(name, batch, sequence),  # noqa: B023
        )
        report(f"{name} batch {batch}", ours, "MemTracker", theirs)


def depth(repeats: int) -> None:
    import preflop
    from preflop.folding import tape_of
    from preflop.models.build import build, example_batch
    from preflop.models.catalog import find
    from preflop.subject import resolve

    whole = find("llama-3-405b")
    shallow = dataclasses.replace(whole, layers=4)
    batch = example_batch(whole, BATCH, LONG)

    def record(facts: Any) -> Took:
        return took(lambda: tape_of(resolve(lambda: build(facts), batch, precision="bf16-mixed")))

    def account(facts: Any) -> Took:
        return took(lambda: preflop.account(lambda: build(facts), batch, precision="bf16-mixed").ledgers)

    for name, way in (("recording", record), ("account", account)):
        ours, four = alternate(repeats, lambda way=way: way(whole), lambda way=way: way(shallow))
        report(f"llama-3-405b {BATCH} x {LONG}, 126 layers, {name}", ours, "4 layers", four)
    code = (
        "import preflop, resource\n"
        f"preflop.account('llama-3-405b', {{'batch_size': {BATCH}, 'sequence_length': {LONG}}},"
        " precision='bf16-mixed').ledgers\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    kib = int(
        subprocess.run([sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE).stdout
    )
    print(f"llama-3-405b: peak resident memory of the process {kib / 2**20:.2f} GiB")


COMMANDS = (
    "time --params 70e9 --tokens 15e12 --gpus 1024 --device h100-sxm --mfu 0.5",
    "hardware",
    "account gpt2 --batch 8 --seq 1024 --device h100-sxm",
    "account llama-3-70b --batch 1 --seq 4096 --precision bf16-mixed --device h100-sxm",
)


def start(repeats: int) -> None:
    for command in COMMANDS:
        words = [sys.executable, "-c", "from preflop.cli.main import main; main()", *command.split()]
        found = []
        for _ in range(repeats + 1):
            before = os.times()
            # Status 1 is an answer ("does not fit").
            subprocess.run(words, check=False, stdout=subprocess.DEVNULL)
            after = os.times()
            computing = after.children_user + after.children_system
            computing -= before.children_user + before.children_system
            found.append(Took(after.elapsed - before.elapsed, computing))
        one = median(found[1:])
        print(f"preflop {command}: {one.wall_s:.2f} s ({one.cpu_s:.2f} s computing)", flush=True)


PARTS = {"flops": flops, "memory": memory, "depth": depth, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for part in options.parts or PARTS:
        PARTS[part](options.repeats)


if __name__ == "__main__":
    main()
