"""`preflop fit`: the largest model that fits by the napkin, or, given a model, the largest of its sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preflop.axes import BATCH, FRAMES, OPTIONS, SEQ, SOURCE, TARGET
from preflop.errors import PreflopError

if TYPE_CHECKING:
    from preflop.hardware.device import Device
    from preflop.plan.fit import What


def command(
    model: Annotated[
        str | None,
        typer.Argument(help="A model of `preflop models` (or a config.json): what is the largest of it?"),
    ] = None,
    *,
    device: Annotated[str, typer.Option(help="A device of `preflop hardware`.", show_default=False)],
    gpus: Annotated[str, typer.Option(help="Number of GPUs; more than 1 without MODEL only.")] = "1",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, adafactor, ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, bf16-mixed, bf16-fp32-states, ...")] = "fp32",
    batch: Annotated[
        str | None, typer.Option(help="With MODEL: samples, for all but the batch itself; 1.")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(help="With MODEL: positions, for all but the sequence; all it has.")
    ] = None,
    source_seq: Annotated[str | None, typer.Option(help="With MODEL: positions of the encoder.")] = None,
    target_seq: Annotated[str | None, typer.Option(help="With MODEL: positions of the decoder.")] = None,
    frames: Annotated[str | None, typer.Option(help="With MODEL: samples of the waveform.")] = None,
    what: Annotated[
        str | None,
        typer.Option(
            help="With MODEL: batch, seq, source, target, frames, depth, width, member, by comma; all of them."
        ),
    ] = None,
    microbatches: Annotated[str | None, typer.Option(help="With MODEL: microbatches of a step; 1.")] = None,
    recompute: Annotated[str | None, typer.Option(help="With MODEL: as for `preflop account`.")] = None,
    alloc_conf: Annotated[
        str | None, typer.Option(help="With MODEL: what PYTORCH_CUDA_ALLOC_CONF sets.", metavar="KEY:VALUE,...")
    ] = None,
    batch_from: Annotated[
        str | None,
        typer.Option(help="FILE:function that makes a factory's batch at any size.", metavar="FILE:FUNCTION"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Without MODEL: most parameters that fit, capacity as sold, no activations. With MODEL: its largest
    batch, longest sequence, most blocks, widest hidden size and largest named member of its family, each
    priced whole, with what one more would need. Exit status 1: not even the smallest fits."""
    from preflop.quantity import read_count
    from preflop.timing.this import device_with_figures

    found, count = device_with_figures(device), read_count(gpus, "--gpus")
    if model is None:
        _refuse_without_model(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames, what=what,
            microbatches=microbatches, recompute=recompute, batch_from=batch_from, alloc_conf=alloc_conf,
        )  # fmt: skip
        _napkin(found, count, optimizer, precision, as_json)
        return
    step = {
        "optimizer": optimizer,
        "precision": precision,
        "microbatches": read_count(microbatches or "1", "--microbatches"),
        "recompute": recompute or "none",
        "device": found.id,
        "gpus": count,
        "alloc_conf": alloc_conf or "",
    }
    given = {BATCH: batch, SEQ: seq, SOURCE: source_seq, TARGET: target_seq, FRAMES: frames}
    sizes: dict[str, Any] = {
        name: read_count(value, OPTIONS[name]) for name, value in given.items() if value is not None
    }
    if batch_from is not None:
        from preflop.subject import load_function

        sizes["batch_from"] = load_function(batch_from, "batch")
    _of_model(model, what, sizes, step, as_json)


def _refuse_without_model(**given: str | None) -> None:
    """Options that say something about a step are not silently dropped where no step is recorded."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')} {value}"
            raise PreflopError(
                f"{option} needs a model: `preflop fit MODEL {option} ...`.\n"
                "  Without a model, fit counts weights, gradients and optimizer states only."
            )


def _napkin(device: Device, gpus: int, optimizer: str, precision: str, as_json: bool) -> None:
    from preflop.optimizers import find_optimizer
    from preflop.plan.fit import largest_model
    from preflop.precision import find_precision
    from preflop.report.fit import largest_model_json, largest_model_text
    from preflop.report.terminal import print_lines

    found = largest_model(device, gpus, find_optimizer(optimizer), find_precision(precision))
    if as_json:
        typer.echo(json.dumps(largest_model_json(found), indent=2))
    else:
        print_lines(largest_model_text(found))


def _of_model(
    model: str, what: str | None, sizes: dict[str, Any], step: dict[str, Any], as_json: bool
) -> None:
    from preflop.cli.subject_options import working_on
    from preflop.fitting import fit_model
    from preflop.plan.fit import What
    from preflop.report.fit import fit_json, fit_text
    from preflop.report.terminal import print_lines

    kinds = tuple(What) if what in (None, "all") else tuple(map(_kind, _words(str(what))))
    _refuse_what_is_sought(kinds, sizes)
    with working_on() as progress:
        answers = fit_model(model, what=kinds, progress=progress, **sizes, **step)
    names = model, step["device"]
    if as_json:
        typer.echo(json.dumps(fit_json(answers, *names), indent=2))
    else:
        print_lines(fit_text(answers, *names))
    if all(answer.found.fits is None for answer in answers):
        raise typer.Exit(1)


def _refuse_what_is_sought(kinds: tuple[What, ...], sizes: Mapping[str, Any]) -> None:
    """A size that is given and the only thing that is sought."""
    for axis, option in OPTIONS.items():
        if axis in sizes and kinds == (axis,):
            raise PreflopError(
                f"{option} {sizes[axis]} is what --what {axis} looks for.\n"
                f"  Leave {option} out, or ask whether it fits: `preflop account MODEL {option} {sizes[axis]} ...`."
            )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word.strip()] or [text]


def _kind(word: str) -> What:
    from preflop.errors import nearest
    from preflop.plan.fit import What

    try:
        return What(word.strip())
    except ValueError:
        names = [kind.value for kind in What]
        near = nearest(word, names)
        hint = f"Nearest: {near[0]}. " if near else ""
        raise PreflopError(f"--what is {word!r}.\n  {hint}All: {', '.join(names)}, all.") from None
