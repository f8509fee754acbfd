"""Steps of this trainer beside a plain loop in nanoGPT's style, transformers' Trainer, and its own parts.

    python bench/trainer.py                 # all of it; OMP_NUM_THREADS sets the threads

Same model (4 layers, 4 heads, width 128, 64 positions: nanoGPT's CPU configuration, README "I only have a
macbook"), same data, same batch of 12, fp32, AdamW, clipping at 1.0. Loops take turns in rounds, so that
what else runs on the machine hurts all of them alike; times are of the process's own CPU, which other
processes disturb less than the clock, and the clock's are printed beside them. Medians over rounds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import preflop
from preflop.models.build import build
from preflop.models.catalog import Activation, find
from preflop.models.initialise import initialise
from preflop.trainer.batches import Plan, Windows, training_steps
from preflop.trainer.checkpoint import Checkpoints, Snapshot
from preflop.trainer.config import TrainConfig
from preflop.trainer.corpus import write_data
from preflop.trainer.model import TokenLoss
from preflop.trainer.optimizer import make_optimizer
from preflop.trainer.processes import Processes
from preflop.trainer.schedule import Scheduler, WarmupCosine
from preflop.trainer.step import Training, train_step
from preflop.trainer.tokens import Data

BATCH, SEQUENCE = 12, 64
ROUNDS, STEPS_PER_ROUND = 15, 8


def model() -> nn.Module:
    """nanoGPT's CPU model over bytes, with its exact GELU."""
    made = build(dataclasses.replace(find("gpt2-nano"), max_positions=SEQUENCE, activation=Activation.GELU))
    initialise(made, 0)
    return made


def ours(data: Data) -> Iterator[float]:
    """This trainer's step, data and meter included; yields losses."""
    config = TrainConfig(data="d", out="o", steps=1000, batch=BATCH, seq=SEQUENCE, learning_rate=1e-3)
    module = TokenLoss(model())
    optimizer = make_optimizer(module.parameters(), config)
    run = Training(
        module, optimizer, Scheduler(optimizer, WarmupCosine(1e-3, 0.1, 10, 1000)),
        torch.amp.GradScaler("cpu", enabled=False), Processes(), torch.device("cpu"), None, 1.0, 0,
    )  # fmt: skip
    windows = Windows(data.train, SEQUENCE, 256)
    plan = Plan(len(windows), BATCH, 1, 0)
    steps = training_steps(windows, plan, first_step=0, rank=0, ranks=1, workers=0, pin=False)
    meter = preflop.Meter(tokens=BATCH * SEQUENCE)
    meter.start()
    for step, batches in enumerate(steps):
        outcome = train_step(run, batches, step, lambda moment, at, index: None)
        meter.step()
        yield outcome.loss


def nanogpt(data: Data) -> Iterator[float]:
    """A plain loop in nanoGPT's style (train.py, get_batch and configure_optimizers of model.py).

    Source: github.com/karpathy/nanoGPT; fused AdamW is taken there on CUDA only, so not here.
    """
    module = model()
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1},
            {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data.train) - SEQUENCE, (BATCH,))
        inputs = [torch.from_numpy(data.train[i : i + SEQUENCE].astype(np.int64)) for i in starts]
        labels = [torch.from_numpy(data.train[i + 1 : i + 1 + SEQUENCE].astype(np.int64)) for i in starts]
        return torch.stack(inputs), torch.stack(labels)

    inputs, labels = get_batch()
    while True:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        logits = module(inputs).logits
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)
        inputs, labels = get_batch()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def rounds(loops: dict[str, Iterator[float]]) -> dict[str, dict[str, float]]:
    """CPU and clock seconds per step of each loop: medians over rounds in which they take turns.

    And the mean loss of the last half of the steps, which are as many for each.
    """
    losses: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    clock: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        for _ in range(3):
            next(loop)
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            begun, wall = time.process_time(), time.perf_counter()
            losses[name] += [next(loop) for _ in range(STEPS_PER_ROUND)]
            cpu[name].append((time.process_time() - begun) / STEPS_PER_ROUND)
            clock[name].append((time.perf_counter() - wall) / STEPS_PER_ROUND)
    return {
        name: {
            "cpu_s": statistics.median(cpu[name]),
            "clock_s": statistics.median(clock[name]),
            "loss": statistics.mean(losses[name][len(losses[name]) // 2 :]),
        }
        for name in loops
    }


def huggingface(data: Data, steps: int) -> tuple[float, float]:
    """CPU and clock seconds per step of transformers' Trainer over the same module, by two lengths of run."""
    from transformers import Trainer, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(input_ids).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return (len(data.train) - 1) // SEQUENCE

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.from_numpy(data.train[index * SEQUENCE : (index + 1) * SEQUENCE + 1].astype(np.int64))
            return {"input_ids": ids[:-1], "labels": ids[1:]}

    def seconds(count: int) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, max_steps=count, per_device_train_batch_size=BATCH, learning_rate=1e-3,
                logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            )  # fmt: skip
            trainer = Trainer(model=Wrapped(), args=arguments, train_dataset=Rows())
            begun, wall = time.process_time(), time.perf_counter()
            trainer.train()
            return time.process_time() - begun, time.perf_counter() - wall

    seconds(3)
    short, long = seconds(5), seconds(5 + steps)
    return (long[0] - short[0]) / steps, (long[1] - short[1]) / steps


def meter_s() -> float:
    """Seconds of one call of the meter, without a device to wait for."""
    meter = preflop.Meter(tokens=1, model_flops=1, peak_flops_per_s=1.0)
    meter.start()
    begun = time.process_time()
    for _ in range(20_000):
        meter.step()
    return (time.process_time() - begun) / 20_000


def saves(megabytes: int = 256) -> dict[str, float]:
    """Seconds that the loop waits for a save, synchronous and beside the loop, least of three."""
    tensors = {f"model/{index}": torch.randn(megabytes * 1024 * 16) for index in range(16)}
    waited: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, asynchronous in (("synchronous_s", False), ("asynchronous_s", True)):
            store = Checkpoints(Path(folder) / name, keep=1, processes=Processes(), asynchronous=asynchronous)
            took = []
            for step in range(1, 5):
                begun = time.perf_counter()
                store.save(step, Snapshot(tensors, {}, {}))
                took.append(time.perf_counter() - begun)
                store.wait()
            waited[name] = min(took[1:])  # the first makes room for the copy
    return waited


def main() -> None:
    """Print every figure as JSON, and what it says in words."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        sources = sorted(Path(json.__file__).parent.glob("*.py"))
        text.write_bytes(b"".join(one.read_bytes() for one in sources))
        data = write_data([text], Path(folder) / "data")
        found: dict[str, dict[str, float]] = rounds({"preflop": ours(data), "nanogpt": nanogpt(data)})
        if "--no-huggingface" not in sys.argv:
            cpu, clock = huggingface(data, 40)
            found["transformers"] = {"cpu_s": cpu, "clock_s": clock}
    one = meter_s()
    found["meter"] = {"cpu_s": one, "share_of_step": one / found["preflop"]["cpu_s"]}
    waited = saves()
    found["save"] = {**waited, "stall_share": waited["asynchronous_s"] / waited["synchronous_s"]}
    print(json.dumps({"threads": torch.get_num_threads(), **found}, indent=2))
    mine = found["preflop"]["cpu_s"]
    for name in ("nanogpt", "transformers"):
        if name in found:
            print(f"preflop does {found[name]['cpu_s'] / mine:.2f} times the tokens per CPU second of {name}")


if __name__ == "__main__":
    main()
