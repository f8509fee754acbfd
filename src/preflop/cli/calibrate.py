"""`preflop calibrate`: what this machine's kernels reach, so that `--device this` predicts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: the user's data folder).", metavar="FILE")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: the GPU where there is one).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure matmul rates by size and dtype, bytes moved by operator, and the cost of a call, on this
    machine. One to two minutes, longer while it is busy.
    Then `--device this` predicts for it, and `preflop verify --time` compares."""
    from preflop.errors import BadSubject
    from preflop.files import check_can_write, write_atomically
    from preflop.timing.this import calibration_path

    if device not in (None, "cpu", "cuda"):
        raise BadSubject(f"--device is {device!r}.\n  Give cpu or cuda, or leave it out.")
    from preflop.cli.subject_options import working_on

    path = out or calibration_path()
    if out is not None:
        check_can_write(out)
    with working_on() as progress:
        from preflop.measure.calibrate import calibrate
        from preflop.measure.calibration_file import calibration_text

        found = calibrate(device, progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, calibration_text(found).encode("utf-8"))
    from preflop.report.calibration import show, to_dict

    if as_json:
        import json

        typer.echo(json.dumps(to_dict(found, str(path)), indent=2))
    else:
        show(found, str(path))
