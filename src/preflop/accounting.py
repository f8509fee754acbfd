"""From a tape (and a device) to the account: where the ledgers, the timing and the verdict meet.

The figures are dataclasses in `account.py`, which every room may import; this file composes them and
gives them the methods that need the rooms to their right.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from preflop.account import Account as Figures
from preflop.account import DeviceFacts, Flops, Memory, OperatorRow, Priced, Traffic
from preflop.collection import collection_put_off
from preflop.device_memory import COMMUNICATOR_BOUNDS_BYTES, communicator_bytes, device_memory
from preflop.errors import PreflopError
from preflop.hardware.allocator_settings import no_such_allocator
from preflop.hardware.catalog import find
from preflop.hardware.device import Device, MissingFigure
from preflop.ledgers.births import born_bytes
from preflop.ledgers.communication import Communication, communication
from preflop.ledgers.copies import copies_ledger, copy_rows
from preflop.ledgers.flops import FlopsTotals, flops_ledger, flops_totals
from preflop.ledgers.host import host_memory
from preflop.ledgers.ledger import Ledger
from preflop.ledgers.memory import memory, memory_ledger
from preflop.ledgers.operators import operator_rows
from preflop.ledgers.six_nd import differences, six_nd, step_tokens
from preflop.ledgers.traffic import traffic_ledger
from preflop.ops.collective import COLLECTIVES
from preflop.ops.workspace_cuda import convolution_bounds
from preflop.plan.evidence import evidence
from preflop.plan.verdict import verdict
from preflop.precision import LOST_SUMS, find_precision
from preflop.tape.events import HOST, Role
from preflop.timing.link import beside_link
from preflop.timing.pages import with_new_pages
from preflop.timing.ranks import beside_collectives
from preflop.timing.roofline import on_roofline
from preflop.timing.step import NO_TIME, StepTime, step_time
from preflop.timing.this import device_with_figures, is_serial, recorded_as
from preflop.units import bytes_text

if TYPE_CHECKING:
    from preflop.tape.events import Tape

CPU = "cpu"

# The device whose measured CUDA context stands in for devices on which nobody measured one: the only
# figure taken with lazy loading, torch's default since CUDA 11.7.
_CONTEXT_STAND_IN = "a100-sxm4-80gb"

CONVENTIONS = (
    "bytes moved: what ideal kernels without fusion move, each operand once",
    "FLOPs: a multiply-add is two; attention counted in full, whatever its mask",
)


class Account(Figures):
    """Everything Preflop says about one training step: figures, and ways to show them."""

    @cached_property
    def ledgers(self) -> dict[str, Ledger]:
        """The step's ledgers: memory, flops, traffic, copies. Each groups by op, module, phase..."""
        return {
            "memory": memory_ledger(self.tape),
            "flops": flops_ledger(self.tape),
            "traffic": traffic_ledger(self.tape),
            "copies": copies_ledger(self.tape),
        }

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON, schema "preflop.account/1"."""
        from preflop.report.json import account_to_dict

        return account_to_dict(self)

    def show(self, *, top: int = 10) -> None:
        """Print the account.

        Args:
            top: how many operators to list.
        """
        from preflop.report.terminal import show

        show(self, top=top)


def find_device(name: Any, alloc_conf: str = "") -> Device | None:
    """The device of that name; None for "cpu", which has memory and kernels but no catalog figures.

    "this" is this machine as `preflop calibrate` measured it.

    Args:
        alloc_conf: what PYTORCH_CUDA_ALLOC_CONF sets there.

    Raises:
        UnknownDevice: no such device; the message names the nearest.
        BadAllocatorSetting: torch would not take the setting, or the device has no such allocator.
    """
    if isinstance(name, str) and name.casefold() == CPU:
        if alloc_conf:
            raise no_such_allocator(alloc_conf, "the device is the CPU")
        return None
    return device_with_figures(name).with_alloc_conf(alloc_conf)


def account_tape(tape: Tape, device: Device | None = None) -> Account:
    """The account of a recorded step on a device; without one, memory and counts but no time.

    Needs no torch.
    """
    with collection_put_off():
        return _account(tape, device)


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What the ledgers say of a tape, before any device."""

    memory: Memory
    totals: FlopsTotals
    flops: Flops
    operators: list[OperatorRow]
    traffic: Traffic
    communication: Communication


def count(tape: Tape) -> Counts:
    """The counts of a tape: one set serves every device that runs its calls."""
    with collection_put_off():
        totals = flops_totals(tape)
        rows = operator_rows(tape)
        return Counts(
            memory(tape), totals, _flops(tape, totals), rows, _traffic(rows, totals.total), communication(tape)
        )


