"""Any size of a step from its parametric tape, by arithmetic alone: peak, FLOPs, bytes and time.

The tape's stacks are unfolded once, with symbols for sizes. Bytes alive at a moment are then a
polynomial in batch and lengths, and so is what each call does and moves (`plan.prices`). Of the
moments only those can be the peak that no other exceeds in every coefficient; a few dozen are left of
a hundred thousand, so that a size costs a fraction of a millisecond.

The figures equal those of the account of the concrete tape, to the byte and the FLOP.

Accumulation: a tape of two microbatches gives any number of them. When the second ends, as many bytes
of each role are alive as when it began; the loop runs the same code again on the same state, so each
further microbatch repeats it and the peak stays. Where that does not hold, it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from preflop.hardware.device import Device, MissingFigure
from preflop.ledgers.memory import require_addressable
from preflop.ledgers.operators import numbered, shapes_text, starred
from preflop.ledgers.tally import aliasing, dtypes, used_outputs
from preflop.ops.moved import UNTOUCHED, is_view
from preflop.ops.pricing import inside_bytes, moved, work
from preflop.ops.registry import Kind, Work
from preflop.ops.variants import tensors_of, variant
from preflop.plan.outcome import Outcome
from preflop.plan.prices import OVER, Answer, Grid, Numerators, Price, grid, whole_value
from preflop.tape.events import HOST, Call, Phase, Signature, Tape
from preflop.tape.sizes import (
    Coefficients,
    NotPolynomial,
    ParametricTape,
    basis,
    basis_names,
    concrete,
    value,
)
from preflop.timing.pages import new_pages_from_bytes, new_pages_s
from preflop.timing.row_times import RowRates, Seconds, row_rates, row_seconds
from preflop.timing.tiles import result_sizes
from preflop.transforms.accumulation import accumulate
from preflop.transforms.depth import deepen

if TYPE_CHECKING:
    import numpy as np

_MODEL_KINDS = frozenset({Kind.MATMUL, Kind.ATTENTION, Kind.CONVOLUTION})


def _fits(peak_bytes: int, device: Device | None) -> bool | None:
    """False where the tensors alone are more than the device has; else None: the allocator was not replayed."""
    try:
        too_many = device is not None and peak_bytes > device.memory_bytes
    except MissingFigure:
        return None
    return False if too_many else None


def _between(name: str, least: int, most: int | None) -> str:
    if most is None:
        return f"{name} {least} and more"
    return f"{name} {least}" if most == least else f"{name} {least} to {most}"


class Evaluator:
    """One step, ready to be priced at any size of its domain and any number of microbatches."""

    def __init__(self, parametric: ParametricTape) -> None:
        """Takes the tape; what it makes of it is made when first asked for.

        Args:
            parametric: of a step of one microbatch, or of two (which gives two and more).
        """
        self.domain = parametric.domain
        self._parametric = parametric
        self._unfolded: _Unfolded | None = None
        self._compiled: dict[int, _Compiled] = {}

    @property
    def extent(self) -> str:
        """The sizes that it holds for, in words: "batch 2 and more, seq 64 to 1024 by 64"."""
        domain, axes = self.domain, self._parametric.axes
        words = [_between("batch", domain.least_batch, domain.most_batch)]
        for axis, span in zip(axes, domain.spans):
            least, most = axis.length(span.least), None if span.most is None else axis.length(span.most)
            step = span.multiple * axis.unit
            words.append(_between(axis.name, least, most) + (f" by {step}" if step > 1 else ""))
        return ", ".join(words)

    def holds(self, batch: int, *lengths: int | None, **named: int) -> bool:
        """Whether the size is one that the tape was verified for (see `ParametricTape.at`)."""
        return self._parametric.holds(batch, *lengths, **named)

    def evaluate(
        self, batch: int, *lengths: int | None, microbatches: int = 1, device: Device | None = None, **named: int
    ) -> Outcome:
        """What a step of that size costs.

        Args:
            batch: what one forward sees, as everywhere; `lengths` and `named` as for `ParametricTape.at`.
            device: whose rates give the time; None: no time.

        Raises:
            NotPolynomial: the size is outside of what was verified.
            Refused: the stacks do not unfold, or something is kept from one microbatch to the next.
        """
        steps = self._parametric.steps(*lengths, **named)
        if steps is None or not self.domain.holds(batch, *steps):
            asked = self._parametric.asked(batch, *lengths, **named)
            raise NotPolynomial(f"{asked} is outside of what was verified")
        return self._of(microbatches).evaluate(batch, steps, microbatches, device)

    def rows(self, microbatches: int = 1) -> list[PolynomialRow]:
        """Operators of the steady step as the account's rows, their figures as polynomials."""
        return self._of(microbatches).rows(microbatches)

    def _of(self, microbatches: int) -> _Compiled:
        recorded = 1 if microbatches == 1 else 2
        if recorded not in self._compiled:
            if self._unfolded is None:
                self._unfolded = _unfolded(self._parametric)
            self._compiled[recorded] = _Compiled(self._parametric, self._unfolded, recorded)
        return self._compiled[recorded]


