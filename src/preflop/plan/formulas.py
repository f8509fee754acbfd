"""Operator rows as formulas in batch and lengths: `2*B*S*768*3072`, `2*B*source*target*64`.

A polynomial's coefficients are products of the model's sizes. Each is written as the product of sizes that
stand in the row's own shapes, where it is one (times a small number): so a reader finds them again. Bytes are
written as those of the row's tensors, and FLOPs by the sizes of a matmul or of a result, where they are that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from math import prod

from preflop.axes import Axis
from preflop.plan.evaluate import PolynomialRow
from preflop.plan.prices import OVER, whole_value
from preflop.tape.sizes import BASIS, SEQUENCE, basis, basis_names, formula
from preflop.units import DTYPE_BYTES

# A coefficient over the sizes it is made of: bytes of an element, 2 of a multiply-add, q, k and v...
_SMALL = 64
# Left over without a further factor: 8 FLOPs are not key-value heads, though there may be 8 of those.
_TINY = 16
# Sizes of one row that are tried in products; a row shows no more than a few tensors.
_TRIED = 10
# Sizes up to this are taken for factors of the formula (2 of a multiply-add), not of the model.
_LEAST = 4
_GATHERING = frozenset({"aten.embedding", "aten.index_select", "aten.gather"})
_MATMULS = frozenset(f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))


@dataclass(frozen=True, slots=True)
class FormulaRow:
    """One operator row. Formulas are of one call; `calls` of them are made."""

    op: str
    phase: str
    module: str
    source: str | None
    dtype: str
    calls: int
    shapes: str
    """"(B*S, 768) x (768, 3072) -> (B*S, 3072)"."""
    flops: str | None
    """None: no polynomial in the sizes."""
    read_bytes: str | None
    write_bytes: str | None
    named: dict[str, str | None]
    """`shapes`, `flops`, `read_bytes`, `write_bytes` with the model's own names for its sizes."""
    flops_at: int
    """FLOPs of all calls at the given size; so are the bytes read and written."""
    bytes_at: int


def formula_rows(
    rows: Iterable[PolynomialRow],
    size: tuple[int, ...],
    names: Mapping[str, int],
    axes: tuple[Axis, ...] = SEQUENCE,
) -> list[FormulaRow]:
    """The rows as formulas, most FLOPs at the given size first, then most bytes.

    Args:
        size: batch, and a length in units along each of the axes.
        names: the model's sizes by name; a size that several names have is written as a number.
    """
    words, letters = _words(names), basis_names(axes)
    found = [_formula_row(row, basis(*size), words, letters) for row in rows]
    return sorted(found, key=lambda row: (-row.flops_at, -row.bytes_at, row.op))


def _words(names: Mapping[str, int]) -> dict[int, str]:
    """Size -> its name, where it has only one."""
    by_size: dict[int, list[str]] = {}
    for name, size in names.items():
        by_size.setdefault(size, []).append(name)
    return {size: those[0] for size, those in by_size.items() if len(those) == 1 and size > 1}


def _formula_row(
    row: PolynomialRow, at: Sequence[int], words: Mapping[int, str], letters: Sequence[str]
) -> FormulaRow:
    factors, summands = _factors(row), _summands(row, letters)
    figures = {"flops": row.flops, "read_bytes": row.read_bytes, "write_bytes": row.write_bytes}
    over = OVER * row.calls
    each = {name: None if f is None else [Fraction(c, over) for c in f] for name, f in figures.items()}

    def written(by: Mapping[int, str]) -> dict[str, str | None]:
        return {
            name: None if found is None else product_formula(found, factors, by, letters, summands[name])
            for name, found in each.items()
        }

    plain, named = written({}), written(words)
    shapes = re.sub(r"#(\d+)", lambda symbol: formula(row.sizes[int(symbol[1])], letters), row.shapes)
    moved = [_value(figure, at) for figure in (row.read_bytes, row.write_bytes)]
    return FormulaRow(
        row.op, row.phase, row.module, row.source, row.dtype, row.calls, shapes, plain["flops"],
        plain["read_bytes"], plain["write_bytes"], {"shapes": _named_shapes(shapes, words), **named},
        _value(row.flops, at), sum(moved),
    )  # fmt: skip


