"""What this machine's kernels reach: matmul by size and dtype, bytes moved by operator and size, launching.

`calibrate` measures the operators of `calibration_cases.py` one by one and gives a `Calibration`;
`calibration_file.py` writes it as the TOML that `timing.this` reads, so that `device="this"` predicts for this
machine. Shares are of the best rate measured, which therefore stands where a catalog has a data sheet's peak:
nothing here is a data-sheet figure.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from preflop.ledgers.operators import operator_rows
from preflop.measure.calibration_cases import Case, cases
from preflop.measure.device import real_device
from preflop.measure.pages import FreshPages, fresh_pages, keep_freed_memory
from preflop.measure.speed import Reference, seconds_of
from preflop.record.call_tape import record_call
from preflop.timing.kernels import Family, family
from preflop.timing.tiles import result_of

BUDGET_S = 0.03
"""Time spent on one operator at one size, after calls to warm up."""
_FOOTPRINT_BYTES, _MOST_COPIES = 48 * 2**20, 48
"""How much is touched, and by how many sets of operands, before the first set's turn comes again; as much is touched
before the host's turn."""
_MOMENTS, _HOST_BUDGET_S = 4, 0.2
"""How often, and how long each time, the host's part is measured."""
_TINY = 16
"""Elements of an operator that does nothing but be called."""


@dataclass(frozen=True)
class Reading:
    """One operator at one size, measured."""

    op: str
    kind: Family
    dtype: str
    flops: int
    """Of one call; only attended pairs of attention, as times are predicted."""
    moved: int
    seconds: float
    """Of one call, without the time of calling."""
    variant: str = ""
    """As in `account.OperatorRow`, and so are `tensors`."""
    tensors: int = 1
    product: tuple[int, int, int] | None = None
    """Rows, inner size and columns of a single matmul."""


@dataclass
class Calibration:
    """All readings of a machine."""

    name: str
    vendor: str
    records_as: str
    """The device by whose rules a step is recorded: "cpu" or a catalog id."""
    launch_s: float
    threads: int
    memory_bytes: int
    readings: list[Reading] = field(default_factory=list)
    context_bytes: int | None = None
    """Of the accelerator: its memory in use outside of the allocator."""
    optimizer_launch_s: float | None = None
    """Seconds of the host per kernel of an optimizer's loop, which autograd and modules have no part in."""
    pages: FreshPages | None = None
    """Of the CPU, where large tensors are on new pages."""
    reference_s: float | None = None
    """Of `speed.Reference`, the median of all its readings: the speed at which the others would have been taken."""

    @property
    def is_cpu(self) -> bool:
        """Whether the host runs the kernels itself, so that calling and computing take turns."""
        return self.records_as == "cpu"