@dataclass(frozen=True, slots=True)
class PolynomialRow:
    """Like calls, as one row of the account has them, at any size."""

    op: str
    phase: str
    module: str
    source: str | None
    dtype: str
    calls: int
    shapes: str
    """As the account's, with a symbol "#7" for each size."""
    sizes: dict[int, Coefficients]
    """What each symbol of `shapes` stands for."""
    flops: Numerators | None
    """Of all calls, over `prices.OVER`; None where it is no polynomial. So are the next two."""
    read_bytes: Numerators | None
    write_bytes: Numerators | None


class _Compiled:
    """One step of one or two microbatches as arrays."""

    def __init__(self, parametric: ParametricTape, unfolded: _Unfolded, microbatches: int) -> None:
        import numpy as np

        tape, sizes = unfolded
        if tape.subject is not None and tape.subject.microbatches != microbatches:
            # The scalar that divides the loss is then no symbol; no price reads it.
            tape = accumulate(tape, microbatches=microbatches)
        self.recorded = microbatches
        self.tf32 = tape.subject is not None and tape.subject.precision == "tf32"
        self._sizes = np.array(sizes, np.int64)
        self._tokens = parametric.tokens
        prices = grid(tape.signatures, tuple(sizes), parametric.domain)
        self._moments = _Moments(tape, self._sizes, prices)
        repeated = self._moments.repeated(tape) if microbatches == 2 else (0, -1)
        self._work = _Steps(tape, self._sizes, prices, repeated)
        self._births = _births(tape, self._moments.first, repeated)
        self._rates: dict[str, RowRates] = {}

    def evaluate(
        self, batch: int, steps: tuple[int, ...], microbatches: int, device: Device | None
    ) -> Outcome:
        at = basis(batch, *steps)
        values: list[int] = (self._sizes @ at).tolist()
        peak_bytes, peak_phase = self._moments.peak(at, values)
        totals, rows = self._work.at(at, values, microbatches - self.recorded)
        seconds = Seconds(None, None, None)
        no_peak: tuple[str, ...] = ()
        if device is not None:
            rates = self._rates_on(device)
            pages_s = self._new_pages_s(device, values, microbatches - self.recorded)
            seconds = row_seconds(rates, *rows, self._work.results(values), pages_s)
            no_peak = rates.no_peak
        return Outcome(
            peak_bytes=peak_bytes, peak_phase=peak_phase, flops_model=totals["model"],
            flops_hardware=totals["hardware"], flops_total=totals["flops"], read_bytes=totals["read"],
            write_bytes=totals["write"], lower_s=seconds.lower_s, expected_s=seconds.expected_s,
            upper_s=seconds.upper_s,
            tokens=None if self._tokens is None else value(self._tokens, at) * microbatches,
            samples=batch * microbatches, no_peak=no_peak if seconds.lower_s is not None else (),
            fits=_fits(peak_bytes, device),
        )  # fmt: skip

    def _new_pages_s(self, device: Device, values: Sequence[int], extra: int) -> float:
        least = new_pages_from_bytes(device)
        if least is None:
            return 0.0
        born = sum(
            values[size] * (once + rest * (1 + extra))
            for size, (once, rest) in self._births.items()
            if values[size] >= least
        )
        return new_pages_s(device, born)

    def rows(self, microbatches: int) -> list[PolynomialRow]:
        return self._work.polynomial_rows(microbatches - self.recorded)

    def _rates_on(self, device: Device) -> RowRates:
        if device.id not in self._rates:
            self._rates[device.id] = row_rates(
                self._work.ops, self._work.kinds, self._work.dtypes, device, tf32=self.tf32,
                variants=self._work.variants, tensors=self._work.tensors, phases=self._work.phases,
            )  # fmt: skip
        return self._rates[device.id]


