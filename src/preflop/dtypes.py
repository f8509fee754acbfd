"""Number formats: what each holds, and what becomes of a value in it.

The figures are read from numpy's and ml_dtypes' own tables, not typed in; TF32, which neither has, is
fp32 with a 10-bit mantissa. Rounding is to the nearest, ties to even, computed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

from preflop.errors import BadNumber
from preflop.quantity import read_number

# NVIDIA A100 whitepaper (2020), "TF32": fp32's 8-bit exponent with fp16's 10-bit mantissa.
_TF32_MANTISSA_BITS = 10


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One format. Values are exact: each is a number of the format itself."""

    name: str
    torch_name: str | None
    """torch's dtype without the module; None where torch has no such dtype (TF32 is a way to multiply)."""
    bits: int
    """Bits of one number that carry it (TF32: 19, kept in 32)."""
    bytes: float
    """Bytes one number takes in memory."""
    exponent_bits: int
    mantissa_bits: int
    """Stored ones, without the implied leading 1."""
    largest: float
    smallest: float
    """Most negative value."""
    smallest_normal: float | None
    """Least positive number with full resolution; None for integers."""
    smallest_subnormal: float | None
    """Least positive number; equals `smallest_normal` where there are no subnormals."""
    epsilon: float
    """From 1 to the next larger number."""
    infinity: bool
    """Too large becomes infinity. Without one it becomes NaN or the largest, as the kernel chooses."""
    zero: bool = True
    """Zero can be written (not in E8M0, which holds scales)."""


class Effect(str, Enum):
    """What becomes of a value in a format."""

    EXACT = "exact"
    ROUNDED = "rounded"
    SUBNORMAL = "subnormal"
    """Rounded with fewer bits than the mantissa has."""
    UNDERFLOW = "underflow"
    """Not zero, becomes zero."""
    OVERFLOW = "overflow"
    """Beyond the largest."""
    UNSIGNED = "unsigned"
    """Negative or zero, in a format that has no such numbers."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A value in one format."""

    format: str
    value: float | None
    """What it becomes; infinity where it overflows to that; None where the format has no answer."""
    effect: Effect
    relative_error: float | None
    """|value - asked| / |asked|; None for zero and where there is no finite value."""


