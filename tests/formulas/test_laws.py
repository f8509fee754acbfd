"""What must hold of the formulas at any size, and what they refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.errors import BadNumber
from preflop.formulas import activation_memory as activations
from preflop.formulas.model_memory import largest_parameters, model_state_bytes
from preflop.formulas.roofline import attainable_flops_per_s, lower_bound_s, ridge_point
from preflop.formulas.training_time import training_days
from preflop.formulas.utilization import model_flops_utilization
from preflop.formulas.work import (
    causal_flops_per_token,
    eight_nd,
    kaplan_forward_flops_per_token,
    palm_flops_per_token,
)
from preflop.formulas.zero import zero_0_bytes, zero_1_bytes, zero_2_bytes, zero_3_bytes

size = st.integers(1, 64)
rate = st.floats(1e6, 1e18)
NOT_POSITIVE = [0, -1, math.nan, math.inf, -math.inf]


@given(n=st.integers(1, 10**12), layers=size, heads=size, width=size, seq=size)
def test_causal_lies_between_none_and_full(n: int, layers: int, heads: int, width: int, seq: int) -> None:
    """6N < causal < full attention, and causal is halfway."""
    causal = causal_flops_per_token(n, layers, heads, width, seq)
    full = palm_flops_per_token(n, layers, heads, width, seq)
    assert 6 * n < causal < full
    assert 2 * causal == full + 6 * n


def test_kaplan_attention_is_half_of_palms() -> None:
    """Kaplan counts scores only: 3 x its attention term is half of PaLM's 12LHQT."""
    attention = kaplan_forward_flops_per_token(0, 12, 1024, 768)
    assert 2 * 3 * attention == palm_flops_per_token(0, 12, 12, 64, 1024)


def test_recompute_makes_six_nd_eight_nd() -> None:
    """A fully recomputed forward: 6ND becomes 8ND."""
    assert eight_nd(10, 7) == 6 * 70 + 2 * 70


@given(peak=rate, bandwidth=rate, intensity=st.floats(1e-3, 1e6))
def test_roofline_is_never_above_either_roof(peak: float, bandwidth: float, intensity: float) -> None:
    """attainable <= peak and <= bandwidth x intensity, and equals one of them."""
    attainable = attainable_flops_per_s(peak, bandwidth, intensity)
    assert attainable <= peak
    assert attainable in (peak, bandwidth * intensity)


@given(peak=rate, bandwidth=rate)
def test_the_two_roofs_meet_at_the_ridge(peak: float, bandwidth: float) -> None:
    """At the ridge bandwidth x intensity == peak."""
    assert ridge_point(peak, bandwidth) * bandwidth == pytest.approx(peak)


@given(flops=st.integers(1, 10**15), moved=st.integers(1, 10**12), peak=rate, bandwidth=rate)
def test_lower_bound_is_flops_over_attainable(flops: int, moved: int, peak: float, bandwidth: float) -> None:
    """The time bound and the rate bound are one statement."""
    attainable = attainable_flops_per_s(peak, bandwidth, flops / moved)
    assert lower_bound_s(flops, moved, peak, bandwidth) == pytest.approx(flops / attainable)


def test_h100_ridge_is_295() -> None:
    """H100 in bf16: 989.5e12 / 3.35e12 = 295 FLOPs per byte."""
    assert round(ridge_point(989.5e12, 3.35e12)) == 295


@given(memory=st.integers(1, 10**15), each=st.integers(1, 64))
def test_largest_model_fits_and_one_more_does_not(memory: int, each: int) -> None:
    """largest x bytes <= memory < (largest + 1) x bytes."""
    largest = largest_parameters(memory, each)
    assert model_state_bytes(largest, each) <= memory < model_state_bytes(largest + 1, each)


def test_eight_80_gb_gpus_hold_40e9_and_53e9() -> None:
    """AdamW on 8 x 80e9 bytes: 40e9 parameters at 16 bytes, 53.3e9 at 12."""
    assert largest_parameters(8 * 80 * 10**9, 16) == 40_000_000_000
    assert round(largest_parameters(8 * 80 * 10**9, 12) / 1e9, 1) == 53.3


