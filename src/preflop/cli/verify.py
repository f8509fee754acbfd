"""`preflop verify`: two real steps on this machine, held against the prediction."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from preflop.cli import subject_options as words

if TYPE_CHECKING:
    from preflop.subject import Subject


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
    batch_from: words.BatchFrom = None,
    loss: words.Loss = None,
    time: Annotated[
        bool, typer.Option("--time", help="Compare the step's time instead (after `preflop calibrate`).")
    ] = False,
    as_json: words.AsJson = False,
) -> None:
    """Run two real optimizer steps here, on the CPU, and compare their memory and FLOPs with the
    prediction. Needs the memory and the time of a real step. Exit status 1: it does not verify."""
    # The profiler writes a line to standard error whenever it starts and stops, unless told before
    # torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    subject = words.subject_of(
        model,
        words.Options(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
            precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=None, gpus=None, shard=None, batch_from=batch_from, loss=loss,
        ),
    )  # fmt: skip
    if time:
        _compare_time(model, subject, as_json)
        return
    with words.working(f"recording {model}, then running two real steps"):
        from preflop.measure.verify import verify_subject

        found = verify_subject(subject)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        from preflop.report.verify_table import show

        show(found)
    if not found.verifies:
        raise typer.Exit(1)


def _compare_time(model: str, subject: Subject, as_json: bool) -> None:
    """The step's time, predicted for this machine and measured on it."""
    with words.working(f"recording {model}, then timing real steps"):
        from preflop.measure.step_time import verify_step_time

        found = verify_step_time(subject)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        from preflop.report.verify_table import show_time

        show_time(found)
    if not found.verifies:
        raise typer.Exit(1)
