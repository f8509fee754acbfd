"""The verdict names what bounds the step and the first thing to change, with its numbers."""

from __future__ import annotations

import dataclasses

from preflop.account import DeviceFacts, OperatorRow, Time
from preflop.accounting import account_tape, find_device
from preflop.plan.verdict import verdict
from tests.tapes import linear_step

BASE = account_tape(linear_step(device="h100-sxm5-80gb"), find_device("h100-sxm"))
DEVICE = DeviceFacts("x", "X", 80 * 10**9, "as sold", 3e12, {"float32": 60e12, "bfloat16": 900e12})


def row(bound, time_s, phase="forward"):
    return OperatorRow("aten.mm", phase, "", None, 1, "", "float32", 1, 1, 1, 1.0, bound, time_s)


def told(bound, rows, *, dtype="float32", peak=60e12, precision="fp32", **memory):
    time = Time(1.0, 1.1, 2.0, bound, 0.4, "expected_s", None, peak, dtype)
    subject = dataclasses.replace(BASE.tape.subject, precision=precision)
    held = dataclasses.replace(BASE.memory, **memory)
    return verdict(held, BASE.flops, BASE.traffic, time, tuple(rows), DEVICE, subject)


def test_float32_compute_wants_bf16():
    """Compute-bound in fp32: bf16-mixed first, whose peak is 900 / 60 = 15 times as high."""
    text = told("compute", [row("compute", 0.9), row("bandwidth", 0.1)])
    assert "90% of the least time is arithmetic" in text and "15 times as high" in text


def test_bf16_compute_wants_hardware():
    """Compute-bound in bf16: there is no cheaper format to name."""
    text = told("compute", [row("compute", 1.0)], dtype="bfloat16", peak=900e12, precision="bf16")
    assert "bf16-mixed" not in text and "Change first: the hardware" in text


def test_optimizer_traffic_wants_more_tokens_per_step():
    """Bandwidth-bound in the optimizer: more tokens per step, or a fused optimizer."""
    text = told("bandwidth", [row("bandwidth", 0.9, "optimizer"), row("bandwidth", 0.1)])
    assert "in the optimizer (90%)" in text and "fused optimizer" in text


def test_bf16_traffic_wants_fusion():
    """Bandwidth-bound in bf16: fuse element-wise work."""
    text = told("bandwidth", [row("bandwidth", 1.0)], precision="bf16-mixed")
    assert "Change first: fuse element-wise work" in text


def test_an_optimizer_peak_wants_no_temporaries():
    """Does not fit for the optimizer's temporaries: an optimizer without them, before anything else."""
    at = dataclasses.replace(BASE.memory.at_peak, temporaries=2**31)
    text = told("compute", [], fits=False, spare_bytes=-(2**30), peak_phase="optimizer", at_peak=at)
    assert text.startswith("It does not fit, by 1.00 GiB: the peak is in the optimizer")


def test_launching_wants_a_larger_batch():
    """Bound by the host: a larger batch first."""
    assert "Change first: a larger batch" in told("launch", [row("bandwidth", 0.5)])