def number_formats() -> tuple[NumberFormat, ...]:
    """The formats of training, widest first.

    >>> {f.name: f.largest for f in number_formats() if f.name.startswith("fp8-e4") or f.name == "fp16"}
    {'fp16': 65504.0, 'fp8-e4m3fn': 448.0, 'fp8-e4m3fnuz': 240.0}
    """
    import ml_dtypes
    import numpy

    fp32 = _floating("fp32", "float32", numpy.float32)
    return (
        _floating("fp64", "float64", numpy.float64),
        fp32,
        _tf32(fp32),
        _floating("bf16", "bfloat16", ml_dtypes.bfloat16),
        _floating("fp16", "float16", numpy.float16),
        _floating("fp8-e4m3fn", "float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        _floating("fp8-e4m3fnuz", "float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        _floating("fp8-e5m2", "float8_e5m2", ml_dtypes.float8_e5m2),
        _floating("fp8-e5m2fnuz", "float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
        _floating("fp8-e8m0fnu", "float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
        _floating("fp4-e2m1fn", "float4_e2m1fn_x2", ml_dtypes.float4_e2m1fn),
        _int8(),
    )


def _floating(name: str, torch_name: str, numpy_type: Any) -> NumberFormat:
    """The format that `finfo` describes; whether it has infinity and zero is asked of the type."""
    import ml_dtypes
    import numpy

    info = ml_dtypes.finfo(numpy_type)
    infinite, zero = numpy.array([numpy.inf, 0], numpy.float32).astype(numpy_type).astype(numpy.float64)
    return NumberFormat(
        name,
        torch_name,
        bits=info.bits,
        bytes=info.bits / 8 if info.bits % 8 else info.bits // 8,
        exponent_bits=info.nexp,
        mantissa_bits=info.nmant,
        largest=float(info.max),
        smallest=float(info.min),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        epsilon=float(info.eps),
        infinity=bool(numpy.isinf(infinite)),
        zero=bool(zero == 0),
    )


def _tf32(fp32: NumberFormat) -> NumberFormat:
    """fp32 with a shorter mantissa: same exponents, so the same least normal number."""
    assert fp32.smallest_normal is not None
    epsilon = 2.0**-_TF32_MANTISSA_BITS
    # (2 - eps) * 2**127, from fp32's own (2 - eps32) * 2**127.
    largest = fp32.largest / (2 - fp32.epsilon) * (2 - epsilon)
    return NumberFormat(
        "tf32",
        None,
        bits=1 + fp32.exponent_bits + _TF32_MANTISSA_BITS,
        bytes=fp32.bytes,
        exponent_bits=fp32.exponent_bits,
        mantissa_bits=_TF32_MANTISSA_BITS,
        largest=largest,
        smallest=-largest,
        smallest_normal=fp32.smallest_normal,
        smallest_subnormal=fp32.smallest_normal * epsilon,
        epsilon=epsilon,
        infinity=True,
    )


def _int8() -> NumberFormat:
    import ml_dtypes

    info = ml_dtypes.iinfo("int8")
    return NumberFormat(
        "int8", "int8", 8, 1, 0, 7, float(info.max), float(info.min), None, None, 1.0, infinity=False
    )


def round_to(value: Fraction, number_format: NumberFormat) -> Rounding:
    """What `value` becomes in a format: rounded to the nearest, ties to even; integers toward zero.

    Exact, unlike a cast from fp64, which ml_dtypes and torch take through fp32 and round twice.

    >>> fp16 = next(f for f in number_formats() if f.name == "fp16")
    >>> round_to(Fraction("1e-8"), fp16).effect.value, round_to(Fraction("1e5"), fp16).value
    ('underflow', inf)
    """
    name = number_format.name
    if not number_format.zero and value <= 0:
        return Rounding(name, None, Effect.UNSIGNED, None)
    nearest, full_resolution = _nearest(abs(value), number_format)
    largest = Fraction(number_format.largest if value > 0 else -number_format.smallest)
    sign = -1 if value < 0 else 1
    if nearest > largest:
        return Rounding(name, sign * float("inf") if number_format.infinity else None, Effect.OVERFLOW, None)
    error = float(abs(nearest - abs(value)) / abs(value)) if value else None
    return Rounding(name, sign * float(nearest), _effect(abs(value), nearest, full_resolution), error)


def _effect(value: Fraction, nearest: Fraction, full_resolution: bool) -> Effect:
    if nearest == value:
        return Effect.EXACT
    if nearest == 0:
        return Effect.UNDERFLOW
    return Effect.ROUNDED if full_resolution else Effect.SUBNORMAL


def _nearest(value: Fraction, number_format: NumberFormat) -> tuple[Fraction, bool]:
    """The number of the format nearest to a value of 0 or more, its exponent unbounded above; and
    whether it has the whole mantissa."""
    normal, least = number_format.smallest_normal, number_format.smallest_subnormal
    if normal is None or least is None:
        return Fraction(int(value)), True
    if value < Fraction(normal):
        steps = round(value / Fraction(least))  # Python rounds a Fraction's ties to even
        return max(steps, 0 if number_format.zero else 1) * Fraction(least), False
    step = Fraction(2) ** (_exponent(value) - number_format.mantissa_bits)
    return round(value / step) * step, True


def _exponent(value: Fraction) -> int:
    """floor(log2(value)) of a positive value, exactly.

    >>> _exponent(Fraction(8)), _exponent(Fraction(1, 3))
    (3, -2)
    """
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def read_value(text: str) -> Fraction:
    """The exact value that a user typed, for `round_to`.

    >>> read_value("0.1")
    Fraction(1, 10)

    Raises:
        BadNumber: not a finite number, or one so large or small that no format comes near it.
    """
    number: Decimal = read_number(text, "VALUE")
    if number and not -400 < number.adjusted() < 400:
        raise BadNumber(
            f"VALUE is {text!r}.\n  Needed: a number between 1e-400 and 1e400; fp64 ends at 1.8e308."
        )
    return Fraction(number)


def roundings(value: Fraction) -> tuple[Rounding, ...]:
    """What `value` becomes in each format, in the order of `number_formats`."""
    return tuple(round_to(value, number_format) for number_format in number_formats())