def _value(polynomial: Sequence[int] | None, at: Sequence[int]) -> int:
    return 0 if polynomial is None else whole_value(polynomial, at)


@dataclass(frozen=True, slots=True)
class Summand:
    """What a figure may count: a term times sizes, so many times at most, each with one of some numbers."""

    monomial: str
    factors: tuple[int, ...]
    most: int
    each: tuple[int, ...]

    def multiples(self) -> list[int]:
        """What it may be multiplied by: all of them first, each with the likeliest number."""
        return [number * count for number in self.each for count in range(self.most, 0, -1)]


_Size = tuple[Counter[str], int]
"""A size that is one term: its letters, and its coefficient."""


def _summands(row: PolynomialRow, letters: Sequence[str]) -> dict[str, list[Summand]]:
    """What each figure of the row counts, by its name: the bytes of its tensors, the elements of its result or the
    products of its matmul."""
    before, _, after = row.shapes.partition("->")
    inputs, outputs = _tensors(row, before, letters), _tensors(row, after, letters)
    own = DTYPE_BYTES.get(row.dtype, 4)
    items = tuple(dict.fromkeys((own, 4, 2, 8, 1, 16)))
    gathered = outputs[:1] if row.op in _GATHERING else []  # the rows that they read, not their whole table
    work: list[Summand] = []
    if row.op in _MATMULS and len(inputs) > 1 and outputs:
        left = inputs[-2]
        work = _counted([[*left, outputs[0][-1]]], letters, (2,))
    elif outputs:
        work = [Summand(s.monomial, s.factors, _TINY, (1,)) for s in _counted(outputs[:1], letters, ())]
    return {
        "flops": work,
        "read_bytes": [] if " more" in before else _counted([*inputs, *gathered], letters, items),
        "write_bytes": [] if " more" in after else _counted(outputs, letters, items),
    }


def _tensors(row: PolynomialRow, shapes: str, letters: Sequence[str]) -> list[list[_Size]]:
    """The sizes of each tensor, of those whose every size is one term."""
    found = []
    for tensor in re.findall(r"\(([^)]*)\)", shapes):
        numbers = [row.sizes[int(number)] for number in re.findall(r"#(\d+)", tensor)]
        if all(sum(map(bool, coefficients)) == 1 for coefficients in numbers):
            terms = [next((c, name) for c, name in zip(coefficients, letters) if c) for coefficients in numbers]
            found.append([(_letters(name), c) for c, name in terms])
    return found


def _letters(monomial: str) -> Counter[str]:
    """How often each letter stands in a term.

    >>> _letters("B*S^2") == Counter(B=1, S=2)
    True
    """
    found: Counter[str] = Counter()
    for part in monomial.split("*"):
        letter, _, power = part.partition("^")
        if letter != "1":
            found[letter] += int(power or 1)
    return found


def _counted(tensors: Sequence[Sequence[_Size]], letters: Sequence[str], each: tuple[int, ...]) -> list[Summand]:
    """Tensors of one number of elements together, of those whose elements are one term."""
    named = {frozenset(_letters(name).items()): name for name in letters}
    alike: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for tensor in tensors:
        monomial = named.get(frozenset(sum((letter for letter, _ in tensor), Counter[str]()).items()))
        if monomial is not None:
            factors = tuple(size for _, size in tensor if size > 1)
            alike.setdefault((monomial, tuple(sorted(factors))), []).append(factors)
    return [Summand(monomial, members[0], len(members), each) for (monomial, _), members in alike.items()]


def _factors(row: PolynomialRow) -> list[int]:
    """Sizes that stand in the row's shapes, in order, each as often as one tensor has it."""
    order = [int(number) for number in re.findall(r"#(\d+)", row.shapes)]
    found: dict[int, int] = {}
    for tensor in re.findall(r"\(([^)]*)\)", row.shapes):
        own: dict[int, int] = {}
        for number in re.findall(r"#(\d+)", tensor):
            for coefficient in row.sizes[int(number)]:
                if coefficient > _LEAST:
                    own[coefficient] = own.get(coefficient, 0) + 1
        for size, count in own.items():
            found[size] = max(found.get(size, 0), count)
    sizes = [c for number in dict.fromkeys(order) for c in row.sizes[number] if c in found]
    return [size for size in dict.fromkeys(sizes) for _ in range(found[size])][:_TRIED]


