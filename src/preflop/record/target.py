"""What the target device would do with a call, applied while recording on fake CPU tensors.

`target_rules` is entered around the recorded steps when the subject's device is not the CPU. It makes one
torch.library fragment that overrides torch's kernels where CUDA differs (autocast, attention, dropout,
softmax, RMS norm), and destroys it when left, also when the model raises: nothing stays behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from preflop.hardware.catalog import find
from preflop.record import target_attention, target_autocast, target_kernels, target_recurrent
from preflop.record.fake import Fresh, Output
from preflop.record.recorder import Recorder
from preflop.subject import Subject

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Target:
    """What the rules need to know of a device, as plain data."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability, or the one whose rules are taken instead."""
    assumed: str = ""
    """What had to be assumed about the device, or nothing."""


# Devices that are no CUDA device follow the rules of this one: fused attention for 16-bit inputs, and
# the autocast lists that torch gives every accelerator backend. Theirs differ in detail.
_STAND_IN = (8, 0)


def find_target(device: str) -> Target | None:
    """The target of a device's id or name; None for the CPU.

    >>> find_target("h100-sxm").capability, find_target("cpu")
    ((9, 0), None)
    >>> find_target("mi300x").assumed
    'Instinct MI300X 192GB is no CUDA device: it is recorded by the rules of CUDA compute capability 8.0.'

    Raises:
        UnknownDevice: no such device.
    """
    if device == CPU:
        return None
    found = find(device)
    capability = found.compute_capability
    if capability is not None:
        return Target(found.name, capability)
    major, minor = _STAND_IN
    return Target(
        found.name,
        _STAND_IN,
        f"{found.name} is no CUDA device: it is recorded by the rules of CUDA compute capability "
        f"{major}.{minor}.",
    )


@contextmanager
def target_rules(subject: Subject, recorder: Recorder) -> Iterator[None]:
    """Record what is inside as the subject's device would run it (nothing changes for the CPU)."""
    target = find_target(subject.device)
    if target is None:
        yield
        return
    if target.assumed:
        recorder.assumed(target.assumed)
    with cuda_kernels(target.capability, recorder.assumed), target_autocast.cuda_means_cpu():
        recorder.kernels.corrected = _corrected
        try:
            yield
        finally:
            recorder.kernels.corrected = None


@contextmanager
def cuda_kernels(capability: tuple[int, int], assumed: Callable[[str], None]) -> Iterator[None]:
    """CUDA's choice of kernels for CPU tensors, inside the block only."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch warns that a kernel is overridden; that is what this does.
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
            target_attention.install(library, capability, assumed)
            target_kernels.install(library)
            target_recurrent.install(library, assumed)
            target_autocast.install(library)
        yield
    finally:
        library._destroy()


def _corrected(func: Any, args: tuple[Any, ...], outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """What CUDA's kernel returns, where torch's fake kernel describes the CPU's or does not know."""
    if func is torch.ops.aten._cudnn_rnn.default:
        count = target_recurrent.reserve_bytes(args)
        return (*outputs[:3], Fresh((count,), (1,), torch.uint8, count), outputs[4])
    return target_kernels.corrected(func, outputs)
