"""`preflop roofline`: the step's operators under the device's roof."""

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
    _need_roof(model, device)
    priced = words.account_of(
        model,
        words.Options(
            batch=batch, seq=seq, source_seq=source_seq, target_seq=target_seq, frames=frames,
            precision=precision, optimizer=optimizer, microbatches=microbatches,
            recompute=recompute, device=device, gpus=gpus, shard=shard, batch_from=batch_from, loss=loss,
        ),
    )  # fmt: skip
    report.need_device(priced.device)
    if out is not None and suffix is not None:
        from preflop.files import write_atomically

        write_atomically(out, report.drawing(priced, suffix))
    if as_json:
        import json

        typer.echo(json.dumps(report.roofline_json(priced), indent=2))
    else:
        report.show_roofline(priced, top=count)


def _suffix(out: str) -> str:
    """Before anything is recorded: can this kind of file be drawn, and written there?"""
    from preflop.files import check_can_write
    from preflop.report.plots import check_suffix

    suffix = check_suffix(out)
    check_can_write(out)
    return suffix


def _need_roof(model: str, device: str | None) -> None:
    """Before anything is recorded: has the device a roof? A tape says its own device."""
    from preflop.accounting import CPU, device_facts, find_device
    from preflop.report.roofline import need_device
    from preflop.tape.file import is_tape

    if is_tape(model) and device is None:
        return
    found = find_device(device or CPU)
    need_device(None if found is None else device_facts(found))
