"""A tape replayed through CUDA's allocator: rounding, cuBLAS, host counters, phases. No torch."""

from __future__ import annotations

import pytest

from preflop.device_memory import device_memory, on_host
from preflop.hardware.allocator import cublas_workspace_bytes
from preflop.hardware.allocator_settings import AllocatorSettings
from preflop.ledgers.memory import memory
from preflop.tape.events import Phase, Role, Storage, SubjectInfo, Tape

from .tapes import Builder, linear_step

MIB = 2**20
A100, H100 = (8, 0), (9, 0)


def subject(device: str = "a100-sxm4-80gb", optimizer: str = "adamw") -> SubjectInfo:
    return SubjectInfo("m", "fp32", optimizer, 1, "none", "", None, None, device)


def one_step(op: str = "aten.relu", *, backward: str | None = None) -> Tape:
    """A 2 MiB parameter, a call that makes 3 MiB from it, and perhaps one in backward that makes 4 MiB."""
    b = Builder()
    b.tape.subject = subject()
    weight = b.parameter("w", (512, 1024))
    b.mark("step")
    b.phase = Phase.FORWARD
    (made,) = b.call(op, [weight], [(768, 1024)])
    b.mark("forward_end")
    if backward is not None:
        b.phase = Phase.BACKWARD
        (grad,) = b.call(backward, [weight], [(1024, 1024)])
        b.free(grad)
    b.free(made)
    b.mark("step_end")
    return b.tape


def test_allocated_is_the_tape_peak_without_workspaces() -> None:
    """Whole MiB and no matmul: allocated == 2 + 3 MiB == the tape's peak; one 20 MiB segment reserved."""
    tape = one_step()
    held = device_memory(tape, A100)
    assert (held.allocated_bytes, memory(tape).peak_bytes, held.reserved_bytes) == (
        5 * MIB,
        5 * MIB,
        20 * MIB,
    )


def test_sizes_round_to_512() -> None:
    """A tensor of 4 bytes takes 512."""
    b = Builder()
    b.tape.subject = subject()
    b.parameter("w", (1,))
    b.mark("step")
    b.call("aten.relu", [0], [(1,)])
    assert device_memory(b.tape, A100).allocated_bytes == 2 * 512


@pytest.mark.parametrize("capability", [A100, H100])
def test_each_thread_takes_one_cublas_workspace(capability: tuple[int, int]) -> None:
    """Matmuls in forward alone take one workspace, in forward and backward two."""
    workspace = cublas_workspace_bytes(capability)
    alone = device_memory(one_step("aten.mm"), capability).allocated_bytes
    both = device_memory(one_step("aten.mm", backward="aten.mm"), capability).allocated_bytes
    assert alone == 5 * MIB + workspace
    assert both == 5 * MIB + 4 * MIB + 2 * workspace


def test_phases_have_their_own_peaks() -> None:
    """Forward peaks at 5 MiB, backward at 9."""
    held = device_memory(one_step(backward="aten.relu"), A100)
    assert held.allocated_by_phase == {"forward": 5 * MIB, "backward": 9 * MIB}


def test_expandable_segments_reserve_by_the_page() -> None:
    """With expandable segments 5 MiB of large tensors reserve one 20 MiB page."""
    settings = AllocatorSettings(expandable_segments=True)
    assert device_memory(one_step(), A100, settings=settings).reserved_bytes == 20 * MIB


def test_reserved_holds_at_least_what_is_allocated() -> None:
    """reserved >= allocated >= the tape's own peak, on a two-step tape."""
    tape = linear_step(device="a100-sxm4-80gb")
    held = device_memory(tape, A100)
    assert held.reserved_bytes >= held.allocated_bytes >= memory(tape).peak_bytes


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", True), ("adamw-fused", False)])
def test_step_counters_lie_on_the_host(optimizer: str, expected: bool) -> None:
    """AdamW keeps its counters on the CPU, the fused one on the device; moments are on the device always."""
    tape = Tape(subject(optimizer=optimizer))
    counter = Storage(4, "float32", (), 1, None, Role.OPTIMIZER_STATE, "step")
    moment = Storage(4, "float32", (1,), 1, None, Role.OPTIMIZER_STATE, "exp_avg")
    assert (on_host(counter, tape), on_host(moment, tape)) == (expected, False)
