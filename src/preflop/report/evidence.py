"""What published runs say of an account, in a sentence per figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from preflop.units import bytes_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from preflop.account import ErrorBar, Evidence


def evidence_sentences(evidence: Evidence | None) -> Iterator[str]:
    """The error bars of memory and time, each with its nearest published row."""
    if evidence is None:
        return
    if evidence.memory is not None:
        yield _sentence("Allocated peak", evidence.memory, lambda value: bytes_text(round(value)))
    if evidence.time is not None:
        yield _sentence("Step time", evidence.time, time_text)


def _sentence(name: str, bar: ErrorBar, shown: Callable[[float], str]) -> str:
    words = (
        f"{name}: {shown(bar.low)} to {shown(bar.high)}, if it errs as {bar.share:.0%} of {bar.rows} published rows "
        f"({bar.kind}, {bar.sources} source{'s' if bar.sources > 1 else ''}; median {bar.median_abs_error:.1%}, "
        f"{bar.under:.0%} were more than predicted)"
    )
    if not bar.nearest:
        return f"{words}. No published row is near: none is of a training step of such a model."
    row = bar.nearest[0]
    return (
        f"{words}. Nearest: {row.model} on {row.device}, {row.setting}: measured {shown(row.measured)}, "
        f"predicted {shown(row.predicted)}, {row.error:+.1%}."
    )
