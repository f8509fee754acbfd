"""Bad input through the command: exit status 2, one clear message on standard error, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# One process answers many cases: importing torch takes seconds. Each case runs `run` of the command's
# own entry point, which is what the console script calls; a few run as commands of their own.
_MANY = """
import contextlib, io, json, os, sys
from preflop.cli.main import run, _status_of
def one(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = run(words)
        except BaseException as error:
            import traceback; traceback.print_exc(); status = repr(error)
    return [status, out.getvalue(), err.getvalue()]
print(json.dumps([one(words) for words in json.loads(sys.stdin.read())]))
"""

MODELS = '''
import sys
import torch
from torch import nn

def fine():
    return nn.Linear(8, 4)

def raising():
    size = 4
    raise ValueError("width must divide heads")  # the user's own error

def no_forward():
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)
    return Empty()

def not_a_model():
    return 3

def no_parameters():
    return nn.Tanh()

def positions():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(50, 8), nn.Embedding(16, 8)
        def forward(self, ids):
            return self.words(ids) + self.places(torch.arange(ids.shape[1]))
    return Model()

def raising_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)
        def forward(self, x):
            h = self.l(x)
            raise KeyError("attention_mask")
    return Model()

def batch():
    return torch.zeros(2, 8)

def ids():
    return torch.zeros(2, 32, dtype=torch.int64)

def wrong_batch():
    return torch.zeros(2, 9)

def exits():
    sys.exit(3)

def exits_in_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)
        def forward(self, x):
            sys.exit("no licence")
    return Model()

def empty_batch():
    return torch.zeros(0, 8)

SAID = "too large\\nException raised from check at x.h:7\\nframe #0: c10::Error::Error"

def long_error():
    raise RuntimeError(SAID)

def raising_batch():
    raise OSError("no data here")

def odd_batch():
    return 5

def no_scalar(output):
    return output

cross_entropy = nn.CrossEntropyLoss()

def with_labels(output, labels):
    return (output - labels).mean()

def no_gradient(output):
    return output.detach().mean()

def number(output):
    return 1.0

not_callable = 3

def two_layers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mid, self.out = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)
        def forward(self, x):
            return self.out(self.mid(x))
    return Two()
'''

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, batches, tapes and configurations, good and bad."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "m.py").write_text(MODELS)
    (folder / "syntax.py").write_text("def f(:\n    pass\n")
    (folder / "importing.py").write_text("import torch\nraise RuntimeError('cannot connect')\n")
    for name, change in {
        "no_type": {"model_type": None}, "unknown_type": {"model_type": "gpt22"},
        "impossible": {"n_embd": -32}, "text": {"n_layer": "two"}, "indivisible": {"n_head": 3},
        "fine": {}, "unknown_class": {"architectures": ["NoSuchModel"]},
    }.items():
        fields = {key: value for key, value in {**CONFIG, **change}.items() if value is not None}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{not json")
    (folder / "list").mkdir()
    (folder / "list" / "config.json").write_text("[1, 2]")
    (folder / "empty").mkdir()
    (folder / "not.tape").write_bytes(b"hello")
    (folder / "empty.tape").write_bytes(b"")
    (folder / "notes.txt").write_text("about the model")
    return folder


F, B = ["account", "m.py:fine"], ["--batch-from", "m.py:batch"]

CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown command": (["acount", "gpt2"], ["acount", "account"]),
    "unknown model": (["account", "gtp2", "--batch", "1", "--seq", "8"], ["gtp2", "gpt2", "preflop models"]),
    "empty name": (["account", "", "--batch", "1", "--seq", "8"], ["name is empty", "preflop models"]),
    "negative number": (["dtypes", "-1e5"], ["-1", "preflop dtypes -- -1e5"]),
    "shapes of a tape": (["shapes", "good.tape"], ["good.tape is a recording of one size", "Name the model"]),
    "bytes beyond torch's": (
        ["account", "gpt2", "--batch", "1000000000000", "--seq", "1024"], ["overflowed", "smaller batch"],
    ),
    "unknown device": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--device", "h100-smx"],
        ["h100-smx", "h100", "preflop hardware"],
    ),
    "unknown precision": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--precision", "bf61"],
        ["bf61", "bf16"],
    ),
    "unknown optimizer": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--optimizer", "adamv"],
        ["adamv", "adamw"],
    ),
    "unknown recompute": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--recompute", "all"],
        ["all", "block"],
    ),
    "misspelt recompute": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--recompute", "blok"],
        ["'blok'", "must be one of", "module's name or pattern", "Nearest: block"],
    ),
    "module that is not there": (
        ["account", "m.py:two_layers", *B, "--recompute", "selective:mod"], ["no module matches 'mod'", "Nearest: mid"],
    ),
    "list of blocks": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--recompute", "blocks"], ["nn.ModuleList", "'blocks.*'"],
    ),
    "name of no module": (["account", "m.py:two_layers", *B, "--recompute", "mit"], ["'mit'", "Nearest: mid"]),
    "one as a share": (["copies", "gpt2", "--fail-over", "1"], ["'1'", "1%", "0.01", "with its sign"]),
    "words as a share": (["copies", "gpt2", "--fail-over", "abc"], ["'abc'", "1%", "0.01", "with its sign"]),
    "fifty as a share": (["copies", "gpt2", "--fail-over", "50"], ["'50'", "1%", "0.01", "with its sign"]),
    "unknown option": (["account", "gpt2", "--bach", "1"], ["--bach"]),
    "no model": (["account"], ["MODEL"]),
    "no batch": (["account", "gpt2"], ["batch", "--batch"]),
    "no sequence": (["account", "gpt2", "--batch", "1"], ["sequence", "--seq"]),
    "sequence for images": (["account", "resnet-50", "--batch", "1", "--seq", "8"], ["images", "--seq"]),
    "sequence too long": (["account", "gpt2", "--batch", "1", "--seq", "2048"], ["2048", "1024"]),
    "zero batch": (["account", "gpt2", "--batch", "0", "--seq", "8"], ["--batch", "0"]),
    "negative batch": (["account", "gpt2", "--batch=-3", "--seq", "8"], ["--batch", "-3"]),
    "half a batch": (["account", "gpt2", "--batch", "1.5", "--seq", "8"], ["--batch", "1.5"]),
    "not a number": (["account", "gpt2", "--batch", "nan", "--seq", "8"], ["--batch", "nan"]),
    "infinite": (["account", "gpt2", "--batch", "1", "--seq", "inf"], ["--seq", "inf"]),
    "words": (["account", "gpt2", "--batch", "many", "--seq", "8"], ["--batch", "many"]),
    "zero microbatches": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--microbatches", "0"],
        ["--microbatches", "0"],
    ),
    "two GPUs": (["account", "gpt2", "--batch", "1", "--seq", "8", "--gpus", "2"], ["gpus=2", "--shard"]),
    "an unknown way to share": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--gpus", "2", "--shard", "zero9"],
        ["zero9", "fsdp"],
    ),
    "an optimizer that parts cannot run": (
        "account gpt2 --batch 1 --seq 8 --optimizer adafactor --gpus 2 --shard fsdp".split(),
        ["adafactor", "--shard ddp"],
    ),
    "sharding": (
        ["account", "gpt2", "--batch", "1", "--seq", "8", "--shard", "fsdp"],
        ["fsdp", "--gpus 8"],
    ),
    "NaN tokens": (
        [
            "time",
            "--params",
            "70e9",
            "--tokens",
            "nan",
            "--gpus",
            "8",
            "--device",
            "h100-sxm",
            "--mfu",
            "0.5",
        ],
        ["nan"],
    ),
    "infinite parameters": (
        [
            "time",
            "--params",
            "inf",
            "--tokens",
            "1e12",
            "--gpus",
            "8",
            "--device",
            "h100-sxm",
            "--mfu",
            "0.5",
        ],
        ["inf"],
    ),
    "missing file": (["account", "nowhere.py:model", *B], ["nowhere.py"]),
    "missing function, none near": (["account", "m.py:zzz", *B], ["'zzz'", "It has: ", "fine", "and "]),
    "missing function": (["account", "m.py:fime", *B], ["fime", "fine"]),
    "not a function": (["account", "m.py:not_callable", *B], ["not_callable", "int"]),
    "missing module": (["account", "no_such_package.models:model", *B], ["no_such_package"]),
    "syntax error": (["account", "syntax.py:f", *B], ["syntax.py", "SyntaxError"]),
    "file that raises": (["account", "importing.py:f", *B], ["cannot connect", "importing.py:2"]),
    "factory that raises": (
        ["account", "m.py:raising", *B],
        ["width must divide heads", "ValueError", "m.py:11"],
    ),
    "factory of something else": (["account", "m.py:not_a_model", *B], ["int", "nn.Module"]),
    "no forward": (["account", "m.py:no_forward", *B], ["Empty", "forward"]),
    "forward that raises": (
        ["account", "m.py:raising_forward", *B],
        ["KeyError", "attention_mask", "m.py:42"],
    ),
    "batch that does not fit": ([*F, "--batch-from", "m.py:wrong_batch"], ["2, 9", "8, 4", "batch"]),
    "batch that raises": ([*F, "--batch-from", "m.py:raising_batch"], ["no data here", "m.py:"]),
    "factory that exits": (["account", "m.py:exits", *B], ["building the model", "sys.exit(3)", "m.py:"]),
    "batch that exits": ([*F, "--batch-from", "m.py:exits"], ["making the batch", "sys.exit(3)"]),
    "forward that exits": (["account", "m.py:exits_in_forward", *B], ["sys.exit('no licence')", "m.py:"]),
    "batch that exits, shapes": (["shapes", "m.py:fine", "--batch-from", "m.py:exits"], ["sys.exit(3)"]),
    "factory that exits, verified": (["verify", "m.py:exits", *B], ["sys.exit(3)"]),
    "empty batch, shapes": (["shapes", "m.py:fine", "--batch-from", "m.py:empty_batch"], ["empty", "(0, 8)"]),
    "error with C++ frames": (["account", "m.py:long_error", *B], ["too large"]),
    "absurd batch": (["account", "gpt2", "--batch", "1e15", "--seq", "8"], ["1000000000000000", "overflow"]),
    "batch beyond 64 bits": (["account", "gpt2", "--batch", "1e20", "--seq", "8"], ["more elements"]),
    "batch beyond all memory": (
        ["account", "gpt2", "--batch", "99999999999", "--seq", "1024", "--device", "h100"], ["64-bit", "smaller batch"],
    ),
    "batch whose sum is beyond it": (
        ["account", "gpt2", "--batch", "1e10", "--seq", "1024", "--device", "h100"], ["64-bit", "smaller batch"],
    ),
    "python file alone": (["account", "m.py"], ["which function", "m.py:fine"]),
    "file that is not there": (["account", "./nonexistent"], ["no file or folder './nonexistent'"]),
    "file that is no model": (["account", "notes.txt"], ["notes.txt is a file"]),
    "time of a cpu": (
        ["time", "--params", "1e9", "--tokens", "1e9", "--device", "cpu"],
        ["no figures", "preflop calibrate", "--device this"],
    ),
    "fit on a cpu": (["fit", "--device", "cpu"], ["no figures", "preflop calibrate", "--device this"]),
    "fit what is given": (
        ["fit", "gpt2", "--device", "h100-sxm", "--seq", "64", "--what", "batch", "--batch", "4"],
        ["--batch 4", "--what batch", "preflop account"],
    ),
    "a batch in words": (["account", "gpt2-nano", "--batch", "two", "--seq", "8"], ["whole number", "1024"]),
    "fit in fp8 without fp8": (
        ["fit", "--device", "a100", "--precision", "fp8"], ["A100", "no fp8 matrix units", "bf16-mixed"],
    ),
    "fit a factory": (["fit", "m.py:fine", "--device", "h100-sxm"], ["is a factory", "named model or a config.json"]),
    "fit a tape": (["fit", "good.tape", "--device", "h100-sxm"], ["is a recording", "named model"]),
    "fit a batch": (
        ["fit", "gpt2", "--device", "h100-sxm", "--batch-from", "m.py:batch"], ["--batch-from", "named model"],
    ),
    "fit a model on a cpu": (["fit", "gpt2", "--device", "cpu"], ["preflop calibrate", "--device this"]),
    "batch without tensors": ([*F, "--batch-from", "m.py:odd_batch"], ["int", "tensor"]),
    "factory without a batch": (F, ["--batch-from"]),
    "sizes for a factory": ([*F, "--batch", "2"], ["--batch-from"]),
    "both batches": ([*F, *B, "--batch", "2"], ["--batch-from", "--batch"]),
    "positions": (["account", "m.py:positions", "--batch-from", "m.py:ids"], ["16", "positions"]),
    "loss of many numbers": ([*F, *B, "--loss", "m.py:no_scalar"], ["(2, 4)", "mean"]),
    "loss without gradient": ([*F, *B, "--loss", "m.py:no_gradient"], ["gradient"]),
    "loss that is no tensor": ([*F, *B, "--loss", "m.py:number"], ["float", "tensor"]),
    "loss of two arguments": (
        [*F, *B, "--loss", "m.py:with_labels"], ["model's output alone", "'labels'", "loss(output)"],
    ),
    "loss that is a module of two": (
        [*F, *B, "--loss", "m.py:cross_entropy"], ["model's output alone", "'target'", "loss(output)"],
    ),
    "missing loss": ([*F, *B, "--loss", "m.py:lost"], ["lost", "m.py"]),
    "no blocks": ([*F, *B, "--recompute", "block"], ["blocks"]),
    "config without type": (["account", "no_type", "--batch", "1", "--seq", "8"], ["model_type"]),
    "config of unknown type": (["account", "unknown_type", "--batch", "1", "--seq", "8"], ["gpt22", "gpt2"]),
    "config with negative size": (["account", "impossible", "--batch", "1", "--seq", "8"], ["n_embd", "-32"]),
    "config with text": (["account", "text", "--batch", "1", "--seq", "8"], ["n_layer", "two"]),
    "config that cannot be": (["account", "indivisible", "--batch", "1", "--seq", "8"], ["divi"]),
    "config of unknown class": (["account", "unknown_class", "--batch", "1", "--seq", "8"], ["NoSuchModel"]),
    "config that is no JSON": (["account", "broken", "--batch", "1", "--seq", "8"], ["JSON"]),
    "config that is a list": (["account", "list", "--batch", "1", "--seq", "8"], ["model_type"]),
    "folder without config": (["account", "empty", "--batch", "1", "--seq", "8"], ["config.json"]),
    "config: sequence too long": (["account", "fine", "--batch", "1", "--seq", "65"], ["65", "64"]),
    "config: no sequence": (["account", "fine", "--batch", "1"], ["--seq"]),
    "config: no batch": (["account", "fine"], ["--batch"]),
    "foreign tape": (["account", "not.tape"], ["not.tape"]),
    "empty tape": (["account", "empty.tape"], ["empty.tape"]),
    "missing tape": (["account", "nowhere.tape"], ["nowhere.tape"]),
    "tape to a wrong name": ([*F, *B, "--tape", "x.json"], [".tape"]),
    "tape and page in one file": ([*F, *B, "--tape", "x.tape", "--html", "x.tape"], ["x.tape", "two files"]),
    "calibration of a GPU that is not there": (
        ["calibrate", "--device", "cuda"], ["the device is cuda", "sees no CUDA GPU here", "--device cpu"],
    ),
    "calibration into a missing folder": (["calibrate", "--out", "no/such/folder/c.toml"], ["no/such/folder"]),
    "page into a missing folder": ([*F, *B, "--html", "no/such/folder/page.html"], ["no/such/folder"]),
    "roofline on nothing": (["roofline", "m.py:fine", *B, "--out", "x.svg"], ["device"]),
}


@pytest.fixture(scope="module")
def answers(place) -> dict[str, tuple[int, str, str]]:
    """Exit status, output and message of every case."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY], input=json.dumps([words for words, _ in CASES.values()]),
        capture_output=True, text=True, check=False, cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: tuple(answer) for name, answer in zip(CASES, json.loads(done.stdout.splitlines()[-1]))}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, answers):
    """Status 2; the message says what is wrong; nothing on standard output; no traceback."""
    status, out, err = answers[name]
    _, said = CASES[name]
    assert status == 2, (status, out[:500], err[-2000:])
    assert out == ""
    assert "Traceback" not in err
    assert "bug in Preflop" not in err
    assert err.startswith("preflop: ")
    assert "frame #" not in err
    assert len(err.strip().splitlines()) <= 8, err
    for words in said:
        assert words in err, err


