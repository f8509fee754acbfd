"""Memory: which storages are alive when, and the moment at which they are most.

A storage is alive at tick t when born <= t < died. The outputs of a call are born just before the
call's own tick and inputs that die with it die after it, so at a call's tick both are alive, as they
are while a kernel runs.

May import: tape, ops, units, errors, account (its dataclasses).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from preflop.account import AtPeak, Column, Columns, Memory, TimelinePoint
from preflop.errors import BadNumber
from preflop.ledgers.ledger import Ledger, Row
from preflop.tape.events import HOST, Call, Mark, Phase, Role, Storage, Tape, require_tape

if TYPE_CHECKING:
    import numpy as np

# The order of the categories in every array of this file; the last one is what a kernel takes inside.
_ROLES = (
    Role.PARAMETER,
    Role.GRADIENT,
    Role.OPTIMIZER_STATE,
    Role.ACTIVATION,
    Role.TEMPORARY,
    Role.BUFFER,
    Role.INPUT,
)
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "temporaries",
    "buffers",
    "inputs",
    "workspace",
)
_LASTING = ("parameters", "gradients", "optimizer_states", "buffers")
_INDEX = {role: index for index, role in enumerate(_ROLES)}
_KEPT = {Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT}


def memory(tape: Tape) -> Memory:
    """Bytes alive through the steady step: peak, what it is made of, the columns, the timeline.

    Counts: every storage of the tape at the bytes asked for, and what CPU kernels take inside
    themselves where `ops` has a rule for it (only when the recording followed a CPU).
    Does not count: the allocator's rounding and caching, the device's context.
    """
    replay = _Replay(tape)
    peak = replay.peak(tape.steps - 1)
    first = replay.peak(0)
    call = peak.call
    signature = None if call is None else tape.signatures[call.signature]
    timeline = replay.timeline(tape.steps - 1)
    return Memory(
        peak_bytes=peak.bytes,
        first_step_peak_bytes=first.bytes,
        peak_phase="other" if call is None else call.phase.value,
        peak_op="" if signature is None else signature.op,
        peak_module="" if call is None else tape.modules[call.module],
        peak_source="" if call is None else tape.sources[call.source],
        columns=_columns(tape, replay),
        at_peak=replay.at(peak.tick, peak.workspace_bytes),
        timeline=timeline,
        lasting_bytes=timeline.most_lasting(),
        lasting_and_optimizer_bytes=timeline.most_lasting(optimizer_temporaries=True),
    )


def memory_ledger(tape: Tape) -> Ledger:
    """Bytes alive at the peak of the steady step, by the place where each storage was born.

    `total()` is the peak. Storages that no call made (parameters, inputs) stand under their role's
    name, in the module that holds them.
    """
    require_tape(tape, "memory_ledger")
    replay = _Replay(tape)
    peak = replay.peak(tape.steps - 1)
    sums: dict[tuple[str, str, str, str, str], list[int]] = {}
    for storage in tape.storages:
        if _alive(storage, peak.tick) and storage.bytes and storage.device != HOST:
            entry = sums.setdefault(_birthplace(tape, storage), [0, 0])
            entry[0] += storage.bytes
            entry[1] += 1
    if peak.workspace_bytes and peak.call is not None:
        entry = sums.setdefault(_place(tape, peak.call, "workspace"), [0, 0])
        entry[0] += peak.workspace_bytes
        entry[1] += 1
    rows = [Row(*place, value=value, calls=count) for place, (value, count) in sums.items()]
    rows.sort(key=lambda row: (-row.value, row.op, row.module))
    return Ledger("bytes", tuple(rows))


def workspace_bytes(tape: Tape) -> dict[int, int]:
    """Bytes that the kernel of each kind of call takes inside itself, by signature index.

    Only signatures with a rule and more than nothing: the rules of CUDA's kernels where the recording
    followed a device's, else those of CPU kernels.
    """
    from preflop.ops.pricing import inside_bytes
    from preflop.ops.workspace import recorded_by

    cuda = tape.subject is not None and tape.subject.device != "cpu"
    found = {}
    with recorded_by(tape.subject):
        for index, signature in enumerate(tape.signatures):
            if (size := inside_bytes(signature, cuda=cuda)) > 0:
                found[index] = size
    return found


@dataclass(frozen=True, slots=True)
class _Peak:
    bytes: int
    tick: int
    workspace_bytes: int
    call: Call | None


class _Replay:
    """Alive bytes per category at every tick, as prefix sums over births and deaths."""

    def __init__(self, tape: Tape) -> None:
        import numpy as np

        self.tape = tape
        calls = tape.calls
        self.call_ticks = np.fromiter((call.tick for call in calls), np.int64, len(calls))
        self.ordered = bool((np.diff(self.call_ticks) >= 0).all())
        if not self.ordered:
            raise ValueError("the calls of a tape must stand in the order of their ticks")
        self.last_tick = _last_tick(tape, self.call_ticks)
        here = [storage for storage in tape.storages if storage.device != HOST]
        self.alive = _alive_by_category(here, self.last_tick)
        self.total = self.alive.sum(axis=0)
        self.workspace = _workspace_by_call(tape)

    def window(self, step: int) -> tuple[int, int]:
        """First and last tick of a step; the whole tape where no step is marked."""
        starts = [m.tick for m in self.tape.marks if m.name == "step" and m.step == step]
        ends = [m.tick for m in self.tape.marks if m.name == "step_end" and m.step == step]
        if starts:
            return min(starts), max(ends) if ends else self.last_tick
        ticks = [c.tick for c in self.tape.calls if c.step == step] if self.tape.steps > 1 else []
        if ticks and step > 0:
            return min(ticks), max(ticks)
        return 0, max(ticks) if ticks else self.last_tick

    def peak(self, step: int) -> _Peak:
        """The first moment of the step at which most bytes are alive."""
        first, last = self.window(step)
        tick = first + int(self.total[first : last + 1].argmax())
        best = _Peak(int(self.total[tick]), tick, 0, self.running(tick))
        for index, size in self.workspace.items():
            call = self.tape.calls[index]
            if first <= call.tick <= last and int(self.total[call.tick]) + size > best.bytes:
                best = _Peak(int(self.total[call.tick]) + size, call.tick, size, call)
        return best

    def running(self, tick: int) -> Call | None:
        """The call for whose outputs memory is taken at a tick: the first one not before it."""
        if not self.tape.calls:
            return None
        index = int(self.call_ticks.searchsorted(tick))
        return self.tape.calls[min(index, len(self.tape.calls) - 1)]

    def at(self, tick: int, workspace: int = 0) -> AtPeak:
        return _at_peak([*self.alive[:, tick].tolist(), workspace])

    def fullest(self, role: Role) -> int:
        """The tick at which most bytes of one role are alive."""
        return int(self.alive[_INDEX[role]].argmax())

    def timeline(self, step: int) -> Timeline:
        """Every tick of the step at which something was born, died, or ran with a workspace."""
        import numpy as np

        first, last = self.window(step)
        inside = np.zeros(self.last_tick + 2, np.int64)
        for index, size in self.workspace.items():
            inside[self.tape.calls[index].tick] = size
        changed = np.zeros(self.last_tick + 2, bool)
        changed[1:] = (self.alive[:, 1:] != self.alive[:, :-1]).any(axis=0)
        changed |= inside > 0
        changed[[first, last]] = True
        ticks = first + np.flatnonzero(changed[first : last + 1])
        rows = np.concatenate([self.alive[:, ticks], inside[None, ticks]])
        return Timeline(ticks, rows, self._phases(ticks))

    def _phases(self, ticks: np.ndarray) -> list[str]:
        if not self.tape.calls:
            return ["other"] * len(ticks)
        calls, names = self.tape.calls, {phase: phase.value for phase in Phase}
        where = self.call_ticks.searchsorted(ticks).clip(max=len(calls) - 1)
        return [names[calls[index].phase] for index in where.tolist()]


class Timeline(Sequence[TimelinePoint]):
    """Bytes alive at each event of the steady step. A sequence of `TimelinePoint`s that are made when
    asked for: a large step has hundreds of thousands."""

    def __init__(self, ticks: np.ndarray, alive: np.ndarray, phases: list[str]) -> None:
        self.ticks = ticks
        self.alive = alive
        """Categories (in the order of `CATEGORIES`) x events, bytes."""
        self.phases = phases

    def most_lasting(self, *, optimizer_temporaries: bool = False) -> int:
        """Most bytes at one event of what does not depend on the batch.

        Args:
            optimizer_temporaries: with what the optimizer makes and frees besides.
        """
        import numpy as np

        lasting = self.alive[[CATEGORIES.index(name) for name in _LASTING]].sum(axis=0)
        if optimizer_temporaries:
            in_optimizer = np.fromiter((phase == "optimizer" for phase in self.phases), bool, len(self))
            lasting = lasting + self.alive[CATEGORIES.index("temporaries")] * in_optimizer
        return int(lasting.max(initial=0))

    def __len__(self) -> int:
        return len(self.phases)

    @overload
    def __getitem__(self, index: int) -> TimelinePoint: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TimelinePoint, ...]: ...
    def __getitem__(self, index: int | slice) -> TimelinePoint | tuple[TimelinePoint, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        alive = _at_peak(self.alive[:, index].tolist())
        return TimelinePoint(int(self.ticks[index]), self.phases[index], alive)

    def __iter__(self) -> Iterator[TimelinePoint]:
        return (self[index] for index in range(len(self)))


def _at_peak(values: Sequence[int]) -> AtPeak:
    """Bytes in the order of `CATEGORIES`, by name."""
    return AtPeak(**dict(zip(CATEGORIES, values, strict=True)))


def _last_tick(tape: Tape, call_ticks: np.ndarray) -> int:
    last = int(call_ticks[-1]) if len(call_ticks) else 0
    last = max(last, max((mark.tick for mark in tape.marks), default=0))
    last = max(last, max((storage.born for storage in tape.storages), default=0))
    return max(last, max((storage.died or 0 for storage in tape.storages), default=0))


def _alive_by_category(storages: list[Storage], last_tick: int) -> np.ndarray:
    """Bytes alive, categories x ticks; one tick more than the last, so that all deaths fit."""
    import numpy as np

    require_addressable(sum(storage.bytes for storage in storages))
    count = len(storages)
    roles = np.fromiter((_INDEX[storage.role] for storage in storages), np.int64, count)
    sizes = np.fromiter((storage.bytes for storage in storages), np.int64, count)
    born = np.fromiter((storage.born for storage in storages), np.int64, count)
    never = last_tick + 1
    died = np.fromiter(
        (never if storage.died is None else storage.died for storage in storages), np.int64, count
    )
    change = np.zeros((len(_ROLES), last_tick + 2), np.int64)
    np.add.at(change, (roles, born), sizes)
    np.subtract.at(change, (roles, died), sizes)
    return change.cumsum(axis=1)


def require_addressable(total_bytes: int) -> None:
    """Refuse more bytes than 64-bit sizes and addresses count; sums of them would wrap around.

    Raises:
        BadNumber: there are more.
    """
    if total_bytes > _MOST_BYTES:
        raise BadNumber(
            f"the tensors of this step have {total_bytes:.3g} bytes together, more than 64-bit addresses count "
            f"({_MOST_BYTES:.3g}).\n  Give a smaller batch or shorter sequences."
        )


_MOST_BYTES = 2**63 - 1
"""Torch's sizes are signed 64-bit numbers."""


