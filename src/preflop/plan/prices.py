"""Prices of symbolic calls as polynomials in batch and sequence length.

A formula of `ops` sees one concrete signature. Here it is asked at a few sizes, the polynomial through
its answers is found exactly (rational coefficients: causal attention has halves), and held against sizes
that were not fitted, small and large. What does not fit (a minimum of two sizes, a padded workspace) is
asked again at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from preflop.tape.events import Signature
from preflop.tape.sizes import (
    BASIS,
    Coefficients,
    Domain,
    NotPolynomial,
    basis,
    concrete_signatures,
    invert,
    value,
)

Size = tuple[int, "int | None"]
Rational = tuple[Fraction, ...]
Answer = tuple[int, ...]

# Verified at, where the domain allows: sizes far beyond the fitted ones, coprime to what kernels pad to.
_FAR_BATCH = 97
_FAR_SEQ = 100_003


@dataclass(frozen=True, slots=True)
class Points:
    """The sizes at which prices are asked: as many as there are coefficients, then the ones to verify."""

    terms: tuple[int, ...]
    """Which of `BASIS` can be other than constant here."""
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
    if domain.least_seq is None:
        terms: tuple[int, ...] = (0,) if one_batch else (0, 1)
        return Points(terms, tuple((b, None) for b in batches), ((far_batch, None), (low, None)))
    lengths = _lengths(domain)
    terms = (0, 2, 4) if one_batch else tuple(range(len(BASIS)))
    fitted = tuple((b, s) for b in batches for s in lengths[1:4])
    verified = ((far_batch, lengths[-1]), (low, lengths[0]), (far_batch, lengths[0]), (low, lengths[-1]))
    return Points(terms, fitted, tuple(dict.fromkeys(verified)))


def _lengths(domain: Domain) -> list[int]:
    """The least length, three between, the longest (or a far one), all in the domain."""
    if domain.least_seq is None:
        raise NotPolynomial("there is no sequence")
    step, least = domain.seq_multiple, domain.least_seq
    most = (domain.most_seq or _FAR_SEQ) // step * step
    between = [(least + (most - least) * part // 8 + step - 1) // step * step for part in (1, 2, 4)]
    lengths = [least, *between, most]
    if len(set(lengths)) != len(lengths):
        raise NotPolynomial(f"sequences from {least} to {most} are too few to fit a price")
    return lengths


@dataclass(frozen=True)
class Grid:
    """The signatures of a symbolic tape at every size of `points`, and what fits prices through them."""

    points: Points
    sizes: tuple[Coefficients, ...]
    at: tuple[list[Signature], ...]
    """Per point: the concrete signatures."""
    symbolic: Sequence[Signature]

    def price(self, index: int, ask: Callable[[Signature], Answer | None]) -> Price | None:
        """The price of one signature; None where the formula knows none.

        Args:
            ask: the formula: a tuple of integers, always of one length.
        """
        answers = [ask(signatures[index]) for signatures in self.at]
        if any(answer is None for answer in answers):
            return None
        columns = list(zip(*[answer for answer in answers if answer is not None]))
        fits = [self._fit(column) for column in columns]
        if any(fit is None for fit in fits):
            return Price((), self.symbolic[index], ask, len(columns))
        return Price(tuple(fit for fit in fits if fit is not None), None, None, len(columns))

    def _fit(self, column: tuple[int, ...]) -> Rational | None:
        count = len(self.points.fitted)
        if len(set(column)) == 1:
            return (Fraction(column[0]), *[Fraction(0)] * (len(BASIS) - 1))
        found = [Fraction(0)] * len(BASIS)
        for term, row in zip(self.points.terms, _inverse_of(self.points)):
            found[term] = sum((c * v for c, v in zip(row, column[:count])), Fraction(0))
        for size, wanted in zip(self.points.verified, column[count:]):
            if sum((c * x for c, x in zip(found, basis(*size))), Fraction(0)) != wanted:
                return None
        return tuple(found)


def grid(signatures: Sequence[Signature], sizes: tuple[Coefficients, ...], domain: Domain) -> Grid:
    """The signatures at the sizes that prices are fitted through."""
    found = points(domain)
    at = []
    for size in found.all:
        values = [value(coefficients, basis(*size)) for coefficients in sizes]
        at.append(concrete_signatures(signatures, values))
    return Grid(found, sizes, tuple(at), signatures)


@dataclass(frozen=True)
class Price:
    """What one call costs, as a function of the size: some integers."""

    polynomials: tuple[Rational, ...]
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


@dataclass(slots=True)
class Total:
    """A sum of polynomials with rational coefficients whose value is an integer."""

    numerators: list[int]
    denominator: int = 1

    @classmethod
    def of(cls, coefficients: Sequence[Fraction]) -> Total:
        """The polynomial over its least common denominator."""
        common = lcm(*(c.denominator for c in coefficients))
        return cls([int(c * common) for c in coefficients], common)

    def at(self, values: Sequence[int]) -> int:
        """Its value where the basis has these values.

        Raises:
            NotPolynomial: the value is no integer.
        """
        whole, rest = divmod(sum(n * x for n, x in zip(self.numerators, values)), self.denominator)
        if rest:
            raise NotPolynomial("a count that is no integer")
        return whole