def product_formula(
    polynomial: Sequence[Fraction],
    factors: Sequence[int],
    words: Mapping[int, str] | None = None,
    letters: Sequence[str] = BASIS,
    summands: Sequence[Summand] = (),
) -> str:
    """A polynomial whose coefficients are written as products of factors, or a sum of two, where they are.

    Args:
        words: what to write for a factor; its number where there is no word.
        letters: the polynomial's terms (`tape.sizes.basis_names`).
        summands: what it likely counts.

    >>> flops = [Fraction(0)] * 3 + [Fraction(2 * 768 * 3072)] + [Fraction(0)] * 2
    >>> product_formula(flops, [768, 3072])
    '2*B*S*768*3072'
    >>> product_formula(flops, [768, 3072], {768: "hidden"})
    '2*B*S*hidden*3072'
    """
    terms = [
        term
        for coefficient, name in zip(polynomial, letters)
        if coefficient
        for term in _terms(coefficient, name, factors, words or {}, [s for s in summands if s.monomial == name])
    ]
    return " + ".join(terms).replace("+ -", "- ") or "0"


def _terms(
    coefficient: Fraction,
    monomial: str,
    factors: Sequence[int],
    words: Mapping[int, str],
    summands: Sequence[Summand],
) -> Iterable[str]:
    letters = [] if monomial == "1" else [monomial]
    if coefficient.denominator != 1:
        yield "*".join([f"{coefficient.numerator}/{coefficient.denominator}", *letters])
        return
    sign = "-" if coefficient < 0 else ""
    number = abs(int(coefficient))
    for rest, parts in _sum_of(number, summands) or _products(number, factors):
        written = [] if rest == 1 else [str(rest)]
        written += letters + [words.get(part, str(part)) for part in parts]
        yield sign + ("*".join(written) or "1")


def _sum_of(number: int, summands: Sequence[Summand]) -> list[tuple[int, tuple[int, ...]]]:
    """(small number, factors) of summands that make up the number: all of them with one number, else any; or
    nothing."""
    wholes = [prod(summand.factors) for summand in summands]
    alike = ([number_of * s.most for s in summands] for number_of in (summands[0].each if summands else ()))
    for times in (*alike, *product(*([*s.multiples(), 0] for s in summands))):
        if sum(n * whole for n, whole in zip(times, wholes)) == number:
            return [(n, s.factors) for n, s in zip(times, summands) if n]
    return []


def _products(number: int, factors: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(small number, factors) whose products sum to the number: one of them, or two; else the number."""
    chosen = [c for count in range(1, len(factors) + 1) for c in combinations(factors, count)]
    known = {prod(parts): parts for parts in reversed(chosen)}
    one = _product(number, known)
    if one[0] <= _SMALL:
        return [one]
    for whole in sorted(known, reverse=True):
        for times in _ITEM_BYTES:
            rest = number - times * whole
            other = _product(rest, known) if rest > 0 else (number, ())
            if other[0] <= _SMALL:
                return [(times, known[whole]), other]
    return [one]


# What a tensor's elements are multiplied by: bytes of each, several tensors of one shape.
_ITEM_BYTES = (1, 2, 4, 8, 6, 12, 16)


def _product(number: int, known: Mapping[int, tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """(what is left, factors used): as few factors as leave a tiny number, else those that leave least."""
    divisors = [(number // whole, parts) for whole, parts in known.items() if number % whole == 0]
    tiny = [found for found in divisors if found[0] <= _TINY]
    if tiny:
        return min(tiny, key=lambda found: (len(found[1]), found[0]))
    return min(divisors, key=lambda found: found[0], default=(number, ()))


def _named_shapes(text: str, words: Mapping[int, str]) -> str:
    """Shapes with the model's words for its sizes.

    >>> _named_shapes("(B*S, 768) x (768, 3072)", {768: "hidden", 3072: "ffn"})
    '(B*S, hidden) x (hidden, ffn)'
    """
    return re.sub(r"(?<![\w^])\d+(?!\d| more)", lambda number: words.get(int(number[0]), number[0]), text)
