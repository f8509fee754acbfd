"""`preflop fit`: the largest model or batch, as JSON and as lines."""

from __future__ import annotations

from typing import Any

from preflop.plan.fit import LargestBatch, LargestModel, Need
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


def largest_batch_json(found: LargestBatch, model: str, device: str) -> dict[str, Any]:
    """The largest batch (0 where none fits), what it needs and what one more would."""
    return {
        "schema": "preflop.fit-batch/1",
        "model": model,
        "device": device,
        "batch": found.fits.batch if found.fits else 0,
        "fits": _need_json(found.fits) if found.fits else None,
        "one_more": _need_json(found.one_more),
        "recordings": found.recordings,
    }


def _need_json(need: Need) -> dict[str, int]:
    return {"batch": need.batch, "peak_bytes": need.peak_bytes, "spare_bytes": need.spare_bytes}


def largest_batch_text(found: LargestBatch, model: str, device: str) -> str:
    """The same in three lines."""
    more = found.one_more
    short = f"peak {bytes_text(more.peak_bytes)}, {bytes_text(-more.spare_bytes)} too much"
    if found.fits is None:
        return f"{model} does not fit on {device}, not even a batch of {more.batch}: {short}."
    fits = found.fits
    return "\n".join(
        (
            f"batch {fits.batch} is the largest of {model} that fits on {device}",
            f"  batch {fits.batch}: peak {bytes_text(fits.peak_bytes)},"
            f" {bytes_text(fits.spare_bytes)} to spare",
            f"  batch {more.batch}: {short}",
        )
    )
