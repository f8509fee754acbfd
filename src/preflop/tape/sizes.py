"""Parametric tapes: every size of a tape as a polynomial in batch B and the lengths of its axes.

The calls of a step do not change with its sizes (for ordinary models); every dimension, stride and
storage size is an integer polynomial: with one sequence S in the basis 1, B, S, BS, S^2, BS^2, with several
axes in all products of at most two lengths, with and without B (cross attention needs source * target).
`fit` finds the coefficients exactly from tapes recorded at a grid of sizes and `agrees` holds them against
tapes that were not fitted. What does not fit is refused, and is to be recorded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from preflop.axes import SEQ, Axis, sizes_text
from preflop.errors import PreflopError
from preflop.tape.events import Signature, Storage, Tape, TensorMeta
from preflop.tape.stack import Stack

Coefficients = tuple[int, ...]
"""Of one polynomial, in the order of `basis_names`."""
SEQUENCE = (Axis(SEQ),)


class NotPolynomial(PreflopError):
    """The tapes do not have one structure, or a size is no such polynomial; the text says which."""


def _products(axes: int) -> list[tuple[int, ...]]:
    """Which axes are multiplied in each term: none, one, or two."""
    return [
        chosen for degree in (0, 1, 2) for chosen in combinations_with_replacement(range(axes), degree)
    ]


def basis_names(axes: Sequence[Axis] = SEQUENCE) -> tuple[str, ...]:
    """The terms that a size is a sum of.

    >>> basis_names()
    ('1', 'B', 'S', 'B*S', 'S^2', 'B*S^2')
    >>> basis_names((Axis("source"), Axis("target")))[6:]
    ('source^2', 'B*source^2', 'source*target', 'B*source*target', 'target^2', 'B*target^2')
    """
    letters = [axis.letter for axis in axes]
    names: list[str] = []
    for chosen in _products(len(axes)):
        squared = len(chosen) == 2 and chosen[0] == chosen[1]
        word = f"{letters[chosen[0]]}^2" if squared else "*".join(letters[index] for index in chosen)
        names += [word or "1", f"B*{word}" if word else "B"]
    return tuple(names)


BASIS = basis_names()
"""With one sequence."""


def basis(batch: int, *steps: int) -> tuple[int, ...]:
    """The values of the terms at a batch and a length in units along each axis.

    >>> basis(2, 3), basis(2)
    ((1, 2, 3, 6, 9, 18), (1, 2))
    """
    values: list[int] = []
    for chosen in _products(len(steps)):
        length = prod(steps[index] for index in chosen)
        values += [length, batch * length]
    return tuple(values)


def value(coefficients: Coefficients, at: Sequence[int]) -> int:
    """The polynomial's value where the basis has the values `at`."""
    return sum(c * x for c, x in zip(coefficients, at))


@dataclass(frozen=True, slots=True)
class Constant:
    """Stands in a merged tape's argument list for a number that differs between its models: the index
    into the model's constants."""

    index: int


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths along one axis, in its units."""

    least: int
    most: int | None = None
    multiple: int = 1

    def holds(self, steps: int) -> bool:
        """Whether the length is one of these."""
        return (
            self.least <= steps
            and (self.most is None or steps <= self.most)
            and steps % self.multiple == 0
        )


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a parametric tape holds: it was verified there, or its structure is known to change."""

    least_batch: int = 1
    most_batch: int | None = None
    spans: tuple[Span, ...] = ()
    """Of each axis, in the tape's order."""

    def holds(self, batch: int, *steps: int) -> bool:
        """Whether the size lies in the domain."""
        if batch < self.least_batch or (self.most_batch is not None and batch > self.most_batch):
            return False
        return len(steps) == len(self.spans) and all(
            span.holds(length) for span, length in zip(self.spans, steps)
        )


