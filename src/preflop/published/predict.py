"""Every prediction of a row: memory, step time, utilization recomputed, published counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from preflop.device_memory import device_memory
from preflop.errors import PreflopError
from preflop.folding import tape_of
from preflop.ledgers.memory import memory
from preflop.published.conventions import recomputed_utilization
from preflop.published.counts import counted, korthikanti_activations
from preflop.published.plans import Plan, plan_of
from preflop.published.rows import CannotBuild, Row, Table
from preflop.published.seconds import arithmetic_seconds, step_seconds
from preflop.tape.events import Role, Tape
from preflop.transforms.fully_sharded import fully_sharded
from preflop.units import GIB

MEMORY, STEP_TIME, UTILIZATION = "memory", "step_time", "mfu_recomputed"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One figure of one row: as published, as predicted."""

    id: str
    source: str
    what: str
    """"memory" (bytes), "step_time" (seconds), "mfu_recomputed" (share or FLOP/s), or a published count."""
    measured: float | None = None
    predicted: float | None = None
    error: float | None = None
    """Relative: 0.1 is ten percent too much. Of a recomputed utilization: beyond the print's rounding."""
    why_not: str | None = None
    grade: str = ""
    lower_s: float | None = None
    """Of a step time: the bound that no prediction may beat."""
    model: str = ""
    device: str = ""
    setting: str = ""
    assumed: tuple[str, ...] = ()
    settled: bool = False
    """See `Plan.settled`: the row counts as evidence whatever its grade."""
    device_id: str = ""
    """Of the catalog's device that was timed; "" where there is none."""
    several: bool = False
    """Whether the run had several devices."""
    bits: int = 32
    """Of the numbers that matmuls read."""
    parameters: float | None = None
    tokens: int | None = None
    """Of one forward."""


@dataclass
class Predictor:
    """Predicts rows; each configuration is recorded once."""

    tapes: dict[tuple[object, ...], Tape | PreflopError] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda words: None

    def predict(self, row: Row) -> list[Prediction]:
        """All figures of a row; one with `why_not` for each that is not predicted."""
        found = list(self._figures(row))
        return found or [_of(row, "row", why_not="nothing in this row is predicted")]

    def _figures(self, row: Row) -> Iterator[Prediction]:
        if row.table is Table.COMMUNICATION:
            yield _of(row, "bandwidth", why_not="collectives: a later version")
            return
        if row.table in (Table.RATIO, Table.COMPUTE):
            yield self._tried(row, row.table.value, lambda: counted(row))
            return
        if row.text("kind") == "activation_memory_reference":
            yield self._tried(row, MEMORY, lambda: korthikanti_activations(row))
            return
        if row.table is Table.THROUGHPUT and (row.text("mfu_pct") or row.text("tflops_gpu")):
            yield _utilization(row)
        measured = _measured(row)
        if not measured:
            yield _of(row, "step_time", why_not="the row gives neither memory nor a step time")
            return
        try:
            plan = plan_of(row)
            tape = self._tape(plan)
        except PreflopError as error:
            why = _first_line(error)
            yield from (_of(row, what, value, why_not=why) for what, value in measured)
            return
        for what, value in measured:
            why = plan.no_memory if what == MEMORY else plan.no_time
            if why:
                yield _of(row, what, value, why_not=why)
            elif what == MEMORY:
                predicted = memory_bytes(plan, tape)
                yield _of(
                    row, what, value, predicted, assumed=plan.assumed, device_id=_id(plan), settled=plan.settled
                )
            else:
                lower, predicted_s = step_seconds(plan, tape)
                least_s = arithmetic_seconds(plan, tape)
                if value < least_s:
                    words = f"the printed time needs {least_s / value:.1f} times the dense peak: a field is wrong"
                    yield _of(row, what, value, why_not=words)
                elif predicted_s is None:
                    yield _of(row, what, value, why_not="nobody measured what this device's kernels reach")
                else:
                    yield _of(row, what, value, predicted_s, lower_s=lower, assumed=plan.assumed, device_id=_id(plan))

    def _tape(self, plan: Plan) -> Tape:
        if plan.key not in self.tapes:
            self.progress(f"recording {plan.key[0]}")
            try:
                self.tapes[plan.key] = tape_of(plan.subject)
            except PreflopError as error:
                self.tapes[plan.key] = error
        found = self.tapes[plan.key]
        if isinstance(found, PreflopError):
            raise found
        return found

    def _tried(self, row: Row, what: str, predict: Callable[[], tuple[str, float, float]]) -> Prediction:
        try:
            what, measured, predicted = predict()
        except PreflopError as error:
            return _of(row, what, why_not=_first_line(error))
        return _of(row, what, measured, predicted)


