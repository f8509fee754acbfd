"""The entry point: finds the command, runs it, and turns every failure into words and an exit status.

0 done, 1 the answer is no, 2 bad input (or a bug, which says so), 130 interrupted. Never a traceback,
unless PREFLOP_DEBUG=1 asks for it.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TextIO

import typer

from preflop.collection import collection_in_a_process
from preflop.errors import PreflopError, nearest

# Command -> (module of this room, one line of help). The module is imported when its command is run.
COMMANDS: dict[str, tuple[str, str]] = {
    "account": ("account", "Price one training step: memory, FLOPs, bytes moved, time, verdict."),
    "roofline": ("roofline", "Draw the step's operators on the device's roofline."),
    "what-if": ("what_if", "Change one knob at a time: memory, work and time of each, what to change first."),
    "time": ("time_", "Days of training from parameters, tokens, GPUs and MFU."),
    "fit": ("fit", "The largest model, or batch, that fits."),
    "verify": ("verify", "Run two real steps here and compare them with the prediction."),
    "calibrate": ("calibrate", "Measure this machine's kernels, so that --device this predicts for it."),
    "data": ("data", "Text files to tokens, for `preflop train`."),
    "train": ("train", "Train: priced first, measured beside the price, saved so that it can go on."),
    "models": ("models", "The models Preflop knows by name."),
    "hardware": ("hardware", "The devices Preflop knows, with a source for each figure."),
    "copies": ("copies", "Every copy a step makes without being asked: line, why, bytes, what instead."),
    "einsum": ("einsum", "Price an expression over named axes, forward and backward."),
    "shapes": ("shapes", "Each module's shapes as formulas in batch and sequence; broadcasts by accident."),
    "precision": ("precision", "Bytes per parameter by recipe; what autocast keeps in fp32, and its cost."),
    "dtypes": ("dtypes", "What each number format holds, and what a value becomes in it."),
}

_RUNS_STEPS = frozenset({"train", "verify", "calibrate"})
"""Commands that run real steps: what these leave in cycles is collected as in any other process."""

BAD_INPUT = 2
INTERRUPTED = 130


class OutputRefused(PreflopError):
    """Standard output takes no more: the disk is full."""


class _Output(io.TextIOWrapper):
    """Standard output, its refusals told apart from those of other files; a closed pipe stays what it is."""

    def write(self, text: str) -> int:
        with self._refusals():
            return super().write(text)

    def flush(self) -> None:
        with self._refusals():
            super().flush()

    @staticmethod
    @contextmanager
    def _refusals() -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputRefused(error.strerror or str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `preflop` with the given words (the command line's by default) and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # `>&-`: whatever is opened next would take its place
        sys.exit(_cannot_write("it is closed"))
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _Output(sys.stdout.buffer, sys.stdout.encoding, line_buffering=sys.stdout.line_buffering)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a rule still gets the numbers
            stream.reconfigure(errors="replace")
    with nullcontext() if _RUNS_STEPS.intersection(words[:1]) else collection_in_a_process():
        status = run(words)
    sys.exit(status)


def run(words: list[str]) -> int:
    """Run the command and return its exit status; what went wrong stands on standard error."""
    try:
        status = _application(words)(words, prog_name="preflop", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (PreflopError, KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        return _status_of(error)
    except Exception as error:
        return _unexpected(error)


def _application(words: Sequence[str]) -> Callable[..., object]:
    """The command line's parser, with the one command that is asked for really there."""
    app = typer.Typer(
        name="preflop",
        help="Price a PyTorch training run before it happens.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    wanted = next((word for word in words if not word.startswith("-")), None)
    if wanted is not None and wanted not in COMMANDS:
        near = ", ".join(nearest(wanted, COMMANDS))
        raise PreflopError(
            f"no command named {wanted!r}.\n"
            f"  {f'Nearest: {near}. ' if near else ''}All: {', '.join(COMMANDS)}."
        )
    app.callback(invoke_without_command=True)(_root)
    for name, (module, text) in COMMANDS.items():
        function = _stub
        if name == wanted:
            function = importlib.import_module(f"preflop.cli.{module}").command
        app.command(name, short_help=text, help=function.__doc__ or text)(function)
    return typer.main.get_command(app)


def _root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"preflop {version_of('preflop')}")
        raise typer.Exit


def _stub() -> None:
    """Stands in the list of commands for one that is not run."""


def _status_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        _say("preflop: interrupted.")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # The reader closed the pipe (`preflop ... | head`); rich and click make a SystemExit(1) of it.
        _drop(sys.stdout)
        return 0
    if isinstance(error, OutputRefused):
        return _cannot_write(str(error))
    if isinstance(error, SystemExit):
        # No command of ours ends like this: code of the user's did, where no recording was there to say so.
        from preflop.subject import users_error

        error = users_error("what the command ran", error)
    if _debugging():
        raise error
    _say(f"preflop: {error}")
    return BAD_INPUT


def _cannot_write(why: str) -> int:
    """Standard output took no more (a full disk): one line, where that is still possible."""
    _drop(sys.stdout)
    _say(f"preflop: cannot write to standard output: {why}")
    return BAD_INPUT


def _say(message: str) -> None:
    """A message on standard error. Where that is closed or full, the exit status is all there is."""
    if sys.stderr is None:
        return
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO | None) -> None:
    """Nothing more is written to the stream, also by Python itself as it ends."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _unexpected(error: Exception) -> int:
    """typer's own complaints about the command line, else a bug of ours: one line each."""
    message = getattr(error, "format_message", None)
    if message is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "preflop"
        if text := message():
            number = re.fullmatch(r"-[\d.]", getattr(error, "option_name", None) or "")
            after = f"A negative number stands after two dashes: `{command} -- -1e5`. " if number else ""
            _say(f"preflop: {text}\n  {after}See `{command} --help`.")
        return BAD_INPUT
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if _debugging():
        raise error
    first_line = (str(error).splitlines() or [""])[0]
    _say(
        f"preflop: this is a bug in Preflop: {type(error).__name__}: {first_line}\n"
        "  Please report it with the command you ran. PREFLOP_DEBUG=1 shows where it happened."
    )
    return BAD_INPUT


def _debugging() -> bool:
    return os.environ.get("PREFLOP_DEBUG", "") not in ("", "0")
