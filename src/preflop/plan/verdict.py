"""The verdict: one sentence on what bounds a step and what to change first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from preflop.account import DeviceFacts, Flops, Memory, OperatorRow, Time, Traffic
from preflop.hardware.allocator_settings import EXPANDABLE
from preflop.plan.smaller import room_bytes, smaller
from preflop.tape.events import SubjectInfo
from preflop.units import bytes_text, time_text

# A step that leaves more than this share of the device's memory free can take a larger batch.
_ROOMY = 0.4

# Optimizer temporaries below this share of what lasts (step counters) are not worth a word.
_MENTIONED = 0.001


def verdict(
    memory: Memory,
    flops: Flops,
    traffic: Traffic,
    time: Time,
    operators: tuple[OperatorRow, ...],
    device: DeviceFacts | None,
    subject: SubjectInfo | None,
) -> str:
    """What bounds the step, with its numbers, and the first thing to change."""
    if memory.fits is False:
        return _does_not_fit(memory, subject)
    if device is None or time.lower_s is None:
        return _without_a_device(memory, traffic)
    if time.bound == "launch":
        return _launch_bound(time)
    if time.bound == "compute":
        return _compute_bound(time, operators, device, subject)
    if time.bound == "bandwidth":
        return _bandwidth_bound(memory, time, operators, device, subject)
    return "Nothing in this step takes time on the device."


def _does_not_fit(memory: Memory, subject: SubjectInfo | None) -> str:
    at = dataclasses.asdict(memory.at_peak)
    largest = max(at, key=lambda name: at[name])
    over = bytes_text(-(memory.spare_bytes or 0))
    if (memory.expandable_spare_bytes or -1) >= 0:
        gaps = bytes_text((memory.reserved_bytes or 0) - (memory.allocated_bytes or 0))
        return (
            f"It does not fit, by {over}, though its tensors would: the allocator reserves {gaps} more than it hands "
            f"out at most. Change first: PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE} "
            f"(--alloc-conf), which leaves {bytes_text(memory.expandable_spare_bytes or 0)} to spare."
        )
    held = f"{largest.replace('_', ' ')} hold {bytes_text(at[largest])} of the peak"
    if memory.peak_phase == "optimizer" and memory.at_peak.temporaries > -(memory.spare_bytes or 0):
        return (
            f"It does not fit, by {over}: the peak is in the optimizer, whose temporaries hold "
            f"{bytes_text(memory.at_peak.temporaries)}. Change first: an optimizer that makes none "
            "(fused, or a loop over parameters instead of foreach)."
        )
    batched = largest in ("activations", "temporaries")
    if memory.lasting_and_optimizer_bytes > room_bytes(memory):
        then = f" Then {_smaller_activations(subject)}: {held}." if batched else ""
        return f"It does not fit, by {over}, and no batch would: {_kept_words(memory, subject)}.{then}"
    if largest in ("optimizer_states", "gradients", "parameters"):
        advice = _keep_less(memory, subject)
    elif batched:
        advice = _smaller_activations(subject)
    else:
        advice = "a smaller batch or a larger device"
    return f"It does not fit, by {over}: {held}. Change first: {advice}."


def _kept_words(memory: Memory, subject: SubjectInfo | None) -> str:
    """That what the step keeps whatever the batch is more than the device has, and what makes it less."""
    lasting, made = memory.lasting_bytes, memory.lasting_and_optimizer_bytes - memory.lasting_bytes
    advice = _keep_less(memory, subject)
    if lasting <= room_bytes(memory):
        advice = f"an optimizer without temporaries (fused, or a loop over parameters instead of foreach), {advice}"
    and_temporaries = f" and {bytes_text(made)} of optimizer temporaries" if made > lasting * _MENTIONED else ""
    return (
        f"{bytes_text(lasting)} of weights, gradients and optimizer states{and_temporaries} are there whatever the "
        f"batch, and the device has {bytes_text(room_bytes(memory))} beside the context. Change first: {advice}"
    )


def _keep_less(memory: Memory, subject: SubjectInfo | None) -> str:
    """What makes weights, gradients and states smaller, by their bytes per parameter."""
    found = smaller(memory, subject)
    said = []
    if found.precisions:
        said.append(f"fewer bytes per parameter (--precision {_or(found.precisions)})")
    if found.optimizers:
        said.append(f"an optimizer with fewer or smaller states ({_or(found.optimizers)})")
    if found.in_backward:
        said.append(f"updates in backward, which free each gradient ({found.in_backward})")
    priced = "; `preflop what-if` prices each, with the activations" if said else ""
    return f"{', '.join([*said, 'sharding'])}, or a larger device{priced}"


def _smaller_activations(subject: SubjectInfo | None) -> str:
    """What makes activations smaller: a batch of one sample cannot be cut."""
    said = [
        "smaller samples"
        if subject is not None and subject.samples == 1
        else "more microbatches of a smaller batch"
    ]
    if subject is not None and subject.samples == 1 and subject.tokens:
        said = ["a shorter sequence"]
    if subject is None or subject.recompute == "none":
        said.append("--recompute block")
    return ", or ".join(said)


def _or(names: Sequence[str]) -> str:
    """Names as a choice.

    >>> _or(["bf16", "sgd", "lion"])
    'bf16, sgd or lion'
    """
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _without_a_device(memory: Memory, traffic: Traffic) -> str:
    intensity = traffic.arithmetic_intensity
    does = "" if intensity is None else f" and does {intensity:.3g} FLOPs per byte it moves"
    return (
        f"The step needs {bytes_text(memory.peak_bytes)}{does}; name a --device to learn whether it "
        "fits, what bounds it and how long it takes."
    )


def _launch_bound(time: Time) -> str:
    lower = time_text(time.lower_s or 0)
    return (
        f"Bound by the host: launching the kernels takes {time_text(time.expected_s or 0)}, running them "
        f"at least {lower}. Change first: a larger batch, else fewer kernels (a fused or foreach "
        "optimizer, torch.compile, CUDA graphs)."
    )


def _compute_bound(
    time: Time, operators: tuple[OperatorRow, ...], device: DeviceFacts, subject: SubjectInfo | None
) -> str:
    share = _share(operators, "compute")
    said = f"Bound by compute: {share:.0%} of the least time is arithmetic at the {time.peak_dtype} peak"
    if time.peak_dtype in ("float32", "tf32") and time.peak_flops_per_s:
        half = device.peak_flops_per_s.get("bfloat16")
        if half and half > time.peak_flops_per_s:
            gain = half / time.peak_flops_per_s
            return f"{said}. Change first: --precision bf16-mixed, whose peak is {gain:.3g} times as high."
    if subject is not None and subject.recompute != "none":
        return f"{said}. Change first: recompute less, if the memory allows it."
    return f"{said}. Change first: the hardware or a lower precision; memory traffic is not what costs."


def _bandwidth_bound(
    memory: Memory,
    time: Time,
    operators: tuple[OperatorRow, ...],
    device: DeviceFacts,
    subject: SubjectInfo | None,
) -> str:
    share = _share(operators, "bandwidth")
    said = f"Bound by bandwidth: {share:.0%} of the least time is moving bytes"
    moving = [row for row in operators if row.bound == "bandwidth"]
    whole_s = sum(row.time_s or 0.0 for row in moving)
    optimizer_s = sum(row.time_s or 0.0 for row in moving if row.phase == "optimizer")
    if whole_s and optimizer_s / whole_s > 0.5:
        return (
            f"{said}, most of them in the optimizer ({optimizer_s / whole_s:.0%}). Change first: more tokens "
            "per optimizer step (a larger batch, or microbatches), or a fused optimizer, which moves each "
            "state once."
        )
    wide = subject is not None and subject.precision in ("fp32", "tf32")
    if wide and "bfloat16" in device.peak_flops_per_s:
        return f"{said}. Change first: --precision bf16-mixed, which halves what activations move."
    roomy = (memory.spare_bytes or 0) > _ROOMY * (device.memory_bytes or 0) > 0
    batch = " A larger batch has room, and lifts the matmuls." if roomy else ""
    fuse = "fuse element-wise work and normalisation (torch.compile, fused kernels)"
    return f"{said}. Change first: {fuse}.{batch}"


def _share(operators: tuple[OperatorRow, ...], bound: str) -> float:
    total = sum(row.time_s or 0.0 for row in operators)
    part = sum(row.time_s or 0.0 for row in operators if row.bound == bound)
    return part / total if total else 0.0