def _of(
    row: Row,
    what: str,
    measured: float | None = None,
    predicted: float | None = None,
    *,
    error: float | None = None,
    why_not: str | None = None,
    lower_s: float | None = None,
    assumed: tuple[str, ...] = (),
    device_id: str = "",
    settled: bool = False,
) -> Prediction:
    if error is None and measured and predicted is not None:
        error = predicted / measured - 1
    return Prediction(
        row.id, row.source, what, measured, predicted, error, why_not, row.grade, lower_s,
        row.text("model") or row.text("model_name"), row.text("gpu") or row.text("device"), _setting(row), assumed,
        settled=settled, device_id=device_id, several=(row.whole("gpus") or 1) > 1,
        bits=_bits(row.text("precision").casefold()),
        parameters=None if row.number("params_b") is None else (row.number("params_b") or 0) * 1e9,
        tokens=_tokens(row),
    )  # fmt: skip


def _bits(precision: str) -> int:
    """Of the numbers that most matmuls read, from a row's own words.

    >>> _bits("amp_bf16"), _bits("fp32"), _bits("bf16 + float8 tensorwise linears")
    (16, 32, 8)
    """
    if "fp8" in precision or "float8" in precision:
        return 8
    return 16 if "16" in precision else 32


def _tokens(row: Row) -> int | None:
    batch = row.whole("micro_batch") or row.whole("batch")
    length = row.whole("seq") or row.whole("seqlen")
    return batch * length if batch and length else None


def _id(plan: Plan) -> str:
    return plan.device.id if plan.device is not None else ""


def _setting(row: Row) -> str:
    """Batch, length, precision and recomputation in a few words."""
    batch = row.text("micro_batch") or row.text("batch")
    length = row.text("seq") or row.text("seqlen")
    parts = [f"{batch} x {length}" if batch and length else "", row.text("precision") or row.text("mode")]
    parts += [
        row.text("sharding"),
        f"recompute {row.text('ckpt')}" if row.text("ckpt") not in ("", "none") else "",
    ]
    phase = row.text("phase").split(" (")[0]
    return ", ".join(part for part in (*parts, phase) if part and part != "none")


def _measured(row: Row) -> list[tuple[str, float]]:
    """What the row measures that is predicted, in bytes and seconds."""
    if row.table is Table.LATENCY:
        latency_ms = row.number("label_all_e2e_latency")
        return [(STEP_TIME, latency_ms / 1000)] if latency_ms else []
    found = []
    gib = row.number("mem_gib") if row.table is Table.MEMORY else None
    if gib:
        found.append((MEMORY, gib * GIB))
    seconds = row.number("step_time_s") if row.table is Table.THROUGHPUT else None
    if seconds:
        found.append((STEP_TIME, seconds))
    return found


def _utilization(row: Row) -> Prediction:
    try:
        found = recomputed_utilization(row)
    except CannotBuild as error:
        return _of(row, UTILIZATION, why_not=_first_line(error))
    beyond = max(abs(found.recomputed - found.printed) - found.rounding, 0.0)
    sign = 1 if found.recomputed > found.printed else -1
    return _of(row, UTILIZATION, found.printed, found.recomputed, error=sign * beyond / found.printed)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


# -- memory -------------------------------------------------------------------------------------------


def memory_bytes(plan: Plan, tape: Tape) -> float:
    """The plan's reading of the tape, in bytes."""
    shared = _divided(plan, tape)
    if plan.fully_sharded is not None:
        shared = fully_sharded(shared, degree=plan.ranks.count, how=plan.fully_sharded)
    capability = (8, 0)
    if plan.subject.device != "cpu":
        from preflop.hardware.catalog import find

        capability = find(plan.subject.device).compute_capability or capability
    if plan.memory == "kept":
        return memory(shared).columns.activations.bytes
    if plan.memory == "static":
        columns = memory(shared).columns
        held = device_memory(shared, capability)
        workspaces = 2 * (33554432 if capability >= (9, 0) else 8519680)
        kept = columns.parameters.bytes + columns.gradients.bytes + columns.optimizer_states.bytes
        return min(held.allocated_bytes, kept + columns.buffers.bytes + columns.inputs.bytes + workspaces)
    if plan.memory == "first":
        return memory(shared).first_step_peak_bytes
    held = device_memory(shared, capability)
    if plan.memory == "forward":
        return held.allocated_by_phase["forward"]
    if plan.memory == "reserved":
        return held.reserved_bytes + plan.static_bytes
    if plan.memory == "used":
        return held.reserved_bytes + (plan.context_bytes or 0)
    return held.allocated_bytes + plan.static_bytes + plan.extra_bytes


def _divided(plan: Plan, tape: Tape) -> Tape:
    """The tape with each column's storages divided over the devices that share it."""
    degrees = {
        Role.PARAMETER: plan.shards.parameters,
        Role.GRADIENT: plan.shards.gradients,
        Role.OPTIMIZER_STATE: plan.shards.states,
    }
    if all(degree == 1 for degree in degrees.values()) and not plan.drop_gradients:
        return tape
    storages = []
    for storage in tape.storages:
        degree = degrees.get(storage.role, 1)
        size = -(-storage.bytes // degree)
        if plan.drop_gradients and storage.role is Role.GRADIENT:
            size = 0
        storages.append(dataclasses.replace(storage, bytes=size))
    return dataclasses.replace(tape, storages=storages)
