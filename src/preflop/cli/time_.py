"""`preflop time`: days of training from parameters, tokens, GPUs and MFU. Needs no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    params: Annotated[str, typer.Option(help="Parameters: 70e9, 70B.", show_default=False)],
    tokens: Annotated[str, typer.Option(help="Tokens: 15e12, 15T.", show_default=False)],
    device: Annotated[str, typer.Option(help="A device of `preflop hardware`.", show_default=False)],
    gpus: Annotated[str, typer.Option(help="Number of GPUs.")] = "1",
    mfu: Annotated[str, typer.Option(help="Model FLOPs utilization, above 0 and at most 1.")] = "0.5",
    precision: Annotated[
        str, typer.Option("--precision", "--dtype", help="A precision (bf16-mixed) or a dtype (int8).")
    ] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Days of training: 6ND / (GPUs x dense peak x MFU)."""
    from preflop.quantity import read_count, read_share
    from preflop.report.terminal import print_lines
    from preflop.report.training_time import training_time_json, training_time_text
    from preflop.timing.this import device_with_figures
    from preflop.timing.training import training_time

    run = training_time(
        parameters=read_count(params, "--params"),
        tokens=read_count(tokens, "--tokens"),
        gpus=read_count(gpus, "--gpus"),
        device=device_with_figures(device),
        model_flops_utilization=read_share(mfu, "--mfu"),
        precision=precision,
    )
    if as_json:
        typer.echo(json.dumps(training_time_json(run), indent=2))
    else:
        print_lines(training_time_text(run))
