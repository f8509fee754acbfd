"""What `account` and `roofline` share: the words that name a subject, and its account."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preflop.axes import (
    BATCH,
    FRAMES,
    KEYS,
    OPTIONS,
    SEQ,
    SOURCE,
    TARGET,
    default_sizes,
    sized_batch,
    takes_sizes,
)

if TYPE_CHECKING:
    from preflop.accounting import Account
    from preflop.choosing import Formulas
    from preflop.plan.what_if import WhatIf
    from preflop.subject import Subject

MODEL_HELP = (
    "A name of `preflop models`, path/file.py:factory, package.module:factory, a folder or file with a "
    "Hugging Face config.json, or a FILE.tape."
)

Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False, metavar="MODEL")]
Batch = Annotated[str | None, typer.Option(help="Samples that one forward sees.")]
Seq = Annotated[str | None, typer.Option(help="Positions of a sequence.")]
SourceSeq = Annotated[str | None, typer.Option(help="Of an encoder with a decoder: positions that the encoder reads.")]
TargetSeq = Annotated[str | None, typer.Option(help="Positions that the decoder reads.")]
Frames = Annotated[str | None, typer.Option(help="Of sound: samples of the waveform.")]
PrecisionName = Annotated[
    str | None,
    typer.Option(help="fp32 (default), tf32, bf16-mixed, fp16-mixed, fp8, bf16, bf16-fp32-states, bf16-master."),
]
Optimizer = Annotated[str | None, typer.Option(help="adamw (default), sgd, adafactor, ..., or none.")]
Microbatches = Annotated[str | None, typer.Option(help="Batches per optimizer step (default 1).")]
Recompute = Annotated[
    str | None,
    typer.Option(
        help="none (default), block, selective, block-reentrant, block:2 (every second block), "
        "or a pattern of module names."
    ),
]
DeviceName = Annotated[str | None, typer.Option(help="A device of `preflop hardware`, or cpu (default).")]
Gpus = Annotated[str | None, typer.Option(help="GPUs that share the step (1); how: --shard.")]
Shard = Annotated[str | None, typer.Option(help="How to share it: ddp, zero2, fsdp.")]
AllocConf = Annotated[
    str | None,
    typer.Option(
        help="What PYTORCH_CUDA_ALLOC_CONF sets there: expandable_segments:True, ...", metavar="KEY:VALUE,..."
    ),
]
BatchFrom = Annotated[
    str | None,
    typer.Option(
        help="FILE:function that makes the batch, for a factory. With parameters batch, seq, source, target or "
        "frames it makes it at those sizes.",
        metavar="FILE:FUNCTION",
    ),
]
Loss = Annotated[
    str | None, typer.Option(help="FILE:function from the output to the loss.", metavar="FILE:FUNCTION")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the contract's JSON.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's words, as typed; None where not given."""

    batch: str | None
    seq: str | None
    source_seq: str | None = None
    target_seq: str | None = None
    frames: str | None = None
    precision: str | None
    optimizer: str | None
    microbatches: str | None
    recompute: str | None
    device: str | None
    gpus: str | None
    shard: str | None
    batch_from: str | None
    loss: str | None
    alloc_conf: str | None = None


def account_of(model: str, options: Options, *, real: bool = False) -> Account:
    """The account that the words ask for: recorded now, or read from a tape (without torch).

    Args:
        real: record real steps, for a model that cannot be recorded on fake tensors.

    Raises:
        PreflopError: a name, number, file or subject that cannot be used.
    """
    from preflop.errors import PreflopError
    from preflop.tape.file import is_tape

    if is_tape(model):
        if real:
            raise PreflopError(f"{model} is recorded already: --real records a model. Leave it out.")
        return _from_tape(model, options)
    import preflop

    arguments = _arguments(options)
    batch = _batch(options)
    if real:
        with working(f"running steps of {model}"):
            return preflop.account_real(model, batch, **arguments)  # type: ignore[return-value]
    with working(f"recording {model}"):
        return preflop.account(model, batch, **arguments)  # type: ignore[return-value]


def what_if_of(
    model: str, options: Options, *, devices: str | None, split: str | None, given: Account | None = None
) -> tuple[WhatIf, str]:
    """One change at a time from what the words name, and the words themselves as a headline.

    Args:
        given: the account of the run as it is, where it was made already.

    Raises:
        PreflopError: a name, number, file or subject that cannot be used; a split that does not divide.
    """
    from preflop.accounting import find_device
    from preflop.choosing import what_if
    from preflop.errors import PreflopError
    from preflop.plan.what_if import DEVICES_TRIED, check_split
    from preflop.quantity import read_count
    from preflop.report.tables import headline
    from preflop.tape.file import is_tape

    if is_tape(model):
        raise PreflopError(
            f"{model} is a recording, and a changed step is recorded anew: name the model itself.\n"
            "  A recording can only be priced on another device: `preflop account FILE.tape --device D`."
        )
    if devices is None:
        names: tuple[str, ...] = DEVICES_TRIED
    else:
        names = tuple(name.strip() for name in devices.split(",") if name.strip() not in ("", "none"))
    cut = None if split is None else read_count(split, "--split")
    if cut is not None:
        check_split(None if options.batch is None else read_count(options.batch, "--batch"), cut)
    for name in names:
        find_device(name)
    if given is None:
        given = account_of(model, options)
    with working_on() as progress:
        found = what_if(
            model, _batch(options), devices=names, split=cut, given=given, progress=progress,
            **_arguments(options),
        )  # fmt: skip
    return found, headline(given)


