"""`preflop copies`: what a step copies without being asked."""

from __future__ import annotations

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
    gpus: words.Gpus = None,
    shard: words.Shard = None,
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    top: Annotated[str, typer.Option(help="Places to list.")] = "12",
    fail_over: Annotated[
        str | None,
        typer.Option(help="Exit with status 1 where hidden copies take more of the step.", metavar="1%"),
    ] = None,
    as_json: words.AsJson = False,
) -> None:
    """Every copy that a step makes without being asked: line, module, bytes, time, share of the step, why
    in terms of shape and stride, and what to write instead. Exit status 1: more than --fail-over."""
    from preflop.quantity import read_count, read_percent
    from preflop.report.copies import copies_json, show_copies
    from preflop.timing.copies import step_copies

    count = read_count(top, "--top")
    limit = None if fail_over is None else read_percent(fail_over, "--fail-over")
    priced = words.account_of(
        model,
        words.Options(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
            precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=device, gpus=gpus, shard=shard, batch_from=batch_from, loss=loss,
        ),
    )  # fmt: skip
    found = step_copies(priced)
    if as_json:
        import json

        typer.echo(json.dumps(copies_json(priced, found, limit), indent=2))
    else:
        show_copies(priced, found, count)
    if limit is not None and found.hidden_share > limit:
        if not as_json:
            typer.echo(f"more than --fail-over {fail_over}: {found.hidden_share:.1%}", err=True)
        raise typer.Exit(1)
