"""Patterns of one tensor: shape, strides, view or copy, as einops and torch do it."""

from __future__ import annotations

import random

import einops
import pytest
import torch

import preflop
from preflop.errors import PreflopError
from preflop.formulas.pattern import laid_out, moved, parse
from preflop.strides import view_strides

SIZES = {"b": 2, "h": 3, "s": 4, "d": 5, "g": 6}
REARRANGED = [
    "b h s d -> b s (h d)",
    "b s (h d) -> b h s d",
    "b h s d -> b h d s",
    "b h s d -> (b h) s d",
    "b h s d -> b (s h) d",
    "(b s) d -> b s d",
    "b 1 s d -> b s d",
    "b s d -> b 1 s d",
    "b s d -> s (b d)",
    "(h g) d -> (g h) d",
]
REPEATED = ["b h s d -> b (h g) s d", "b s d -> b g s d", "b s 1 -> b (s g)", "s d -> (g s) d", "b 1 -> b g"]


def operand(pattern, strides=None) -> torch.Tensor:
    shape = pattern.shape(pattern.before)
    if strides is None:
        return torch.randn(shape)
    return torch.empty_strided(shape, strides)


def known(text: str) -> dict[str, int]:
    return {a: n for a, n in SIZES.items() if a in text}


@pytest.mark.parametrize("text", REARRANGED + REPEATED)
def test_view_or_copy_as_einops_does_it(text):
    """Shape, strides and whether memory is shared equal what einops and torch return."""
    pattern = parse(text, known(text))
    x = operand(pattern)
    function = einops.repeat if pattern.kind == "repeat" else einops.rearrange
    axes = {a: n for a, n in SIZES.items() if a in text}
    got = function(x, text, **axes)
    said = moved(pattern)
    assert (said.shape_after, said.is_view) == (tuple(got.shape), got.data_ptr() == x.data_ptr())
    assert said.strides_after == got.stride()
    assert said.copied_elements == (0 if said.is_view else got.numel())


@pytest.mark.parametrize("text", REARRANGED)
def test_the_layout_decides(text):
    """For every order in memory, a view is told from a copy as torch tells it."""
    pattern = parse(text, known(text))
    names = [axis for group in pattern.before for axis in group]
    for seed in range(6):
        order = random.Random(seed).sample(names, len(names))
        try:
            strides = laid_out(pattern, " ".join(order))
        except PreflopError:
            continue  # no tensor lies like that
        x = operand(pattern, strides)
        got = einops.rearrange(x, text, **known(text))
        assert moved(pattern, strides).is_view == (got.data_ptr() == x.data_ptr()), (text, order)


def test_random_views_as_torch_decides():
    """Whether a shape is a view of strides, and with which, equals torch's own answer (3,000 draws)."""
    draw = random.Random(0)
    for _ in range(3000):
        x = torch.empty(tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(0, 4))))
        x = x.permute(draw.sample(range(x.ndim), x.ndim)) if x.ndim else x
        if x.ndim and draw.random() < 0.4:
            axis = draw.randrange(x.ndim)
            x = x.narrow(axis, 0, max(1, x.shape[axis] - 1))
        wanted, left = [], x.numel()
        while left > 1:
            factor = draw.choice([k for k in range(2, left + 1) if left % k == 0])
            wanted.append(factor)
            left //= factor
        for _ in range(draw.randint(0, 2)):
            wanted.insert(draw.randint(0, len(wanted)), 1)
        try:
            truth = x.view(wanted).stride()
        except RuntimeError:
            truth = None
        assert view_strides(tuple(x.shape), x.stride(), tuple(wanted)) == truth


def test_heads_merged_after_a_transpose_copy():
    """(8, 12, 1024, 64) merged to (8, 1024, 768) copies 12 MiB in bf16; laid out as b s h d it is a view."""
    sizes = {"b": 8, "h": 12, "s": 1024, "d": 64}
    copied = preflop.einsum_cost("b h s d -> b s (h d)", sizes, device="h100-sxm")
    assert copied.forward.copied_bytes == copied.forward.write_bytes == 2 * 8 * 12 * 1024 * 64
    assert copied.forward.note == (
        "(8, 1024, 12, 64) with strides (786432, 64, 65536, 1) cannot be viewed as (8, 1024, 768)"
    )
    seen = preflop.einsum_cost("b h s d -> b s (h d)", sizes, layout="b s h d")
    assert (seen.is_view, seen.forward.write_bytes) == (True, 0)


def test_h05_repeat_of_a_size_one_axis_is_a_view():
    """H05: repeating an axis of size 1 is a stride-0 view; repeating a longer one copies 144 bytes, and
    reads the 24 * 2 real ones."""
    one = preflop.einsum_cost("a 1 -> a r", a=3, r=3, dtype="int64")
    assert (one.is_view, one.forward.copied_bytes) == (True, 0)
    longer = preflop.einsum_cost("a c -> a (c r)", a=3, c=2, r=3, dtype="int64")
    assert (longer.forward.copied_bytes, longer.forward.read_bytes) == (144, 48)


def test_reduce_reads_all_and_writes_what_is_left():
    """A mean over s reads every element once and does one FLOP for each."""
    cost = preflop.einsum_cost("b s d -> b d", b=2, s=8, d=4, dtype="fp32", reduction="mean").forward
    assert (cost.flops, cost.read_bytes, cost.write_bytes) == (64, 256, 32)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("b (s d -> b s d", {}, "parenthesis"),
        ("b s d -> b s d", {"layout": "b s"}, "not an order"),
        ("b (h d) -> b h d", {"layout": "h b d"}, "tears"),
        ("b s d -> b s d", {"strides": (1, 2)}, "2 strides"),
        ("b s d -> b d", {"reduction": "median"}, "no reduction"),
        ("b s d, d -> b s", {"layout": "b s d"}, "pattern of one tensor"),
    ],
)
def test_what_is_wrong_is_said(text, options, said):
    """A pattern or layout that cannot be is refused with the reason."""
    with pytest.raises(PreflopError, match=said):
        preflop.einsum_cost(text, known(text), **options)
