"""The command's exit statuses and messages, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from preflop.cli import main as entry
from preflop.errors import PreflopError
from preflop.tape.file import save
from tests.tapes import linear_step


def preflop(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from preflop.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def tape(tmp_path_factory):
    path = tmp_path_factory.mktemp("tapes") / "linear.tape"
    save(linear_step(device="h100-sxm5-80gb"), path)
    return str(path)


def test_account_of_a_tape_needs_no_torch(tape, tmp_path):
    """`preflop account FILE.tape` answers on a machine where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    done = preflop("account", tape, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Alive at the peak" in done.stdout and done.stderr == ""


def test_account_json(tape):
    """--json prints the contract's object and nothing else."""
    told = json.loads(preflop("account", tape, "--json").stdout)
    assert told["schema"] == "preflop.account/1"
    assert told["device"]["name"] == "H100 SXM5 80GB"


def test_status_1_when_it_does_not_fit(tmp_path):
    """A step larger than the device prints its account and exits with 1."""
    path = tmp_path / "large.tape"
    save(linear_step(tokens=90_000_000, device="h100-sxm5-80gb"), path)
    done = preflop("account", str(path))
    assert done.returncode == 1 and "Does not fit" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["acount"], "no command named 'acount'.\n  Nearest: account"),
        (["account"], "Missing argument 'MODEL'"),
        (["account", "nowhere.tape"], "cannot read the tape nowhere.tape"),
        (["account", "TAPE", "--bach", "8"], "No such option: --bach"),
        (["account", "TAPE", "--batch", "8"], "recorded already: --batch cannot change it"),
        (["account", "TAPE", "--device", "h100-smx"], "no device named 'h100-smx'"),
        (["account", "TAPE", "--top", "nan"], "--top is 'nan'"),
        (["account", "TAPE", "--html", "no/such/folder/a.html"], "cannot write no/such/folder/a.html"),
        (["account", "TAPE", "--tape", "a.json"], "must end in .tape"),
        (["account", "gpt2", "--batch", "0"], "--batch is '0'"),
        (["account", "gpt2", "--batch", "-1"], "--batch is '-1'"),
        (["account", "gpt2", "--batch", "inf"], "--batch is 'inf'"),
        (["account", "gpt2", "--batch", "8", "--batch-from", "a.py:f"], "no file 'a.py' to take the batch from"),
        (["roofline", "TAPE", "--out", "a.pdf"], "a.pdf"),
        (["roofline", "TAPE", "--device", "cpu"], "a roofline needs a device"),
        (["--nonsense"], "No such option"),
    ],
)
def test_bad_input_is_status_2_with_one_message(words, says, tape):
    """Bad input: status 2, the reason on standard error, nothing on standard output, no traceback."""
    done = preflop(*[tape if word == "TAPE" else word for word in words])
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr and done.stderr.startswith("preflop: ")
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_no_words_shows_the_commands():
    """`preflop` alone lists what it can do, with every command's line."""
    done = preflop()
    for name in entry.COMMANDS:
        assert name in done.stdout + done.stderr
    assert preflop("--help").returncode == 0


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_is_there_and_has_json(name):
    """Each listed command exists, explains itself and has --json."""
    done = preflop(name, "--help", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_version():
    """--version prints it."""
    assert preflop("--version").stdout.startswith("preflop 0.")


def test_html_is_written_whole(tape, tmp_path):
    """--html writes a page; on a full disk status 2, a message, and no file."""
    page = tmp_path / "a.html"
    assert preflop("account", tape, "--html", str(page)).returncode == 0
    assert page.read_text().rstrip().endswith("</html>")
    if os.path.exists("/dev/full"):
        done = preflop("account", tape, "--html", "/dev/full")
        assert done.returncode == 2 and "No space left" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_roofline_draws(tape, tmp_path, suffix):
    """`preflop roofline --out FILE` writes each kind of picture and prints the table."""
    out = tmp_path / f"a.{suffix}"
    done = preflop("roofline", tape, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 1000 and "ridge" in done.stdout


def test_closed_pipe_is_quiet(tape):
    """`preflop account ... | head -1` leaves no complaint."""
    code = "from preflop.cli.main import main; main()"
    done = subprocess.run(
        f"{sys.executable} -c '{code}' account {tape} --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{\n" and done.stderr == ""


def run_with(monkeypatch, error):
    def fail(words):
        raise error

    monkeypatch.setattr(entry, "_application", fail)
    return entry.run(["account"])


def test_interrupt_is_130(monkeypatch, capsys):
    """Ctrl-C: status 130 and a word, no traceback."""
    assert run_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "preflop: interrupted.\n"


def test_a_bug_says_that_it_is_one(monkeypatch, capsys):
    """An exception that is no PreflopError: one clear message, status 2, no traceback."""
    assert run_with(monkeypatch, ZeroDivisionError("division by zero\nmore")) == 2
    err = capsys.readouterr().err
    assert err.startswith("preflop: this is a bug in Preflop: ZeroDivisionError: division by zero\n")
    assert "PREFLOP_DEBUG=1" in err and "more" not in err


def test_debugging_shows_where(monkeypatch):
    """With PREFLOP_DEBUG=1 the exception itself comes out."""
    monkeypatch.setenv("PREFLOP_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(PreflopError):
        run_with(monkeypatch, PreflopError("x"))


def test_fast_commands_import_neither_torch_nor_pictures():
    """Starting `preflop hardware` imports no torch, matplotlib or jinja2."""
    code = (
        "import sys; from preflop.cli.main import run; run(['hardware', '--json'])\n"
        "print([m for m in ('torch', 'matplotlib', 'jinja2', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["account", "gpt2-nano", "--html", "{}/none/page.html"], "there is no folder"),
        (["account", "gpt2-nano", "--tape", "{}/none/step.tape"], "there is no folder"),
        (["roofline", "gpt2-nano", "--device", "h100-sxm", "--out", "{}/none/roof.svg"], "there is no folder"),
        (["roofline", "gpt2-nano"], "needs a device with a peak"),
    ],
    ids=["html", "tape", "out", "no roof"],
)
def test_refused_before_anything_is_recorded(words, said, tmp_path, monkeypatch, capsys):
    """What can be seen to fail is told before the recording, which is not begun."""

    def recorded(*_, **__):
        raise AssertionError("recorded")

    monkeypatch.setattr("preflop.cli.subject_options.account_of", recorded)
    sizes = ["--batch", "2", "--seq", "8"]
    assert entry.run([word.format(tmp_path) for word in words] + sizes) == 2
    assert said in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    """`python -m preflop` prints what the command does, is called like it, and ends with its status."""
    words = ("hardware", "h100-smx")
    done, other = (
        subprocess.run([sys.executable, *how, *words], capture_output=True, text=True, check=False)
        for how in (("-m", "preflop"), ("-c", "from preflop.cli.main import main; main()"))
    )
    assert (done.returncode, done.stdout, done.stderr) == (other.returncode, other.stdout, other.stderr)
    assert done.returncode == 2
    assert done.stderr.startswith("preflop: no device named 'h100-smx'")