@dataclass(frozen=True)
class ParametricTape:
    """A tape whose integers are polynomials, and the stacks of blocks it folds."""

    tape: Tape
    """As recorded, except that every size is an index into `sizes`."""
    sizes: tuple[Coefficients, ...]
    stacks: tuple[Stack, ...] = ()
    domain: Domain = field(default_factory=Domain)
    axes: tuple[Axis, ...] = ()
    """What the lengths are called, in the order of the polynomials."""
    tokens: Coefficients | None = None
    """Tokens of one microbatch; None where there are none."""

    def steps(self, *lengths: int | None, **named: int) -> tuple[int, ...] | None:
        """The lengths in units, in the order of the axes; None where they are not those of this tape.

        Args:
            lengths: in the order of the axes; None for a sequence that there is not.
            named: the same by their names.
        """
        given = [length for length in lengths if length is not None]
        names = [axis.name for axis in self.axes]
        if len(given) > len(names) or set(named) != set(names[len(given) :]):
            return None
        ordered = [*given, *(named[name] for name in names[len(given) :])]
        found = [axis.steps(length) for axis, length in zip(self.axes, ordered)]
        return None if None in found else tuple(steps for steps in found if steps is not None)

    def holds(self, batch: int, *lengths: int | None, **named: int) -> bool:
        """Whether the size was verified (see `at`)."""
        steps = self.steps(*lengths, **named)
        return steps is not None and self.domain.holds(batch, *steps)

    def at(self, batch: int, *lengths: int | None, **named: int) -> Tape:
        """The concrete tape at a size, its stacks still cut (see `transforms.depth.deepen`).

        Args:
            lengths: along each axis, in their order; None for a sequence that there is not.
            named: the same by their names: `tape.at(8, source=512, target=128)`.

        Raises:
            NotPolynomial: the size is outside of the domain.
        """
        steps = self.steps(*lengths, **named)
        if steps is None or not self.domain.holds(batch, *steps):
            raise NotPolynomial(f"{self.asked(batch, *lengths, **named)} is outside of what was verified")
        return self._concrete(batch, steps)

    @staticmethod
    def asked(batch: int, *lengths: int | None, **named: int) -> str:
        """A size in words, as it was asked for.

        >>> ParametricTape.asked(8, 512), ParametricTape.asked(8, source=512, target=128)
        ('batch 8, sequence 512', 'batch 8, source 512, target 128')
        """
        words = [f"sequence {length}" for length in lengths if length is not None]
        return ", ".join([f"batch {batch}", *words, *(f"{name} {length}" for name, length in named.items())])

    def _concrete(self, batch: int, steps: tuple[int, ...]) -> Tape:
        at = basis(batch, *steps)
        made = concrete(self.tape, self.sizes, at)
        if made.subject is not None:
            lengths = [axis.length(count) for axis, count in zip(self.axes, steps)]
            unit = made.subject.batch.rpartition(" ")[2]
            made.subject = dataclasses.replace(
                made.subject, batch=sizes_text(self.axes, batch, lengths, unit), samples=batch,
                tokens=None if self.tokens is None else value(self.tokens, at),
            )  # fmt: skip
        return made


# -- fitting --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A tape recorded at one size."""

    batch: int
    steps: tuple[int, ...]
    """The length along each axis, in its units."""
    tape: Tape


def fit(
    samples: Sequence[Sample], stacks: tuple[Stack, ...] = (), axes: tuple[Axis, ...] = SEQUENCE
) -> ParametricTape:
    """The parametric tape through the samples.

    Args:
        samples: at two batches, or at one: the fit then holds for that batch alone; times the lengths of
            `lattice`.

    Raises:
        NotPolynomial: the samples differ in more than sizes, or a size is no integer polynomial.
    """
    terms = terms_of(len(axes), one_batch=len({sample.batch for sample in samples}) == 1)
    inverse = invert([tuple(basis(s.batch, *s.steps)[i] for i in terms) for s in samples])
    table: dict[Coefficients, int] = {}
    known: dict[tuple[int, ...], int] = {}

    def symbol(values: tuple[int, ...]) -> int:
        if values not in known:
            known[values] = table.setdefault(_solve(inverse, values, terms, axes), len(table))
        return known[values]

    tapes = [sample.tape for sample in samples]
    tape = _joined(tapes, symbol)
    tokens = [None if one.subject is None else one.subject.tokens for one in tapes]
    counted = tuple(count for count in tokens if count is not None)
    of_tokens = _solve(inverse, counted, terms, axes) if len(counted) == len(tapes) else None
    return ParametricTape(tape, tuple(table), stacks, axes=axes, tokens=of_tokens)