_Unfolded = tuple[Tape, list[tuple[int, ...]]]
"""A symbolic tape, and the polynomial of each symbol."""


def _unfolded(parametric: ParametricTape) -> _Unfolded:
    """The symbolic tape with all its layers, and one symbol for each polynomial."""
    tape, sizes = _canonical(parametric)
    for stack in parametric.stacks:
        tape = deepen(tape, stack)
    return tape, sizes


def _canonical(parametric: ParametricTape) -> _Unfolded:
    """The symbolic tape with one symbol for each polynomial (models that share a tape may have several)."""
    table: dict[tuple[int, ...], int] = {}
    width = len(basis_names(parametric.axes))
    padded = [(*row[:width], *(0,) * (width - len(row))) for row in parametric.sizes]
    symbols = [(table.setdefault(row, len(table)),) for row in padded]
    return concrete(parametric.tape, symbols, (1,)), list(table)


# -- memory ---------------------------------------------------------------------------------------


class _Moments:
    """The moments of the steady step that can be its peak."""

    def __init__(self, tape: Tape, sizes: np.ndarray, prices: Grid) -> None:
        import numpy as np

        self._bytes = sizes
        self.first, self.last = _window(tape)
        alive = self._alive(tape)
        inside = alive[self.first : self.last + 1]
        ticks = _unexceeded(inside)
        self._plain = inside[ticks]
        calls = np.array([call.tick for call in tape.calls], np.int64)
        where = calls.searchsorted(ticks + self.first).clip(max=len(calls) - 1)
        self._phases = [tape.calls[index].phase.value for index in where.tolist()]
        self._most: list[int] = abs(self._plain).max(axis=0).tolist()
        """Of each coefficient, the largest that is alive: their sum bounds every sum of bytes."""
        self._inside(tape, alive, prices)

    def _alive(self, tape: Tape) -> np.ndarray:
        """Bytes alive at each tick, ticks x coefficients."""
        return self._alive_of(tape, range(len(tape.storages)))

    def _alive_of(self, tape: Tape, which: Iterable[int]) -> np.ndarray:
        import numpy as np

        storages = [tape.storages[index] for index in which]
        last = max(self.last, tape.calls[-1].tick, *[s.died or s.born for s in tape.storages])
        change = np.zeros((last + 2, self._bytes.shape[1]), np.int64)
        sizes = self._bytes[[storage.bytes for storage in storages]]
        np.add.at(change, [storage.born for storage in storages], sizes)
        died = [last + 1 if storage.died is None else storage.died for storage in storages]
        np.subtract.at(change, died, sizes)
        return change.cumsum(axis=0)

    def _inside(self, tape: Tape, alive: np.ndarray, prices: Grid) -> None:
        """Moments at which a kernel takes memory inside itself."""
        import numpy as np

        self._fixed: list[tuple[int, np.ndarray, str]] = []
        self._asked: list[tuple[np.ndarray, list[int], Price, str]] = []
        by_signature: dict[tuple[int, str], list[int]] = {}
        for call in tape.calls:
            if self.first <= call.tick <= self.last:
                by_signature.setdefault((call.signature, call.phase.value), []).append(call.tick)
        known = _workspaces(tape, prices, {signature for signature, _ in by_signature})
        for (signature, phase), ticks in by_signature.items():
            price = known.get(signature)
            if price is None:
                continue
            rows = alive[ticks]
            kept = _unexceeded(rows)
            at = [ticks[index] for index in kept.tolist()]
            if price.polynomials:
                extra = _whole(price.polynomials[0])
                self._fixed.extend((tick, alive[tick] + extra, phase) for tick in at)
            else:
                self._asked.append((rows[kept], at, price, phase))
        self._fixed.sort(key=lambda moment: moment[0])
        fixed = [row for _, row, _ in self._fixed]
        self._fixed_rows = np.array(fixed, np.int64).reshape(-1, self._bytes.shape[1])

    def peak(self, at: Sequence[int], values: Sequence[int]) -> tuple[int, str]:
        """Bytes of the peak and the phase it lies in.

        Raises:
            BadNumber: more bytes than 64-bit sizes count.
        """
        require_addressable(sum(most * each for most, each in zip(self._most, at)))
        plain = self._plain @ at
        index = int(plain.argmax())
        best, phase = int(plain[index]), self._phases[index]
        found: list[tuple[int, int, str]] = []
        if len(self._fixed_rows):
            fixed = self._fixed_rows @ at
            index = int(fixed.argmax())
            found.append((int(fixed[index]), -self._fixed[index][0], self._fixed[index][2]))
        for rows, ticks, price, where in self._asked:
            (extra,) = price.at(values)
            if extra <= 0:
                continue
            alive = rows @ at
            index = int(alive.argmax())
            found.append((int(alive[index]) + extra, -ticks[index], where))
        most = max(found, default=(0, 0, ""))
        return (most[0], most[2]) if most[0] > best else (best, phase)

    def repeated(self, tape: Tape) -> tuple[int, int]:
        """First and last tick of what each further microbatch repeats.

        Raises:
            NotPolynomial: the second microbatch does not end with what it began with.
        """
        last = tape.steps - 1
        ends = {m.microbatch: m.tick for m in tape.marks if m.name == "backward_end" and m.step == last}
        if set(ends) != {0, 1}:
            raise NotPolynomial("the step's two microbatches are not marked")
        for role in {storage.role for storage in tape.storages}:
            alive = self._alive_of(tape, [i for i, s in enumerate(tape.storages) if s.role is role])
            if (alive[ends[0]] != alive[ends[1]]).any():
                raise NotPolynomial(f"the second microbatch leaves other {role.value} bytes than the first")
        return ends[0] + 1, ends[1]


