"""A step's time with the collectives of its ranks beside its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from preflop.account import Time
from preflop.hardware.device import Device
from preflop.ledgers.communication import Communication, Message
from preflop.ops.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from preflop.tape.events import Phase
from preflop.timing.collective import GPUS_PER_NODE, Collective, Ranks, beside_s, collective_s
from preflop.timing.roofline import RooflineRow
from preflop.timing.step import StepTime, step_time
from preflop.units import bytes_text, time_text

_KINDS = {
    ALL_GATHER: Collective.ALL_GATHER, REDUCE_SCATTER: Collective.REDUCE_SCATTER, ALL_REDUCE: Collective.ALL_REDUCE,
}  # fmt: skip
_SIDES = ((Phase.FORWARD,), (Phase.BACKWARD, Phase.RECOMPUTE))


def beside_collectives(
    timed: StepTime, kernels: Sequence[RooflineRow], sent: Communication, device: Device
) -> StepTime:
    """The step's time where ranks exchange weights and gradients beside its kernels.

    Forward takes the longer of computing and communicating, and the first collective, before which nothing can run;
    backward the longer of both, and the last, after which nothing is left to compute. Kernels beside a collective have
    the multiprocessors that it leaves. At worst nothing overlaps. The lower bound has no communication: another network
    could hide all of it.
    """
    if sent.ranks is None or timed.time.lower_s is None:
        return timed
    seconds = [_seconds(message, sent.ranks, device) for message in sent.messages]
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds):
        return StepTime(_unknown(timed.time), (*timed.assumptions, _why_not(device, sent.ranks)))
    if timed.time.expected_s is None:
        return timed
    exposed_s = sum(
        _exposed(phases, kernels, sent, known, device) for phases in _SIDES
    )  # fmt: skip
    said = (
        f"{len(known):,} collectives of {bytes_text(sent.bytes)} over {sent.ranks} ranks take {time_text(sum(known))}, "
        f"of which {time_text(exposed_s)} add to the step: what kernels do not hide, and what these lose to them"
    )
    return StepTime(_longer(timed.time, exposed_s, sum(known)), (*timed.assumptions, said))


def _seconds(message: Message, ranks: int, device: Device) -> float | None:
    return collective_s(device, _KINDS[message.op], message.bytes, Ranks(count=ranks))


def _exposed(
    phases: tuple[Phase, ...],
    kernels: Sequence[RooflineRow],
    sent: Communication,
    seconds: Sequence[float],
    device: Device,
) -> float:
    own = [one for message, one in zip(sent.messages, seconds, strict=True) if message.phase in phases]
    if not own:
        return 0.0
    rows = [row for row in kernels if row.row.phase in phases]
    computing_s = step_time(rows, device, model_flops=0, tokens=None).time.expected_s or 0.0
    edge_s = own[0] if Phase.FORWARD in phases else own[-1]
    both_s = beside_s(computing_s, sum(own), device, Ranks(count=sent.ranks or 1))
    return both_s - computing_s + edge_s * sent.microbatches


def _longer(time: Time, exposed_s: float, all_s: float) -> Time:
    assert time.expected_s is not None
    factor = time.expected_s / (time.expected_s + exposed_s)
    return dataclasses.replace(
        time,
        expected_s=time.expected_s + exposed_s,
        upper_s=None if time.upper_s is None else time.upper_s + all_s,
        mfu=None if time.mfu is None else time.mfu * factor,
        tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s * factor,
    )


def _unknown(time: Time) -> Time:
    """No expectation: the bounds that kernels give alone are no bounds of this step."""
    return dataclasses.replace(time, expected_s=None, upper_s=None, mfu=None, mfu_basis=None, tokens_per_s=None)


def _why_not(device: Device, ranks: int) -> str:
    if ranks > GPUS_PER_NODE:
        return (
            f"{ranks} ranks are more than one node of {GPUS_PER_NODE}, and what joins nodes is not known: collectives "
            "are not timed, and there is no expected time"
        )
    return f"nobody measured collectives between {device.name}s: they are not timed, and there is no expected time"
