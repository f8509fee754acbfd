"""Named patterns of one tensor: `rearrange`, `reduce` and `repeat` as einops runs them in torch.

A pattern is reshape to single axes, permute, reduce, expand, reshape: whether the last step is a view or
a copy follows from strides alone.

Source: einops, https://einops.rocks/api/rearrange; einops/einops.py, `_apply_recipe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from preflop.errors import BadExpression
from preflop.strides import Sizes, contiguous_strides, view_strides

Group = tuple[str, ...]
"""Axes that one axis of the tensor holds, outermost first: (h d) is ("h", "d"); 1 is ()."""

_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
REDUCTIONS = ("sum", "mean", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern with a size for each axis."""

    text: str
    before: tuple[Group, ...]
    after: tuple[Group, ...]
    sizes: Mapping[str, int]

    @property
    def kind(self) -> str:
        """Whether axes stay ("rearrange"), are lost ("reduce") or gained ("repeat")."""
        old, new = set(_flat(self.before)), set(_flat(self.after))
        if old - new:
            return "reduce"
        return "repeat" if new - old else "rearrange"

    def shape(self, groups: Sequence[Group]) -> Sizes:
        """The tensor's shape, one size per group."""
        return tuple(_product(self.sizes[axis] for axis in group) for group in groups)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pattern does to memory. Sizes are in elements."""

    shape_before: Sizes
    strides_before: Sizes
    shape_after: Sizes
    strides_after: Sizes
    copied_elements: int
    """Written because the result cannot be a view; 0 for a view."""
    read_elements: int
    write_elements: int
    flops: int
    """One per element that is summed or compared."""
    reason: str
    """Why it is a view, or what stands in the way."""

    @property
    def is_view(self) -> bool:
        """Whether the result shares the operand's memory."""
        return self.write_elements == 0


def is_pattern(text: str) -> bool:
    """Whether a text is a pattern of one tensor and not a product: one operand, with blanks between axes.

    >>> is_pattern("b s (h d) -> b h s d"), is_pattern("b s d, d f -> b s f")
    (True, False)
    """
    return "," not in text.partition("->")[0]


