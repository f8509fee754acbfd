"""Tiles and waves of matmuls: what of them is work."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.hardware.catalog import find
from preflop.timing.kernels import Family
from preflop.timing.rates import kernel_rate
from preflop.timing.tiles import tile_share, tile_shares

SIZE = st.integers(1, 20000)


@given(
    results=st.lists(st.tuples(st.integers(1, 64), SIZE, SIZE), min_size=1, max_size=8),
    units=st.integers(1, 200),
)
def test_arrays_and_numbers_agree_and_are_shares(results: list[tuple[int, int, int]], units: int) -> None:
    """The same rule twice: for one call and for many; 0 < share <= 1."""
    each = [tile_share(result, units) for result in results]
    assert list(tile_shares(np.array(results), units)) == pytest.approx(each)
    assert all(0 < share <= 1 for share in each)


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), units=st.integers(1, 8))
def test_full_tiles_in_full_waves_lose_nothing(rows: int, columns: int, units: int) -> None:
    """Whole tiles, a whole number of waves: 1."""
    assert tile_share((units, 256 * rows, 128 * columns), units) == 1.0


def test_rows_that_are_no_matmul_lose_nothing() -> None:
    """Zeros stand for other operators."""
    assert list(tile_shares(np.zeros((2, 3)), 108)) == [1.0, 1.0]


def test_a_wave_too_many_costs_most_of_a_wave() -> None:
    """108 multiprocessors, 27 x 4 tiles of 256 x 128: one full wave. Half a tile more in width: nearly two for one."""
    full, over = (tile_share((1, 256 * 27, columns), 108) for columns in (128 * 4, 128 * 4 + 64))
    assert full == 1.0 and over < 0.8


def test_where_a_curve_was_measured_its_shapes_have_their_tiles() -> None:
    """fp32 on the A100 was measured by size: no tiles besides. bf16 was not: a result of few tiles is slower."""
    a100 = find("a100-80gb")
    measured = kernel_rate(a100, Family.MATMUL, "float32")
    single = kernel_rate(a100, Family.MATMUL, "bfloat16")
    assert measured is not None and measured.units == 0
    assert single is not None and single.units == 108
    assert any("whole tiles" in words for words in single.bases)
    assert single.compute_share(1e9, 1e6, (1, 64, 64)) < 0.02 * single.compute_share(
        1e9, 1e6, (1, 256 * 108, 128)
    )


def test_other_vendors_matmuls_are_left_alone() -> None:
    """The tiles are those of NVIDIA's library: the same figures under another name have none."""
    other = dataclasses.replace(find("a100-80gb"), vendor="AMD")
    rate = kernel_rate(other, Family.MATMUL, "bfloat16")
    assert rate is not None and rate.units == 0