def _workspace_by_call(tape: Tape) -> dict[int, int]:
    by_signature = workspace_bytes(tape)
    if not by_signature:
        return {}
    return {
        index: by_signature[call.signature]
        for index, call in enumerate(tape.calls)
        if call.signature in by_signature
    }


def _alive(storage: Storage, tick: int) -> bool:
    return storage.born <= tick and (storage.died is None or tick < storage.died)


def _birthplace(tape: Tape, storage: Storage) -> tuple[str, str, str, str, str]:
    if storage.call >= 0:
        return _place(tape, tape.calls[storage.call], storage.dtype)
    module = storage.name.rpartition(".")[0] if storage.role in _KEPT else ""
    return storage.role.value, module, "other", "", storage.dtype


def _place(tape: Tape, call: Call, dtype: str) -> tuple[str, str, str, str, str]:
    op = tape.signatures[call.signature].op
    return op, tape.modules[call.module], call.phase.value, tape.sources[call.source], dtype


def _columns(tape: Tape, replay: _Replay) -> Columns:
    """The columns of the table, each taken at the moment of the steady step when it is complete."""
    step = tape.steps - 1
    forward_end = _last_mark(tape, "forward_end", step)
    backward_end = _last_mark(tape, "backward_end", step)
    optimizer_end = _last_mark(tape, "optimizer_end", step)

    def of(role: Role, mark: Mark | None) -> Column:
        tick = mark.tick if mark is not None else replay.fullest(role)
        return _column([s for s in tape.storages if s.role is role and _alive(s, tick) and s.device != HOST])

    # An optimizer in backward frees gradients one by one: then the most that are alive at once.
    in_backward = tape.subject is not None and (tape.subject.optimizer or "").endswith("-in-backward")
    return Columns(
        parameters=_with_parameter_elements(tape, of(Role.PARAMETER, forward_end)),
        gradients=of(Role.GRADIENT, None if in_backward else backward_end),
        optimizer_states=of(Role.OPTIMIZER_STATE, optimizer_end),
        activations=_activations(tape, replay, forward_end),
        buffers=of(Role.BUFFER, forward_end),
        inputs=of(Role.INPUT, forward_end),
    )