def parse(text: str, sizes: Mapping[str, int]) -> Pattern:
    """The pattern that a text writes.

    >>> parse("b s (h d) -> b h s d", dict(b=2, s=8, h=4, d=16)).kind
    'rearrange'

    Raises:
        BadExpression: it cannot be read, an axis has no size, or a size no axis.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise BadExpression(
            f"{text!r} has {'no' if not arrow else 'more than one'} arrow.\n"
            '  Write both sides: "b s (h d) -> b h s d".'
        )
    before, after = _groups(left, text), _groups(right, text)
    known = dict.fromkeys((*_flat(before), *_flat(after)))
    missing = [axis for axis in known if axis not in sizes]
    if missing:
        raise BadExpression(
            f"{text!r}: no size for {', '.join(missing)}.\n"
            f"  Give one for each axis: {' '.join(f'{axis}=...' for axis in missing)}"
        )
    extra = [axis for axis in sizes if axis not in known]
    if extra:
        raise BadExpression(
            f"{text!r} has no axis {', '.join(extra)}, which got a size.\n  Its axes: {', '.join(known)}."
        )
    return Pattern(" ".join(text.split()), before, after, dict(sizes))


def _groups(side: str, text: str) -> tuple[Group, ...]:
    groups = []
    for inside, word in _TOKEN.findall(side):
        if word in {"(", ")"} or "(" in word or ")" in word:
            raise BadExpression(f"{text!r}: a parenthesis is not closed, or stands in another.")
        words = [] if word == "1" else [word] if word else inside.split()
        bad = [name for name in words if not _AXIS.match(name)]
        if bad:
            raise BadExpression(
                f"{text!r}: {bad[0]!r} is no axis.\n  An axis is a name such as b or heads, 1, or names in "
                "parentheses. Write axes out instead of '...'."
            )
        groups.append(tuple(words))
    doubled = sorted({axis for axis in _flat(groups) if _flat(groups).count(axis) > 1})
    if doubled:
        raise BadExpression(f"{text!r}: {doubled[0]} stands twice on one side.\n  Name each axis once.")
    return tuple(groups)


def _flat(groups: Sequence[Group]) -> list[str]:
    return [axis for group in groups for axis in group]


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def laid_out(pattern: Pattern, order: str) -> Sizes:
    """Strides of the operand when its axes lie in memory in this order, outermost first.

    >>> p = parse("b h s d -> b s (h d)", dict(b=2, h=4, s=8, d=16))
    >>> laid_out(p, "b s h d")               # a transposed view of what is stored as b s h d
    (512, 16, 64, 1)

    Raises:
        BadExpression: not exactly the operand's axes, or axes of one group that are not neighbours.
    """
    names = order.split()
    axes = _flat(pattern.before)
    if sorted(names) != sorted(axes):
        raise BadExpression(
            f"the layout {order!r} is not an order of the operand's axes.\n"
            f"  Needed: each of {' '.join(axes)} once, outermost in memory first."
        )
    steps = contiguous_strides(tuple(pattern.sizes[axis] for axis in names))
    stride_of = dict(zip(names, steps, strict=True))
    strides = []
    for group in pattern.before:
        sizes = tuple(pattern.sizes[axis] for axis in group)
        merged = view_strides(sizes, tuple(stride_of[axis] for axis in group), (_product(sizes),))
        if merged is None:
            raise BadExpression(
                f"the layout {order!r} tears ({' '.join(group)}) apart: no tensor lies like that.\n"
                f"  Keep {' '.join(group)} next to each other, in this order."
            )
        strides.append(merged[0])
    return tuple(strides)


def moved(pattern: Pattern, strides: Sizes | None = None, reduction: str = "sum") -> Moved:
    """What the pattern does to an operand with these strides (contiguous by default).

    >>> p = parse("b h s d -> b s (h d)", dict(b=2, h=4, s=8, d=16))
    >>> moved(p).copied_elements, moved(p, laid_out(p, "b s h d")).is_view
    (1024, True)

    Raises:
        BadExpression: strides of another length, or an unknown reduction.
    """
    shape = pattern.shape(pattern.before)
    steps = contiguous_strides(shape) if strides is None else tuple(strides)
    if len(steps) != len(shape):
        raise BadExpression(
            f"{len(steps)} strides for a tensor of shape {shape}.\n  Needed: {len(shape)}, one per axis."
        )
    if reduction not in REDUCTIONS:
        raise BadExpression(f"no reduction named {reduction!r}.\n  Known: {', '.join(REDUCTIONS)}.")
    axes = _flat(pattern.before)
    single = tuple(pattern.sizes[axis] for axis in axes)
    opened = view_strides(shape, steps, single)
    if opened is None:  # splitting never fails; an operand with overlapping strides could
        raise BadExpression(f"strides {steps} cannot be split into {' '.join(axes)}.")
    stride_of = dict(zip(axes, opened, strict=True))
    if pattern.kind == "reduce":
        return _reduced(pattern, shape, steps, stride_of)
    return _reshaped(pattern, shape, steps, stride_of)


def _reshaped(pattern: Pattern, shape: Sizes, steps: Sizes, stride_of: dict[str, int]) -> Moved:
    axes = _flat(pattern.after)
    sizes = tuple(pattern.sizes[axis] for axis in axes)
    strides = tuple(stride_of.get(axis, 0) for axis in axes)
    wanted = pattern.shape(pattern.after)
    seen = view_strides(sizes, strides, wanted)
    if seen is not None:
        return Moved(shape, steps, wanted, seen, 0, 0, 0, 0, "strides alone tell it, nothing moves")
    elements = _product(sizes)
    source = _product(size for size, stride in zip(sizes, strides, strict=True) if stride)
    reason = f"{sizes} with strides {strides} cannot be viewed as {wanted}"
    return Moved(shape, steps, wanted, contiguous_strides(wanted), elements, source, elements, 0, reason)


def _reduced(pattern: Pattern, shape: Sizes, steps: Sizes, stride_of: dict[str, int]) -> Moved:
    """A reduction writes a new tensor; axes that it leaves only change their order in it."""
    kept = [axis for axis in _flat(pattern.after) if axis in stride_of]
    made = _product(pattern.sizes[axis] for axis in kept)
    wanted = pattern.shape(pattern.after)
    elements = _product(shape)
    lost = [axis for axis in _flat(pattern.before) if axis not in kept]
    return Moved(
        shape, steps, wanted, contiguous_strides(wanted), 0, elements, made, elements,
        f"reduces over {', '.join(lost)}",
    )  # fmt: skip


def reversed_pattern(pattern: Pattern) -> Pattern:
    """The pattern that takes a rearranged tensor's gradient back, as autograd's reshape and permute do.

    >>> reversed_pattern(parse("b s (h d) -> b h s d", dict(b=2, s=8, h=4, d=16))).text
    'b h s d -> b s (h d)'
    """
    left, _, right = pattern.text.partition("->")
    return Pattern(f"{right.strip()} -> {left.strip()}", pattern.after, pattern.before, pattern.sizes)
