"""What an account's figures stand on, and how far published runs of the same kind were from prediction.

The rows ship with the package (`evidence.json`, written by `python -m preflop.published --write-evidence`).
An error bar is the middle 90 % of the errors of rows of that kind: it says how others' runs fared, and
nothing of what none of them had.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from statistics import median
from typing import Any

from preflop.account import DeviceFacts, ErrorBar, Evidence, Memory, PublishedRow, Standing, Time
from preflop.tape.events import SubjectInfo

SHARE = 0.9
"""Of the published errors that an error bar holds."""
NEAREST = 3
_FEWEST = 8
"""Published rows without which runs on several devices are taken in, and then without which there is no bar."""


def evidence(
    memory: Memory, time: Time, device: DeviceFacts | None, subject: SubjectInfo | None, parameters: int
) -> Evidence:
    """What the figures stand on.

    Args:
        parameters: elements, for the nearest published rows.
    """
    bars: dict[str, ErrorBar | None] = {"memory": None, "step_time": None}
    if device is not None and device.id != "this":
        bits = 32 if subject is None else _bits(subject.precision)
        tokens = subject.tokens if subject is not None else None
        asked = _Asked(device.id, bits, parameters, tokens)
        bars["memory"] = _bar("memory", memory.allocated_bytes, asked)
        bars["step_time"] = _bar("step_time", time.expected_s, asked)
    return Evidence(tuple(_standing(memory, time, device)), bars["memory"], bars["step_time"])


def _bits(precision: str) -> int:
    """Of the numbers that most matmuls read, from a precision's name.

    >>> _bits("fp8"), _bits("bf16-mixed"), _bits("tf32")
    (8, 16, 32)
    """
    return 8 if precision == "fp8" else 16 if "16" in precision else 32


def _standing(memory: Memory, time: Time, device: DeviceFacts | None) -> Sequence[Standing]:
    found = [
        Standing("flops", "counted", "from the shapes of every call"),
        Standing("traffic", "counted", "each operand of every call once"),
        Standing("memory.peak_bytes", "counted", "births and deaths of every storage of the recorded step"),
        Standing("memory.at_peak.workspace", "rule", "scratch inside kernels, by the kernels' source"),
    ]
    if memory.reserved_bytes is not None:
        found.append(
            Standing("memory.allocated_bytes", "rule", "CUDA's caching allocator and cuBLAS's workspaces, replayed")
        )
        found.append(Standing("memory.reserved_bytes", "rule", "CUDA's caching allocator, replayed"))
    if memory.context_bytes is not None:
        found.append(Standing("memory.context_bytes", "assumed", "measured on one device, grows as kernels load"))
    if device is not None and time.lower_s is not None:
        found.append(Standing("time.lower_s", "counted", "FLOPs and bytes over the device's printed peaks"))
    if time.expected_s is not None:
        found.append(
            Standing("time.expected_s", "measured rates", "what single kernels were measured to reach elsewhere")
        )
    return found


class _Asked:
    """The run that is asked about, as rows are compared to it."""

    def __init__(self, device: str, bits: int, parameters: int, tokens: int | None) -> None:
        self.device, self.bits, self.parameters, self.tokens = device, bits, parameters, tokens

    def distance(self, row: dict[str, Any]) -> float:
        """How unlike a published row is: other devices and number formats, and sizes by factors of ten."""
        apart: float = 2.0 * (row["device"] != self.device) + 2.0 * (row["bits"] != self.bits)
        return apart + _decades(row["parameters"], self.parameters) + _decades(row["tokens"], self.tokens)


def _decades(one: float | None, other: float | None) -> float:
    return abs(math.log10(one / other)) if one and other else 1.0


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, Any], ...]:
    text = (resources.files("preflop.plan") / "evidence.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


def _bar(what: str, value: float | None, asked: _Asked) -> ErrorBar | None:
    if not value:
        return None
    alike = [row for row in _rows() if row["what"] == what and row["bits"] == asked.bits]
    own = [row for row in alike if not row["several"]]
    several = len(own) < _FEWEST
    if several:
        own = alike
    if len(own) < _FEWEST:
        return None
    errors = sorted(row["error"] for row in own)
    low, high = _quantile(errors, (1 - SHARE) / 2), _quantile(errors, (1 + SHARE) / 2)
    steps = [row for row in own if _is_step(row)]
    # All published rows are of language models: none is near to what reads no tokens.
    nearest = sorted(steps, key=asked.distance)[:NEAREST] if asked.tokens else []
    count = "one device or several" if several else "one device"
    return ErrorBar(
        low=value / (1 + high), high=value / (1 + low), share=SHARE, rows=len(own),
        sources=len({row["source"] for row in own}),
        kind=f"{what.replace('_', ' ')} of {asked.bits}-bit runs of language models on {count}, {len(steps)} of them "
        "training steps",
        median_abs_error=median(abs(error) for error in errors),
        under=sum(error < 0 for error in errors) / len(errors),
        nearest=tuple(_published(row) for row in nearest),
    )  # fmt: skip


# How the last words of a setting call what is no training step of a whole model.
_OTHER_KINDS = ("inf", "inference", "forward", "saved for backward", "before/after")


def _is_step(row: dict[str, Any]) -> bool:
    """Whether a row is of a training step of a whole model, by the words of its source.

    >>> _is_step({"model": "gpt2_large", "setting": "8 x 1024, inf"})
    False
    >>> _is_step({"model": "gpt2_large", "setting": "1 x 1024, train"})
    True
    """
    last = row["setting"].rsplit(", ", 1)[-1]
    return not (last.startswith(_OTHER_KINDS) or row["model"].endswith((" layer", "(no heads)")))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the ranks.

    >>> _quantile([0.0, 1.0, 2.0], 0.75)
    1.5
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _published(row: dict[str, Any]) -> PublishedRow:
    names = ("id", "source", "model", "device", "setting", "measured", "predicted", "error")
    return PublishedRow(**{name: row[name] for name in names})
