"""FLOPs of the steady step: by phase, by kind, model and hardware, and what could not be priced.

May import: tape, ops, ledgers.ledger, errors. Never torch, never a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from preflop.ledgers.ledger import Ledger, Row
from preflop.ledgers.tally import Origin, count_by_origin, dtypes, used_outputs
from preflop.ops.pricing import work
from preflop.ops.registry import Kind, Work
from preflop.tape.events import Phase, Tape, require_tape

MODEL_KINDS = frozenset({Kind.MATMUL, Kind.ATTENTION, Kind.CONVOLUTION})


@dataclass(frozen=True, slots=True)
class FlopsTotals:
    """FLOPs of the steady step. Integers; 1 multiply-add = 2."""

    forward: int
    """Calls outside every phase count here too."""
    backward: int
    recompute: int
    optimizer: int
    total: int
    """Sum of the four phases, and of `by_kind`. Element-wise work included."""
    by_kind: dict[str, int]
    model: int
    """Forward + backward of matmul, attention and convolution. No recompute, no optimizer."""
    hardware: int
    """model + recomputed work of these kinds + what attention kernels recompute inside."""
    attended: int
    """model, counting only the pairs that causality or a known mask leaves."""
    estimates: dict[str, int] = field(default_factory=dict)
    """Operators whose count is an estimate or a bound -> FLOPs."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Operators that could not be priced -> calls."""


def flops_ledger(tape: Tape, *, elementwise: bool = False) -> Ledger:
    """FLOPs of the steady step by operator, module, phase, line and dtype.

    Args:
        elementwise: also count element-wise work. Without it the rows are matrix products, attention,
            convolution and labelled estimates (FFT).

    Counts: attention in full, whatever its mask; every call of a shared module; recomputed calls.
    Does not count: bias, what a kernel recomputes inside (see `flops_totals`).
    `unknown` names every operator that makes or changes tensors and has no formula.
    """
    require_tape(tape, "flops_ledger")
    kinds = dtypes(tape)
    rows: dict[tuple[str, str, str, str, str], list[int]] = {}
    unknown: dict[str, int] = {}
    for origin, calls, price in priced(tape):
        sig = tape.signatures[origin.signature]
        if price is None:
            unknown[sig.op] = unknown.get(sig.op, 0) + calls
        elif price.flops and (elementwise or price.kind in MODEL_KINDS or price.estimate):
            key = (
                sig.op,
                tape.modules[origin.module],
                origin.phase.value,
                tape.sources[origin.source],
                kinds[origin.signature],
            )
            row = rows.setdefault(key, [0, 0])
            row[0] += price.flops * calls
            row[1] += calls
    ordered = tuple(Row(*key, value=value, calls=calls) for key, (value, calls) in rows.items())
    return Ledger("flops", ordered, unknown)


def priced(tape: Tape) -> Iterator[tuple[Origin, int, Work | None]]:
    """Each group of like calls of the steady step, their number, and the work of one of them.

    None: no formula. Each signature is priced once.
    """
    calls = tape.steady()
    used = used_outputs(tape)
    prices: dict[int, Work | None] = {}
    for origin, count in count_by_origin([c for i, c in enumerate(calls) if i not in used]).items():
        if origin.signature not in prices:
            prices[origin.signature] = work(tape.signatures[origin.signature])
        yield origin, count, prices[origin.signature]
    for position, outputs in used.items():
        call = calls[position]
        origin = Origin(call.signature, call.phase, call.module, call.source)
        yield origin, 1, work(tape.signatures[call.signature], outputs)


def flops_totals(tape: Tape) -> FlopsTotals:
    """FLOPs of the steady step as the report shows them.

    Source: model and hardware FLOPs as in Chowdhery et al., "PaLM" (2022), appendix B.
    """
    phases = dict.fromkeys(Phase, 0)
    by_kind = {kind.value: 0 for kind in Kind}
    model = hardware = attended = 0
    estimates: dict[str, int] = {}
    unknown: dict[str, int] = {}
    for origin, calls, price in priced(tape):
        op = tape.signatures[origin.signature].op
        if price is None:
            unknown[op] = unknown.get(op, 0) + calls
            continue
        phases[origin.phase] += price.flops * calls
        if price.estimate:
            estimates[op] = estimates.get(op, 0) + price.flops * calls
        for part in price.parts or (price,):
            by_kind[part.kind.value] += part.flops * calls
            if part.kind not in MODEL_KINDS or origin.phase is Phase.OPTIMIZER:
                continue
            hardware += _or(part.hardware_flops, part.flops) * calls
            if origin.phase is not Phase.RECOMPUTE:
                model += part.flops * calls
                attended += _or(part.attended_flops, part.flops) * calls
    return FlopsTotals(
        forward=phases[Phase.FORWARD] + phases[Phase.OTHER],
        backward=phases[Phase.BACKWARD],
        recompute=phases[Phase.RECOMPUTE],
        optimizer=phases[Phase.OPTIMIZER],
        total=sum(phases.values()),
        by_kind=by_kind,
        model=model,
        hardware=hardware,
        attended=attended,
        estimates=estimates,
        unknown=unknown,
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
