"""`preflop precision`: bytes per parameter by recipe, and what autocast keeps in fp32."""

from __future__ import annotations

from typing import Annotated

import typer

from preflop.cli import subject_options as words


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="As for `preflop account`; without one, the recipes.", metavar="[MODEL]"),
    ] = None,
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
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    top: Annotated[str, typer.Option(help="Operators to list.")] = "12",
    as_json: words.AsJson = False,
) -> None:
    """Mixed-precision recipes in bytes per parameter, each with where it is used; with a MODEL, which
    operators stay in fp32 under autocast, what that costs, and what its casts cost."""
    import json

    from preflop.quantity import read_count
    from preflop.report import precision as report

    count = read_count(top, "--top")
    if model is None:
        if as_json:
            typer.echo(json.dumps(report.recipes_json(), indent=2))
        else:
            report.show_recipes()
        return
    from preflop.plan.precision import precision_advice

    priced = words.account_of(
        model,
        words.Options(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
            precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=device, gpus=None, shard=None, batch_from=batch_from, loss=loss,
        ),
    )  # fmt: skip
    advice = precision_advice(priced)
    if as_json:
        typer.echo(json.dumps(report.precision_json(priced, advice), indent=2))
    else:
        report.show_precision(priced, advice, count)
