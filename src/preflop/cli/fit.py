"""`preflop fit`: the largest model that fits by the napkin, or, given a model, the largest batch."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of `preflop models` (or a config.json): find its largest batch."),
    ] = None,
    device: Annotated[str, typer.Option(help="A device of `preflop hardware`.", show_default=False)] = ...,  # type: ignore[assignment]
    gpus: Annotated[str, typer.Option(help="Number of GPUs; more than 1 without MODEL only.")] = "1",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, adafactor, ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16-mixed, bf16-fp32-states, ...")] = "fp32",
    seq: Annotated[str | None, typer.Option(help="With MODEL: positions of a sequence.")] = None,
    microbatches: Annotated[str, typer.Option(help="With MODEL: microbatches of a step.")] = "1",
    recompute: Annotated[str, typer.Option(help="With MODEL: none, block or selective.")] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Without MODEL: most parameters that fit, capacity as sold, no activations. With MODEL: its
    largest batch, recorded, and what one more would need. Exit status 1: not even one fits."""
    from preflop.hardware.catalog import find
    from preflop.optimizers import find_optimizer
    from preflop.precision import find_precision
    from preflop.quantity import read_count

    found_device, count = find(device), read_count(gpus, "--gpus")
    find_precision(precision)
    if model is None:
        _napkin(found_device, count, optimizer, precision, as_json)
        return
    find_optimizer(optimizer)
    options = {
        "optimizer": optimizer,
        "precision": precision,
        "microbatches": read_count(microbatches, "--microbatches"),
        "recompute": recompute,
        "device": found_device.id,
        "gpus": count,
    }
    _largest_batch(model, None if seq is None else read_count(seq, "--seq"), options, as_json)


def _napkin(device, gpus: int, optimizer: str, precision: str, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    from preflop.optimizers import find_optimizer
    from preflop.plan.fit import largest_model
    from preflop.precision import find_precision
    from preflop.report.fit import largest_model_json, largest_model_text

    found = largest_model(device, gpus, find_optimizer(optimizer), find_precision(precision))
    typer.echo(json.dumps(largest_model_json(found), indent=2) if as_json else largest_model_text(found))


def _largest_batch(model: str, sequence: int | None, options: dict[str, object], as_json: bool) -> None:
    from rich.console import Console

    from preflop.plan.fit import Need, largest_batch, need_of_account
    from preflop.report.fit import largest_batch_json, largest_batch_text

    with Console(stderr=True).status("recording") as status:

        def need_of(batch: int) -> Need:
            from preflop.api import account

            status.update(f"recording {model} with a batch of {batch}")
            sizes = {"batch_size": batch} if sequence is None else {"batch_size": batch, "sequence_length": sequence}
            return need_of_account(batch, account(model, sizes, **options))  # type: ignore[arg-type]

        found = largest_batch(need_of)
    names = model, str(options["device"])
    typer.echo(
        json.dumps(largest_batch_json(found, *names), indent=2) if as_json else largest_batch_text(found, *names)
    )
    if found.fits is None:
        raise typer.Exit(1)
