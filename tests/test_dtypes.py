"""Number formats: figures against torch's, rounding against numpy's and ml_dtypes' casts."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preflop.dtypes import Effect, Rounding, number_formats, read_value, round_to, roundings
from preflop.errors import BadNumber

FORMATS = {number_format.name: number_format for number_format in number_formats()}
FLOATS = {
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8-e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8-e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8-e5m2": ml_dtypes.float8_e5m2,
    "fp8-e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp8-e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "fp4-e2m1fn": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize(
    "name", [n for n, f in FORMATS.items() if f.torch_name and n not in ("int8", "fp4-e2m1fn")]
)
def test_figures_are_torchs(name: str) -> None:
    """Bits, largest, smallest normal and epsilon == torch.finfo's."""
    number_format = FORMATS[name]
    dtype = getattr(torch, str(number_format.torch_name), None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {number_format.torch_name}")
    info = torch.finfo(dtype)
    ours = (number_format.bits, number_format.largest, number_format.smallest_normal, number_format.epsilon)
    # torch 2.13 says 0.125 for E5M2FNUZ, which has 2 mantissa bits: 1.125 becomes 1 in it.
    epsilon = 0.25 if name == "fp8-e5m2fnuz" else info.eps
    assert ours == (info.bits, info.max, info.smallest_normal, epsilon)
    assert (
        torch.tensor(1 + number_format.epsilon, dtype=torch.float64).to(dtype).double()
        == 1 + number_format.epsilon
    )


def test_specification_facts() -> None:
    """E4M3 ends at 448, E5M2 at 57344; bf16 has fp32's range; bytes are 8, 4, 2, 1 and a half."""
    assert FORMATS["fp8-e4m3fn"].largest == 448
    assert FORMATS["fp8-e5m2"].largest == 57344
    assert FORMATS["bf16"].exponent_bits == FORMATS["fp32"].exponent_bits == 8
    assert FORMATS["bf16"].smallest_normal == FORMATS["fp32"].smallest_normal
    sizes = [
        FORMATS[name].bytes for name in ("fp64", "fp32", "tf32", "bf16", "fp8-e5m2", "fp4-e2m1fn", "int8")
    ]
    assert sizes == [8, 4, 4, 2, 1, 0.5, 1]


def test_tf32_is_fp32_with_10_mantissa_bits() -> None:
    """TF32: 19 bits, fp32's exponents, fp16's epsilon, the same largest exponent as fp32."""
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.bits, tf32.exponent_bits, tf32.mantissa_bits) == (19, fp32.exponent_bits, fp16.mantissa_bits)
    assert tf32.epsilon == fp16.epsilon
    assert tf32.largest == (2 - 2**-10) * 2.0**127
    bits = np.float32(tf32.largest).view(np.uint32)
    assert bits & 0x1FFF == 0 and bits >> 23 == 254


@pytest.mark.parametrize("name", FORMATS)
def test_figures_are_numbers_of_the_format(name: str) -> None:
    """Largest, smallest, both least ones and 1 + epsilon round to themselves."""
    f = FORMATS[name]
    for value in (f.largest, f.smallest, f.smallest_normal, f.smallest_subnormal, 1 + f.epsilon):
        if value is not None and (f.zero or value > 0):
            assert round_to(Fraction(value), f).effect is Effect.EXACT


def test_1e_minus_8_underflows_in_fp16_only() -> None:
    """1e-8 becomes 0 in fp16 but not in bf16."""
    assert round_to(Fraction("1e-8"), FORMATS["fp16"]) == Rounding("fp16", 0.0, Effect.UNDERFLOW, 1.0)
    bf16 = round_to(Fraction("1e-8"), FORMATS["bf16"])
    assert bf16.effect is Effect.ROUNDED
    assert bf16.value == pytest.approx(1e-8, rel=2**-8)


def test_1e5_overflows_in_fp16_and_fp8() -> None:
    """1e5 is infinite in fp16 and E5M2, beyond E4M3 (which has no infinity), and fine in bf16."""
    value = Fraction(10**5)
    assert round_to(value, FORMATS["fp16"]).value == math.inf
    assert round_to(value, FORMATS["fp8-e5m2"]).value == math.inf
    e4m3 = round_to(value, FORMATS["fp8-e4m3fn"])
    assert (e4m3.effect, e4m3.value) == (Effect.OVERFLOW, None)
    assert round_to(value, FORMATS["bf16"]).value == 99840
    assert round_to(-value, FORMATS["fp16"]).value == -math.inf


def test_int8() -> None:
    """int8 truncates toward zero and ends at 127 and -128."""
    int8 = FORMATS["int8"]
    assert round_to(Fraction("-2.9"), int8).value == -2
    assert round_to(Fraction(-128), int8).effect is Effect.EXACT
    assert round_to(Fraction(128), int8).effect is Effect.OVERFLOW
    assert round_to(Fraction("0.9"), int8).effect is Effect.UNDERFLOW


def test_scales_have_neither_zero_nor_sign() -> None:
    """E8M0 holds powers of two: 0 and negative values have no answer, tiny ones become the least."""
    e8m0 = FORMATS["fp8-e8m0fnu"]
    assert round_to(Fraction(0), e8m0).effect is Effect.UNSIGNED
    assert round_to(Fraction(-1), e8m0).effect is Effect.UNSIGNED
    assert round_to(Fraction("1e-45"), e8m0).value == e8m0.smallest_normal


