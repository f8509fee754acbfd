"""This machine as a device: the calibration file, and what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import preflop
from preflop.accounting import find_device
from preflop.errors import BadFile
from preflop.measure.calibrate import Calibration, Reading, calibration_text
from preflop.timing.kernels import Family
from preflop.timing.this import this_device


def reading(op: str, kind: Family, flops: int, moved: int, seconds: float, dtype: str = "float32") -> Reading:
    return Reading(op, kind, dtype, flops, moved, seconds)


MEASURED = Calibration(
    "A CPU", "CPU", "cpu", 2e-6, 1, 8 * 2**30,
    [
        reading("aten.mm", Family.MATMUL, 10**9, 10**7, 0.01),
        reading("aten.mm", Family.MATMUL, 10**6, 10**5, 1e-4),
        reading("aten.add", Family.ELEMENTWISE, 10**6, 12 * 10**6, 1e-3),
        reading("aten.gelu", Family.ELEMENTWISE, 10**6, 8 * 10**6, 8e-3),
        reading("aten._softmax", Family.SOFTMAX, 10**6, 8 * 10**6, 2e-3),
        reading("aten.native_layer_norm", Family.NORM, 10**6, 8 * 10**6, 2e-3),
    ],
)  # fmt: skip


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "this.toml"
    path.write_text(calibration_text(MEASURED), "utf-8")
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(path))
    return path


def test_the_best_rates_are_the_device(calibrated: Path) -> None:
    """Peaks and bandwidth are what was measured: 1e9 FLOPs in 10 ms, 12 MB in 1 ms."""
    device = this_device()
    assert device.peak_flops_per_s("float32") == pytest.approx(1e11)
    assert device.bandwidth_bytes_per_s == pytest.approx(12e9)
    assert device.memory_bytes == 8 * 2**30


def test_a_step_is_recorded_as_the_cpu_runs_it_and_timed(calibrated: Path) -> None:
    """device="this" gives the CPU's tape a time; its host calls and computes in turn."""
    step = preflop.account(torch.nn.Linear(64, 64), torch.randn(8, 64), optimizer=None, device="this")
    assert step.tape.subject is not None and step.tape.subject.device == "cpu"
    assert step.time.expected_s is not None and step.time.lower_s is not None
    kernels = sum(row.calls for row in step.operators if row.read_bytes + row.write_bytes)
    assert step.time.expected_s > kernels * 2e-6
    assert step.time.lower_s <= step.time.expected_s


def test_an_operator_measured_alone_has_its_own_rate(calibrated: Path) -> None:
    """gelu was measured at 1 GB/s, an add at 12: an account of gelu takes twelve times the add's bound."""
    from preflop.timing.rates import kernel_rate

    device = this_device()
    own = kernel_rate(device, Family.ELEMENTWISE, "float32", "aten.gelu")
    other = kernel_rate(device, Family.ELEMENTWISE, "float32", "aten.add")
    assert own is not None and other is not None
    assert other.moving_share(1e6) / own.moving_share(1e6) == pytest.approx(12, rel=0.01)


def test_a_matmul_is_timed_by_flops_and_by_bytes(calibrated: Path) -> None:
    """A measured call gives its own time, by number and by array; its bytes are in it. One that moves more for
    the same FLOPs leans to the measured call of few FLOPs per byte."""
    import numpy as np

    from preflop.timing.rates import kernel_rate

    rate = kernel_rate(this_device(), Family.MATMUL, "float32", "aten.mm")
    assert rate is not None
    assert rate.compute_share(1e9, 1e7) == pytest.approx(1.0)
    assert rate.compute_share(1e6, 1e5) == pytest.approx(1e6 / 1e-4 / 1e11)
    assert rate.moving_share(1e5) == float("inf")
    flops, moved = np.array([1e9, 3e7]), np.array([1e7, 1e6])
    assert list(rate.compute_shares(flops, moved)) == pytest.approx(
        [rate.compute_share(f, m) for f, m in zip(flops, moved)]
    )
    assert rate.compute_share(1e9, 1e9) < rate.compute_share(1e9, 1e7)


def test_operands_take_turns() -> None:
    """Each call takes the next set: a tensor just touched would be in the nearest cache."""
    from preflop.measure.calibrate import _in_turn

    seen: list[int] = []
    call = _in_turn([lambda: seen.append(0), lambda: seen.append(1)])
    for _ in range(3):
        call()
    assert seen == [0, 1, 0]


def test_not_calibrated_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file the message names the command."""
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(tmp_path / "none.toml"))
    with pytest.raises(BadFile, match="preflop calibrate"):
        find_device("this")


@pytest.mark.parametrize("text", ["schema = [", 'schema = "other/1"'])
def test_a_broken_file_says_so(text: str, calibrated: Path) -> None:
    """A file that is no calibration is refused, with the command that writes one."""
    calibrated.write_text(text, "utf-8")
    with pytest.raises(BadFile, match="preflop calibrate"):
        find_device("this")
