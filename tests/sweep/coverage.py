"""Writes docs/coverage.md from the sweep's rows: per family tried, answered, exact, assumed, failed."""

from __future__ import annotations

import platform
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Row

DOCUMENT = Path("docs/coverage.md")
EXACT, WITH_CONVOLUTIONS, SILENT = 1e-3, 5e-3, 2e-2
"""Relative differences of the peaks: exact; the same for steps with convolutions; too much to be silent."""
SLACK_BYTES = 512

_ABOUT = """# What was swept, and what came out

Written by `python -m tests.sweep.run --write-docs`; do not edit. The sweep builds each pair of
configuration and head that transformers' auto classes know from its default configuration, shrunk by the
rules of `tests/sweep/rules.py` (two layers, width 64, a vocabulary of 512), with a batch that fits the
head. A pair counts as tried once a real step of it ran here; then it is recorded, from a factory and from a
module that exists, and two real AdamW steps are measured with torch's profiler and compared, within
60 seconds for all of it. Where the clock stopped the real step, a pair is answered and not measured. Below
transformers' families stand peft's adapters, torch's own layers and uses, and diffusers' models. Run all with
`python -m tests.sweep.run --measure` (hours on two cores; an interrupted run goes on where it stopped), after
`pip install -c constraints.txt -e '.[test,sweep]'`: a few models need scipy or diffusers.
"""


def write_coverage(rows: dict[str, Row], pairs: list[Any]) -> None:
    """Write the document, of the rows that are of these pairs."""
    import torch
    import transformers

    names = {pair.name for pair in pairs}
    rows = {name: row for name, row in rows.items() if name in names}
    parts = [
        _ABOUT,
        f"transformers {transformers.__version__}, torch {torch.__version__}, {platform.machine()}, "
        f"{_threads(rows)} thread(s).\n",
        _totals(rows, pairs),
        _families(rows, pairs),
        _untouched(rows),
        _differences(rows),
        _flops(rows),
        _assumptions(rows),
        _reasons(rows, "failed", "The real step runs and the recording raises"),
        _reasons(rows, "crashed", "The process ended"),
        _reasons(rows, "too slow", "Stopped by the clock"),
        _reasons(rows, "library missing", "Needs a library that was not installed"),
        _reasons(rows, "does not train", "The model itself refuses to train"),
        _reasons(rows, "not built", "The sweep has no small model and batch that run for real (its own debt)"),
    ]
    DOCUMENT.write_text("\n".join(part for part in parts if part))


def within(row: Row) -> bool:
    """Whether both measured peaks are the predicted ones, within the tolerance of the row's kind."""
    tolerance = WITH_CONVOLUTIONS if row.convolutions else EXACT
    peaks = (
        (row.predicted_bytes, row.measured_bytes),
        (row.predicted_first_bytes, row.measured_first_bytes),
    )
    return all(abs(p - m) <= max(tolerance * m, SLACK_BYTES) for p, m in peaks)


def _threads(rows: dict[str, Row]) -> str:
    return ", ".join(str(n) for n in sorted({row.threads for row in rows.values()}))


def _tried(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.status in ("answered", "failed", "crashed", "too slow")]


