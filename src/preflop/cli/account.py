"""`preflop account`: one training step, priced."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from preflop.cli import subject_options as words


def command(
    model: words.Model,
    batch: words.Batch = None,
    seq: words.Seq = None,
    source_seq: words.SourceSeq = None,
    target_seq: words.TargetSeq = None,
    frames: words.Frames = None,
    precision: words.PrecisionName = None,
    optimizer: words.Optimizer = None,
    microbatches: words.Microbatches = None,
    recompute: words.Recompute = None,
    device: words.DeviceName = None,
    alloc_conf: words.AllocConf = None,
    gpus: words.Gpus = None,
    shard: words.Shard = None,
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    top: Annotated[str, typer.Option(help="Operators to list.")] = "10",
    html: Annotated[
        str | None, typer.Option(help="Write a page with tables and pictures.", metavar="FILE")
    ] = None,
    tape: Annotated[str | None, typer.Option(help="Save the recorded step.", metavar="FILE.tape")] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also change one knob at a time (see `preflop what-if`).")
    ] = False,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Also write the operators as formulas in B and S.")
    ] = False,
    real: Annotated[
        bool,
        typer.Option("--real", help="Record real steps on small sizes, for a model that cannot be faked."),
    ] = False,
    as_json: words.AsJson = False,
) -> None:
    """Price one training step before it runs: what sits in memory and whether it fits, what work is
    done, how long it takes, what bounds it. Exit status 1: it does not fit."""
    from preflop.quantity import read_count

    count = read_count(top, "--top")
    _check_files(tape, html)
    options = words.Options(
        batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
        precision=precision, optimizer=optimizer, microbatches=microbatches,
        recompute=recompute, device=device, gpus=gpus, shard=shard, batch_from=batch_from, loss=loss,
        alloc_conf=alloc_conf,
    )  # fmt: skip
    priced = words.account_of(model, options, real=real)
    changed = None
    if what_if:
        changed, _ = words.what_if_of(model, options, devices=None, split=None, given=priced)
    letters = words.formulas_of(model, options) if formulas else None
    if tape is not None:
        from preflop.tape.file import save

        save(priced.tape, tape)
    if html is not None:
        from preflop.files import write_atomically
        from preflop.report.html import account_html

        write_atomically(html, account_html(priced).encode())
    if as_json:
        import json

        from preflop.report.formulas import formulas_json
        from preflop.report.what_if import what_if_json

        extra = {} if changed is None else {"what_if": what_if_json(changed)}
        if letters is not None:
            extra["formulas"] = formulas_json(letters)
        typer.echo(json.dumps({**priced.to_dict(), **extra}, indent=2))
    else:
        priced.show(top=count)
        if letters is not None:
            from preflop.report.formulas import show_formulas

            show_formulas(letters, top=count)
        if changed is not None:
            from preflop.report.what_if import show_section

            show_section(changed)
    if priced.memory.fits is False:
        raise typer.Exit(1)


def _check_files(tape: str | None, html: str | None) -> None:
    """Before anything is recorded: can the files be written, and is the tape known by its name when it is read?"""
    from preflop.errors import BadFile
    from preflop.files import check_can_write
    from preflop.tape.file import is_tape

    for path in (tape, html):
        if path is not None:
            check_can_write(path)

    if tape is not None and html is not None and os.path.realpath(tape) == os.path.realpath(html):
        raise BadFile(f"--tape and --html are both {tape!r}.\n  Nothing was recorded. Name two files.")
    if tape is not None and not is_tape(tape):
        raise BadFile(f"--tape is {tape!r}: the name must end in .tape, by which `preflop account` knows it.")