def test_zero_paper_figure_1() -> None:
    """7.5B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB."""
    psi = 7_500_000_000
    stages = (zero_0_bytes(psi), zero_1_bytes(psi, 64), zero_2_bytes(psi, 64), zero_3_bytes(psi, 64))
    assert [round(stage / 1e9, 1) for stage in stages] == [120.0, 31.4, 16.6, 1.9]


@given(psi=st.integers(1, 10**12))
def test_zero_on_one_device_is_no_zero(psi: int) -> None:
    """Degree 1 = identity for every stage."""
    whole = zero_0_bytes(psi)
    for stage in (zero_1_bytes, zero_2_bytes, zero_3_bytes):
        assert stage(psi, 1) == pytest.approx(whole)


@given(s=size, b=size, h=size, a=size, t=st.sampled_from([1, 2, 4, 8]))
def test_more_splitting_never_costs_activations(s: int, b: int, h: int, a: int, t: int) -> None:
    """Table 2 from top to bottom: each technique keeps no more than the one it adds to."""
    s, h, a = 8 * s, 8 * h, 8 * a
    none = activations.layer_bytes(s, b, h, a)
    tensor = activations.layer_bytes_tensor_parallel(s, b, h, a, t)
    both = activations.layer_bytes_tensor_sequence_parallel(s, b, h, a, t)
    selective = activations.layer_bytes_tensor_parallel_selective(s, b, h, t)
    all_three = activations.layer_bytes_tensor_sequence_parallel_selective(s, b, h, t)
    assert none >= tensor >= both >= all_three
    assert tensor >= selective >= all_three
    assert activations.layer_bytes_full_recompute(s, b, h) * 17 == all_three * t


def test_gpt3_attention_term_is_80_of_the_114_units() -> None:
    """Korthikanti section 5: 5as/h is 80 for GPT-3, against 34 for everything else."""
    s, h = 2048, 12_288
    assert activations.layer_bytes(s, 1, h, 96) == s * h * (34 + 80)


def test_megatron_530b_attention_term_is_64() -> None:
    """Korthikanti section 5: 5as/h is 64 for MT-NLG (a = 128, s = 2048, h = 20480)."""
    s, h = 2048, 20_480
    assert activations.layer_bytes(s, 1, h, 128) == s * h * (34 + 64)


def test_outside_layers_without_pipeline_has_the_head() -> None:
    """p = 1: embedding mask sbh, and 4sbh(1 + v/h) for the last norm, the head's input and logits."""
    s, b, h, v = 128, 2, 64, 1000
    assert activations.outside_layers_bytes(s, b, h, v, 1, 1) == s * b * h + 4 * s * b * h + 4 * s * b * v


@pytest.mark.parametrize("t", [0, -1, 7])
def test_a_split_that_does_not_divide_is_refused(t: int) -> None:
    """Tensor-parallel sizes that do not divide the bytes are an error, not a rounded answer."""
    with pytest.raises(BadNumber, match="divisor"):
        activations.layer_bytes_tensor_sequence_parallel_selective(2, 1, 2, t)


@pytest.mark.parametrize("bad", NOT_POSITIVE)
def test_training_days_refuses_what_is_not_positive(bad: float) -> None:
    """Zero, negative, NaN and infinite inputs raise and name the argument."""
    with pytest.raises(BadNumber, match="model_flops_utilization"):
        training_days(1, 1, 1, 1.0, bad)
    with pytest.raises(BadNumber, match="peak_flops_per_s"):
        model_flops_utilization(1.0, 1.0, bad)
    with pytest.raises(BadNumber, match="bandwidth_bytes_per_s"):
        ridge_point(1.0, bad)


@given(gpus=st.integers(1, 10_000), mfu=st.floats(0.01, 1))
def test_gpu_days_do_not_depend_on_the_number_of_gpus(gpus: int, mfu: float) -> None:
    """Days x GPUs is constant: the formula has no communication."""
    one = training_days(10**9, 10**10, 1, 1e15, mfu)
    assert gpus * training_days(10**9, 10**10, gpus, 1e15, mfu) == pytest.approx(one)
