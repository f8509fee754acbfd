"""`preflop what-if`: one knob at a time from a given run."""

from __future__ import annotations

from typing import Annotated

import typer

from preflop.cli import subject_options as words

Devices = Annotated[
    str | None,
    typer.Option(help="Devices to compare with, by comma, or none.", metavar="NAME,NAME,..."),
]
Split = Annotated[
    str | None, typer.Option(help="Microbatches that the batch is cut into (2, where it is even).")
]


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
    devices: Devices = None,
    split: Split = None,
    as_json: words.AsJson = False,
) -> None:
    """Change one knob at a time from the given run: accumulation, recomputation, precision, optimizer,
    device. Each is priced whole. Ends with what to change first, and why. Exit status 1: the given run
    does not fit."""
    from preflop.report.what_if import show_what_if, what_if_json

    found, headline = words.what_if_of(
        model,
        words.Options(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
            precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=device, gpus=gpus, shard=shard, batch_from=batch_from, loss=loss,
            alloc_conf=alloc_conf,
        ),
        devices=devices, split=split,
    )  # fmt: skip
    if as_json:
        import json

        typer.echo(json.dumps(what_if_json(found), indent=2))
    else:
        show_what_if(found, headline)
    if found.given.outcome is not None and found.given.outcome.fits is False:
        raise typer.Exit(1)