def _births(tape: Tape, first: int, repeated: tuple[int, int]) -> dict[int, list[int]]:
    """Storages that the steady step makes, by the symbol of their bytes: how many once, how many in what repeats."""
    found: dict[int, list[int]] = {}
    for storage in tape.storages:
        if storage.born >= first and storage.device != HOST:
            counts = found.setdefault(storage.bytes, [0, 0])
            counts[repeated[0] <= storage.born <= repeated[1]] += 1
    return found


def _window(tape: Tape) -> tuple[int, int]:
    """First and last tick of the steady step."""
    last = tape.steps - 1
    starts = [m.tick for m in tape.marks if m.name == "step" and m.step == last]
    ends = [m.tick for m in tape.marks if m.name == "step_end" and m.step == last]
    if not starts or not ends:
        raise NotPolynomial("the tape marks no steady step")
    return min(starts), max(ends)


def _unexceeded(rows: np.ndarray) -> np.ndarray:
    """Indices, rising, of the rows that no other reaches in every coefficient; of equal ones the first.

    Only these can be the largest: the basis is never negative.
    """
    import numpy as np

    _, first = np.unique(rows, axis=0, return_index=True)
    left = np.sort(first)
    kept: list[int] = []
    while len(left):
        index = left[int(rows[left].sum(axis=1).argmax())]
        kept.append(int(index))
        left = left[~(rows[left] <= rows[index]).all(axis=1)]
    return np.array(sorted(kept), np.int64)