def test_rounds_once() -> None:
    """1 + 2^-8 + 2^-40 is above the tie: bf16 rounds it up. A cast through fp32 rounds it down."""
    value = Fraction(1) + Fraction(1, 2**8) + Fraction(1, 2**40)
    assert round_to(value, FORMATS["bf16"]).value == 1 + 2**-7
    assert float(np.float64(float(value)).astype(ml_dtypes.bfloat16)) == 1


finite = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1e3, 1e3, width=32),
    st.integers(-2048, 2048).map(lambda n: n / 64),
)


@pytest.mark.parametrize("name", FLOATS)
@given(value=finite)
def test_rounding_is_the_librarys_cast_from_fp32(name: str, value: float) -> None:
    """For any fp32 value: round_to == numpy's or ml_dtypes' cast (exact from fp32: rounded once)."""
    ours = round_to(Fraction(value), FORMATS[name])
    with np.errstate(over="ignore"):
        cast = float(np.float32(value).astype(FLOATS[name]))
    if ours.effect is Effect.OVERFLOW:
        # Without infinity, ml_dtypes' fp8 becomes NaN and its fp4 stays at the largest.
        assert math.isnan(cast) or math.isinf(cast) or abs(cast) == FORMATS[name].largest
    elif ours.effect is Effect.UNSIGNED:
        assert math.isnan(cast)
    else:
        assert ours.value == cast


@given(value=finite)
def test_tf32_is_fp32_bits_rounded_at_the_tenth(value: float) -> None:
    """TF32 == adding half of bit 13 (ties to even) to fp32's bits and clearing the 13 below."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
    expected = float(np.uint32(rounded & 0xFFFFFFFF).view(np.float32))
    assert round_to(Fraction(value), FORMATS["tf32"]).value == expected


@given(value=finite)
def test_rounding_is_odd_and_idempotent(value: float) -> None:
    """round(-x) == -round(x) in signed formats, and a rounded value stays."""
    for number_format in FORMATS.values():
        once = round_to(Fraction(value), number_format)
        if once.value is None or math.isinf(once.value) or not number_format.zero:
            continue
        assert round_to(Fraction(once.value), number_format).value == once.value
        if number_format.name != "int8":
            assert round_to(Fraction(-value), number_format).value == -once.value


def test_every_format_answers() -> None:
    """One rounding per format, in order."""
    assert [r.format for r in roundings(Fraction(1))] == list(FORMATS)


@pytest.mark.parametrize("text", ["nan", "inf", "x", "", "1e999", "1e-999", "1e999999999"])
def test_bad_values(text: str) -> None:
    """What is no finite number, or far from any format, is refused."""
    with pytest.raises(BadNumber, match="VALUE"):
        read_value(text)


def test_read_value_is_exact() -> None:
    """0.1 is a tenth, not fp64's nearest."""
    assert read_value("0.1") == Fraction(1, 10)


@given(value=st.floats(1.0, 2.0))
def test_relative_error_is_at_most_half_epsilon(value: float) -> None:
    """Between 1 and 2 each float format is within half its epsilon."""
    for number_format in FORMATS.values():
        error = round_to(Fraction(value), number_format).relative_error
        if number_format.name != "int8":
            assert error is not None and error <= number_format.epsilon / 2


def test_devices_compute_in_a_format_at_their_dense_rate():
    """H100: bf16 989.4e12, fp8 of the OCP kind, no fp4; MI300X has the other fp8; scales are no numbers."""
    from preflop.hardware.catalog import devices, find
    from preflop.timing.formats import dense_flops_per_s, rates

    formats = {number_format.name: number_format for number_format in number_formats()}
    h100, mi300x = find("h100-sxm"), find("mi300x")
    assert dense_flops_per_s(h100, formats["bf16"]) == 989.4e12
    assert dense_flops_per_s(h100, formats["fp8-e4m3fn"]) == h100.peak_flops_per_s("fp8")
    assert dense_flops_per_s(h100, formats["fp4-e2m1fn"]) is None
    assert dense_flops_per_s(mi300x, formats["fp8-e4m3fn"]) is None
    assert dense_flops_per_s(mi300x, formats["fp8-e4m3fnuz"]) == mi300x.peak_flops_per_s("fp8")
    assert rates(devices(), formats["fp8-e8m0fnu"]) == {}
    found = list(rates(devices(), formats["bf16"]).values())
    assert found == sorted(found, reverse=True)


def test_the_command_lists_devices(capsys):
    """`preflop dtypes --json` holds, per format, every device that computes in it."""
    import json

    from preflop.cli.main import run

    assert run(["dtypes", "--json"]) == 0
    found = {f["name"]: f["dense_flops_per_s"] for f in json.loads(capsys.readouterr().out)["formats"]}
    assert found["bf16"]["h100-sxm5-80gb"] == 989.4e12
    assert run(["dtypes", "--device", "h100-sxm"]) == 0
    assert "989 TFLOP/s" in capsys.readouterr().out
