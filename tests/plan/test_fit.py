"""What fits: the napkin's facts, and the search for the largest batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.errors import PreflopError
from preflop.hardware.catalog import find
from preflop.optimizers import find_optimizer
from preflop.plan.fit import Largest, Need, largest, largest_batch, largest_model
from preflop.precision import find_precision


@pytest.mark.parametrize(
    ("precision", "billions"),
    [("fp32", 40.0), ("bf16-mixed", 40.0), ("bf16-fp32-states", 53.3), ("bf16", 80.0)],
)
def test_adamw_on_eight_h100(precision: str, billions: float) -> None:
    """8 x 80e9 bytes with AdamW: 40e9 parameters at 16 bytes, 53.3e9 at 12, 80e9 at 8."""
    found = largest_model(find("h100-sxm"), 8, find_optimizer("adamw"), find_precision(precision))
    assert round(found.parameters / 1e9, 1) == billions
    assert found.memory_bytes == 640 * 10**9


def test_columns_sum_to_bytes_per_parameter() -> None:
    """Weights + gradients + states == bytes per parameter, for every optimizer and precision."""
    from preflop.optimizers import OPTIMIZERS
    from preflop.precision import PRECISIONS

    for optimizer in OPTIMIZERS.values():
        for precision in PRECISIONS.values():
            found = largest_model(find("h100-sxm"), 1, optimizer, precision)
            parts = found.parameter_bytes + found.gradient_bytes + found.optimizer_state_bytes
            assert parts == found.bytes_per_parameter


def test_adafactor_says_what_it_leaves_out() -> None:
    """A factored optimizer's vectors are not in the napkin, and the answer says so."""
    found = largest_model(find("a100"), 1, find_optimizer("adafactor"), find_precision("fp32"))
    assert any("row and column vectors" in text for text in found.assumptions)


def test_muon_says_what_is_adamws() -> None:
    """Muon's napkin is between all parameters by it (12 bytes) and all by AdamW (16), and says both."""
    found = largest_model(find("h100-sxm"), 8, find_optimizer("muon"), find_precision("fp32"))
    assert found.parameters == 640 * 10**9 // 12
    assert any("40,000,000,000 parameters if all were" in text for text in found.assumptions)


def test_8bit_states_are_a_byte_each() -> None:
    """fp32 with 8-bit AdamW: 4 + 4 + 2 bytes a parameter, and the answer says what is left out."""
    found = largest_model(find("h100-sxm"), 8, find_optimizer("adamw-8bit"), find_precision("fp32"))
    assert (found.bytes_per_parameter, found.optimizer_state_bytes) == (10, 2)
    assert any("absmax" in text for text in found.assumptions)


def search(capacity: int, base: int, each: int, jump: int = 0, at: int = 1) -> Largest:
    """Search in a made-up model: base + each x batch bytes, `jump` more from batch `at` on."""

    def need(batch: int) -> Need:
        peak = base + each * batch + (jump if batch >= at else 0)
        return Need(batch, peak, capacity - peak)

    return largest_batch(need)


@given(
    capacity=st.integers(0, 10**12),
    base=st.integers(0, 10**10),
    each=st.integers(1, 10**9),
    jump=st.integers(0, 10**10),
    at=st.integers(1, 2000),
)
def test_found_fits_and_one_more_does_not(capacity: int, base: int, each: int, jump: int, at: int) -> None:
    """The found batch fits, the next one does not, and both were recorded."""
    if (capacity - base) // each > 2**29:
        return
    found = search(capacity, base, each, jump, at)
    assert found.one_more.spare_bytes < 0
    if found.fits is None:
        assert found.one_more.size == 1
    else:
        assert found.fits.spare_bytes >= 0
        assert found.one_more.size == found.fits.size + 1


def test_a_linear_model_needs_few_recordings() -> None:
    """GPT-2-like sizes on 80 GB: five recordings find a batch in the hundreds."""
    found = search(80 * 10**9, 2 * 10**9, 310 * 10**6)
    assert found.fits is not None
    assert found.fits.size == 251
    assert found.tried <= 5


def test_memory_that_does_not_grow_is_an_error() -> None:
    """A model whose memory does not depend on its batch has no largest batch."""
    with pytest.raises(PreflopError, match="does not grow with its batch"):
        largest_batch(lambda batch: Need(batch, 5, 5))


def jagged(capacity: int, *, most: int | None = None) -> tuple[Largest, list[int]]:
    """Search where each size needs 10 a piece and gaps of up to 300 besides, which do not grow; and what fits."""

    def need(size: int) -> Need:
        blocks = 10 * size
        gaps = 300 if size % 7 else 0
        return Need(size, blocks, capacity - blocks - gaps, gapless_spare_bytes=capacity - blocks)

    fitting = [size for size in range(1, capacity // 10 + 1) if need(size).spare_bytes >= 0]
    return largest(need, most=most), fitting


def test_a_larger_size_that_fits_beyond_one_that_does_not_is_found() -> None:
    """Up to 70 fit with gaps, 77, 84, 91 and 98 without: the answer is a size that fits where the next does not, is
    beyond the first that does not fit, and says so."""
    found, fitting = jagged(1000)
    assert fitting[-4:] == [77, 84, 91, 98]
    assert found.fits is not None and found.one_more is not None and found.gap is not None
    assert found.fits.size == 98
    assert found.one_more.size == 99
    assert found.gap.size not in fitting


def test_the_last_size_is_looked_at_beyond_a_gap() -> None:
    """The largest that there is fits, though smaller ones do not."""
    found, _ = jagged(1000, most=91)
    assert found.fits is not None
    assert (found.fits.size, found.one_more) == (91, None)


@given(capacity=st.integers(400, 10**5))
def test_beyond_gaps_found_fits_and_one_more_does_not(capacity: int) -> None:
    """Whatever is looked at, the answer fits, the next does not, and none of the sizes tried above it did."""
    found, fitting = jagged(capacity)
    assert found.fits is not None and found.one_more is not None
    assert found.fits.size in fitting
    assert found.one_more.size == found.fits.size + 1
    assert found.one_more.size not in fitting
    assert found.tried < 60