def _workspaces(tape: Tape, prices: Grid, signatures: set[int]) -> dict[int, Price]:
    """What the kernels of these signatures take inside, where it is more than nothing."""
    from preflop.ops.workspace import recorded_by

    cuda = tape.subject is not None and tape.subject.device != "cpu"

    def ask(signature: Signature) -> Answer:
        with recorded_by(tape.subject):
            return (inside_bytes(signature, cuda=cuda),)

    found = {}
    for signature in signatures:
        price = prices.price(signature, ask)
        if price is not None and not (price.polynomials and not any(price.polynomials[0])):
            found[signature] = price
    return found


def _whole(polynomial: Numerators) -> np.ndarray:
    """Coefficients that must be whole: those of bytes."""
    import numpy as np

    if any(c % OVER for c in polynomial):
        raise NotPolynomial("bytes that are no integer polynomial")
    return np.array([c // OVER for c in polynomial], np.int64)


# -- work -----------------------------------------------------------------------------------------

_TOTALS = ("flops", "model", "hardware", "read", "write")
# A size in the text of shapes; "x 144 more" counts tensors.
_SYMBOL = re.compile(r"\d+(?!\d| more)")
_ROW = ("flops", "attended", "read", "write")


def _nothing(names: Sequence[str], width: int) -> dict[str, list[list[int]]]:
    """Sums of polynomials, over once and over what is repeated, to begin with."""
    return {name: [[0] * width for _ in range(2)] for name in names}


@dataclass(slots=True)
class _Row:
    """Calls that the account shows on one row, with sums over once and over what is repeated."""

    key: tuple[str, ...]
    symbols: tuple[int, ...]
    """Of the shapes it shows: rows whose shapes become equal at a size are one there."""
    sums: dict[str, list[list[int]]]
    tensors: int = 1
    """As the account's row has them."""
    kind: Kind = Kind.OTHER
    calls: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(frozen=True, slots=True)
class _Asked:
    """Calls whose price is no polynomial."""

    price: Price
    row: int
    calls: tuple[int, int]
    names: tuple[tuple[str, ...], ...]
    """Per integer of the price, the totals it adds to."""
    row_names: tuple[str | None, ...]


class _Steps:
    """What the steady step does: totals, and rows to time."""

    def __init__(self, tape: Tape, sizes: np.ndarray, prices: Grid, repeated: tuple[int, int]) -> None:
        self._tape, self._prices, self._repeated = tape, prices, repeated
        self._rows: dict[tuple[int, Phase, int, int], int] = {}
        self._order: list[_Row] = []
        self._asked: list[_Asked] = []
        self._sums = _nothing(_TOTALS, sizes.shape[1])
        signatures = zip(tape.signatures, prices.at[0], dtypes(tape), strict=True)
        self._works, self._work = numbered(
            (symbolic.op, variant(example), dtype, shapes_text(symbolic), tensors_of(symbolic))
            for symbolic, example, dtype in signatures
        )
        self._modules, self._module = numbered(starred(name) for name in tape.modules)
        self._sizes = sizes
        self._count_work()
        self._count_bytes()
        self._finish()

    def _grouped(self, calls: Iterable[tuple[Call, Any]]) -> dict[tuple[int, int, Any], list[int]]:
        """Calls alike, by row, signature and what else is given: how many are made once, how many in what is
        repeated."""
        first, last = self._repeated
        work, module, rows = self._work, self._module, self._rows
        groups: dict[tuple[int, int, Any], list[int]] = {}
        for call, extra in calls:
            place = work[call.signature], call.phase, module[call.module], call.source
            row = rows.get(place)
            if row is None:
                row = self._new_row(*place)
            counts = groups.setdefault((row, call.signature, extra), [0, 0])
            counts[first <= call.tick <= last] += 1
        return groups

    def _new_row(self, work: int, phase: Phase, module: int, source: int) -> int:
        op, which, dtype, shapes, tensors = self._works[work]
        key = (op, which, phase.value, self._modules[module], self._tape.sources[source], dtype, shapes)
        symbols = tuple(int(n) for n in _SYMBOL.findall(shapes))
        self._order.append(_Row(key, symbols, _nothing(_ROW, self._sizes.shape[1]), tensors))
        self._rows[work, phase, module, source] = len(self._order) - 1
        return len(self._order) - 1

    def _count_work(self) -> None:
        calls = self._tape.steady()
        used = used_outputs(self._tape)
        groups = self._grouped((call, used.get(position)) for position, call in enumerate(calls))
        known: dict[tuple[int, Any], tuple[Price | None, Work | None]] = {}
        for (index, signature, outputs), counts in groups.items():
            if (signature, outputs) not in known:
                example = work(self._prices.at[0][signature], outputs)
                known[signature, outputs] = self._prices.price(signature, _work_of(outputs)), example
            price, example = known[signature, outputs]
            row = self._order[index]
            row.calls = [a + b for a, b in zip(row.calls, counts)]
            if price is None or example is None:
                continue
            row.kind = example.kind
            phase = row.key[2]
            names = (
                ("flops",),
                (),
                () if phase in (Phase.OPTIMIZER, Phase.RECOMPUTE) else ("model",),
                () if phase == Phase.OPTIMIZER else ("hardware",),
            )
            self._add(index, price, counts, names, ("flops", "attended", None, None))

    def _count_bytes(self) -> None:
        tape = self._tape
        still = [is_view(sig) or sig.op in UNTOUCHED for sig in tape.signatures]
        calls = ((call, aliasing(call.storages)) for call in tape.steady() if not still[call.signature])
        known: dict[tuple[int, Any], Price | None] = {}
        for (index, signature, shared), counts in self._grouped(calls).items():
            if (signature, shared) not in known:
                known[signature, shared] = self._prices.price(signature, _moved_of(shared))
            price = known[signature, shared]
            if price is not None:
                self._add(index, price, counts, (("read",), ("write",)), ("read", "write"))

    def _add(
        self,
        index: int,
        price: Price,
        counts: Sequence[int],
        names: tuple[tuple[str, ...], ...],
        row_names: tuple[str | None, ...],
    ) -> None:
        if not price.polynomials:
            self._asked.append(_Asked(price, index, (counts[0], counts[1]), names, row_names))
            return
        row = self._order[index]
        for polynomial, totals, own in zip(price.polynomials, names, row_names):
            if not any(polynomial):
                continue
            for part, count in enumerate(counts):
                if not count:
                    continue
                for sums in [self._sums[name][part] for name in totals] + (
                    [] if own is None else [row.sums[own][part]]
                ):
                    for term, coefficient in enumerate(polynomial):
                        if coefficient:
                            sums[term] += coefficient * count

    def _finish(self) -> None:
        """Sums as arrays, and which rows may become one."""
        import numpy as np

        self._arrays = {
            name: [
                np.array([[c / OVER for c in row.sums[name][part]] for row in self._order], np.float64)
                for part in range(2)
            ]
            for name in _ROW
        }
        self._calls = [np.array([row.calls[part] for row in self._order], np.float64) for part in range(2)]
        asked = {item.row for item in self._asked}
        self.kinds = [
            row.kind.value if index in asked or any(any(part) for part in row.sums["flops"]) else ""
            for index, row in enumerate(self._order)
        ]
        self._results = [
            result_sizes(row.key[-1]) if row.kind is Kind.MATMUL else None for row in self._order
        ]
        self.dtypes = [row.key[-2] for row in self._order]
        self.ops = [row.key[0] for row in self._order]
        self.variants = [row.key[1] for row in self._order]
        self.phases = [row.key[2] for row in self._order]
        self.tensors = [row.tensors for row in self._order]
        self._pairs = list(_may_be_one(self._order, self._sizes))

    def at(
        self, at: Sequence[int], values: Sequence[int], extra: int
    ) -> tuple[dict[str, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Totals at a size, and the rows' FLOPs, bytes and calls.

        Args:
            extra: microbatches beyond those recorded.
        """
        import numpy as np

        times = (1, 1 + extra)
        totals = {
            name: sum(whole_value(part, at) * n for part, n in zip(parts, times))
            for name, parts in self._sums.items()
        }
        point = np.array(at, np.float64)
        more = times[1]
        rows = {name: once @ point + rest @ point * more for name, (once, rest) in self._arrays.items()}
        calls = self._calls[0] + self._calls[1] * more
        for item in self._asked:
            count = sum(c * n for c, n in zip(item.calls, times))
            for answer, names, own in zip(item.price.at(values), item.names, item.row_names):
                for name in names:
                    totals[name] += answer * count
                if own is not None:
                    rows[own][item.row] += float(answer * count)
        self._join(rows, calls, values)
        return totals, (np.minimum(rows["flops"], rows["attended"]), rows["read"] + rows["write"], calls)

    def results(self, values: Sequence[int]) -> np.ndarray:
        """Products, rows and columns of what each row's matmul writes; zeros for other rows."""
        import numpy as np

        found = np.zeros((len(self._order), 3))
        for index, symbols in enumerate(self._results):
            if symbols is not None:
                found[index] = [1, *(values[symbol] for symbol in symbols)][-3:]
        return found

    def polynomial_rows(self, extra: int) -> list[PolynomialRow]:
        """The rows, with so many microbatches beyond those recorded."""
        asked: dict[int, set[str | None]] = {}
        for item in self._asked:
            asked.setdefault(item.row, set()).update(item.row_names)

        def total(index: int, row: _Row, name: str) -> Numerators | None:
            if name in asked.get(index, ()):
                return None
            once, rest = row.sums[name]
            return tuple(a + b * (1 + extra) for a, b in zip(once, rest))

        found = []
        for index, row in enumerate(self._order):
            op, _, phase, module, source, dtype, shapes = row.key
            figures = [total(index, row, name) for name in ("flops", "read", "write")]
            if all(figure is not None and not any(figure) for figure in figures):
                continue  # a view
            found.append(
                PolynomialRow(
                    op, phase, module, source or None, dtype, row.calls[0] + row.calls[1] * (1 + extra),
                    _SYMBOL.sub(lambda number: f"#{number[0]}", shapes),
                    {symbol: tuple(self._sizes[symbol].tolist()) for symbol in set(row.symbols)},
                    *figures,
                )
            )  # fmt: skip
        return found

    def _join(self, rows: dict[str, Any], calls: Any, values: Sequence[int]) -> None:
        """Rows whose shapes are equal at this size are one row of the account."""
        gone: set[int] = set()
        for into, row, ones, twos in self._pairs:
            if row in gone or any(values[a] != values[b] for a, b in zip(ones, twos)):
                continue
            gone.add(row)
            for figures in (*rows.values(), calls):
                figures[into] += figures[row]
                figures[row] = 0


def _work_of(outputs: tuple[bool, ...] | None) -> Any:
    """A formula for (FLOPs, attended FLOPs, model FLOPs, hardware FLOPs) of one call."""

    def ask(signature: Signature) -> Answer | None:
        price = work(signature, outputs)
        if price is None:
            return None
        parts = [part for part in price.parts or (price,) if part.kind in _MODEL_KINDS]
        return (
            price.flops,
            price.flops if price.attended_flops is None else price.attended_flops,
            sum(part.flops for part in parts),
            sum(part.flops if part.hardware_flops is None else part.hardware_flops for part in parts),
        )

    return ask


def _moved_of(shared: tuple[int, ...] | None) -> Any:
    """A formula for (bytes read, bytes written) of one call."""

    def ask(signature: Signature) -> Answer:
        price = moved(signature, shared)
        return price.read_bytes, price.write_bytes

    return ask


def _may_be_one(
    rows: Sequence[_Row], sizes: np.ndarray
) -> Iterable[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Pairs of rows that differ in their shapes alone, and whose shapes are equal at some sizes."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault((*row.key[:-1], _SYMBOL.sub("#", row.key[-1])), []).append(index)
    for members in groups.values():
        for place, later in enumerate(members):
            for earlier in members[:place]:
                one, two = rows[earlier].symbols, rows[later].symbols
                if all(_may_be_equal(sizes[a] - sizes[b]) for a, b in zip(one, two)):
                    yield earlier, later, one, two


def _may_be_equal(difference: np.ndarray) -> bool:
    """Whether a polynomial may be zero: not when all its coefficients have one sign."""
    return not difference.any() or bool((difference > 0).any() and (difference < 0).any())