def priced_tape(tape: Tape, counts: Counts, device: Device | None = None) -> Priced:
    """The account's figures alone, without words about them: for comparing many choices."""
    with collection_put_off():
        return _priced(tape, counts, device)[0]


def _account(tape: Tape, device: Device | None) -> Account:
    counts = count(tape)
    priced, assumed = _priced(tape, counts, device)
    priced = dataclasses.replace(
        priced,
        memory=dataclasses.replace(
            priced.memory, expandable_spare_bytes=_expandable_spare_bytes(tape, priced.memory, device)
        ),
    )
    figures = {field.name: getattr(priced, field.name) for field in dataclasses.fields(priced)}
    parameters = priced.memory.columns.parameters.elements
    return Account(
        **figures,
        copies=tuple(copy_rows(tape)),
        assumptions=(*tape.assumptions, *_assumptions(tape, counts, device), *assumed),
        verdict=verdict(
            priced.memory, priced.flops, priced.traffic, priced.time, priced.operators, priced.device, tape.subject
        ),
        evidence=evidence(priced.memory, priced.time, priced.device, tape.subject, parameters),
    )


def _priced(tape: Tape, counts: Counts, device: Device | None) -> tuple[Priced, tuple[str, ...]]:
    """The figures, and what was assumed for the times."""
    held, rows, timed, facts = counts.memory, counts.operators, StepTime(NO_TIME, ()), None
    if device is not None:
        facts = device_facts(device)
        held = _on_device(tape, held, device, counts.communication.ranks)
        rows, timed = _timed(tape, counts, device)
    return Priced(tape, facts, held, counts.flops, counts.traffic, timed.time, tuple(rows)), timed.assumptions


def memory_of(tape: Tape, device: Device) -> Memory:
    """The memory of the account alone, without what else it counts: for searches."""
    return _on_device(tape, memory(tape), device, communication(tape).ranks)


def device_facts(device: Device) -> DeviceFacts:
    """What the report says of a device."""
    try:
        memory_bytes: int | None = device.memory_bytes
        basis = device.memory_basis
    except MissingFigure:
        memory_bytes, basis = None, "not known"
    try:
        bandwidth: float | None = device.bandwidth_bytes_per_s
    except MissingFigure:
        bandwidth = None
    peaks = {name: float(figure.value) for name, figure in device.peaks.items()}
    return DeviceFacts(device.id, device.name, memory_bytes, basis, bandwidth, peaks, device.alloc_conf)


def _flops(tape: Tape, totals: FlopsTotals) -> Flops:
    return Flops(
        forward=totals.forward,
        backward=totals.backward,
        recompute=totals.recompute,
        optimizer=totals.optimizer,
        total=totals.total,
        by_kind=totals.by_kind,
        model=totals.model,
        hardware=totals.hardware,
        six_nd=six_nd(tape),
        attended=totals.attended,
        differences=differences(tape, totals.model),
        unknown=totals.unknown,
    )


def _traffic(rows: list[OperatorRow], flops: int) -> Traffic:
    """Bytes of the step: what its operators move, which is the traffic ledger's total."""
    read_bytes = sum(row.read_bytes for row in rows)
    write_bytes = sum(row.write_bytes for row in rows)
    moved = read_bytes + write_bytes
    return Traffic(read_bytes, write_bytes, flops / moved if moved else None)


def _timed(tape: Tape, counts: Counts, device: Device) -> tuple[list[OperatorRow], StepTime]:
    """The operators with their times, longest first, and the step's time."""
    placed = [on_roofline(row, device, _tf32(tape)) for row in counts.operators]
    kernels = [place for place in placed if place.row.op not in COLLECTIVES]
    timed = step_time(kernels, device, model_flops=counts.flops.model, tokens=step_tokens(tape))
    timed = with_new_pages(timed, lambda size: born_bytes(tape, size), device)
    timed = beside_collectives(timed, kernels, counts.communication, device)
    timed = beside_link(timed, host_memory(tape).link_bytes, device)
    ordered = sorted(
        (place.row for place in placed), key=lambda row: (-(row.time_s or 0.0), -row.flops, row.op)
    )
    return ordered, timed


def _tf32(tape: Tape) -> bool:
    if tape.subject is None:
        return False
    try:
        return find_precision(tape.subject.precision).tf32
    except PreflopError:
        return False  # a precision that only the recorder of this tape knew


