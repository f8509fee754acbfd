"""`preflop verify`: prediction beside reading, as rows and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from preflop.report.tables import Heading, Table
from preflop.report.terminal import bullet, heading, make_console, print_parts, table, text
from preflop.units import bytes_text, si_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from preflop.measure.step_time import TimeVerification
    from preflop.measure.verify import Comparison, Verification


def error_text(error: float) -> str:
    """A relative difference in percent; zero only where it is zero.

    >>> error_text(0.0), error_text(1e-7), error_text(-0.0123)
    ('exact', '+0.00001 %', '-1.23 %')
    """
    if error == 0:
        return "exact"
    return f"{100 * error:+.3g} %" if abs(error) >= 1e-5 else f"{100 * error:+.5f} %"


def memory_rows(verification: Verification) -> Table:
    """Peaks of both steps, and of the steady step's phases."""
    compared = (verification.steady, verification.first)
    return Table(
        "Peak memory",
        (
            Heading("", False),
            Heading("predicted"),
            Heading("measured"),
            Heading("bytes apart"),
            Heading("error"),
        ),
        (
            *(_row(one.name, one) for one in compared),
            *(_row(f"  {one.name} of the steady step", one) for one in verification.phases),
        ),
    )


def _row(name: str, one: Comparison) -> tuple[str, ...]:
    apart = one.predicted_bytes - one.measured_bytes
    return (
        name,
        f"{one.predicted_bytes:,}",
        f"{one.measured_bytes:,}",
        f"{apart:+,}" if apart else "0",
        error_text(one.error),
    )


def memory_sentence(verification: Verification) -> str:
    """The answer about memory."""
    steady = verification.steady
    answer = "Memory verifies" if verification.memory_verifies else "Memory does not verify"
    return (
        f"{answer}: {bytes_text(steady.predicted_bytes)} predicted, "
        f"{bytes_text(steady.measured_bytes)} measured"
        f" (allowed: {100 * verification.tolerance:g} % or {verification.slack_bytes} B, whichever is more)."
    )


def flops_sentence(verification: Verification) -> str:
    """The answer about FLOPs."""
    flops = verification.flops
    if flops.counted is None:
        priced = f"{flops.predicted:,} predicted for matmul, attention and convolution"
        return f"FLOPs are not compared: torch's counter does not run on this step. {priced}."
    both = (
        f"{si_text(flops.predicted, 'FLOP')} predicted, {si_text(flops.counted, 'FLOP')} by FlopCounterMode"
    )
    if flops.agrees:
        return f"FLOPs agree exactly: {flops.predicted:,} for matmul, attention and convolution."
    if flops.agrees is None:
        return f"FLOPs cannot be held against torch's counter here, which is wrong in this step: {both}."
    return f"FLOPs differ: {both}."


def show(verification: Verification, *, file: TextIO | None = None) -> None:
    """Print the verification: the answer first."""
    print_parts(make_console(file), _parts(verification))


def _parts(verification: Verification) -> Iterable[RenderableType]:
    good = verification.verifies
    verdict = "verifies" if good else "does not verify"
    yield text(f"{verification.model}: {verdict}", "bold green" if good else "bold red")
    yield text(memory_sentence(verification))
    yield text(flops_sentence(verification))
    yield table(memory_rows(verification))
    yield heading("How it was read")
    yield bullet(
        f"two real optimizer steps on this CPU, {verification.threads} threads, torch "
        f"{verification.torch_version}, every allocation event of torch's profiler"
    )
    yield bullet(f"predicted to run at the peak: {verification.peak_op}")
    for wrong in verification.flops.oracle_wrong:
        yield bullet(f"torch's counter is wrong for {wrong}", "yellow")
    for assumption in verification.assumptions:
        yield bullet(assumption)


def time_sentence(found: TimeVerification) -> str:
    """Predicted and measured time of a step, and whether they agree."""
    verdict = "verifies" if found.verifies else "does not verify"
    now = "" if found.pace is None else (
        f", {time_text(found.predicted_now_s)} at its speed now (a reference matmul takes {found.pace:.2f} of its "
        "calibrated time)"
    )  # fmt: skip
    return (
        f"{found.model}: predicted {time_text(found.predicted_s)} (at least {time_text(found.lower_s)}){now}, measured "
        f"{time_text(found.measured_s)} ({time_text(found.fastest_s)} to {time_text(found.slowest_s)} over "
        f"{found.steps} steps, {found.threads} thread{'s' if found.threads > 1 else ''}, {found.clock}): "
        f"{error_text(found.error)}, {verdict} within {found.tolerance:.0%}."
    )


def show_time(found: TimeVerification, *, file: TextIO | None = None) -> None:
    """Print it."""
    print_parts(make_console(file), [text(time_sentence(found), "bold green" if found.verifies else "bold red")])
