"""Curves of measured kernels: shares, families, and the same time by rows and by arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.account import OperatorRow
from preflop.hardware.catalog import devices, find
from preflop.timing.kernels import Curve, Family, _table, family
from preflop.timing.rates import kernel_rate
from preflop.timing.roofline import on_roofline
from preflop.timing.row_times import row_rates, row_seconds
from preflop.timing.step import step_time


def curves() -> list[tuple[str, str, list[list[float]]]]:
    found = []
    for group in ("devices", "attention"):
        for name, entry in _table()[group].items():
            found += [(name, key, points) for key, points in entry.items() if key != "source"]
    return found


@pytest.mark.parametrize(("name", "key", "points"), curves(), ids=lambda value: str(value)[:24])
def test_every_point_is_a_share_and_sizes_rise(name: str, key: str, points: list[list[float]]) -> None:
    """Shares lie in (0, 1], so that no expectation beats the lower bound; sizes are sorted."""
    sizes = [size for size, _ in points]
    assert sizes == sorted(set(sizes)), (name, key)
    assert all(0 < share <= 1 for _, share in points), (name, key)


def test_every_curve_is_of_a_known_device_and_source() -> None:
    """Each device is in the catalog, each source is named with where it was read."""
    known = {device.id for device in devices()}
    table = _table()
    assert set(table["devices"]) | set(table["same_die"]) <= known
    entries = [*table["devices"].values(), *table["attention"].values()]
    assert {entry["source"] for entry in entries} <= set(table["sources"])


def test_large_matmuls_reach_more_than_small_ones() -> None:
    """fp32 on a V100: 0.9 of the peak at 1e11 FLOPs, less at 5e9."""
    rate = kernel_rate(find("v100-pcie-32gb"), Family.MATMUL, "float32")
    assert rate is not None
    assert rate.compute_share(5e9, 1e7) < rate.compute_share(1e11, 1e8)
    assert rate.compute_share(1e11, 1e8) == pytest.approx(0.93, abs=0.05)


def test_flash_attention_is_slower_on_hopper_than_on_ampere_in_share() -> None:
    """FlashAttention-2 reaches 35 % of an H100 and up to 73 % of an A100 (its paper; FlashAttention-3's)."""
    shares = []
    for name in ("h100-sxm", "a100-80gb"):
        rate = kernel_rate(find(name), Family.FLASH_FORWARD, "bfloat16")
        assert rate is not None
        shares.append(rate.compute_share(16384 / 2 * 1e6, 1e6))
    assert shares == pytest.approx([0.351, 0.730])


def test_attention_backward_does_five_products_for_four() -> None:
    """What a curve gives is divided by 1.25: the scores are computed anew inside the kernel."""
    rate = kernel_rate(find("a100-80gb"), Family.FLASH_BACKWARD, "bfloat16")
    assert rate is not None and rate.compute is not None
    assert rate.compute_share(8192e6, 1e6) == pytest.approx(rate.compute.at(16384) / 1.25)


def test_a_device_with_the_same_die_has_the_same_shares() -> None:
    """Nobody measured an A800; the A100 PCIe 80 GB stands in, and the basis names it."""
    one = kernel_rate(find("a800"), Family.MATMUL, "float32")
    other = kernel_rate(find("a100-pcie-80gb"), Family.MATMUL, "float32")
    assert one is not None and other is not None
    assert one.compute_share(1e11, 1e8) == other.compute_share(1e11, 1e8)


@given(st.floats(1.0, 1e15))
def test_a_curve_by_number_and_by_array_is_the_same(size: float) -> None:
    """`at` and `at_each` interpolate alike, also beyond the ends."""
    curve = Curve((1e3, 1e6, 1e9), (0.1, 0.8, 0.5), "")
    assert curve.at(size) == pytest.approx(float(curve.at_each(np.array([size]))[0]))


ROWS = [
    ("aten.mm", "matmul", "float32", 3 * 10**11, 10**9, 3),
    ("aten.bmm", "matmul", "float32", 10**11, 3 * 10**9, 2),
    ("aten._softmax", "other", "float32", 10**8, 10**9, 4),
    ("aten.native_layer_norm", "other", "float32", 10**8, 3 * 10**8, 4),
    ("aten.mm", "matmul", "bfloat16", 10**12, 10**9, 2),
    ("aten._scaled_dot_product_flash_attention_backward", "attention", "bfloat16", 10**12, 10**9, 2),
    ("aten.add", "other", "bfloat16", 10**6, 10**7, 7),
]


@pytest.mark.parametrize("name", ["v100-pcie-32gb", "a100-80gb", "h100-sxm", "l4", "mi300x", "tpu-v5e"])
def test_rows_and_arrays_give_the_same_step(name: str) -> None:
    """`row_times` repeats `step` on arrays: lower, expected and upper agree to the last digits."""
    device = find(name)
    rows = [
        OperatorRow(op, "forward", "m", None, calls, "", dtype, flops, moved, 0, None, None, None, kind)
        for op, kind, dtype, flops, moved, calls in ROWS
    ]
    one = step_time([on_roofline(row, device) for row in rows], device, model_flops=1, tokens=None).time
    rates = row_rates([r[0] for r in ROWS], [r[1] for r in ROWS], [r[2] for r in ROWS], device, tf32=False)
    arrays = [np.array([r[i] for r in ROWS], np.float64) for i in (3, 4, 5)]
    other = row_seconds(rates, *arrays)
    for figure in ("lower_s", "expected_s", "upper_s"):
        by_rows, by_arrays = getattr(one, figure), getattr(other, figure)
        if by_rows is None or by_arrays is None:
            assert by_rows is by_arrays, figure
        else:
            assert by_rows == pytest.approx(by_arrays, rel=1e-9), figure


@pytest.mark.parametrize(
    ("op", "kind", "wanted"),
    [
        ("aten.addmm", "matmul", Family.MATMUL),
        ("aten.baddbmm", "matmul", Family.BATCHED),
        ("aten.mkldnn_rnn_layer", "matmul", Family.RECURRENT),
        ("aten._scaled_dot_product_cudnn_attention", "attention", Family.CUDNN_FORWARD),
        ("aten._scaled_dot_product_efficient_attention_backward", "attention", Family.EFFICIENT_BACKWARD),
        ("aten.native_group_norm", "other", Family.NORM),
        ("aten.gelu", "other", Family.ELEMENTWISE),
    ],
)
def test_families(op: str, kind: str, wanted: Family) -> None:
    """Each operator belongs to the kernels that are measured with it."""
    assert family(op, kind) is wanted
