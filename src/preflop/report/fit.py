"""`preflop fit`: the largest model or batch, as JSON and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from preflop.hardware.allocator_settings import EXPANDABLE
from preflop.plan.fit import Answer, LargestModel, Need, What
from preflop.report.counts import count_text
from preflop.units import bytes_text


def largest_model_json(found: LargestModel) -> dict[str, Any]:
    """The napkin answer with the bytes it follows from."""
    return {
        "schema": "preflop.fit/1",
        "parameters": found.parameters,
        "bytes_per_parameter": {
            "parameters": found.parameter_bytes,
            "gradients": found.gradient_bytes,
            "optimizer_states": found.optimizer_state_bytes,
            "total": found.bytes_per_parameter,
        },
        "memory_bytes": found.memory_bytes,
        "gpus": found.gpus,
        "device": {"id": found.device_id, "name": found.device_name},
        "optimizer": found.optimizer,
        "precision": found.precision,
        "assumptions": list(found.assumptions),
    }


def largest_model_text(found: LargestModel) -> str:
    """The same in a few lines, the answer first."""
    each = f"{found.parameter_bytes} weights + {found.gradient_bytes} gradients"
    return "\n".join(
        (
            f"{count_text(found.parameters)} parameters at most ({found.parameters:,})",
            f"  memory  {found.gpus} x {found.device_name} = {found.memory_bytes / 1e9:,.0f} GB",
            f"  each    {found.bytes_per_parameter} bytes = {each} + {found.optimizer_state_bytes} states"
            f" ({found.optimizer}, {found.precision})",
            *(f"  assumed {text}" for text in found.assumptions),
        )
    )


# What the sizes of an answer are, and how one is said in a sentence.
_UNITS = {
    What.BATCH: "batch {}",
    What.SEQ: "sequence {}",
    What.SOURCE: "source {}",
    What.TARGET: "target {}",
    What.FRAMES: "{} frames",
    What.DEPTH: "{} blocks",
    What.WIDTH: "{} heads",
    What.MEMBER: "{}",
}


def fit_json(answers: Sequence[Answer], model: str, device: str) -> dict[str, Any]:
    """Per kind, the largest that fits, what it needs, and what one more would."""
    return {
        "schema": "preflop.fit-model/1",
        "model": model,
        "device": device,
        **{answer.what.value: _answer_json(answer) for answer in answers},
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    found = answer.found
    return {
        "largest": found.fits.size if found.fits and not found.fits.words else None,
        "words": None if found.fits is None else _said(answer, found.fits),
        "fits": None if found.fits is None else _need_json(found.fits),
        "one_more": None if found.one_more is None else _need_json(found.one_more),
        "at": answer.at,
        "limit": answer.limit or None,
        "tried": found.tried,
        "gap": None if found.gap is None else _need_json(found.gap),
    }


def _need_json(need: Need) -> dict[str, Any]:
    return {
        "size": need.size,
        "words": need.words or None,
        "parameters": need.parameters,
        "peak_bytes": need.peak_bytes,
        "needs_bytes": need.needs_bytes,
        "spare_bytes": need.spare_bytes,
    }


def fit_text(answers: Sequence[Answer], model: str, device: str) -> str:
    """The same, three lines each."""
    return "\n".join(line for answer in answers for line in _answer_lines(answer, model, device))


def _answer_lines(answer: Answer, model: str, device: str) -> Iterator[str]:
    fits, more = answer.found.fits, answer.found.one_more
    at = f", at {answer.at}" if answer.at else ""
    if fits is None:
        smallest = "" if more is None else f", not even {_said(answer, more)}: {_short(more)}"
        yield f"{_NONE[answer.what]} {model} fits on {device}{at}{smallest}."
        return
    largest = f"{_VERB[answer.what]} the largest {_OF[answer.what].format(model)}"
    yield f"{_said(answer, fits)} {largest} that fits on {device}{at}"
    yield (
        f"  {_said(answer, fits)}{_parameters(answer, fits)}: {_held(fits)},"
        f" {bytes_text(fits.spare_bytes)} to spare"
    )
    if more is None:
        yield f"  nothing larger: {answer.limit}"
    else:
        yield f"  {_said(answer, more)}{_parameters(answer, more)}: {_short(more)}"
    if answer.found.gap is not None:
        gap = answer.found.gap
        yield (
            f"  not every smaller one fits: {_said(answer, gap)} needs {bytes_text(-gap.spare_bytes)} too much, "
            f"for gaps that the allocator leaves (fewer with --alloc-conf {EXPANDABLE})"
        )


_NONE = {
    What.BATCH: "no batch of",
    What.SEQ: "no sequence of",
    What.DEPTH: "no depth of",
    What.WIDTH: "no width of",
    What.MEMBER: "no member of the family of",
}
_VERB = {What.BATCH: "is", What.SEQ: "is", What.DEPTH: "are", What.WIDTH: "is", What.MEMBER: "is"}
_OF = {
    What.BATCH: "of {}",
    What.SEQ: "of {}",
    What.DEPTH: "depth of {}",
    What.WIDTH: "width of {}",
    What.MEMBER: "member of the family of {}",
}


def _said(answer: Answer, need: Need) -> str:
    return need.words or _UNITS[answer.what].format(need.size)


def _parameters(answer: Answer, need: Need) -> str:
    if need.parameters is None or answer.what in (What.BATCH, What.SEQ):
        return ""
    return f" ({count_text(need.parameters)} parameters)"


def _short(need: Need) -> str:
    return f"{_held(need)}, {bytes_text(-need.spare_bytes)} too much"


def _held(need: Need) -> str:
    """The peak, and what is held against the device's memory."""
    peak = f"peak {bytes_text(need.peak_bytes)}"
    if need.needs_bytes is None:
        return peak
    return f"{peak}, needs {bytes_text(need.needs_bytes)} with the allocator's reserve and the context"
