"""Collectives between GPUs: what was measured, and what a sharded step does not hide of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.hardware.catalog import find
from preflop.timing.collective import Collective, Ranks, Sharding, beside_s, collective_s, sharded_s

A100, H100 = find("a100-80gb"), find("h100-sxm")
SECONDS = st.floats(1e-6, 1e3)


@given(
    what=st.sampled_from(Collective),
    ranks=st.integers(2, 8),
    message=st.floats(1e3, 1e11),
)
def test_larger_messages_take_longer_and_one_rank_none(what: Collective, ranks: int, message: float) -> None:
    """Monotone in the message; a single GPU waits for nobody."""
    smaller = collective_s(A100, what, message, Ranks(count=ranks))
    larger = collective_s(A100, what, 4 * message, Ranks(count=ranks))
    assert smaller is not None and larger is not None
    assert 0 < smaller < larger
    assert collective_s(A100, what, message, Ranks(count=1)) == 0.0


def test_the_measured_point_is_given_back() -> None:
    """All-reduce of 1 GiB on eight A100s: 229.04 GB/s of bus bandwidth, as nccl-tests printed it."""
    seconds = collective_s(A100, Collective.ALL_REDUCE, 2**30, Ranks(count=8))
    assert seconds is not None
    assert 2 * 7 / 8 * 2**30 / seconds == pytest.approx(229.04e9)


def test_on_switches_that_do_not_add_an_all_reduce_is_two_halves() -> None:
    """A100: gathering takes half of reducing. H100's switches add: less than twice."""
    for device, twice in ((A100, True), (H100, False)):
        reduced = collective_s(device, Collective.ALL_REDUCE, 2**30, Ranks(count=8))
        gathered = collective_s(device, Collective.ALL_GATHER, 2**30, Ranks(count=8))
        assert reduced is not None and gathered is not None
        assert (reduced == pytest.approx(2 * gathered)) is twice


def test_a_slow_network_decides_and_a_fast_one_does_not() -> None:
    """Sixteen GPUs: 25 Gbit/s each take longer than the links inside the nodes, 4000 Gbit/s do not."""
    inside = collective_s(A100, Collective.ALL_GATHER, 1e10, Ranks(count=8))
    slow, fast = (
        collective_s(A100, Collective.ALL_GATHER, 1e10, Ranks(count=16, link_bytes_per_s=speed / 8))
        for speed in (25e9, 4000e9)
    )
    assert inside is not None and slow is not None and fast is not None
    assert fast == pytest.approx(inside) and slow > 5 * inside


def test_what_nobody_measured_has_no_time() -> None:
    """Another device, or several nodes without a network: None, not a guess."""
    assert collective_s(find("l4"), Collective.ALL_REDUCE, 1e9, Ranks(count=8)) is None
    assert collective_s(A100, Collective.ALL_REDUCE, 1e9, Ranks(count=16)) is None
    sharding = Sharding(units=2, gathered_bytes=1e9, reduced_bytes=1e9)
    assert sharded_s(1.0, 1.0, find("l4"), sharding, Ranks(count=8)) is None


@given(
    forward=st.floats(1e-3, 10), backward=st.floats(1e-3, 10), parameters=st.floats(1e6, 1e11),
    units=st.integers(1, 100),
)  # fmt: skip
def test_sharding_never_makes_a_step_faster(
    forward: float, backward: float, parameters: float, units: int
) -> None:
    """At least what computing takes; prefetching never loses; freeing weights never wins."""

    def step(**how: bool) -> float:
        sharding = Sharding(units=units, gathered_bytes=2 * parameters, reduced_bytes=4 * parameters, **how)
        found = sharded_s(forward, backward, A100, sharding, Ranks(count=8))
        assert found is not None
        assert found[0] >= forward and found[1] >= backward
        return sum(found)

    assert step(prefetches=True) <= step(prefetches=False) + 1e-9
    assert step(regathers=False) <= step(regathers=True) + 1e-9


def test_enough_work_hides_all_but_the_ends() -> None:
    """A thousand units and much to compute: what is left is one gathering, one scattering and what kernels lose."""
    sharding = Sharding(units=1000, gathered_bytes=2e9, reduced_bytes=4e9)
    found = sharded_s(10.0, 20.0, A100, sharding, Ranks(count=8))
    gather_s = collective_s(A100, Collective.ALL_GATHER, 2e6, Ranks(count=8))
    scatter_s = collective_s(A100, Collective.REDUCE_SCATTER, 4e6, Ranks(count=8))
    assert found is not None and gather_s is not None and scatter_s is not None
    lost_s = 1000 * (2 * gather_s + scatter_s) * 24 / 108
    assert sum(found) == pytest.approx(30 + gather_s + scatter_s + lost_s)


@pytest.mark.parametrize(("ranks", "taken"), [(8, 24), (64, 16)])
def test_kernels_beside_a_collective_lose_its_multiprocessors(ranks: int, taken: int) -> None:
    """An A100 has 108: NCCL takes 24 of them inside a node and 16 between nodes, for as long as it runs."""
    assert beside_s(10.0, 2.0, A100, Ranks(count=ranks)) == pytest.approx(10 + 2 * taken / 108)


@given(computing=SECONDS, communicating=SECONDS, ranks=st.integers(1, 512))
def test_side_by_side_is_between_the_longer_and_the_sum(computing: float, communicating: float, ranks: int) -> None:
    """Never shorter than either, never longer than one after the other; one rank sends nothing."""
    both = beside_s(computing, communicating, A100, Ranks(count=ranks))
    if ranks == 1:
        assert both == computing
    else:
        assert max(computing, communicating) <= both <= (computing + communicating) * (1 + 1e-12)
