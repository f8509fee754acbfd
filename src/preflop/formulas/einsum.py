"""Named expressions: what "b s d, d f -> b s f" computes, in which steps, and its gradients' products.

An expression becomes *products*: pairs of tensors multiplied and summed, as torch runs them. Each has its
FLOPs and the elements it reads and writes; bytes and time are the caller's.

Source: Harris et al., NumPy's einsum; einops' notation (https://einops.rocks/api/einsum); the order of
several operands is opt_einsum's (Smith and Gray 2018, JOSS 3(26), 753).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from preflop.errors import BadExpression

Axes = tuple[str, ...]

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Trying every order is fast up to here (opt_einsum's own limit for "auto").
_OPTIMAL_UP_TO = 6


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression with a size for each axis."""

    operands: tuple[Axes, ...]
    result: Axes
    sizes: Mapping[str, int]

    @property
    def text(self) -> str:
        """As einops writes it: "b s d, d f -> b s f"."""
        return f"{', '.join(' '.join(axes) for axes in self.operands)} -> {' '.join(self.result)}".strip()

    def elements(self, axes: Iterable[str]) -> int:
        """Elements of a tensor with these axes."""
        count = 1
        for axis in axes:
            count *= self.sizes[axis]
        return count

    def of(self, operands: Sequence[Axes], result: Axes) -> Expression:
        """Another expression over the same sizes."""
        return Expression(tuple(operands), result, self.sizes)


@dataclass(frozen=True, slots=True)
class Product:
    """One kernel: one or two tensors in, one out."""

    expression: Expression
    kind: str
    """"matmul" (multiply and add), or "other": element-wise multiplication, or a sum."""
    flops: int
    read_elements: int
    write_elements: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One step of the order in which several operands are contracted."""

    expression: Expression
    names: tuple[str, ...]
    """What its operands are: "operand 1", or "step 2" for an earlier step's result."""


def parse(text: str, sizes: Mapping[str, int]) -> Expression:
    """The expression that a text writes.

    Axes are words set apart by blanks, as in einops; operands without blanks whose letters are the axes
    ("bsd,df->bsf") are read as torch reads them.

    >>> parse("bsd,df->bsf", dict(b=8, s=2048, d=4096, f=14336)).text
    'b s d, d f -> b s f'
    >>> parse("b s d, d f -> b f", dict(b=8, s=2048, d=4096))
    Traceback (most recent call last):
    preflop.errors.BadExpression: 'b s d, d f -> b f': no size for f.
      Give one for each: f=...

    Raises:
        BadExpression: it cannot be read, an axis has no size, or a size no axis.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise BadExpression(
            f"{text!r} has {'no' if not arrow else 'more than one'} arrow.\n"
            '  Write operands and result: "b s d, d f -> b s f".'
        )
    parts = [part.strip() for part in left.split(",")]
    letters = _written_as_letters([*parts, right.strip()], sizes)
    operands = tuple(_axes(part, letters, text) for part in parts)
    result = _axes(right.strip(), letters, text)
    _check(text, operands, result)
    _check_sizes(text, [axis for axes in operands for axis in axes], sizes)
    return Expression(operands, result, dict(sizes))


def _written_as_letters(parts: Sequence[str], sizes: Mapping[str, int]) -> bool:
    """Whether axes are single letters without blanks: no part has blanks, and words that have no size
    themselves are made of letters that have one."""
    if any(" " in part for part in parts):
        return False
    words = [part for part in parts if len(part) > 1 and part not in sizes]
    return bool(words) and all(any(letter in sizes for letter in word) for word in words)


def _axes(part: str, letters: bool, text: str) -> Axes:
    words = tuple(part) if letters else tuple(part.split())
    for word in words:
        if not _AXIS.match(word):
            raise BadExpression(
                f"{text!r}: {word!r} is no axis.\n"
                "  An axis is a name, such as b or heads; parentheses are for patterns of one operand."
            )
    return words


def _check(text: str, operands: Sequence[Axes], result: Axes) -> None:
    for axes in (*operands, result):
        doubled = sorted({axis for axis in axes if axes.count(axis) > 1})
        if doubled:
            raise BadExpression(
                f"{text!r}: {doubled[0]} stands twice in {' '.join(axes)!r}.\n"
                "  Take the diagonal first (torch.diagonal is a view), then name its axis once."
            )
    known = {axis for axes in operands for axis in axes}
    unknown = [axis for axis in result if axis not in known]
    if unknown:
        raise BadExpression(
            f"{text!r}: no operand has the axis {unknown[0]} of the result.\n"
            "  A product makes no new axes; repeat does, with one operand."
        )


def _check_sizes(text: str, axes: Sequence[str], sizes: Mapping[str, int]) -> None:
    missing = [axis for axis in dict.fromkeys(axes) if axis not in sizes]
    if missing:
        raise BadExpression(
            f"{text!r}: no size for {', '.join(missing)}.\n"
            f"  Give one for each: {' '.join(f'{axis}=...' for axis in missing)}"
        )
    extra = [axis for axis in sizes if axis not in axes]
    if extra:
        raise BadExpression(
            f"{text!r} has no axis {', '.join(extra)}, which got a size.\n"
            f"  Its axes: {', '.join(dict.fromkeys(axes))}."
        )


def contraction_order(expression: Expression) -> tuple[Pair, ...]:
    """The cheapest order (in FLOPs) to multiply several operands, two at a time.

    >>> chain = parse("a b, b c, c d -> a d", dict(a=2, b=1000, c=1000, d=2))
    >>> [pair.expression.text for pair in contraction_order(chain)]
    ['a b, b c -> a c', 'c d, a c -> a d']
    """
    if len(expression.operands) <= 2:
        names = tuple(f"operand {n + 1}" for n in range(len(expression.operands)))
        return (Pair(expression, names),)
    import opt_einsum

    symbols = {axis: opt_einsum.get_symbol(n) for n, axis in enumerate(expression.sizes)}
    equation = ",".join("".join(symbols[axis] for axis in axes) for axes in expression.operands)
    equation += "->" + "".join(symbols[axis] for axis in expression.result)
    shapes = [tuple(expression.sizes[axis] for axis in axes) for axes in expression.operands]
    optimize = "optimal" if len(shapes) <= _OPTIMAL_UP_TO else "auto"
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=optimize)
    return _pairs(expression, [tuple(int(n) for n in step) for step in path])


def written_order(expression: Expression) -> tuple[Pair, ...]:
    """The order in which the operands are written, from left to right: what torch does without opt_einsum."""
    count = len(expression.operands)
    if count <= 2:
        return contraction_order(expression)
    last = list(range(count, 1, -1))
    return _pairs(expression, [(0, 1), *[(0, left - 1) for left in last[1:]]])


def _pairs(expression: Expression, path: Sequence[tuple[int, ...]]) -> tuple[Pair, ...]:
    """Steps of a path in opt_einsum's form: each takes operands out by position and appends its result."""
    held = [(axes, f"operand {n + 1}") for n, axes in enumerate(expression.operands)]
    pairs: list[Pair] = []
    for number, step in enumerate(path):
        taken = [held[n] for n in step]
        held = [item for n, item in enumerate(held) if n not in step]
        last = number == len(path) - 1
        result = expression.result if last else _kept(taken, held, expression.result)
        pairs.append(Pair(expression.of([axes for axes, _ in taken], result), tuple(n for _, n in taken)))
        held.append((result, f"step {number + 1}"))
    return tuple(pairs)


