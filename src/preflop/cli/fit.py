"""`preflop fit`: the largest model that fits by the napkin, or, given a model, the largest batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preflop.errors import PreflopError

if TYPE_CHECKING:
    from preflop.hardware.device import Device


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of `preflop models` (or a config.json): find its largest batch."),
    ] = None,
    *,
    device: Annotated[str, typer.Option(help="A device of `preflop hardware`.", show_default=False)],
    gpus: Annotated[str, typer.Option(help="Number of GPUs; more than 1 without MODEL only.")] = "1",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, adafactor, ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16-mixed, bf16-fp32-states, ...")] = "fp32",
    seq: Annotated[str | None, typer.Option(help="With MODEL: positions of a sequence.")] = None,
    microbatches: Annotated[str | None, typer.Option(help="With MODEL: microbatches of a step; 1.")] = None,
    recompute: Annotated[str | None, typer.Option(help="With MODEL: none, block or selective.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Without MODEL: most parameters that fit, capacity as sold, no activations. With MODEL: its
    largest batch, recorded, and what one more would need. Exit status 1: not even one fits."""
    from preflop.hardware.catalog import find
    from preflop.quantity import read_count

    found, count = find(device), read_count(gpus, "--gpus")
    if model is None:
        _refuse_without_model(seq=seq, microbatches=microbatches, recompute=recompute)
        _napkin(found, count, optimizer, precision, as_json)
        return
    step = {
        "optimizer": optimizer,
        "precision": precision,
        "microbatches": read_count(microbatches or "1", "--microbatches"),
        "recompute": recompute or "none",
        "device": found.id,
        "gpus": count,
    }
    _largest_batch(model, {} if seq is None else {"sequence_length": read_count(seq, "--seq")}, step, as_json)


def _refuse_without_model(**given: str | None) -> None:
    """Options that say something about a step are not silently dropped where no step is recorded."""
    for name, value in given.items():
        if value is not None:
            raise PreflopError(
                f"--{name} {value} needs a model: `preflop fit MODEL --{name} {value} ...`.\n"
                "  Without a model, fit counts weights, gradients and optimizer states only."
            )


def _napkin(device: Device, gpus: int, optimizer: str, precision: str, as_json: bool) -> None:
    from preflop.optimizers import find_optimizer
    from preflop.plan.fit import largest_model
    from preflop.precision import find_precision
    from preflop.report.fit import largest_model_json, largest_model_text

    found = largest_model(device, gpus, find_optimizer(optimizer), find_precision(precision))
    typer.echo(json.dumps(largest_model_json(found), indent=2) if as_json else largest_model_text(found))


def _largest_batch(model: str, sizes: dict[str, int], step: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console

    from preflop.plan.fit import Need, largest_batch, need_of_account
    from preflop.report.fit import largest_batch_json, largest_batch_text

    with Console(stderr=True).status("recording") as status:

        def need_of(batch: int) -> Need:
            from preflop.api import account

            status.update(f"recording {model} with a batch of {batch}")
            return need_of_account(batch, account(model, {"batch_size": batch, **sizes}, **step))

        found = largest_batch(need_of)
    names = model, step["device"]
    typer.echo(
        json.dumps(largest_batch_json(found, *names), indent=2)
        if as_json
        else largest_batch_text(found, *names)
    )
    if found.fits is None:
        raise typer.Exit(1)
