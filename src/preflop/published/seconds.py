"""The measured part of a row's step in seconds: kernels, and what collectives add that nothing hides."""

from __future__ import annotations

import dataclasses

from preflop.account import OperatorRow
from preflop.hardware.device import Device
from preflop.ledgers.operators import operator_rows
from preflop.published.plan import Plan
from preflop.tape.events import Tape
from preflop.timing.collective import beside_s, collective_s, sharded_s
from preflop.timing.kernels import Family
from preflop.timing.rates import kernel_rate
from preflop.timing.roofline import MATMUL_LIKE, bandwidth_bytes_per_s, on_roofline
from preflop.timing.step import step_time
from preflop.transforms.fusion import fuse

_IN_BACKWARD = ("backward", "recompute")


@dataclasses.dataclass
class _Seconds:
    """Lower bound and expectation of one part of the step."""

    lower_s: float = 0.0
    expected_s: float = 0.0

    def plus(self, other: _Seconds, times: float = 1) -> _Seconds:
        return _Seconds(self.lower_s + other.lower_s * times, self.expected_s + other.expected_s * times)


def step_seconds(plan: Plan, tape: Tape) -> tuple[float | None, float | None]:
    """(lower bound, expectation) of the measured part of the step; None where there is no expectation.

    The lower bound has no communication: another network could hide all of it.
    """
    device = plan.device
    assert device is not None
    rows = [_as_run(row, plan.kernels) for row in operator_rows(fuse(tape) if plan.fused else tape)]
    forward, backward, optimizer = _Seconds(), _moved(device, plan.copied_bytes), _moved(device, plan.optimizer_bytes)
    for phase in plan.phases:
        own = [row for row in rows if row.phase == phase]
        if not own:
            continue
        timed = step_time([on_roofline(row, device) for row in own], device, model_flops=0, tokens=None).time
        if timed.expected_s is None or timed.lower_s is None:
            return timed.lower_s, None
        found = _Seconds(timed.lower_s, timed.expected_s)
        if phase == "optimizer":
            optimizer = optimizer.plus(found)
        elif phase in _IN_BACKWARD:
            backward = backward.plus(found)
        else:
            forward = forward.plus(found)
    return _with_collectives(plan, device, forward, backward, optimizer)


def _with_collectives(
    plan: Plan, device: Device, forward: _Seconds, backward: _Seconds, optimizer: _Seconds
) -> tuple[float | None, float | None]:
    compute = optimizer.plus(forward, plan.microbatches).plus(backward, plan.microbatches)
    expected_s = compute.expected_s
    if plan.sharding is not None:
        sharded = sharded_s(forward.expected_s, backward.expected_s, device, plan.sharding, plan.ranks)
        if sharded is None:
            return compute.lower_s, None
        expected_s = optimizer.expected_s + plan.microbatches * sum(sharded)
    for what, message_bytes, hidden in plan.synced:
        seconds = collective_s(device, what, message_bytes, plan.ranks)
        if seconds is None:
            return compute.lower_s, None
        computing_s = backward.expected_s
        expected_s += beside_s(computing_s, seconds, device, plan.ranks) - computing_s if hidden else seconds
    return compute.lower_s, expected_s


def _moved(device: Device, moved_bytes: int) -> _Seconds:
    """What element-wise kernels take to move so much."""
    bandwidth = bandwidth_bytes_per_s(device)
    if not moved_bytes or not bandwidth:
        return _Seconds()
    rate = kernel_rate(device, Family.ELEMENTWISE, "")
    lower_s = moved_bytes / bandwidth
    return _Seconds(lower_s, lower_s / (rate.moving_share(moved_bytes) if rate else 1.0))


def arithmetic_seconds(plan: Plan, tape: Tape) -> float:
    """Matmul-like FLOPs (attended pairs only) over the dense peak: no run of these sizes can be faster."""
    assert plan.device is not None
    placed = [on_roofline(row, plan.device) for row in operator_rows(tape) if row.phase in plan.phases]
    per_microbatch = sum(row.compute_s for row in placed if row.row.kind in MATMUL_LIKE)
    return per_microbatch * plan.microbatches


def _as_run(row: OperatorRow, kernels: str) -> OperatorRow:
    """The row with the attention kernel of the run's software."""
    op = row.op
    for name in ("cudnn", "flash") if kernels else ():
        op = op.replace(f"_{name}_", f"_{kernels}_")
    return row if op == row.op else dataclasses.replace(row, op=op)