def lattice(axes: int) -> list[tuple[int, ...]]:
    """Where lengths must be known for a fit: as many points as there are products of at most two lengths.

    >>> lattice(1), lattice(2)
    ([(0,), (1,), (2,)], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)])
    """
    return [point for point in product(range(3), repeat=axes) if sum(point) <= 2]


def terms_of(axes: int, *, one_batch: bool) -> list[int]:
    """Which terms samples can tell apart: at one batch those without it."""
    return [index for index in range(2 * len(_products(axes))) if not (one_batch and index % 2)]


Symbol = Callable[[tuple[int, ...]], int]
ConstantFor = Callable[[tuple[float, ...]], Constant]


def _no_constant(values: tuple[float, ...]) -> Constant:
    raise NotPolynomial(f"the argument {values[0]!r} changes with the size")


def _joined(
    tapes: Sequence[Tape], symbol: Symbol, constant: ConstantFor = _no_constant
) -> Tape:
    """One tape whose sizes are symbols for what the tapes have in each place."""
    for tape in tapes[1:]:
        _aligned(tapes[0], tape)
    pairs: dict[tuple[int, ...], int] = {}
    signatures: list[Signature] = []
    calls = []
    for rows in zip(*(tape.calls for tape in tapes)):
        key = tuple(call.signature for call in rows)
        if key not in pairs:
            pairs[key] = len(signatures)
            kinds = [tape.signatures[number] for tape, number in zip(tapes, key)]
            signatures.append(_symbolic_signature(kinds, symbol, constant))
        calls.append(dataclasses.replace(rows[0], signature=pairs[key]))
    storages = [_symbolic_storage(row, symbol) for row in zip(*(tape.storages for tape in tapes))]
    parameters = [
        dataclasses.replace(row[0], shape=tuple(symbol(sizes) for sizes in zip(*(p.shape for p in row))))
        for row in zip(*(tape.parameters for tape in tapes))
    ]
    return dataclasses.replace(
        tapes[0], signatures=signatures, calls=calls, storages=storages, parameters=parameters
    )


@dataclass(frozen=True)
class Merged:
    """One symbolic tape of several models."""

    tape: Tape
    sizes: list[list[Coefficients]]
    """Per model: what the tape's indices stand for."""
    constants: list[list[float]]
    """Per model: what the tape's `Constant`s stand for."""


def merge(tapes: Sequence[ParametricTape]) -> Merged:
    """One symbolic tape for several models that make the same calls, and what each model puts in it.

    Raises:
        NotPolynomial: they differ in more than sizes.
    """
    first = tapes[0].tape
    for other in tapes:
        for part in ("modules", "module_types", "sources", "marks", "assumptions", "steps"):
            if getattr(first, part) != getattr(other.tape, part):
                raise NotPolynomial(f"the models differ in {part}")
    table: dict[tuple[Coefficients, ...], int] = {}
    numbers: dict[tuple[float, ...], int] = {}

    def symbol(indices: tuple[int, ...]) -> int:
        key = tuple(tape.sizes[index] for tape, index in zip(tapes, indices))
        return table.setdefault(key, len(table))

    def constant(values: tuple[float, ...]) -> Constant:
        return Constant(numbers.setdefault(values, len(numbers)))

    merged = _joined([tape.tape for tape in tapes], symbol, constant)
    every = range(len(tapes))
    return Merged(
        merged,
        [[key[number] for key in table] for number in every],
        [[key[number] for key in numbers] for number in every],
    )


def filled(tape: Tape, constants: Sequence[float]) -> Tape:
    """A merged tape with one model's constants in their places."""

    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple([fill(item) for item in value])
        return constants[value.index] if isinstance(value, Constant) else value

    signatures = [
        dataclasses.replace(
            s, args=fill(s.args), kwargs=tuple((name, fill(value)) for name, value in s.kwargs)
        )
        for s in tape.signatures
    ]
    return dataclasses.replace(tape, signatures=signatures)


