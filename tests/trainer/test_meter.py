"""The meter: each way in which published throughput and MFU went wrong, as a test."""

from __future__ import annotations

import pytest

from preflop import Meter
from preflop.errors import BadNumber

H100_DENSE, H100_SPARSE = 989.4e12, 1978.9e12


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(times: list[float], **options: object) -> Meter:
    clock = Clock()
    meter = Meter(clock=clock, **options)
    meter.start()
    for seconds in times:
        clock.now += seconds
        meter.step()
    return meter


def test_mfu_is_over_the_dense_peak() -> None:
    """480e12 achieved on an H100 is 48.5 %, not the sparse peak's 24.3 %; the peak stands beside it (T01)."""
    reading = run([1.0] * 3, tokens=1, model_flops=480e12, peak_flops_per_s=H100_DENSE,
                  peak_basis="H100 SXM, bfloat16, dense").reading()  # fmt: skip
    assert reading.mfu == pytest.approx(0.485, abs=5e-4)
    assert pytest.approx(0.243, abs=5e-4) == 480e12 / H100_SPARSE
    assert "MFU 48.5% of H100 SXM, bfloat16, dense" in str(reading)


def test_the_accounts_peaks_are_dense() -> None:
    """Half of what the sheets print with sparsity; A100 stays 312, not 156 (T02)."""
    from preflop.hardware.catalog import find

    dense = {"a100-80gb": 312e12, "h100-sxm": 989.4e12, "h100-pcie": 756e12, "h200": 989.4e12}
    for name, flops in dense.items():
        assert float(find(name).peaks["bfloat16"].value) == pytest.approx(flops, rel=2e-3)


def test_a_step_is_all_of_its_microbatches() -> None:
    """4 x 256 tokens, 8 microbatches, 2 s: 4,096 tokens/s and not 512 (T04)."""
    assert run([2.0] * 4, tokens=4 * 256 * 8).reading().tokens_per_s == 4096


def test_each_window_divides_its_own_tokens_by_its_own_time() -> None:
    """1,000 tokens each 0.5 s are 2,000 tokens/s at every step (T05)."""
    clock = Clock()
    meter = Meter(tokens=1000, clock=clock)
    meter.start()
    for _ in range(10):
        clock.now += 0.5
        meter.step()
        assert meter.last_tokens_per_s == 2000


def test_the_whole_jobs_tokens_are_over_the_whole_jobs_peak() -> None:
    """16 GPUs: 2.84 %, and not the published 45.4 % that forgot to divide by them (T06)."""
    tokens = 2048 * 16 * 500
    flops = 6 * 70e9 * tokens
    assert flops == pytest.approx(6.8813e18, rel=1e-4)
    meter = run([13.5 * 3600] * 3, tokens=tokens, model_flops=flops, peak_flops_per_s=312e12, devices=16)
    assert meter.reading().mfu == pytest.approx(0.0284, abs=5e-5)


def test_warm_up_is_left_out_of_both_sides() -> None:
    """50 steps, 10 of warm-up, each at 50 %: exactly 50.00 %, 40 steps over 40 steps' time (T07)."""
    reading = run([1.0] * 50, warmup_steps=10, model_flops=50e12, peak_flops_per_s=100e12).reading()
    assert (reading.mfu, reading.steps, reading.excluded_steps) == (0.5, 40, 10)


def test_steady_and_overall_are_told_apart() -> None:
    """Compilation in the first steps: steady 2,000 tokens/s, overall 1,235, 2 steps left out (T08)."""
    reading = run([30.0, 2.0] + [0.5] * 98, tokens=1000).reading()
    assert reading.tokens_per_s == 2000
    assert reading.overall_tokens_per_s == pytest.approx(100_000 / 81)
    assert reading.excluded_steps == 2


