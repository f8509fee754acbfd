"""Prices of symbolic calls as polynomials in batch and lengths.

A formula of `ops` sees one concrete signature. Here it is asked at a few sizes, the polynomial through
its answers is found exactly (rational coefficients: causal attention has halves), and held against sizes
that were not fitted, small and large. What does not fit (a minimum of two sizes, a padded workspace) is
asked again at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

from preflop.tape.events import Signature
from preflop.tape.sizes import (
    Coefficients,
    Domain,
    NotPolynomial,
    Span,
    basis,
    concrete_signatures,
    invert,
    lattice,
    terms_of,
    value,
)

Size = tuple[int, ...]
"""Batch, and a length in units along each axis."""
Numerators = tuple[int, ...]
"""Coefficients of `tape.sizes.basis`, each over `OVER`."""
Answer = tuple[int, ...]

# Denominators that occur: 2 of causal pairs, and room for thirds, fifths and more halves.
OVER = 240

# Verified at, where the domain allows: sizes far beyond the fitted ones, coprime to what kernels pad to.
_FAR_BATCH = 97
_FAR_SEQ = 100_003


@dataclass(frozen=True, slots=True)
class Points:
    """The sizes at which prices are asked: as many as there are coefficients, then the ones to verify."""

    terms: tuple[int, ...]
    """Which of the basis can be other than constant here."""
    fitted: tuple[Size, ...]
    verified: tuple[Size, ...]

    @property
    def all(self) -> tuple[Size, ...]:
        """Fitted, then verified."""
        return self.fitted + self.verified


def points(domain: Domain) -> Points:
    """Sizes within the domain to fit and verify prices at."""
    one_batch = domain.most_batch == domain.least_batch
    low = domain.least_batch
    batches = (low,) if one_batch else (low + 1, low + 2)
    far_batch = low if one_batch else _FAR_BATCH
    lengths = [_lengths(span) for span in domain.spans]
    terms = tuple(terms_of(len(lengths), one_batch=one_batch))
    inner = [tuple(of[1 + n] for of, n in zip(lengths, point)) for point in lattice(len(lengths))]
    ends = list(product(*((of[0], of[-1]) for of in lengths)))
    fitted = tuple((batch, *steps) for batch in batches for steps in inner)
    verified = tuple((batch, *steps) for steps in ends for batch in (far_batch, low))
    return Points(terms, fitted, tuple(dict.fromkeys(verified)))


def _lengths(span: Span) -> list[int]:
    """The least length, three to fit, the longest (or a far one), all in the span."""
    step, least = span.multiple, span.least
    last = ((span.most or _FAR_SEQ) - least) // step
    if last < 2:
        raise NotPolynomial(f"lengths from {least} to {span.most} are too few to fit a price")
    first = min(max(1, last // 8), last - 2)
    second = min(max(first + 1, last // 4), last - 1)
    numbers = (0, first, second, max(second + 1, last // 2), last)
    return [least + step * number for number in numbers]


@dataclass(frozen=True)
class Grid:
    """The signatures of a symbolic tape at every size of `points`, and what fits prices through them."""

    points: Points
    sizes: tuple[Coefficients, ...]
    at: tuple[list[Signature], ...]
    """Per point: the concrete signatures."""
    symbolic: Sequence[Signature]
    fits: dict[tuple[int, ...], Numerators | None] = field(default_factory=dict, compare=False)
    """Answers over all points -> the polynomial through them, None where there is none."""

    def price(self, index: int, ask: Callable[[Signature], Answer | None]) -> Price | None:
        """The price of one signature; None where the formula knows none.

        Args:
            ask: the formula: a tuple of integers, always of one length.
        """
        first, last = self.at[0][index], self.at[-1][index]
        # What depends on no size is one object at every point: asked once.
        answers = [ask(first)] * len(self.at) if first is last else [ask(signatures[index]) for signatures in self.at]
        if any(answer is None for answer in answers):
            return None
        columns = list(zip(*[answer for answer in answers if answer is not None]))
        fits = [self._fit(column) for column in columns]
        if any(fit is None for fit in fits):
            return Price((), self.symbolic[index], ask, len(columns))
        return Price(tuple(fit for fit in fits if fit is not None), None, None, len(columns))

    def _fit(self, column: tuple[int, ...]) -> Numerators | None:
        if column not in self.fits:
            self.fits[column] = self._solved(column)
        return self.fits[column]

    def _solved(self, column: tuple[int, ...]) -> Numerators | None:
        count = len(self.points.fitted)
        width = len(basis(*self.points.fitted[0]))
        found = [0] * width
        if len(set(column)) == 1:
            return (column[0] * OVER, *found[1:])
        for term, row in zip(self.points.terms, _inverse_of(self.points)):
            coefficient = OVER * sum((c * v for c, v in zip(row, column[:count])), Fraction(0))
            if coefficient.denominator != 1:
                return None
            found[term] = int(coefficient)
        for size, wanted in zip(self.points.verified, column[count:]):
            if sum(c * x for c, x in zip(found, basis(*size))) != wanted * OVER:
                return None
        return tuple(found)


def grid(signatures: Sequence[Signature], sizes: tuple[Coefficients, ...], domain: Domain) -> Grid:
    """The signatures at the sizes that prices are fitted through."""
    found = points(domain)
    varying = [index for index, signature in enumerate(signatures) if _varies(signature, sizes)]
    at: list[list[Signature]] = []
    for size in found.all:
        values = [value(coefficients, basis(*size)) for coefficients in sizes]
        if not at:
            at.append(concrete_signatures(signatures, values))
            continue
        changed = concrete_signatures([signatures[index] for index in varying], values)
        row = list(at[0])
        for index, signature in zip(varying, changed):
            row[index] = signature
        at.append(row)
    return Grid(found, sizes, tuple(at), signatures)


def _varies(signature: Signature, sizes: tuple[Coefficients, ...]) -> bool:
    """Whether anything of a symbolic signature depends on the size (the optimizer's calls do not)."""
    symbols = {symbol for meta in signature.inputs + signature.outputs for symbol in meta.shape + meta.stride}
    symbols |= {meta.offset for meta in signature.inputs + signature.outputs}
    symbols |= set(_integers((signature.args, signature.kwargs, signature.attended_pairs)))
    return any(any(sizes[symbol][1:]) for symbol in symbols)


def _integers(thing: object) -> Iterator[int]:
    if isinstance(thing, tuple):
        for item in thing:
            yield from _integers(item)
    elif type(thing) is int:
        yield thing


@dataclass(frozen=True)
class Price:
    """What one call costs, as a function of the size: some integers."""

    polynomials: tuple[Numerators, ...]
    """One for each integer; empty where it is no polynomial."""
    signature: Signature | None
    """Where it is no polynomial: the symbolic call, to be asked at each size."""
    ask: Callable[[Signature], Answer | None] | None
    length: int

    def at(self, values: Sequence[int]) -> Answer:
        """The integers of a call that is no polynomial, where the symbols have these values."""
        if self.ask is None or self.signature is None:
            raise ValueError("this price is a polynomial")
        answer = self.ask(concrete_signatures([self.signature], values)[0])
        if answer is None:
            raise NotPolynomial(f"{self.signature.op} has no price at this size")
        return answer


_INVERSES: dict[Points, list[list[Fraction]]] = {}


def _inverse_of(found: Points) -> list[list[Fraction]]:
    if found not in _INVERSES:
        rows = [tuple(basis(*size)[term] for term in found.terms) for size in found.fitted]
        _INVERSES[found] = invert(rows)
    return _INVERSES[found]


def whole_value(numerators: Sequence[int], at: Sequence[int]) -> int:
    """The polynomial's value where the basis has these values.

    >>> whole_value((0, 0, 0, OVER // 2, 0, OVER // 2), basis(3, 5))     # causal pairs: B S (S + 1) / 2
    45

    Raises:
        NotPolynomial: the value is no integer.
    """
    whole, rest = divmod(sum(n * x for n, x in zip(numerators, at)), OVER)
    if rest:
        raise NotPolynomial("a count that is no integer")
    return whole