def _activations(tape: Tape, replay: _Replay, forward_end: Mark | None) -> Column:
    """What the last microbatch's forward made and left alive; without marks, activations at their most."""
    if forward_end is None:
        tick, since = replay.fullest(Role.ACTIVATION), 0
        alive = [s for s in tape.storages if s.role is Role.ACTIVATION and _alive(s, tick)]
        return _column(alive)
    tick = forward_end.tick
    since = max((m.tick for m in tape.marks if m.tick < tick), default=0)
    made = [s for s in tape.storages if s.role not in _KEPT and s.born > since and s.device != HOST]
    return _column([s for s in made if _alive(s, tick)])


def _last_mark(tape: Tape, name: str, step: int) -> Mark | None:
    found = [mark for mark in tape.marks if mark.name == name and mark.step == step]
    return max(found, key=lambda mark: mark.tick) if found else None


def _column(storages: list[Storage]) -> Column:
    dtypes: dict[str, tuple[int, int]] = {}
    for storage in storages:
        size, elements = dtypes.get(storage.dtype, (0, 0))
        dtypes[storage.dtype] = size + storage.bytes, elements + storage.elements
    return _sum_of(dtypes)


def _sum_of(dtypes: dict[str, tuple[int, int]]) -> Column:
    largest_first = dict(sorted(dtypes.items(), key=lambda item: (-item[1][0], item[0])))
    return Column(
        sum(size for size, _ in dtypes.values()),
        sum(elements for _, elements in dtypes.values()),
        largest_first,
    )


def _with_parameter_elements(tape: Tape, column: Column) -> Column:
    """The same bytes with the elements that the parameters have: one may be a part of its storage. Where the storages
    hold fewer, they are one rank's parts of them, and their own elements stand."""
    if not tape.parameters:
        return column
    elements: dict[str, int] = {}
    for parameter in tape.parameters:
        count = 1
        for size in parameter.shape:
            count *= size
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + count
    elsewhere = {name: (0, count) for name, count in elements.items() if name not in column.dtypes}
    held = {name: (size, min(elements.get(name, 0), most)) for name, (size, most) in column.dtypes.items()}
    return _sum_of(held | elsewhere)