@pytest.mark.parametrize("window", [1, 7])
def test_evaluation_and_saving_are_left_out(window: int) -> None:
    """100 steps of 0.5 s, 30 s of evaluation, 20 s of saving: 2,000 tokens/s, 1,000 by the clock (T09)."""
    clock = Clock()
    meter = Meter(tokens=1000, warmup_steps=0, window_steps=window, clock=clock)
    meter.start()
    for step in range(100):
        clock.now += 0.5
        meter.step()
        if step % 50 == 9:
            with meter.paused("evaluation"):
                clock.now += 15
            with meter.paused("saving"):
                clock.now += 10
    reading = meter.reading()
    assert reading.tokens_per_s == pytest.approx(2000)
    assert reading.overall_tokens_per_s == 1000
    assert reading.paused_s == {"evaluation": 30, "saving": 20}


def test_the_device_is_waited_for_at_the_edges_of_windows_only() -> None:
    """20 steps in windows of 5: 4 waits and one at the start; time per step is wall time / steps (T10)."""
    waits = []
    clock = Clock()
    meter = Meter(
        tokens=1, warmup_steps=0, window_steps=5, synchronize=lambda: waits.append(clock.now), clock=clock
    )
    meter.start()
    for _ in range(20):
        clock.now += 0.25
        meter.step()
    assert waits == [0.0, 1.25, 2.5, 3.75, 5.0]
    assert meter.last_step_s == 0.25


def test_more_than_the_peak_is_warned_of() -> None:
    """An MFU above 1 is impossible: the meter says so (T10)."""
    with pytest.warns(UserWarning, match="MFU is 200%.*not waited for"):
        run([1.0] * 3, model_flops=2e12, peak_flops_per_s=1e12).reading()


def test_hfu_counts_recomputed_work() -> None:
    """With a recomputed forward HFU is 4/3 of MFU."""
    reading = run([1.0] * 3, model_flops=3e12, hardware_flops=4e12, peak_flops_per_s=10e12).reading()
    assert (reading.mfu, reading.hfu) == (pytest.approx(0.3), pytest.approx(0.4))


def test_an_account_gives_flops_tokens_and_peak() -> None:
    """Tokens, model FLOPs and the dense peak come from the account of one device's step."""
    import preflop

    account = preflop.account("gpt2-nano", {"batch_size": 2, "sequence_length": 16}, microbatches=3,
                              precision="bf16-mixed", device="h100-sxm")  # fmt: skip
    meter = Meter(account, devices=2)
    assert meter.tokens == 2 * 16 * 3 * 2
    assert meter.model_flops == account.flops.model * 2
    assert meter.peak_flops_per_s == account.time.peak_flops_per_s
    assert "dense" in meter.peak_basis


def test_what_is_not_known_is_none() -> None:
    """No steady step, no FLOPs, no peak: None, never a guess."""
    reading = run([1.0], tokens=5).reading()
    assert (reading.tokens_per_s, reading.mfu, reading.step_s) == (None, None, None)
    assert run([1.0] * 4, tokens=5, model_flops=1).reading().mfu is None


@pytest.mark.parametrize(("warmup", "excluded"), [(0, 1), (1, 1), (2, 2)])
def test_a_meter_that_was_not_started_leaves_the_first_step_out(warmup: int, excluded: int) -> None:
    """Steps of 0.5 s and 1,000 tokens without `start`: 2,000 tokens/s, steady and overall; the first is excluded."""
    clock = Clock()
    meter = Meter(tokens=1000, warmup_steps=warmup, clock=clock)
    for _ in range(6):
        clock.now += 0.5
        meter.step()
    reading = meter.reading()
    assert (reading.tokens_per_s, reading.overall_tokens_per_s) == (2000, 2000)
    assert (reading.steps, reading.excluded_steps) == (6 - excluded, excluded)


def test_a_reading_of_nothing_says_so() -> None:
    """No step, started or not: nothing measured, in words; one step: no steady one."""
    assert str(Meter(tokens=5).reading()).startswith("nothing measured: no step was seen")
    assert str(run([], tokens=5).reading()).startswith("nothing measured: no step was seen")
    assert str(run([1.0], tokens=5).reading()) == "no steps (1 warm-up steps left out)"


def test_a_peak_of_nothing_is_refused() -> None:
    """A peak of 0 is no peak."""
    with pytest.raises(BadNumber, match="peak_flops_per_s is 0"):
        Meter(peak_flops_per_s=0)
