"""`preflop shapes`: shape contracts of a model, and broadcasts by accident."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from preflop.cli import subject_options as words
from preflop.errors import PreflopError


def command(
    model: Annotated[
        str,
        typer.Argument(help="As for `preflop account`, but no tape.", show_default=False, metavar="MODEL"),
    ],
    batch: words.Batch = None,
    seq: words.Seq = None,
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    as_json: words.AsJson = False,
) -> None:
    """Each module's inputs and outputs as formulas in batch and sequence, from recordings at coprime sizes.
    Exit status 1: something broadcasts, or runs, only because two sizes are equal by accident."""
    from preflop.record.shapes import shapes
    from preflop.report.shapes import shapes_json, show_shapes

    subject_at, asked, sequence = _subjects(model, batch, seq, batch_from, loss)
    with words.working(f"recording {model} at several sizes"):
        found = shapes(subject_at, asked, sequence=sequence)
    if as_json:
        import json

        typer.echo(json.dumps(shapes_json(found), indent=2))
    else:
        show_shapes(found)
    if found.accidents:
        raise typer.Exit(1)


def _subjects(
    model: str, batch: str | None, seq: str | None, batch_from: str | None, loss: str | None
) -> Any:
    """(subject at a batch and a sequence, the sizes asked for, whether there is a sequence)."""
    from preflop.quantity import read_count
    from preflop.record.shapes import need_sizes, resized
    from preflop.subject import FAILURES, load_function, resolve, users_error
    from preflop.tape.file import is_tape

    if is_tape(model):
        raise PreflopError(
            f"{model} is a recording of one size, and shapes are recorded at several.\n"
            "  Name the model that was recorded."
        )
    options: dict[str, Any] = {"optimizer": None}
    if loss is not None:
        options["loss"] = load_function(loss, "loss")
    if batch_from is not None:
        try:
            made = load_function(batch_from, "batch")()
        except FAILURES as error:
            raise users_error("making the batch", error) from error
        asked = need_sizes(made)

        def from_batch(count: int, length: int) -> Any:
            return resolve(model, lambda: resized(made, (count, length), asked), **options)

        return from_batch, asked, asked[1] > 1
    count = read_count(batch or "2", "--batch")
    length = None if seq is None else read_count(seq, "--seq")

    def by_sizes(batch_size: int, sequence_length: int) -> Any:
        sizes = {"batch_size": batch_size}
        if length is not None:
            sizes["sequence_length"] = sequence_length
        return resolve(model, sizes, **options)

    return by_sizes, (count, length or 1), length is not None