def agrees(parametric: ParametricTape, sample: Sample) -> bool:
    """Whether the parametric tape gives exactly the sample's tape."""
    try:
        _aligned(parametric.tape, sample.tape)
    except NotPolynomial:
        return False
    made = concrete(parametric.tape, parametric.sizes, basis(sample.batch, *sample.steps))
    same_calls = all(
        made.signatures[a.signature] == sample.tape.signatures[b.signature]
        for a, b in zip(made.calls, sample.tape.calls)
    )
    return (
        same_calls
        and made.storages == sample.tape.storages
        and made.parameters == sample.tape.parameters
    )


def _aligned(first: Tape, other: Tape) -> None:
    """Raise unless `other` has the structure of `first`."""
    if len(first.calls) != len(other.calls) or len(first.storages) != len(other.storages):
        raise NotPolynomial("the step makes other calls at other sizes")
    for a, b in zip(first.calls, other.calls):
        if (a.storages, a.tick, a.phase, a.module) != (b.storages, b.tick, b.phase, b.module):
            raise NotPolynomial("the step makes its calls in another order at other sizes")
        one, two = first.signatures[a.signature], other.signatures[b.signature]
        if (one.op, one.overload, one.aliases, one.writes) != (
            two.op, two.overload, two.aliases, two.writes,
        ):  # fmt: skip
            raise NotPolynomial(f"{one.op} becomes {two.op} at another size")
    for c, d in zip(first.storages, other.storages):
        if (c.born, c.died, c.role, c.dtype) != (d.born, d.died, d.role, d.dtype):
            raise NotPolynomial("tensors live otherwise at other sizes")


def invert(rows: Sequence[tuple[int, ...]]) -> list[list[Fraction]]:
    """The inverse of a small integer matrix, exactly (Gauss-Jordan)."""
    size = len(rows)
    if any(len(row) != size for row in rows):
        raise ValueError(f"{size} samples do not determine {len(rows[0])} coefficients")
    work = [
        [Fraction(x) for x in row] + [Fraction(int(i == j)) for j in range(size)]
        for i, row in enumerate(rows)
    ]
    for column in range(size):
        pivot = next((r for r in range(column, size) if work[r][column] != 0), None)
        if pivot is None:
            raise ValueError("the samples' sizes do not determine the coefficients")
        work[column], work[pivot] = work[pivot], work[column]
        scale = work[column][column]
        work[column] = [x / scale for x in work[column]]
        for row in range(size):
            if row != column and work[row][column] != 0:
                factor = work[row][column]
                work[row] = [x - factor * y for x, y in zip(work[row], work[column])]
    return [row[size:] for row in work]


def _solve(
    inverse: list[list[Fraction]], values: tuple[int, ...], terms: list[int], axes: Sequence[Axis]
) -> Coefficients:
    solved = [sum((c * v for c, v in zip(row, values)), Fraction(0)) for row in inverse]
    if any(x.denominator != 1 for x in solved):
        names = " and ".join(["batch", *("sequence" if axis.name == SEQ else axis.name for axis in axes)])
        raise NotPolynomial(f"sizes {values} are no integer polynomial in {names}")
    found = {term: int(x) for term, x in zip(terms, solved)}
    return tuple(found.get(term, 0) for term in range(2 * len(_products(len(axes)))))


# -- symbols for sizes, and back ------------------------------------------------------------------


def _symbolic_signature(
    kinds: Sequence[Signature], symbol: Symbol, constant: ConstantFor
) -> Signature:
    first = kinds[0]
    pairs = [kind.attended_pairs for kind in kinds]
    known = tuple(pair for pair in pairs if pair is not None)
    if 0 < len(known) < len(pairs):
        raise NotPolynomial("attended pairs are known at some sizes only")
    return dataclasses.replace(
        first,
        args=_symbolic([kind.args for kind in kinds], symbol, constant),
        kwargs=tuple(
            (name, _symbolic([dict(kind.kwargs)[name] for kind in kinds], symbol, constant))
            for name, _ in first.kwargs
        ),
        inputs=tuple(_symbolic_meta(row, symbol) for row in zip(*(k.inputs for k in kinds))),
        outputs=tuple(_symbolic_meta(row, symbol) for row in zip(*(k.outputs for k in kinds))),
        attended_pairs=symbol(known) if known else None,
    )