def formulas_of(model: str, options: Options) -> Formulas:
    """The operators of what the words name, as formulas.

    Raises:
        PreflopError: a name, number, file or subject that cannot be used, or has no formulas.
    """
    from preflop.choosing import formulas
    from preflop.errors import PreflopError
    from preflop.tape.file import is_tape

    if is_tape(model):
        raise PreflopError(f"{model} is a recording of one size: name the model itself for formulas.")
    with working(f"fitting {model}"):
        return formulas(model, _batch(options), **_arguments(options))


def subject_of(model: str, options: Options) -> Subject:
    """The subject that the words name, to be run for real; a tape cannot be.

    Raises:
        PreflopError: a name, number, file or subject that cannot be used.
    """
    from preflop.errors import PreflopError
    from preflop.subject import resolve
    from preflop.tape.file import is_tape

    if is_tape(model):
        raise PreflopError(
            f"{model} is a recording, and a real step needs the model itself.\n"
            "  Name the model that was recorded."
        )
    return resolve(model, _batch(options), **_arguments(options))


_PRICED = ("device", "alloc_conf")
"""Words that say where a recorded step is priced, and change nothing of it."""


def _from_tape(path: str, options: Options) -> Account:
    from preflop.accounting import account_tape, find_device
    from preflop.errors import PreflopError
    from preflop.tape.file import load

    given = [name for name, value in vars(options).items() if value is not None and name not in _PRICED]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise PreflopError(
            f"{path} is recorded already: {names} cannot change it.\n"
            "  Leave them out, or record the model anew."
        )
    alloc_conf = options.alloc_conf or ""
    device = None if options.device is None else find_device(options.device, alloc_conf)
    tape = load(path)
    if options.device is None:
        device = find_device("cpu" if tape.subject is None else tape.subject.device, alloc_conf)
    return account_tape(tape, device)


def _arguments(options: Options) -> dict[str, Any]:
    """Arguments of `preflop.account` for what was given; the rest keep its defaults."""
    from preflop.quantity import read_count

    words = ("precision", "optimizer", "recompute", "device", "shard", "alloc_conf")
    arguments: dict[str, Any] = {
        name: getattr(options, name) for name in words if getattr(options, name) is not None
    }
    for name in ("microbatches", "gpus"):
        value = getattr(options, name)
        if value is not None:
            arguments[name] = read_count(value, f"--{name}")
    if options.loss is not None:
        from preflop.subject import load_function

        arguments["loss"] = load_function(options.loss, "loss")
    return arguments


def _batch(options: Options) -> Any:
    return batch_of(
        {
            BATCH: options.batch, SEQ: options.seq, SOURCE: options.source_seq, TARGET: options.target_seq,
            FRAMES: options.frames,
        },
        options.batch_from,
    )  # fmt: skip


def batch_of(words: Mapping[str, str | None], batch_from: str | None) -> Any:
    """The batch that the words ask for: sizes, or what a function makes (at those sizes, where it takes any).

    Args:
        words: by axis.

    Raises:
        PreflopError: a size that is none; sizes and a function that takes none.
    """
    from preflop.errors import PreflopError
    from preflop.quantity import read_count

    sizes = {name: read_count(word, OPTIONS[name]) for name, word in words.items() if word is not None}
    if batch_from is None:
        return {KEYS[name]: size for name, size in sizes.items()} or None
    from preflop.subject import load_function

    make = load_function(batch_from, "batch")
    if takes_sizes(make):
        sizes = default_sizes(make) | sizes
        if BATCH not in sizes:
            raise PreflopError(f"{batch_from} makes a batch of any size: give --batch N and the lengths it takes.")
        return sized_batch(make, **sizes)
    if sizes:
        raise PreflopError(
            "--batch-from makes the batch, and --batch or --seq its size: which of them?\n"
            "  Give --batch-from for a factory, --batch and --seq for a named model; or give the function "
            "parameters batch, seq, source, target or frames."
        )
    return make


_SECONDS_BETWEEN_LINES = 20
"""Of progress in a pipe: what is done sooner says nothing."""


def _now_and_then() -> Callable[[str], None]:
    last = time.monotonic()

    def say(words: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            typer.echo(f"preflop: {words}", err=True)

    return say


@contextmanager
def working(words: str) -> Iterator[None]:
    """Says on standard error what is being done, where a person is looking."""
    with working_on() as progress:
        progress(words)
        yield


@contextmanager
def working_on() -> Iterator[Callable[[str], None]]:
    """Gives a function that says on standard error what is being done now: where a person is looking, all of it;
    in a pipe or a file, a line now and then where the work is long."""
    from rich.console import Console

    console = Console(stderr=True)
    if os.environ.get("PREFLOP_QUIET"):
        yield lambda words: None
        return
    if not console.is_terminal:
        yield _now_and_then()
        return
    with console.status("") as status:
        yield status.update