def calibrate(
    device: str | None = None,
    *,
    budget_s: float = BUDGET_S,
    progress: Callable[[str], None] = lambda words: None,
) -> Calibration:
    """Measure this machine. On a CPU this process keeps memory that it frees from then on (`pages.py`): operators
    are measured on pages that are there, and what new ones cost apart.

    Args:
        device: "cpu" or "cuda"; by default the GPU where there is one.
        budget_s: seconds per operator and size.

    Raises:
        BadSubject: a device that this machine does not have.
    """
    where = real_device(device)
    found = _machine(where)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if found.is_cpu:
            found.pages = fresh_pages()
            keep_freed_memory(of_every_size=True)
        hosts = (_layers(where), _optimizer(where))
        cooled = _cooled() if found.is_cpu else None
        call_s = _call_s(where)
        every = list(cases(where))
        reference = Reference(where)
        paces, around = [reference.seconds()], list[float]()
        for number, case in enumerate(every):
            if number % (len(every) // _MOMENTS) == 0:  # what else runs on a machine comes and goes
                for host in hosts:
                    host.taken.append(seconds_of(host.step, where, _HOST_BUDGET_S, cooled))
            progress(f"{number / len(every):4.0%} {case.op} {case.dtype}")
            reading = _read(case, where, call_s if found.is_cpu else 0.0, budget_s)
            paces.append(reference.seconds())
            if reading is not None:
                found.readings.append(reading)
                around.append((paces[-2] + paces[-1]) / 2)
    found.reference_s = median(paces)
    found.readings = [_at_pace(*pair, found.reference_s) for pair in zip(found.readings, around)]
    found.launch_s, found.optimizer_launch_s = (_launch_s(host, found) for host in hosts)
    return found


def _machine(where: torch.device) -> Calibration:
    if where.type == "cuda":
        from preflop.errors import UnknownDevice
        from preflop.hardware.catalog import find

        properties = torch.cuda.get_device_properties(where)
        free, total = torch.cuda.mem_get_info(where)
        try:
            records_as = find(properties.name).id
        except UnknownDevice:
            major, minor = torch.cuda.get_device_capability(where)
            records_as = "h100-sxm5-80gb" if (major, minor) >= (9, 0) else "a100-sxm4-80gb"
        context = total - free - torch.cuda.memory_reserved(where)
        return Calibration(
            properties.name, "NVIDIA", records_as, 0.0, torch.get_num_threads(), total, context_bytes=context
        )
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        memory = 0
    return Calibration(_cpu_name(), "CPU", "cpu", 0.0, torch.get_num_threads(), memory)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


# -- clock --------------------------------------------------------------------------------------------


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A call that takes the next set of operands each time, and keeps results until their set's next turn: in a step
    the operands were last touched long before, a result is written to memory that was something else's, and neither
    is in the nearest cache."""
    turn = itertools.cycle(calls)
    results: deque[Any] = deque(maxlen=len(calls))

    def call() -> Any:
        if len(results) == len(calls):
            results.popleft()  # its memory is the next result's
        results.append(next(turn)())

    return call


def _cooled() -> Callable[[], Any]:
    """Takes the nearest caches away from what the host needs, as a step's kernels do with a model's tensors: on a CPU
    they share them, and a host that has them to itself is a tenth to a third faster."""
    filling = torch.zeros(_FOOTPRINT_BYTES, dtype=torch.uint8)
    return lambda: filling.add_(1)


def _call_s(where: torch.device) -> float:
    """Seconds that one operator takes which has nothing to do, called from a loop."""
    a = torch.zeros(_TINY, device=where)
    b = torch.zeros(_TINY, device=where)
    repeats = 200

    def many() -> None:
        for _ in range(repeats):
            torch.add(a, b)

    return seconds_of(many, where, 0.3) / repeats


@dataclass
class _Host:
    """A step of a training loop whose kernels have nothing to do: what is left is the host's."""

    step: Callable[[], Any]
    kernels: dict[str, int]
    """Calls by operator; views, which run no kernel, left out."""
    taken: list[float] = field(default_factory=list)
    """Seconds of a step, at several moments."""


def _host(step: Callable[[], Any]) -> _Host:
    kernels: dict[str, int] = {}
    step()  # makes what later steps find, as an optimizer's states
    for row in operator_rows(record_call(step, (), {})):
        if row.read_bytes + row.write_bytes:
            kernels[row.op] = kernels.get(row.op, 0) + row.calls
    return _Host(step, kernels)


def _layers(where: torch.device) -> _Host:
    """Forward and backward: modules, autograd and views included, which a bare call is not."""
    layers = [
        torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(16)
    ]
    model = torch.nn.Sequential(*layers).to(where)
    x = torch.zeros(2, 8, device=where)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    return _host(step)


def _optimizer(where: torch.device) -> _Host:
    """AdamW's loop over parameters, one operator after the other."""
    parameters = [torch.nn.Parameter(torch.zeros(8, device=where)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones(8, device=where)
    return _host(torch.optim.AdamW(parameters, lr=1e-9, foreach=False).step)


def _launch_s(host: _Host, found: Calibration) -> float:
    """Seconds of the host per kernel. On a CPU, where the host runs the kernels itself, without what each takes at
    the smallest size that was measured: that is counted as the kernel's."""
    smallest: dict[str, float] = {}
    for reading in sorted(found.readings, key=lambda reading: -reading.moved) if found.is_cpu else ():
        smallest[reading.op] = reading.seconds / reading.tensors
    own_s = sum(calls * smallest.get(op, 0.0) for op, calls in host.kernels.items())
    step_s, kernels = median(host.taken), sum(host.kernels.values())
    return max(step_s - own_s, step_s / 2) / kernels


def _read(case: Case, where: torch.device, launch_s: float, budget_s: float) -> Reading | None:
    """One reading; None where torch has no such kernel here."""
    try:
        call = case.make()
        rows = [row for row in operator_rows(record_call(call, (), {})) if row.op == case.op]
        moved = max(sum(row.read_bytes + row.write_bytes for row in rows), 1)
        copies = [call, *(case.make() for _ in range(min(_FOOTPRINT_BYTES // moved, _MOST_COPIES)))]
        # Not in the order in which they lie: the processor would read ahead, from one set into the next.
        seconds = seconds_of(_in_turn(copies[::3] + copies[1::3] + copies[2::3]), where, budget_s)
    except (RuntimeError, NotImplementedError):
        return None
    flops = sum(row.flops if row.attended_flops is None else row.attended_flops for row in rows)
    moved = sum(row.read_bytes + row.write_bytes for row in rows)
    if not rows or not moved:
        return None
    kind = family(case.op, rows[0].kind)
    calls = sum(row.calls for row in rows)
    net = max(seconds / calls - launch_s, seconds / calls * 0.05)
    return Reading(
        case.op, kind, case.dtype, flops // calls, moved // calls, net, rows[0].variant, rows[0].tensors,
        _product(kind, flops // calls, rows[0].shapes),
    )  # fmt: skip


def _at_pace(reading: Reading, around_s: float, reference_s: float) -> Reading:
    """The reading as it would have been at the machine's usual speed: what computes goes with its clock, as the
    reference does, which was read right before and after it; what moves goes with the memory, and stays."""
    if not reading.kind.computes:
        return reading
    return replace(reading, seconds=reading.seconds * reference_s / around_s)


def _product(kind: Family, flops: int, shapes: str) -> tuple[int, int, int] | None:
    """Rows, inner size and columns of a matmul that is one product."""
    result = result_of(shapes) if kind is Family.MATMUL else None
    return None if result is None else (result[1], flops // (2 * result[1] * result[2]), result[2])