def _symbolic(values: Sequence[Any], symbol: Symbol, constant: ConstantFor) -> Any:
    first = values[0]
    if isinstance(first, tuple):
        if any(not isinstance(v, tuple) or len(v) != len(first) for v in values):
            raise NotPolynomial("an argument list changes its length with the size")
        return tuple(_symbolic(row, symbol, constant) for row in zip(*values))
    if type(first) is int:
        if any(type(v) is not int for v in values):
            raise NotPolynomial("an argument changes its kind with the size")
        return symbol(tuple(values))
    if any(v != first for v in values):
        if all(type(v) is float for v in values):
            return constant(tuple(values))
        raise NotPolynomial(f"the argument {first!r} changes with the size")
    return first


def _symbolic_meta(metas: Sequence[TensorMeta], symbol: Symbol) -> TensorMeta:
    first = metas[0]
    if any(len(m.shape) != len(first.shape) or m.dtype != first.dtype for m in metas):
        raise NotPolynomial("a tensor changes its rank or dtype with the size")
    return TensorMeta(
        tuple(symbol(row) for row in zip(*(m.shape for m in metas))),
        tuple(symbol(row) for row in zip(*(m.stride for m in metas))),
        symbol(tuple(m.offset for m in metas)),
        first.dtype,
        first.device,
    )


def _symbolic_storage(storages: Sequence[Storage], symbol: Symbol) -> Storage:
    first = storages[0]
    return dataclasses.replace(
        first,
        bytes=symbol(tuple(s.bytes for s in storages)),
        shape=tuple(symbol(row) for row in zip(*(s.shape for s in storages))),
    )


def concrete(tape: Tape, sizes: Sequence[Coefficients], at: Sequence[int]) -> Tape:
    """The tape with every symbol replaced by its value where the basis has the values `at`."""
    values = [value(coefficients, at) for coefficients in sizes]
    signatures = concrete_signatures(tape.signatures, values)
    storages = [
        Storage(values[s.bytes], s.dtype, tuple([values[i] for i in s.shape]), s.born, s.died, s.role,
                s.name, s.call, s.device)
        for s in tape.storages
    ]  # fmt: skip
    return dataclasses.replace(
        tape,
        signatures=signatures,
        storages=storages,
        parameters=[
            dataclasses.replace(p, shape=tuple([values[i] for i in p.shape])) for p in tape.parameters
        ],
        assumptions=list(tape.assumptions),
    )


def concrete_signatures(symbolic: Sequence[Signature], values: Sequence[int]) -> list[Signature]:
    """The signatures with every symbol replaced by its value."""
    metas: dict[TensorMeta, TensorMeta] = {}

    def meta(symbol: TensorMeta) -> TensorMeta:
        if symbol not in metas:
            metas[symbol] = TensorMeta(
                tuple([values[i] for i in symbol.shape]),
                tuple([values[i] for i in symbol.stride]),
                values[symbol.offset],
                symbol.dtype,
                symbol.device,
            )
        return metas[symbol]

    return [
        Signature(
            s.op, s.overload, _number(s.args, values),
            tuple((name, _number(v, values)) for name, v in s.kwargs),
            tuple(meta(m) for m in s.inputs), tuple(meta(m) for m in s.outputs),
            s.aliases, s.writes,
            None if s.attended_pairs is None else values[s.attended_pairs],
        )
        for s in symbolic
    ]


def _number(symbolic: Any, values: Sequence[int]) -> Any:
    if isinstance(symbolic, tuple):
        return tuple([_number(item, values) for item in symbolic])
    if type(symbolic) is int:
        return values[symbolic]
    return symbolic


def formula(coefficients: Coefficients, names: Sequence[str] = BASIS) -> str:
    """A polynomial as people write it.

    Args:
        names: of its terms (`basis_names`).

    >>> formula((0, 0, 0, 8192, 0, 0)), formula((0, 0, 0, 0, 0, 0)), formula((1, 2))
    ('8192*B*S', '0', '1 + 2*B')
    """
    terms: list[str] = []
    for coefficient, name in zip(coefficients, names):
        if coefficient == 0:
            continue
        if name == "1":
            terms.append(str(coefficient))
        else:
            terms.append(name if coefficient == 1 else f"{coefficient}*{name}")
    return " + ".join(terms) or "0"
