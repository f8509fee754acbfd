"""Timing: operators on a device's roofline, and the bounds of a step."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.account import OperatorRow
from preflop.hardware.catalog import devices, find
from preflop.timing.achieved import achieved_bandwidth, achieved_matmul
from preflop.timing.roofline import ceiling, device_ridge_point, on_roofline
from preflop.timing.step import step_time

H100 = find("h100-sxm")


def row(flops=0, moved=0, kind="matmul", dtype="bfloat16", calls=1, attended=None):
    return OperatorRow(
        "aten.mm", "forward", "fc", None, calls, "", dtype, flops, moved, 0, None, None, None, kind, attended
    )


def times(rows, device=H100, tf32=False, model_flops=None, tokens=None):
    priced = [on_roofline(r, device, tf32) for r in rows]
    flops = sum(r.flops for r in rows) if model_flops is None else model_flops
    return step_time(priced, device, model_flops=flops, tokens=tokens)


def test_a_large_matmul_is_bound_by_compute():
    """989.4e12 bf16 FLOPs on an H100 take 1 s at least."""
    result = on_roofline(row(flops=989_400_000_000_000, moved=1000), H100).row
    assert result.bound == "compute"
    assert result.time_s == pytest.approx(1.0)


def test_elementwise_is_bound_by_bandwidth():
    """3352e9 bytes take 1 s on an H100; an add's FLOPs do not matter."""
    result = on_roofline(row(flops=10**9, moved=3_352_000_000_000, kind="other"), H100).row
    assert result.bound == "bandwidth"
    assert result.time_s == pytest.approx(1.0)


def test_elementwise_work_can_still_be_bound_by_the_vector_units():
    """Element-wise FLOPs count against the fp32 vector peak, 66.9e12 on an H100, in any dtype."""
    result = on_roofline(row(flops=66_900_000_000_000, moved=10, kind="other"), H100).row
    assert result.bound == "compute" and result.time_s == pytest.approx(1.0)


def test_float32_matmuls_use_float32s_peak_unless_tf32_is_asked_for():
    """66.9e12 on an H100 in fp32, 494.7e12 in tf32: no silent tensor cores."""
    assert ceiling(H100, "matmul", "float32").flops_per_s == 66.9e12
    assert ceiling(H100, "matmul", "float32", tf32=True).flops_per_s == 494.7e12
    assert ceiling(H100, "convolution", "float32").flops_per_s == 494.7e12  # cuDNN's default
    assert ceiling(H100, "matmul", "float32", op="aten._cudnn_rnn").flops_per_s == 494.7e12
    assert ceiling(H100, "convolution", "bfloat16").flops_per_s == 989.4e12
    assert ceiling(find("v100-pcie-32gb"), "convolution", "float32").dtype == "float32"  # has none
    assert ceiling(find("mi300x"), "convolution", "float32").dtype == "float32"  # not cuDNN
    assert ceiling(H100, "matmul", "bfloat16", tf32=True).flops_per_s == 989.4e12


def test_views_take_no_time_and_have_no_bound():
    """What moves nothing and computes nothing is bound by nothing."""
    result = on_roofline(row(kind="other"), H100).row
    assert (result.time_s, result.bound) == (0.0, None)


def test_causal_attention_is_bounded_by_the_attended_pairs():
    """A kernel may skip what causality masks, so the lower bound counts only what is attended."""
    full = on_roofline(row(flops=2 * 10**15, kind="attention"), H100).row
    causal = on_roofline(row(flops=2 * 10**15, kind="attention", attended=10**15), H100).row
    assert causal.time_s == pytest.approx(full.time_s / 2)
    assert causal.flops == full.flops


def test_h100_ridge_point():
    """989.4e12 / 3.352e12 = 295 FLOPs per byte in bf16."""
    assert round(device_ridge_point(H100, "bfloat16")) == 295


def test_a_dtype_without_a_peak_is_said_and_never_guessed():
    """The V100 prints no bf16 peak: bytes alone bound the time, nothing is expected."""
    v100 = find("v100-sxm2-32gb")
    result = times([row(flops=10**15, moved=900_000_000)], v100)
    assert result.time.expected_s is None and result.time.mfu is None
    assert result.time.lower_s == pytest.approx(900e6 / v100.bandwidth_bytes_per_s)
    assert any("no dense peak for bfloat16" in text for text in result.assumptions)