def _kept(taken: Sequence[tuple[Axes, str]], held: Sequence[tuple[Axes, str]], result: Axes) -> Axes:
    """Axes of a step's result: those that the rest or the whole's result still needs."""
    needed = set(result).union(*(axes for axes, _ in held))
    return tuple(dict.fromkeys(axis for axes, _ in taken for axis in axes if axis in needed))


def products(expression: Expression) -> tuple[Product, ...]:
    """The kernels of one step of one or two operands.

    Axes that only one operand has, and the result has not, are summed first; then the pair is multiplied:
    2 FLOPs per term where terms are summed, 1 per element where none are.

    >>> [(p.kind, p.flops) for p in products(parse("b d, d f -> b f", dict(b=4, d=8, f=16)))]
    [('matmul', 1024)]
    >>> [(p.kind, p.flops) for p in products(parse("b d, d -> b d", dict(b=4, d=8)))]
    [('other', 32)]

    Source: ATen/native/Linear.cpp, einsum and sumproduct_pair.
    """
    if len(expression.operands) == 1:
        return _sum(expression.operands[0], expression.result, expression)
    first, second = expression.operands
    summed: list[Product] = []
    reduced = []
    for axes, other in ((first, second), (second, first)):
        kept = tuple(axis for axis in axes if axis in other or axis in expression.result)
        summed.extend(_sum(axes, kept, expression))
        reduced.append(kept)
    return (*summed, _multiply(expression.of(reduced, expression.result)))


def _sum(axes: Axes, kept: Axes, expression: Expression) -> tuple[Product, ...]:
    """A sum over axes; nothing where none are lost (the rest is a view)."""
    if set(axes) == set(kept):
        return ()
    elements = expression.elements(axes)
    return (Product(expression.of([axes], kept), "other", elements, elements, expression.elements(kept)),)


def _multiply(expression: Expression, matmul: bool = False) -> Product:
    """The kernel that multiplies two operands. A matmul's gradient is one too, also where the axis that it
    sums over has one position: (m, 1) @ (1, n) is 2·m·n."""
    contracted = {axis for axes in expression.operands for axis in axes} - set(expression.result)
    terms = expression.elements((*expression.result, *sorted(contracted)))
    reads = sum(expression.elements(axes) for axes in expression.operands)
    writes = expression.elements(expression.result)
    if contracted or matmul:
        return Product(expression, "matmul", 2 * terms, reads, writes)
    return Product(expression, "other", terms, reads, writes)


def gradient(expression: Expression, operand: int) -> tuple[Expression, tuple[Product, ...]]:
    """The expression for one operand's gradient, and its kernels.

    With C = A·B it is dA = dC·B: the result's gradient stands in the operand's place. Axes that forward
    summed away before multiplying are expanded afterwards, which is a view.

    >>> step = parse("b s d, d f -> b s f", dict(b=2, s=3, d=4, f=5))
    >>> [gradient(step, n)[0].text for n in (0, 1)]
    ['b s f, d f -> b s d', 'b s d, b s f -> d f']
    """
    if len(expression.operands) == 1:
        return expression.of([expression.result], expression.operands[0]), ()
    axes, other = expression.operands[operand], expression.operands[1 - operand]
    reached = tuple(axis for axis in axes if axis in other or axis in expression.result)
    other = tuple(axis for axis in other if axis in axes or axis in expression.result)
    pair = (expression.result, other) if operand == 0 else (other, expression.result)
    asked = expression.of(pair, reached)
    forward = products(expression)[-1]
    if forward.kind == "matmul":
        return asked, (_multiply(asked, matmul=True),)
    # Element-wise forward: backward multiplies element by element and sums what was broadcast.
    every = expression.result
    return asked, (_multiply(expression.of(pair, every)), *_sum(every, reached, expression))
