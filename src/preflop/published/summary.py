"""Errors of predictions, per source and figure: counts, median, 95th percentile, worst, share under."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from preflop.published.predict import MEMORY, STEP_TIME, UTILIZATION, Prediction

FIGURES = (MEMORY, STEP_TIME, UTILIZATION)


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one figure over some rows; all relative."""

    n: int
    median_abs_error: float | None
    p95_abs_error: float | None
    max_abs_error: float | None
    under: float | None
    """Share of rows predicted too small: the error that costs a user a run."""
    median_error: float | None = None
    """With its sign: whether there is a bias."""


@dataclass(frozen=True)
class SourceSummary:
    """One source: rows, rows with at least one prediction, and errors per figure."""

    source: str
    rows: int
    built: int
    figures: dict[str, Errors]
    reasons: dict[str, int]
    """Why rows were not built -> how many."""
    below_lower: int
    """Measured times below our lower bound (it must be none: a bound is a bound), or predictions below it."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed.

    >>> quantile([3.0, 1.0, 2.0, 4.0], 0.5), quantile([1.0], 0.95)
    (2.0, 1.0)
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def errors_of(predictions: Iterable[Prediction]) -> Errors:
    """The errors of what was predicted."""
    signed = [p.error for p in predictions if p.error is not None]
    if not signed:
        return Errors(0, None, None, None, None)
    sizes = [abs(error) for error in signed]
    return Errors(
        len(signed), median(sizes), quantile(sizes, 0.95), max(sizes),
        sum(error < 0 for error in signed) / len(signed), median(signed),
    )  # fmt: skip


def summaries(predictions: Sequence[Prediction]) -> list[SourceSummary]:
    """One summary per source, by name."""
    by_source: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.source, []).append(prediction)
    return [_summary(source, found) for source, found in sorted(by_source.items())]


def _summary(source: str, found: list[Prediction]) -> SourceSummary:
    named: dict[str, list[Prediction]] = {name: [] for name in FIGURES}
    for prediction in found:
        named.setdefault(prediction.what, []).append(prediction)
    figures = {name: errors_of(group) for name, group in named.items()}
    reasons: dict[str, int] = {}
    for prediction in found:
        if prediction.why_not:
            reasons[prediction.why_not] = reasons.get(prediction.why_not, 0) + 1
    built = {p.id for p in found if p.predicted is not None}
    return SourceSummary(
        source=source,
        rows=len({p.id for p in found}),
        built=len(built),
        figures={name: found for name, found in figures.items() if found.n or name in FIGURES},
        reasons=dict(sorted(reasons.items(), key=lambda item: -item[1])),
        below_lower=sum(1 for p in found if p.lower_s is not None and (p.predicted or 0) < p.lower_s),
    )


def to_dict(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """JSON of the command."""
    return {
        "schema": "preflop.published/1",
        "sources": {s.source: _source_dict(s) for s in summaries(predictions)},
        "rows": [_row_dict(prediction) for prediction in predictions],
    }


def _source_dict(summary: SourceSummary) -> dict[str, Any]:
    figures = {
        name: {
            "n": errors.n, "median_abs_error": errors.median_abs_error, "max_abs_error": errors.max_abs_error,
            "p95_abs_error": errors.p95_abs_error, "under": errors.under, "median_error": errors.median_error,
        }
        for name, errors in summary.figures.items()
    }  # fmt: skip
    return {
        "rows": summary.rows, "built": summary.built, **figures, "predictions_below_lower_s": summary.below_lower,
        "why_not": summary.reasons,
    }  # fmt: skip


def _row_dict(p: Prediction) -> dict[str, Any]:
    return {
        "id": p.id, "source": p.source, "grade": p.grade, "what": p.what, "measured": p.measured,
        "predicted": p.predicted, "error": p.error, "why_not": p.why_not, "lower_s": p.lower_s, "model": p.model,
        "device": p.device, "setting": p.setting, "assumed": list(p.assumed),
    }  # fmt: skip
