"""Reading the numbers people type: "70e9", "70B", "15T", "0.5". Never a NaN, an infinity or a guess.

Exact: decimal text is not passed through a float, so "70.6B" is 70,600,000,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from numbers import Integral
from typing import Any

from preflop.errors import BadNumber

# Short scale, as the field writes parameters and tokens: 7B, 15T, 124M, 32k.
_SUFFIXES = {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
# No count of parameters, tokens or GPUs is near this; keeps 1e999999 from being expanded.
_LARGEST_COUNT = Decimal(10) ** 24


def read_number(text: str, what: str) -> Decimal:
    """The finite number that `text` writes, a suffix K, M, B (or G) or T applied.

    Args:
        text: "70e9", "70B", "1_000", "0.5".
        what: what it is, for the message: "--params".

    >>> read_number("70.6B", "--params")
    Decimal('70600000000')

    Raises:
        BadNumber: not a number, or not a finite one.
    """
    return _number(text, what, "a number, such as 0.5, 70e9, 70B or 15T")


def _number(text: str, what: str, need: str) -> Decimal:
    written = text.strip().replace("_", "").upper()
    exponent = _SUFFIXES.get(written[-1:], 0)
    digits = written[:-1] if exponent else written
    try:
        number = Decimal(digits)
    except InvalidOperation:
        raise _bad(what, text, need) from None
    if not number.is_finite():
        raise _bad(what, text, "a finite number")
    try:
        scaled = number.scaleb(exponent) + 0
    except ArithmeticError:
        raise _bad(what, text, f"a number below {_LARGEST_COUNT:.0e}") from None
    return Decimal(int(scaled)) if 1 <= abs(scaled) <= _LARGEST_COUNT and scaled % 1 == 0 else scaled


def read_count(text: str, what: str) -> int:
    """A whole number, 1 or more: parameters, tokens, GPUs, a batch.

    >>> read_count("7b", "--params"), read_count("1024", "--gpus")
    (7000000000, 1024)
    >>> read_count("-3", "--gpus")
    Traceback (most recent call last):
    preflop.errors.BadNumber: --gpus is '-3'.
      Needed: a whole number, 1 or more.

    Raises:
        BadNumber: not a number, not whole, below 1, or above 1e24.
    """
    number = _number(text, what, "a whole number, such as 8, 1024, 7B or 15T")
    if number < 1 or number > _LARGEST_COUNT or number % 1:
        need = "a whole number below 1e24" if number > _LARGEST_COUNT else "a whole number, 1 or more"
        raise _bad(what, text, need)
    return int(number)


def read_share(text: str, what: str) -> float:
    """A share of a whole: above 0 and at most 1, as MFU is.

    >>> read_share("0.5", "--mfu")
    0.5
    >>> read_share("50", "--mfu")
    Traceback (most recent call last):
    preflop.errors.BadNumber: --mfu is '50'.
      Needed: a number above 0 and at most 1 (50 % is 0.5).

    Raises:
        BadNumber: not a number, or outside of (0, 1].
    """
    number = read_number(text, what)
    share = float(number)
    if not 0 < share <= 1 or number > 1:
        raise _bad(what, text, "a number above 0 and at most 1 (50 % is 0.5)")
    return share


def read_percent(text: str, what: str) -> float:
    """A share written as "1%" or 0.01: from 0% to 100%, or from 0 to below 1.

    A bare 1 is refused: it may be meant as a percent, and would be all of it.

    >>> read_percent("1%", "--fail-over"), read_percent("0.01", "--fail-over")
    (0.01, 0.01)

    Raises:
        BadNumber: neither of the two.
    """
    need = "a percentage with its sign (1%), or a share below 1 (0.01)"
    written = text.strip()
    percent = written.endswith("%")
    try:
        number = read_number(written.removesuffix("%"), what)
    except BadNumber:
        raise _bad(what, text, need) from None
    if not 0 <= number <= 100 or (not percent and number >= 1):
        raise _bad(what, text, need)
    return float(number) / 100 if percent else float(number)


def read_sizes(words: Iterable[str]) -> dict[str, int]:
    """Sizes of named axes as people type them.

    >>> read_sizes(["b=8", "s=2048"])
    {'b': 8, 's': 2048}

    Raises:
        BadNumber: a word that is no AXIS=SIZE, or an axis given twice.
    """
    sizes: dict[str, int] = {}
    for word in words:
        axis, equals, size = word.partition("=")
        if not equals or not axis.strip():
            raise BadNumber(f"{word!r} gives no axis a size.\n  Needed: AXIS=SIZE, such as b=8.")
        if axis.strip() in sizes:
            raise BadNumber(f"axis {axis.strip()} has two sizes.\n  Give it one.")
        sizes[axis.strip()] = read_count(size, axis.strip())
    return sizes


def read_strides(text: str) -> tuple[int, ...]:
    """Strides in elements, 0 or more.

    >>> read_strides("786432, 64, 0, 1")
    (786432, 64, 0, 1)

    Raises:
        BadNumber: something that is no whole number, or is negative.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise _bad("--strides", text, "whole numbers of 0 or more, with commas between: 4096,64,1")
    return tuple(int(part) for part in parts)


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number of at least `least`, or a clear error; a float that is whole is one.

    >>> whole("batch", 8), whole("batch", 8.0)
    (8, 8)
    >>> whole("batch", 0)
    Traceback (most recent call last):
    preflop.errors.BadNumber: batch is 0; it must be a whole number of at least 1.

    Raises:
        BadNumber: anything else.
    """
    integral = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not integral or value < least:
        raise BadNumber(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return int(value)


def require_positive(**values: float) -> None:
    """Refuse what no equation of ours is meant for: zero, negative, NaN and infinite values.

    >>> require_positive(gpus=8, mfu=0.5)
    >>> require_positive(peak_flops_per_s=float("nan"))
    Traceback (most recent call last):
    preflop.errors.BadNumber: peak_flops_per_s is nan.
      Needed: a finite number above 0.

    Raises:
        BadNumber: for the first value that is not positive and finite.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise BadNumber(f"{name} is {value}.\n  Needed: a finite number above 0.")


def _bad(what: str, text: str, need: str) -> BadNumber:
    return BadNumber(f"{what} is {text!r}.\n  Needed: {need}.")