def test_a_factorys_error_stands_once(answers):
    """The user's own message is not repeated."""
    assert answers["factory that raises"][2].count("width must divide heads") <= 2
    assert answers["file that raises"][2].count("RuntimeError") <= 2


def test_no_parameters_is_not_bad_input(place):
    """A model without parameters is priced."""
    done = command(place, "account", "m.py:no_parameters", *B, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory"]["columns"]["parameters"]["bytes"] == 0


def _calls() -> dict[str, tuple[Callable[[], object], list[str]]]:
    import torch

    import preflop

    linear, x = torch.nn.Linear(8, 4), torch.zeros(2, 8)
    step = preflop.account(linear, x)
    return {
        "choices of a module": (lambda: preflop.choices(linear), ["named model", "Linear", "preflop.account"]),
        "device that is a number": (lambda: preflop.account(linear, x, device=5), ["int: 5", "preflop hardware"]),
        "device of torch": (
            lambda: preflop.account(linear, x, device=torch.device("cpu")), ["device is named by text"],
        ),
        "no precision": (lambda: preflop.account(linear, x, precision=None), ["precision", "NoneType", "fp32"]),
        "flops of a number": (lambda: preflop.flops_ledger(3), ["flops_ledger", "int: 3", "preflop.record"]),
        "memory of a number": (lambda: preflop.memory_ledger(3), ["memory_ledger", "int: 3"]),
        "traffic of a number": (lambda: preflop.traffic_ledger(3), ["traffic_ledger", "int: 3"]),
        "copies of a number": (lambda: preflop.copies_ledger(3), ["copies_ledger", "int: 3"]),
        "flops of an account": (lambda: preflop.flops_ledger(step), ["Account", ".tape"]),
        "allocator settings that are a number": (
            lambda: preflop.account(linear, x, device="h100-sxm", alloc_conf=3), ["alloc_conf is int: 3", "text"],
        ),
        "allocator settings that are none": (
            lambda: preflop.account(linear, x, device="h100-sxm", alloc_conf=None), ["alloc_conf is NoneType"],
        ),
        "batch of numpy": (
            lambda: preflop.account(linear, x.numpy()), ["numpy.ndarray of shape (2, 8)", "torch.from_numpy(x)"],
        ),
        "batch of numpy within": (lambda: preflop.account(linear, {"input": x.numpy()}), ["torch.from_numpy(x)"]),
        "batch of numpy, real": (lambda: preflop.account_real(linear, x.numpy()), ["torch.from_numpy(x)"]),
        "jagged batch": (
            lambda: preflop.account(linear, torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)),
            ["nested tensor (torch.float32)", "to_padded_tensor"],
        ),
        "jagged batch, real": (
            lambda: preflop.account_real(linear, torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)),
            ["nested tensor", "to_padded_tensor"],
        ),
        "size beyond all memory": (
            lambda: preflop.choices("gpt2", recompute="none", device="h100").evaluate(99999999999, 1024),
            ["64-bit", "smaller batch"],
        ),
        "storage of a number": (lambda: preflop.same_storage(3, x), ["same_storage", "int: 3"]),
        "storage of a sparse tensor": (
            lambda: preflop.same_storage(x, x.to_sparse()), ["same_storage", "torch.sparse_coo"],
        ),
        "meter of negative tokens": (lambda: preflop.Meter(tokens=-3), ["tokens is -3", "at least 0"]),
        "meter of half a device": (lambda: preflop.Meter(devices=1.5), ["devices is 1.5", "whole number"]),
        "meter of no number": (lambda: preflop.Meter(model_flops="1e12"), ["model_flops is '1e12'"]),
        "meter of negative warm-up": (lambda: preflop.Meter(warmup_steps=-1), ["warmup_steps is -1"]),
        "meter of a module": (lambda: preflop.Meter(linear), ["Linear", "preflop.account"]),
        "step of negative tokens": (lambda: preflop.Meter().step(-3), ["tokens is -3"]),
        "what-if on a device that is none": (
            lambda: preflop.what_if(linear, x, devices="a1000"), ["no device named 'a1000'"],
        ),
        "saving no tape": (lambda: preflop.save_tape(3, "x.tape"), ["save_tape", "int: 3"]),
        "record of a number": (lambda: preflop.record(3), ["int: 3", "preflop.record(fn, x)"]),
    }  # fmt: skip


