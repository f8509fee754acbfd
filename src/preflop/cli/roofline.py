"""`preflop roofline`: the step's operators under the device's roof."""

from __future__ import annotations

from typing import Annotated

import typer

from preflop.cli import subject_options as words


def command(
    model: words.Model,
    batch: words.Batch = None,
    seq: words.Seq = None,
    precision: words.PrecisionName = None,
    optimizer: words.Optimizer = None,
    microbatches: words.Microbatches = None,
    recompute: words.Recompute = None,
    device: words.DeviceName = None,
    gpus: words.Gpus = None,
    shard: words.Shard = None,
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    top: Annotated[str, typer.Option(help="Operators to list.")] = "20",
    out: Annotated[
        str | None,
        typer.Option(help="Draw the roofline and the memory timeline.", metavar="FILE.{svg,png,html}"),
    ] = None,
    as_json: words.AsJson = False,
) -> None:
    """Place the step's operators on the device's roofline: what each does, moves, and is bound by."""
    from preflop.quantity import read_count
    from preflop.report import roofline as report

    count = read_count(top, "--top")
    suffix = None if out is None else _suffix(out)
    priced = words.account_of(
        model,
        words.Options(
            batch=batch, seq=seq, precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=device, gpus=gpus, shard=shard, batch_from=batch_from, loss=loss,
        ),
    )  # fmt: skip
    report.need_device(priced)
    if out is not None and suffix is not None:
        from preflop.files import write_atomically

        write_atomically(out, report.drawing(priced, suffix))
    if as_json:
        import json

        typer.echo(json.dumps(report.roofline_json(priced), indent=2))
    else:
        report.show_roofline(priced, top=count)


def _suffix(out: str) -> str:
    """Before anything is recorded: can this kind of file be drawn?"""
    from preflop.report.plots import check_suffix

    return check_suffix(out)
