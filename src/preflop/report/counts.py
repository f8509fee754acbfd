"""Counts and dtypes as the field writes them, for people to read."""

from __future__ import annotations

# torch's name -> the short one people use (the names of `preflop dtypes`).
_SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8": "fp8",
    "float6": "fp6",
    "float4": "fp4",
}


def count_text(count: float) -> str:
    """Parameters or tokens in the short scale: thousands, millions, billions (B), trillions (T).

    >>> count_text(70_000_000_000), count_text(124_439_808), count_text(53_333_333_333), count_text(12)
    ('70B', '124.4M', '53.33B', '12')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.4g}{letter}"
    return f"{count:g}"


def short_dtype(name: str) -> str:
    """A dtype's short name: "bfloat16" is bf16.

    >>> short_dtype("bfloat16"), short_dtype("int8")
    ('bf16', 'int8')
    """
    return _SHORT.get(name, name)
