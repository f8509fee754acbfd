"""Examples and callbacks: each runs, learns, and logs through its host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words: str) -> str:
    """Output of an example, in a Python of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        # torchrun's workers lead sessions of their own and hold the pipes: it ends them itself when it is told to.
        process.terminate()
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, errors
    return output


def launched(*words: str) -> str:
    """Output of an example under torchrun. One that hangs is launched once more: on a machine with no core to
    spare gloo's processes were once seen waiting for each other for ever."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    try:
        return run(*launch, *words)
    except subprocess.TimeoutExpired:
        return run(*launch, *words)


def falls(output: str) -> bool:
    """Whether the loss that was printed fell by a quarter."""
    first, last = (float(one) for one in output.split("loss ")[1].splitlines()[0].split(" -> "))
    return last < 0.75 * first


@pytest.mark.parametrize("name", ["naive_loop", "amp_loop"])
def test_a_loop_is_priced_learns_and_is_measured(name: str) -> None:
    """The naive and the AMP loop print the account, a falling loss and the meter's reading."""
    output = run(str(EXAMPLES / f"{name}.py"))
    assert "a step peaks at" in output
    assert falls(output)
    assert "10 steps (2 warm-up steps left out)" in output


def test_the_distributed_loop_is_one_run_however_it_is_shared() -> None:
    """DDP and FSDP2 on two processes print the same losses, and they fall."""
    found = []
    for shard in ("ddp", "fsdp"):
        output = launched(str(EXAMPLES / "distributed_loop.py"), shard)
        line = next(line for line in output.splitlines() if line.startswith("losses"))
        found.append([float(one) for one in line.split()[1:]])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0][-1] < found[0][0]


def test_the_huggingface_callback_logs_through_the_trainer() -> None:
    """Tokens/s, MFU and the predictions stand in the trainer's own history."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    output = run(str(EXAMPLES / "huggingface_trainer.py"))
    for name in ("tokens_per_s", "mfu", "step_s", "predicted_step_s", "predicted_peak_bytes"):
        assert f"'preflop/{name}'" in output


def test_the_huggingface_callback_changes_no_training() -> None:
    """Losses with the callback equal those without, bit for bit: pricing draws no sample and no number."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from preflop.integrations.transformers import PreflopCallback

    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(16, (8,))
            return {"input_ids": ids, "labels": ids}

    def losses(callbacks: list, folder: Path) -> list[float]:
        transformers.set_seed(1)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2)
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Noisy(), callbacks=callbacks
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert losses([PreflopCallback()], Path(folder)) == losses([], Path(folder))


def test_the_lightning_callback_logs_through_the_module(tmp_path: Path) -> None:
    """Tokens/s and MFU are among the trainer's logged metrics; validation is paused."""
    lightning = pytest.importorskip("pytorch_lightning")
    import preflop
    from preflop.integrations.lightning import PreflopCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).pow(2).mean()

        def validation_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    account = preflop.account(torch.nn.Linear(8, 8), torch.randn(4, 8), microbatches=2, device="h100-sxm")
    callback = PreflopCallback(account)
    trainer = lightning.Trainer(
        max_steps=6, accumulate_grad_batches=2, accelerator="cpu", callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
        val_check_interval=4,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    trainer.fit(Module(), loader, loader)
    assert callback.meter is not None
    reading = callback.meter.reading()
    assert (reading.steps, reading.excluded_steps) == (4, 2)
    assert {"preflop/step_s", "preflop/mfu"} <= set(trainer.logged_metrics)
    assert "validation" in reading.paused_s


def test_tensorboard_gets_what_the_csv_gets(data: Path, tmp_path: Path) -> None:
    """Losses in the event files are those of metrics.csv."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from preflop.trainer.config import TrainConfig
    from preflop.trainer.loop import train
    from tests.trainer.runs import rows

    config = TrainConfig(data=str(data), out=str(tmp_path / "run"), steps=3, batch=1, seq=8, tensorboard=True)
    train(config, price=False)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    logged = [scalar.value for scalar in events.Scalars("loss")]
    assert logged == [pytest.approx(float(row["loss"])) for row in rows(tmp_path / "run")]
