"""The verdict names what bounds the step and the first thing to change, with its numbers."""

from __future__ import annotations

import dataclasses

import preflop
from preflop.account import DeviceFacts, OperatorRow, Time
from preflop.accounting import account_tape, find_device
from preflop.choosing import Accounts
from preflop.plan.choice import Choice
from preflop.plan.outcome import outcome_of
from preflop.plan.smaller import room_bytes, smaller
from preflop.plan.verdict import verdict
from preflop.plan.what_if import changes
from tests.tapes import linear_step

NANO = {"batch_size": 1, "sequence_length": 16}
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


# -- what does not fit --------------------------------------------------------------------------------


def on_a_device_of(room, account, **subject):
    """(memory, verdict) of an account, had its device so many bytes beside the context."""
    memory = account.memory
    memory = dataclasses.replace(memory, fits=False, spare_bytes=room - memory.needs_bytes + memory.context_bytes)
    assert room_bytes(memory) == room
    info = dataclasses.replace(account.tape.subject, **subject)
    said = verdict(memory, account.flops, account.traffic, account.time, account.operators, account.device, info)
    return memory, said


def test_what_is_kept_is_parameters_gradients_states_and_optimizer_temporaries():
    """fp32 AdamW (foreach): 16 bytes per parameter last, and the optimizer makes 4 more."""
    account = preflop.account("gpt2-nano", NANO, device="l4")
    count = account.memory.columns.parameters.elements
    lasting = account.memory.lasting_bytes
    assert 16 * count <= lasting < 16.1 * count
    assert 20 * count <= account.memory.lasting_and_optimizer_bytes < 20.1 * count


def test_no_batch_is_advised_where_weights_alone_fill_the_device():
    """Activations hold most of the peak, and yet a smaller batch comes second: what is kept is too much."""
    account = preflop.account("gpt2-nano", {"batch_size": 64, "sequence_length": 128}, device="l4")
    kept = account.memory.lasting_bytes
    memory, said = on_a_device_of(kept - 1, account)
    assert memory.at_peak.activations > kept
    first, then = said.split(" Then ")
    assert "no batch would" in first and "--precision bf16 or bf16-fp32-states" in first and "sgd" in first
    assert "smaller batch" not in first and then.startswith("more microbatches of a smaller batch")
    _, roomy = on_a_device_of(2 * kept, account)
    assert "no batch would" not in roomy and "Change first: more microbatches of a smaller batch" in roomy


def test_temporaries_alone_want_an_optimizer_without_them():
    """Weights, gradients and states fit, the foreach temporaries do not: a fused optimizer comes first."""
    account = preflop.account("gpt2-nano", {"batch_size": 64, "sequence_length": 128}, device="l4")
    _, said = on_a_device_of(account.memory.lasting_bytes, account)
    assert "Change first: an optimizer without temporaries (fused" in said


def test_one_sample_is_not_cut():
    """A batch of one sample: a shorter sequence, no smaller batch."""
    account = preflop.account("gpt2-nano", {"batch_size": 1, "sequence_length": 256}, device="l4")
    held = dataclasses.replace(account.memory.at_peak, activations=2**40)
    memory = dataclasses.replace(account.memory, fits=False, spare_bytes=-1, at_peak=held)
    said = verdict(memory, account.flops, account.traffic, account.time, (), account.device, account.tape.subject)
    assert "a shorter sequence" in said and "batch" not in said


def test_what_if_and_the_verdict_agree():
    """On a device of any memory: what what-if finds to fit, of fewer bytes per parameter, the verdict's rule names."""
    account = preflop.account("gpt2-nano", NANO, device="l4", precision="bf16-mixed")
    prices = Accounts("gpt2-nano", NANO, precision="bf16-mixed", device="l4")
    fewer = {"bf16", "bf16-fp32-states", "adamw-8bit", "adafactor", "lion", "momentum", "sgd"}
    given = Choice(batch=1, seq=16, precision="bf16-mixed", device="l4")
    tried = {words: choice for _, words, choice, _ in changes(given, devices=()) if words in fewer}
    rows = {words: outcome_of(prices.account(choice)).needs_bytes for words, choice in tried.items()}
    assert set(rows) == fewer
    for needs in rows.values():
        memory, _ = on_a_device_of(needs - account.memory.context_bytes, account)
        named = smaller(memory, account.tape.subject)
        fitting = {words for words, other in rows.items() if other <= needs}
        assert fitting <= {*named.precisions, *named.optimizers}


def test_what_cannot_hold_its_weights_is_not_named():
    """Room for 9 bytes per parameter: bf16 (8) of the precisions, sgd (8) of the optimizers; for 7, none."""
    account = preflop.account("gpt2-nano", NANO, device="l4", precision="bf16-mixed")
    count = account.memory.columns.parameters.elements
    nine, _ = on_a_device_of(9 * count, account)
    named = smaller(nine, account.tape.subject)
    assert named.precisions == ("bf16",) and set(named.optimizers) == {"adafactor", "sgd"}
    _, said = on_a_device_of(7 * count, account)
    assert "Change first: sharding, or a larger device" in said and "what-if" not in said


def test_gaps_of_the_allocator_want_expandable_segments():
    """What would fit without gaps: the setting that closes them, and what it leaves, before any other change."""
    held = {"fits": False, "spare_bytes": -5, "allocated_bytes": 10 * 2**30, "reserved_bytes": 12 * 2**30}
    said = told("compute", [row("compute", 1.0)], expandable_spare_bytes=3 * 2**30, **held)
    assert "the allocator reserves 2.00 GiB more than it hands out" in said
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said and "3.00 GiB to spare" in said
    assert "expandable" not in told("compute", [row("compute", 1.0)], expandable_spare_bytes=-1, **held)