def _on_device(tape: Tape, counted: Memory, device: Device, ranks: int | None) -> Memory:
    """The memory with what the device's allocator reserves, its context, and whether it all fits.

    Args:
        ranks: that share the step; None: it is not shared.
    """
    capability = device.compute_capability
    if capability is not None:
        held = device_memory(tape, capability, settings=device.allocator)
        counted = dataclasses.replace(
            counted, allocated_bytes=held.allocated_bytes, reserved_bytes=held.reserved_bytes
        )
    counted = dataclasses.replace(
        counted, context_bytes=_context_bytes(device),
        communicator_bytes=None if ranks is None or capability is None else communicator_bytes(ranks),
    )  # fmt: skip
    try:
        has = device.memory_bytes
    except MissingFigure:
        return counted
    needs = counted.needs_bytes
    return dataclasses.replace(counted, fits=needs <= has, spare_bytes=has - needs)


def _expandable_spare_bytes(tape: Tape, counted: Memory, device: Device | None) -> int | None:
    """What expandable segments would leave to spare where only the allocator's placing is in the way."""
    if device is None or device.compute_capability is None:
        return None
    if counted.fits is not False or (counted.gapless_spare_bytes or 0) < 0:
        return None
    settings = dataclasses.replace(device.allocator, expandable_segments=True)
    held = device_memory(tape, device.compute_capability, settings=settings)
    return device.memory_bytes - held.reserved_bytes - counted.outside_bytes


def _context_bytes(device: Device) -> int | None:
    """Bytes of the CUDA context: measured on the device, else on the A100; None where there is no CUDA.

    Zero would be the one figure that is surely wrong; the assumptions name the stand-in.
    """
    if device.context_bytes is not None or device.compute_capability is None:
        return device.context_bytes
    return find(_CONTEXT_STAND_IN).context_bytes


def _assumptions(tape: Tape, counts: Counts, device: Device | None) -> list[str]:
    said = list(CONVENTIONS)
    if counts.totals.estimates:
        names = ", ".join(op.removeprefix("aten.") for op in counts.totals.estimates)
        said.append(f"FLOPs of {names} are published estimates, not exact counts")
    places = {storage.device for storage in tape.storages} - {HOST}
    if len(places) > 1:
        said.append(f"memory of {', '.join(sorted(places))} is counted together")
    if device is not None and device.context_bytes is None and not is_serial(device):
        stands_in = _context_bytes(device)
        what = "fits counts none" if stands_in is None else f"the A100's {bytes_text(stands_in)} stands in"
        said.append(f"nobody measured what a context takes on {device.name}: {what}")
    said.extend(_communicator(counts.communication.ranks, device))
    said.extend(_convolution_workspace(tape, device))
    said.extend(_recorded_elsewhere(tape, device))
    said.extend(_sums_in_16_bits(tape))
    return said


def _sums_in_16_bits(tape: Tape) -> list[str]:
    """Said of microbatches whose gradients add up in 16 bits."""
    subject = tape.subject
    if subject is None or subject.microbatches < 2:
        return []
    dtypes = {storage.dtype for storage in tape.storages if storage.role is Role.GRADIENT}
    return [f"gradients are kept in {dtype}, and {LOST_SUMS}" for dtype in ("bfloat16", "float16") if dtype in dtypes]


def _recorded_elsewhere(tape: Tape, device: Device | None) -> list[str]:
    """Said of a step that was recorded by the rules of another device than it is priced on."""
    if tape.subject is None:
        return []
    recorded_for = tape.subject.device
    if device is None:
        if recorded_for == CPU:
            return []
        return [
            f"the calls are those that {recorded_for} runs: on a CPU other kernels would run, and hold other "
            "memory; record the model anew with --device cpu for those"
        ]
    if recorded_for in (device.id, device.name, recorded_as(device)):
        return []
    return [f"the calls are those that {recorded_for} runs, and {device.name} may run others"]


def _communicator(ranks: int | None, device: Device | None) -> list[str]:
    """What is assumed of NCCL's memory, with bounds; nothing on one rank."""
    if ranks is None or device is None or device.compute_capability is None:
        return []
    least, most = (bytes_text(bound) for bound in COMMUNICATOR_BOUNDS_BYTES)
    return [
        f"NCCL's buffers lie outside the allocator: {bytes_text(communicator_bytes(ranks))} for one group of ranks, as "
        f"measured on A100s; between {least} and {most}, by channels, algorithms and release"
    ]


def _convolution_workspace(tape: Tape, device: Device | None) -> list[str]:
    """What is assumed of cuDNN's workspaces, with the bounds of the largest; nothing without convolutions."""
    if device is None or device.compute_capability is None:
        return []
    bounds = [
        convolution_bounds(signature)
        for signature in tape.signatures
        if signature.op in ("aten.convolution", "aten.convolution_backward")
    ]
    if not bounds:
        return []
    widest = max(bounds, key=lambda bound: bound.upper)
    return [
        "cuDNN does not say what workspace a convolution takes: "
        f"{bytes_text(widest.assumed)} assumed for the largest, between none and {bytes_text(widest.upper)}"
    ]
