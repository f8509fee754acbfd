"""`preflop data` and `preflop train`: what they print, refuse and leave behind."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest
import torch

from preflop.cli.main import run
from preflop.trainer.config import TrainConfig, keys, make_config, read_toml, to_toml

SMALL = ["--batch", "2", "--seq", "16", "--checkpoint-every", "4", "--steps", "8"]


@pytest.fixture
def words(data: Path, tmp_path: Path) -> list[str]:
    return ["train", "--data", str(data), "--out", str(tmp_path / "run"), *SMALL]


def test_data_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of both splits and the vocabulary; --json the same for programs."""
    (tmp_path / "a.txt").write_text("hello there\n" * 50)
    assert run(["data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "d")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # folded where the folder's name is long
    assert "541 tokens to train on, 61 to validate, 256 ids (bytes)" in said
    assert run(["data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "e"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_tokens"] == 541


def test_train_prices_trains_and_compares(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The account first, a line with the prediction beside each reading, and a closing table."""
    assert run(words) == 0
    out = capsys.readouterr().out
    assert out.index("What the step keeps") < out.index("step 1/8  loss") < out.index("peak memory")
    assert [f"step {step}/8  loss" in out for step in range(1, 9)] == [True] * 8
    assert "in brackets what was predicted" in out and "peak " in out and "[" in out
    assert "agrees within 0.5%" in out or "Largest difference" in out
    assert "Done: step 8 of 8" in out
    assert read_toml(tmp_path / "run/config.toml")["batch"] == 2


def test_metrics_hold_each_step_in_full_precision(words: list[str], tmp_path: Path) -> None:
    """A row per step; the loss reads back to the very bits of an fp32 number."""
    assert run(words) == 0
    with (tmp_path / "run/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    for row in rows:
        loss = float(row["loss"])
        assert torch.tensor(loss, dtype=torch.float32).item() == loss
        assert repr(loss) == row["loss"]
    assert {"learning_rate", "grad_norm", "tokens_per_s", "mfu", "peak_bytes", "skipped"} <= set(rows[0])
    assert [bool(row["validation_loss"]) for row in rows] == [step in (4, 8) for step in range(1, 9)]


def test_resume_needs_only_the_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--out and --resume: the settings are the run's; more steps are allowed and told."""
    assert run(words) == 0
    assert run(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "Resumed from step-00000008" in out
    assert "Changed since the checkpoint: steps was 8 and is 10" in out
    assert "Done: step 10 of 10" in out


def test_nothing_to_do_and_too_few_steps(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many steps as are done: said, status 0. Fewer: one message, status 2; the run stays as it was."""
    assert run(words) == 0
    before = (tmp_path / "run/config.toml").read_text(), (tmp_path / "run/metrics.csv").read_text()
    capsys.readouterr()
    again = ["train", "--out", str(tmp_path / "run"), "--resume"]
    assert run(again) == 0
    assert "Nothing to do: step 8 of 8 was done before." in capsys.readouterr().out
    assert run([*again, "--steps", "5"]) == 2
    printed = capsys.readouterr()
    assert "has 8 steps done, which is beyond the 5 asked for" in printed.err
    assert printed.out == ""
    assert before == ((tmp_path / "run/config.toml").read_text(), (tmp_path / "run/metrics.csv").read_text())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--batch", "4"], "is of another run: batch was 2 and is 4"),
        (["--model", "gpt2"], "is of another run: model was gpt2-nano and is gpt2"),
        (["--data", "OTHER"], "was made with other data"),
    ],
)
def test_another_runs_settings_are_refused_before_anything_is_priced(
    words: list[str],
    changed: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--resume with what would be another run: status 2, nothing recorded and nothing on standard output."""
    from preflop.trainer import preflight

    (tmp_path / "a.txt").write_text("other words\n" * 200)
    assert run(["data", str(tmp_path / "a.txt"), "--out", str(tmp_path / "other")]) == 0
    assert run(words) == 0
    capsys.readouterr()
    monkeypatch.setattr(preflight, "own_account", lambda *_: pytest.fail("the step was priced"))
    changed = [str(tmp_path / "other") if word == "OTHER" else word for word in changed]
    assert run(["train", "--out", str(tmp_path / "run"), "--resume", *changed]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_resuming_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--resume without a run: that is what is missing, not --data."""
    assert run(["train", "--out", str(tmp_path / "none"), "--resume"]) == 2
    assert f"there is no run in {tmp_path / 'none'} to go on with" in capsys.readouterr().err


def test_no_checkpoint_is_praised_where_none_is(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that breaks before its first save says that there is no checkpoint."""
    breaking = [*words, "--learning-rate", "1e30", "--warmup-steps", "0", "--max-skipped", "2"]
    assert run([*breaking, "--checkpoint-every", "0"]) == 1
    said = capsys.readouterr().err
    assert "No checkpoint was saved before." in said
    assert "are good" not in said


def test_changed_data_is_found_before_training(
    words: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte of train.bin changed to another that is in the vocabulary: status 2, the file named."""
    import shutil

    copied = tmp_path / "copied"
    shutil.copytree(data, copied)
    raw = bytearray((copied / "train.bin").read_bytes())
    raw[len(raw) // 2] ^= 1
    (copied / "train.bin").write_bytes(raw)
    assert run([*words, "--data", str(copied)]) == 2
    said = capsys.readouterr().err
    assert "train.bin was changed: its SHA-256 is not the manifest's" in said
    assert not (tmp_path / "run").exists()


def test_json_is_one_object(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints how the run ended and nothing else."""
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["step"], found["skipped"]) == ("preflop.train/1", 8, 0)
    assert {row["what"] for row in found["compared"]} == {
        "peak memory",
        "step time",
        "tokens per second",
        "MFU",
    }


def test_predicted_peak_is_what_the_allocator_saw(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer's own step, microbatches and clipping included: peak within 0.5 % of the prediction."""
    assert run([*words, "--microbatches", "2", "--json"]) == 0
    peak = next(
        row for row in json.loads(capsys.readouterr().out)["compared"] if row["what"] == "peak memory"
    )
    assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-master"])
def test_the_trainers_own_step_verifies(
    words: list[str], precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--verify: two real steps are within 0.5 % of the prediction, FLOPs exactly; nothing is trained."""
    status = run([*words, "--verify", "--json", "--microbatches", "2", "--precision", precision])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found["verifies"] else 1)
    assert abs(found["memory"]["steady"]["error"]) < 0.005
    assert found["flops"]["predicted"] == found["flops"]["counted"]
    assert not (tmp_path / "run").exists()


def test_flops_are_those_of_the_named_model(data: Path) -> None:
    """Model FLOPs of the trainer's step equal those of `preflop account` for the same sizes, exactly."""
    import preflop
    from preflop.trainer.model import trained_facts
    from preflop.trainer.preflight import own_account

    config = TrainConfig(data=str(data), out="r", steps=1, batch=2, seq=16, microbatches=3)
    mine = own_account(config, trained_facts(config, 256), 1, torch.device("cpu"))
    named = preflop.account("gpt2-nano", {"batch_size": 2, "sequence_length": 16}, microbatches=3)
    assert mine.flops.model == named.flops.model
    assert mine.tape.subject is not None
    assert mine.tape.subject.optimizer == "adamw-fused"


def test_a_run_that_does_not_fit_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and how to start it all the same; nothing is made."""
    words = ["train", "--data", str(data), "--out", str(tmp_path / "r"), "--model", "gpt2-xl", "--steps", "1"]
    assert run([*words, "--batch", "4096", "--seq", "512"]) == 1
    error = capsys.readouterr().err
    assert "does not fit: a step needs" in error
    assert "--force" in error
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--data", "nowhere"], "no data folder 'nowhere'"),
        (["--seq", "9999"], "gpt2-nano has 256 positions"),
        (["--seq", "256", "--data", "SHORT"], "a sequence of 256 tokens needs 257"),
        (["--vocab", "99"], "the vocabulary is 99, and the data has token ids up to 255"),
        (["--precision", "fp17"], "no precision named 'fp17'"),
        (["--model", "gpt2-nanno"], "Nearest: gpt2-nano"),
        (["--model", "bert-base"], "does not predict the next token"),
        (["--optimizer", "adamv"], "no optimizer named 'adamv'"),
        (["--steps", "ten"], "--steps is 'ten'"),
        (["--epochs", "2"], "steps or epochs, and not both"),
        (["--learning-rate", "nan"], "--learning-rate is 'nan'"),
        (["--recompute", "all"], "recompute is 'all'; it must be one of none, block, selective"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--config", "none.toml"], "cannot read the config none.toml"),
        (["--shard", "fsdp"], "torchrun --nproc_per_node N --no-python preflop train ... --shard fsdp"),
        (["--shard", "ddp"], "this is one by itself"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: list[str], changed: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, what we got and what is needed on standard error, no traceback, and no run begun."""
    if "SHORT" in changed:
        (tmp_path / "short.txt").write_text("short\n" * 20)
        assert run(["data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "short")]) == 0
        changed = [str(tmp_path / "short") if word == "SHORT" else word for word in changed]
    assert run([*words, *changed]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "torch sees no CUDA GPU here"), (["--verify"], "--verify runs two real steps on this machine's CPU")],
)
def test_a_gpu_that_is_not_there(
    words: list[str],
    more: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--device cuda without a GPU: status 2, which device to give instead, and no run begun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run([*words, "--device", "cuda", *more]) == 2
    error = capsys.readouterr().err
    assert message in error and "--device cpu" in error
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two processes where torch sees one GPU: how many to start, before they are joined."""
    from preflop.errors import BadSubject
    from preflop.trainer.processes import processes

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(BadSubject, match="process 2 of this machine finds 1"), processes(torch.device("cuda")):
        pass


def test_a_misspelt_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key of a TOML file is refused, with the nearest setting."""
    (tmp_path / "c.toml").write_text('data = "d"\nout = "r"\nsteps = 3\nmicrobatch = 2\n')
    assert run(["train", "--config", str(tmp_path / "c.toml")]) == 2
    assert "no setting named 'microbatch'.\n  Nearest: microbatches" in capsys.readouterr().err


def test_settings_round_trip_through_toml(tmp_path: Path) -> None:
    """What is saved with the run reads back as it was, odd names included."""
    config = TrainConfig(data='a "b"\\ü', out="r", steps=3, learning_rate=1e-05, dropout=0.1, async_save=True)
    (tmp_path / "run.toml").write_text(to_toml(config), "utf-8")
    assert make_config(read_toml(tmp_path / "run.toml")) == config


def test_flags_go_before_the_file(data: Path, tmp_path: Path) -> None:
    """A flag wins over the TOML file, which wins over the default."""
    (tmp_path / "c.toml").write_text(
        f'data = "{data}"\nout = "{tmp_path / "run"}"\nsteps = 2\nbatch = 3\nseq = 8\n'
    )
    assert run(["train", "--config", str(tmp_path / "c.toml"), "--batch", "1", "--json"]) == 0
    saved = read_toml(tmp_path / "run/config.toml")
    assert (saved["batch"], saved["seq"], saved["microbatches"]) == (1, 8, 1)


def test_every_setting_has_a_meaning_on_the_command_line() -> None:
    """Flags and settings do not drift apart: what is a flag is a setting."""
    import inspect

    from preflop.cli.train import command

    flags = set(inspect.signature(command).parameters) - {"config", "resume", "force", "verify", "as_json"}
    assert flags <= set(keys())


def test_too_many_bad_steps_stop_the_run(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that breaks everything: skipped steps are counted and shown, then status 1; saves are good."""
    from preflop.trainer.checkpoint import why_invalid

    ending = [*words[:-1], "60", "--learning-rate", "1e30", "--warmup-steps", "0", "--max-skipped", "5"]
    assert run([*ending, "--checkpoint-every", "1"]) == 1
    printed = capsys.readouterr()
    assert "stopped at step" in printed.err
    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        assert why_invalid(path) is None
    with (tmp_path / "run/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) < 60
    assert math.isfinite(float(rows[0]["loss"]))


def shown_steps(first: int, steps: int, step_s: float, every: int | None = None, **odd: dict[str, object]) -> list[int]:
    """Which steps have a line in a pipe, of a run from `first` to `steps`; `odd`: s3={"taken": 0} for step 3."""
    import io

    from preflop.trainer.compare import Predicted
    from preflop.trainer.display import Lines, Moment
    from preflop.trainer.metrics import Row

    stream, seconds = io.StringIO(), 0.0
    lines = Lines(stream, every=every, clock=lambda: seconds)
    nothing = Predicted(*[None] * len(Predicted.__dataclass_fields__))
    plain = {**dict.fromkeys(Row.__dataclass_fields__, 1), "validation_loss": None, "samples": ""}
    for step in range(first, steps + 1):
        seconds += step_s
        lines.step(Moment(Row(**{**plain, "step": step, **odd.get(f"s{step}", {})}), steps, nothing))
    return [int(step) for step in re.findall(r"^step (\d+)/", stream.getvalue(), re.MULTILINE)]


def test_a_pipe_has_a_line_for_each_step_of_a_short_run() -> None:
    """20 steps in no time have 20 lines, also where a longer run was gone on with; 21 have the first and last."""
    assert shown_steps(1, 20, 0.0) == list(range(1, 21))
    assert shown_steps(981, 1000, 0.0) == list(range(981, 1001))
    assert shown_steps(1, 21, 0.0) == [1, 21]


def test_a_pipe_has_about_a_line_a_second_of_a_long_run() -> None:
    """Steps of 0.25 s: each fourth. Steps of 2 s: all. Every third when asked for. What is odd always."""
    assert shown_steps(1, 31, 0.25) == [1, 5, 9, 13, 17, 21, 25, 29, 31]
    assert shown_steps(1, 40, 2.0) == list(range(1, 41))
    assert shown_steps(1, 10, 2.0, every=3) == [1, 3, 6, 9, 10]
    odd = {"s7": {"taken": 0, "skipped": 1}, "s9": {"validation_loss": 2.0}}
    assert shown_steps(1, 40, 0.0, **odd) == [1, 7, 9, 40]


def test_showing_a_run_draws_nothing() -> None:
    """The display leaves Python's random state as it is, in a pipe and on a terminal: it belongs to the run."""
    import os
    import subprocess
    import sys

    program = """
import os, random, sys
from preflop.measure.utilization import Meter
from preflop.trainer.compare import Predicted
from preflop.trainer.display import Lines, Moment
from preflop.trainer.metrics import Row
values = dict.fromkeys(Row.__dataclass_fields__, 1)
row = Row(**{**values, "samples": ""})
lines = Lines(every=1)
before = random.getstate()
for _ in range(2):
    lines.step(Moment(row, 2, Predicted(*[None] * len(Predicted.__dataclass_fields__))))
    lines.say("a sentence " * 20)
lines.close((), "done")
print("KEPT" if random.getstate() == before else "DRAWN")
print("RICH" if "rich.console" in sys.modules else "PLAIN")
"""
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "KEPT" in piped and "PLAIN" in piped
    ours, theirs = os.openpty()
    done = subprocess.Popen([sys.executable, "-c", program], stdout=theirs)
    os.close(theirs)
    shown = b""
    while b"RICH" not in shown and b"PLAIN" not in shown:
        shown += os.read(ours, 4096)
    done.wait(timeout=60)
    assert b"KEPT" in shown and b"RICH" in shown


@pytest.mark.parametrize(
    ("precision", "microbatches", "said"),
    [("bf16", 2, True), ("bf16-master", 2, True), ("bf16-mixed", 2, False), ("bf16", 1, False)],
)
def test_sums_of_gradients_in_16_bits_are_warned_of(
    words: list[str], precision: str, microbatches: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Microbatches that add up in bf16 lose small gradients, and the run says so; in fp32 it does not (L23)."""
    kept = [*words[:-1], "1", "--precision", precision, "--microbatches", str(microbatches)]
    assert run(kept) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("Gradients are kept in bf16, and small ones are lost when microbatches add up" in out) == said


def test_bf16_sums_stall_and_mixed_ones_do_not() -> None:
    """512 gradients of 1: a bf16 weight's add up to 256, an fp32 weight's under bf16 autocast to 512 (L23)."""
    ones = torch.ones(1, 1)
    pure = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    mixed = torch.nn.Linear(1, 1, bias=False)
    for _ in range(512):
        pure(ones.bfloat16()).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = mixed(ones).sum()
        value.backward()
    assert pure.weight.grad is not None and mixed.weight.grad is not None
    assert (pure.weight.grad.item(), mixed.weight.grad.item()) == (256.0, 512.0)


def test_a_stale_calibration_does_not_stop_training(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration of another version costs the predicted times, is named, and nothing more."""
    (tmp_path / "this.toml").write_text('schema = "preflop.calibration/0"\n')
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(tmp_path / "this.toml"))
    assert run(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no time is predicted" in out and "is no calibration of this version" in out


def test_clipping_is_priced() -> None:
    """The step that is priced is the trainer's own: the norm of all gradients and their scaling are in it."""
    from preflop.models.catalog import find
    from preflop.trainer.config import TrainConfig
    from preflop.trainer.preflight import own_account

    config = TrainConfig(data="none", out="none", steps=1, batch=2, seq=16)
    priced = own_account(config, find("gpt2-nano"), 1, torch.device("cpu")).operators
    calls = {row.op: (row.phase, row.calls) for row in priced if "_foreach_" in row.op}
    assert calls["aten._foreach_norm"] == calls["aten._foreach_mul_"] == ("optimizer", 1)


@pytest.mark.parametrize(("pace", "said"), [(1.6, "takes 1.60 times as long"), (1.02, "the host"), (None, "the host")])
def test_a_machine_that_is_not_as_it_was_is_named(pace: float | None, said: str) -> None:
    """A step slower than predicted on a machine whose matmul is slower than when it was calibrated: that is why."""
    from preflop.measure.utilization import Meter
    from preflop.trainer.compare import Predicted, compare

    expected = Predicted(step_s=1.0, peak_bytes=2**20, tokens_per_s=1.0)
    rows = compare(expected, Meter(tokens=1).reading(), 2**20, on_gpu=False, sharded=False, pace=pace)
    (row,) = [row for row in rows if row.what == "step time"]
    assert said in row.reason


def test_a_calibration_with_other_threads_predicts_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of two threads say nothing of a step on one: the run says so and goes on without a predicted time."""
    from preflop.measure.calibrate import Calibration, Reading
    from preflop.measure.calibration_file import calibration_text
    from preflop.timing.kernels import Family
    from preflop.trainer.preflight import device_name, stale_calibration

    readings = [
        Reading("aten.mm", Family.MATMUL, "float32", 10**9, 10**7, 0.01),
        Reading("aten.add", Family.ELEMENTWISE, "float32", 10**6, 12 * 10**6, 1e-3),
    ]
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(tmp_path / "this.toml"))
    for threads in (torch.get_num_threads(), torch.get_num_threads() + 1):
        found = Calibration("A CPU", "CPU", "cpu", 2e-6, threads, 2**30, readings)
        (tmp_path / "this.toml").write_text(calibration_text(found), "utf-8")
        said = stale_calibration()
        if threads == torch.get_num_threads():
            assert said is None and device_name(torch.device("cpu")) == "this"
        else:
            assert said is not None and "OMP_NUM_THREADS" in said and device_name(torch.device("cpu")) == "cpu"
