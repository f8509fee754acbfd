"""The rows that ship with the package as evidence (`plan/evidence.json`), from a run over published rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from preflop.errors import UnknownDevice
from preflop.hardware.catalog import find
from preflop.published.predict import MEMORY, STEP_TIME, Prediction

_GRADES = ("A", "A-", "")
"""Grades that count, beside rows whose doubts their source's code settles; the latency table has none and gives every
field."""


def evidence_text(predictions: Sequence[Prediction]) -> str:
    """JSON: one short list per row that was predicted, of memory and step time."""
    rows = [
        _row(p)
        for p in predictions
        if p.what in (MEMORY, STEP_TIME) and p.predicted is not None and (p.grade in _GRADES or p.settled)
    ]
    command = "python -m preflop.published --rows DIR --write-evidence FILE"
    return f'{{\n "written_by": {json.dumps(command)},\n "rows": {_lines(rows)}\n}}\n'


def _lines(rows: Sequence[dict[str, object]]) -> str:
    return "[\n  " + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]"


def _row(p: Prediction) -> dict[str, object]:
    return {
        "id": p.id, "source": p.source, "what": p.what, "model": p.model, "device": _device_id(p),
        "setting": p.setting, "several": p.several, "bits": p.bits, "parameters": p.parameters, "tokens": p.tokens,
        "measured": _rounded(p.measured), "predicted": _rounded(p.predicted), "error": _rounded(p.error),
        "lower_s": _rounded(p.lower_s),
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _device_id(p: Prediction) -> str:
    """The catalog's id where it has one, else as the row writes it."""
    if p.device_id:
        return p.device_id
    try:
        return find(p.device.replace("_", " ")).id
    except UnknownDevice:
        return p.device