def test_mfu_at_the_lower_bound_is_at_most_one():
    """One matmul, all compute: MFU of the expectation = what matmuls of models were measured to reach."""
    result = times([row(flops=10**18, moved=1)]).time
    assert result.mfu == pytest.approx(0.803 * 0.926)
    assert result.mfu_basis == "expected_s"
    assert result.peak_dtype == "bfloat16"


def test_many_tiny_kernels_are_bound_by_launching():
    """10,000 adds of a few bytes take the host 5 us each."""
    result = times([row(moved=64, kind="other", calls=10_000)]).time
    assert result.bound == "launch"
    assert result.expected_s == pytest.approx(0.05)


def test_tokens_per_second():
    """8,192 tokens in the expected time."""
    result = times([row(flops=989_400_000_000_000)], tokens=8192).time
    assert result.tokens_per_s == pytest.approx(8192 / result.expected_s)


def test_nothing_to_time():
    """An empty step has no time, not zero seconds of bound."""
    assert dataclasses.astuple(times([]).time) == (None,) * 9


def test_unmeasured_devices_say_whose_median_stands_in():
    """Nobody measured an L40S: the median of NVIDIA's devices, and the basis says so."""
    figure = achieved_matmul(find("l40s"), "bfloat16")
    assert "nobody measured NVIDIA L40S" in figure.basis and 0.7 < figure.ratio < 0.9
    assert "median" in achieved_bandwidth(find("l40s")).basis


def test_tf32_is_not_expected_slower_than_float32():
    """Equal peaks and two borrowed medians (RTX 4090): TF32 takes what float32 takes, and the basis says why."""
    device = find("rtx-4090")
    plain, tf32 = achieved_matmul(device, "float32"), achieved_matmul(device, "tf32")
    assert device.peak_flops_per_s("float32") == device.peak_flops_per_s("tf32")
    assert tf32.ratio == plain.ratio
    assert "the faster is expected" in tf32.basis
    assert "the faster" not in achieved_matmul(find("l40s"), "tf32").basis


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.id)
def test_tf32_permits_and_does_not_slow_down(device):
    """On every device of the catalog with both peaks: share x peak of TF32 >= that of float32."""
    rates = []
    for dtype in ("float32", "tf32"):
        figure = achieved_matmul(device, dtype)
        if dtype not in device.peaks or figure is None:
            pytest.skip("no such peak, or nobody measured the vendor")
        rates.append(figure.ratio * device.peak_flops_per_s(dtype))
    assert rates[1] >= rates[0] * (1 - 1e-9)


def test_unmeasured_vendors_have_no_expectation():
    """Nobody measured a TPU here: lower bound only."""
    tpu = find("tpu-v5e")
    assert achieved_matmul(tpu, "bfloat16") is None
    result = times([row(flops=10**15, moved=10**9)], tpu)
    assert result.time.expected_s is None and result.time.mfu_basis == "lower_s"
    assert any("nobody measured" in text for text in result.assumptions)


def test_every_achieved_figure_has_a_source_and_is_a_share():
    """Each device of achieved.toml has the catalog's vendor, a known source, ratios within (0, 1]."""
    from preflop.timing.achieved import _table

    vendors = {device.id: device.vendor for device in devices()}
    for device_id, entry in _table()["devices"].items():
        # The M4 is not in the catalog (no peak was found for it) but its bandwidth was measured.
        assert vendors.get(device_id, entry["vendor"]) == entry["vendor"], device_id
        figures = [*entry.get("matmul", {}).values(), *([entry["bandwidth"]] if "bandwidth" in entry else [])]
        assert figures
        for figure in figures:
            assert 0 < figure["ratio"] <= 1 and figure["source"] in _table()["sources"]


rows = st.lists(
    st.builds(
        row,
        flops=st.integers(0, 10**15),
        moved=st.integers(0, 10**12),
        kind=st.sampled_from(["matmul", "attention", "convolution", "other"]),
        dtype=st.sampled_from(["bfloat16", "float32", "float16"]),
        calls=st.integers(1, 1000),
    ),
    max_size=6,
)


@given(rows, st.sampled_from(["h100-sxm", "a100-80gb", "mi300x", "l4", "tpu-v5e", "v100-sxm2-32gb"]))
def test_lower_expected_upper(some, name):
    """lower <= expected <= upper, on every device, whatever the step; more work is never faster."""
    device = find(name)
    time = times(some, device).time
    if time.expected_s is not None:
        assert time.lower_s <= time.expected_s <= time.upper_s
    if some:
        more = times([*some, row(flops=10**12, moved=10**9)], device).time
        assert more.lower_s >= time.lower_s