def test_wrong_kinds_in_python() -> None:
    """Each public function says what it was given and what it needs; nothing falls out of its inside."""
    import preflop

    for name, (call, needed) in _calls().items():
        with pytest.raises(preflop.PreflopError) as raised:
            call()
        for words in needed:
            assert words in str(raised.value), (name, str(raised.value))


def command(place: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from preflop.cli.main import main; main()", *words],
        capture_output=True, text=True, check=False, cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )


def test_a_full_disk_leaves_nothing_half_written(place):
    """A page that does not fit on the disk is refused, and an older one stays whole."""
    page = place / "page.html"
    page.write_text("the older page")

    def small_disk():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    before = sorted(p.name for p in place.iterdir())
    done = command(place, "account", "m.py:fine", *B, "--html", "page.html", preexec_fn=small_disk)
    assert done.returncode == 2, done.stderr
    assert "page.html" in done.stderr
    assert "Traceback" not in done.stderr
    assert page.read_text() == "the older page"
    assert [n for n in sorted(p.name for p in place.iterdir()) if n != "__pycache__"] == [
        n for n in before if n != "__pycache__"
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_full_device(place):
    """Writing a page to a full device is a message, not a traceback."""
    done = command(place, "account", "m.py:fine", *B, "--html", "/dev/full")
    assert done.returncode == 2, done.stderr
    assert "/dev/full" in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_and_newer_tapes(place):
    """A truncated tape, and one of a newer version, are named."""
    done = command(place, "account", "m.py:fine", *B, "--tape", "good.tape")
    assert done.returncode == 0, done.stderr
    whole = (place / "good.tape").read_bytes()
    (place / "cut.tape").write_bytes(whole[: len(whole) // 2])
    cut = command(place, "account", "cut.tape")
    assert cut.returncode == 2
    assert "cut.tape" in cut.stderr
    assert "Traceback" not in cut.stderr
    assert command(place, "account", "good.tape").returncode == 0
    changed = command(place, "account", "good.tape", "--batch", "4")
    assert changed.returncode == 2
    assert "--batch" in changed.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("words", [["hardware"], ["hardware", "--json"], ["--help"], ["--version"], ["dtypes"]])
def test_a_full_disk_under_standard_output(words):
    """What is printed by rich, click or ourselves: one line that says so, status 2."""
    with open("/dev/full", "w") as full:
        done = output_to(full, *words)
    assert done.returncode == 2
    assert done.stderr == "preflop: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("words", [["hardware"], ["models"], ["hardware", "--json"], ["fit", "--device", "h100"]])
def test_a_reader_that_went_away(words):
    """A closed pipe ends the command quietly, whoever was printing."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = output_to(pipe, *words)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_standard_output_at_all():
    """`>&-`: said, status 2; and with standard error closed too, the status alone."""
    done = output_to(None, "hardware", preexec_fn=lambda: os.close(1))
    assert done.returncode == 2
    assert done.stderr == "preflop: cannot write to standard output: it is closed\n"
    both = output_to(None, "hardware", preexec_fn=lambda: (os.close(1), os.close(2)))
    assert both.returncode == 2


def test_messages_have_nowhere_to_go():
    """Bad input with standard error closed: the status, and nothing on standard output."""
    done = subprocess.run(
        [sys.executable, "-c", "from preflop.cli.main import main; main()", "hardwar"],
        stdout=subprocess.PIPE, text=True, check=False, preexec_fn=lambda: os.close(2),
    )
    assert (done.returncode, done.stdout) == (2, "")


def output_to(stream, *words: str, **options) -> subprocess.CompletedProcess[str]:
    """The command with its standard output going there."""
    return subprocess.run(
        [sys.executable, "-c", "from preflop.cli.main import main; main()", *words],
        stdout=stream, stderr=subprocess.PIPE, text=True, check=False, **options,
    )


def test_part_of_a_batch_that_is_empty_is_remarked():
    """Where only some tensors are empty the step is priced, and the account says which were."""
    import torch

    import preflop

    class Boxes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.box = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)

        def forward(self, image, boxes):
            return self.image(image).sum() + self.box(boxes).sum()

    found = preflop.account(Boxes(), (torch.zeros(2, 8), torch.zeros(0, 4)))
    assert any("(0, 4) float32 has no element" in said for said in found.assumptions)
    nothing = preflop.account(torch.nn.Linear(8, 4), torch.zeros(0, 8))
    assert nothing.flops.model == 0
    assert any("(0, 8) float32 has no element" in said for said in nothing.assumptions)


def test_python_is_not_ended_by_a_users_exit():
    """`preflop.account` of a factory that calls sys.exit raises a PreflopError, with the line."""
    import preflop
    from preflop.errors import PreflopError

    def factory():
        sys.exit(0)

    with pytest.raises(PreflopError, match=r"sys.exit\(0\)"):
        preflop.account(factory, None)