def _totals(rows: dict[str, Row], pairs: list[Any]) -> str:
    found = list(rows.values())
    tried, answered = _tried(found), [r for r in found if r.status == "answered"]
    refuse = sum(r.status == "does not train" for r in found)
    measured = [r for r in answered if r.measured_bytes]
    exact = [r for r in measured if within(r)]
    silent = [r for r in measured if abs(r.error or 0) > SILENT and not r.assumptions]
    seconds = [r.record_s for r in answered]
    return (
        f"Of {len(pairs)} pairs {len(tried)} were tried, {len(answered)} answered "
        f"({_share(len(answered), len(tried))} of the tried). {len(measured)} were measured: {len(exact)} "
        f"({_share(len(exact), len(measured))}) are within 0.1 % (0.5 % with convolutions), and "
        f"{len(silent)} are more than 2 % off with no assumption that says so. "
        f"Not tried: {len(pairs) - len(tried)}, of which {refuse} refuse to train by themselves. "
        "Recording and pricing took "
        f"{median(seconds) if seconds else 0:.1f} s in the median, on a shared machine.\n"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _families(rows: dict[str, Row], pairs: list[Any]) -> str:
    lines = [
        "| Family | Pairs | Tried | Answered | Measured | Within | With assumptions | Not tried |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for family in dict.fromkeys(pair.family for pair in pairs):
        all_of = [pair for pair in pairs if pair.family == family]
        found = [rows[pair.name] for pair in all_of if pair.name in rows]
        tried, answered = _tried(found), [r for r in found if r.status == "answered"]
        measured = [r for r in answered if r.measured_bytes]
        numbers = (
            len(all_of), len(tried), len(answered), len(measured), sum(within(r) for r in measured),
            sum(bool(r.assumptions) for r in answered), len(all_of) - len(tried),
        )
        lines.append(f"| {family} | " + " | ".join(str(number) for number in numbers) + " |")
    return "\n".join([*lines, ""])


def _untouched(rows: dict[str, Row]) -> str:
    """Whether recording a module that exists changed it, and gave what its factory gave."""
    answered = [r for r in rows.values() if r.status == "answered"]
    changed = [r for r in answered if r.changed]
    other = [r for r in answered if r.instance]
    lines = [
        "## Nothing changes",
        "",
        f"A module that exists was recorded in {len(answered)} pairs, its weights, gradients, flags, hooks, "
        f"attributes and the random states compared before and after: {len(changed)} changed. In "
        f"{len(answered) - len(other)} the peaks are those of its factory.",
        *(f"- {r.pair} changed: {', '.join(r.changed)}" for r in changed),
        *(f"- {r.pair}: {_clean(r.instance)}" for r in other),
    ]
    return "\n".join([*lines, ""])


def _differences(rows: dict[str, Row]) -> str:
    off = [r for r in rows.values() if r.measured_bytes and not within(r)]
    if not off:
        return ""
    lines = ["## Larger differences", "", "| Pair | Predicted − measured | At | Assumptions |", "|---|---:|---|---|"]
    for row in sorted(off, key=lambda r: -abs(r.error or 0)):
        lines.append(f"| {row.pair} | {row.error:+.3%} | `{row.peak_op}` | {' '.join(row.assumptions) or 'none'} |")
    return "\n".join([*lines, ""])


def _flops(rows: dict[str, Row]) -> str:
    counted = [r for r in rows.values() if r.counted_flops]
    right = [r for r in counted if not r.oracle_wrong]
    equal = [r for r in right if r.flops == r.counted_flops]
    apart = [r for r in right if r.flops != r.counted_flops]
    lines = [
        "## FLOPs",
        "",
        f"Counted with FlopCounterMode on real tensors, attention written out: {len(counted)} pairs; the "
        f"counter is right on {len(right)} of them, and {len(equal)} ({_share(len(equal), len(right))}) of "
        "those are equal.",
    ]
    lines += [
        f"- {r.pair}: ours {r.flops:,}, counted {r.counted_flops:,} ("
        + ", ".join(f"`{op}` {ours:,} / {theirs:,}" for op, (ours, theirs) in r.flops_apart.items())
        + ")"
        for r in apart
    ]
    unknown = Counter(op for r in rows.values() for op in r.unknown)
    if unknown:
        named = ", ".join(f"`{op}` ({n} pairs)" for op, n in unknown.most_common())
        lines.append(f"- operators without a price: {named}")
    return "\n".join([*lines, ""])


def _assumptions(rows: dict[str, Row]) -> str:
    counts = Counter(re.sub(r" at \S+:\d+", "", text) for row in rows.values() for text in row.assumptions)
    if not counts:
        return ""
    return "\n".join(["## Assumptions made", "", *(f"- {text} ({n} pairs)" for text, n in counts.most_common()), ""])


def _reasons(rows: dict[str, Row], status: str, title: str) -> str:
    found = [row for row in rows.values() if row.status == status]
    if not found:
        return ""
    return "\n".join([f"## {title}: {len(found)}", "", *(f"- {r.pair}: {_clean(r.reason)}" for r in found), ""])


def _clean(reason: str) -> str:
    """One line without paths of this machine."""
    words = ["…" + word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in reason.split()]
    return " ".join(words)[:220].replace("|", "/").replace("<", "‹").replace(">", "›")
