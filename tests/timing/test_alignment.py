"""Matmuls whose rows do not begin at multiples of 16 bytes are named, and nothing else is."""

from __future__ import annotations

import pytest

import preflop
from preflop.account import OperatorRow
from preflop.hardware.catalog import find
from preflop.timing.alignment import contiguous_sizes, unaligned
from preflop.timing.roofline import on_roofline


def said(model: str = "gpt2", precision: str = "bf16-mixed", device: str = "h100-sxm") -> list[str]:
    """What an account says of alignment."""
    step = preflop.account(model, {"batch_size": 8, "sequence_length": 512}, precision=precision, device=device)
    return [words for words in step.assumptions if "tensor cores are slower" in words]


def row(shapes: str, variant: str, dtype: str = "bfloat16", flops: int = 10**12) -> OperatorRow:
    """One matmul."""
    return OperatorRow(
        "aten.mm", "forward", "head", None, 1, shapes, dtype, flops, 1, 1, None, None, None, "matmul", variant=variant
    )


def test_gpt2s_head_is_named_with_what_to_pad_it_to() -> None:
    """50257 is no multiple of 8; 50304, nanoGPT's, is one of 64, for 0.09 % more FLOPs."""
    (words,) = said()
    assert "lm_head" in words
    assert "50,257, no multiple of 8" in words
    assert "padded to 50,304, 0.09% more FLOPs" in words


@pytest.mark.parametrize(
    ("model", "precision", "device"),
    [
        ("pythia-160m", "bf16-mixed", "h100-sxm"),  # 50304
        ("gpt2", "fp32", "h100-sxm"),  # no tensor cores
        ("gpt2", "bf16-mixed", "mi300x"),  # cuBLAS's rule is NVIDIA's
    ],
)
def test_others_are_not(model: str, precision: str, device: str) -> None:
    """Aligned sizes, other units, other vendors."""
    assert said(model, precision, device) == []


@pytest.mark.parametrize(("dtype", "multiple"), [("bfloat16", 8), ("float16", 8), ("float8_e4m3fn", 16)])
def test_multiples_by_format(dtype: str, multiple: int) -> None:
    """16 bytes of each format: a size one multiple up is aligned, one number more is not."""
    device = find("h100-sxm")
    for inner, odd in ((3 * multiple, False), (3 * multiple + 1, True)):
        placed = on_roofline(row(f"(64, {inner}) x ({inner}, 128) -> (64, 128)", "NT", dtype), device)
        assert bool(list(unaligned([placed], device))) is odd


@pytest.mark.parametrize(
    ("variant", "sizes"), [("NN", (3, 5, 5)), ("NT", (3, 3, 5)), ("TN", (2, 5, 5)), ("TT", (2, 3, 5))]
)
def test_sizes_that_lie_contiguous(variant: str, sizes: tuple[int, ...]) -> None:
    """Of (2, 3) x (3, 5) by layout: of the first factor, the second, the result. Rows of tokens never matter in NT."""
    assert contiguous_sizes(row("(2, 3) x (3, 5) -> (2, 5)", variant)) == sizes


def test_formulas_have_no_sizes_to_look_at() -> None:
    """Rows of a tape without sizes are passed over."""
    assert contiguous_sizes(row("(B*S, 3) x (3, 5) -> (B*S, 5)", "NT")) == ()


def test_a_small_share_is_not_worth_a_line() -> None:
    """A thousandth of the step."""
    device = find("h100-sxm")
    rows = [row("(8, 9) x (9, 8) -> (8, 8)", "NT", flops=10**9), row("(8, 8) x (8, 8) -> (8, 8)", "NT", flops=10**12)]
    assert list(unaligned([on_roofline(one, device) for one in rows], device)) == []
