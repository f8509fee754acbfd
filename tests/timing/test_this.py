"""This machine as a device: the calibration file, and what it gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import preflop
from preflop.accounting import find_device
from preflop.errors import BadFile
from preflop.measure.calibrate import Calibration, Reading
from preflop.measure.calibration_file import calibration_text
from preflop.timing.kernels import Family
from preflop.timing.rates import Named, kernel_rate
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
    device = this_device()
    own = kernel_rate(device, Family.ELEMENTWISE, "float32", Named("aten.gelu"))
    other = kernel_rate(device, Family.ELEMENTWISE, "float32", Named("aten.add"))
    assert own is not None and other is not None
    assert other.moving_share(1e6) / own.moving_share(1e6) == pytest.approx(12, rel=0.01)


def test_a_matmul_is_timed_by_flops_and_by_bytes(calibrated: Path) -> None:
    """A measured call gives its own time, by number and by array; its bytes are in it. One that moves more for
    the same FLOPs leans to the measured call of few FLOPs per byte."""
    rate = kernel_rate(this_device(), Family.MATMUL, "float32", Named("aten.mm"))
    assert rate is not None
    assert rate.compute_share(1e9, 1e7) == pytest.approx(1.0)
    assert rate.compute_share(1e6, 1e5) == pytest.approx(1e6 / 1e-4 / 1e11)
    assert rate.moving_share(1e5) == float("inf")
    flops, moved = np.array([1e9, 3e7]), np.array([1e7, 1e6])
    assert list(rate.compute_shares(flops, moved)) == pytest.approx(
        [rate.compute_share(f, m) for f, m in zip(flops, moved)]
    )
    assert rate.compute_share(1e9, 1e9) < rate.compute_share(1e9, 1e7)


def test_a_matmul_is_timed_by_its_rows_inner_size_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal FLOPs and bytes, another time: a grid of products tells (128, 32, 32) from (32, 128, 32)."""
    from itertools import product

    found = dataclasses.replace(MEASURED, readings=list(MEASURED.readings))
    for m, k, n in product((32, 128), repeat=3):
        slow = 4.0 if k == 128 else 1.0
        moved, flops = 4 * (m * k + k * n + m * n), 2 * m * k * n
        found.readings.append(
            Reading("aten.mm", Family.MATMUL, "float32", flops, moved, slow * flops / 1e11, "NN", 1, (m, k, n))
        )
    path = tmp_path / "grid.toml"
    path.write_text(calibration_text(found), "utf-8")
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(path))
    rate = kernel_rate(this_device(), Family.MATMUL, "float32", Named("aten.mm", "NN"))
    assert rate is not None
    flops, moved = 2.0 * 128 * 32 * 32, 4.0 * (128 * 32 * 2 + 32 * 32)
    tall, deep = rate.compute_share(flops, moved, (1, 128, 32)), rate.compute_share(flops, moved, (1, 32, 32))
    assert (tall, deep) == (pytest.approx(1.0), pytest.approx(0.25))
    together = rate.compute_shares(
        np.array([flops, flops]), np.array([moved, moved]), np.array([[1, 128, 32], [1, 32, 32]])
    )
    assert list(together) == pytest.approx([tall, deep])


def test_kernels_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gelu by tanh and in 16 bits each have their own curve; what was not measured takes the nearest that was."""
    found = dataclasses.replace(MEASURED, readings=list(MEASURED.readings))
    for variant, dtype, seconds in (("tanh", "float32", 32e-3), ("tanh", "bfloat16", 16e-3)):
        found.readings.append(
            Reading("aten.gelu", Family.ELEMENTWISE, dtype, 10**6, 8 * 10**6, seconds, variant)
        )
    path = tmp_path / "variants.toml"
    path.write_text(calibration_text(found), "utf-8")
    monkeypatch.setenv("PREFLOP_CALIBRATION", str(path))
    device, seconds = this_device(), {}
    for named in (
        Named("aten.gelu"), Named("aten.gelu", "tanh"), Named("aten.gelu", "tanh", "bfloat16"),
        Named("aten.gelu", "tanh", "float16"),
    ):  # fmt: skip
        rate = kernel_rate(device, Family.ELEMENTWISE, "float32", named)
        assert rate is not None
        seconds[named.variant, named.dtype] = 8e6 / device.bandwidth_bytes_per_s / rate.moving_share(8e6)
    assert seconds == pytest.approx(
        {
            ("", "float32"): 8e-3, ("tanh", "float32"): 32e-3, ("tanh", "bfloat16"): 16e-3,
            ("tanh", "float16"): 32e-3,
        },
        rel=1e-3,
    )  # fmt: skip


def test_large_tensors_pay_for_their_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight 64 x 64: the gradient's 16384 bytes are on new pages; at 1 us a byte the step is longer by just that.
    The same holds where sizes are evaluated by arithmetic."""
    from preflop.measure.pages import FreshPages

    times = []
    for least in (16384, 16385):
        found = dataclasses.replace(MEASURED, pages=FreshPages(least, 1e-6))
        path = tmp_path / f"{least}.toml"
        path.write_text(calibration_text(found), "utf-8")
        monkeypatch.setenv("PREFLOP_CALIBRATION", str(path))
        step = preflop.account(torch.nn.Linear(64, 64), torch.randn(8, 64), optimizer="sgd", device="this")
        times.append(step.time)
        assert any("new pages" in words for words in step.assumptions) == (least == 16384)
    assert times[0].expected_s is not None and times[1].expected_s is not None
    assert times[0].expected_s - times[1].expected_s == pytest.approx(16384e-6)
    assert times[0].lower_s == times[1].lower_s


@pytest.mark.parametrize(
    ("op", "variants", "tensors"),
    [("aten.mm", {"NT", "NN", "TN"}, 1), ("aten.gelu", {"", "tanh"}, 1), ("aten._foreach_norm", {""}, 48)],
)
def test_a_reading_says_which_kernel_it_is(op: str, variants: set[str], tensors: int) -> None:
    """What calibrate measures carries the variant, tensors and sizes by which a step's rows are looked up."""
    from preflop.measure.calibrate import _read
    from preflop.measure.calibration_cases import cases

    where = torch.device("cpu")
    small = [case for case in cases(where) if case.op == op and case.dtype == "float32"]
    readings = [_read(case, where, 0.0, 0.0) for case in (*small[:4], *small[8:10])]
    found = [reading for reading in readings if reading is not None]
    assert len(found) == len(readings)
    assert {reading.variant for reading in found} == variants
    assert found[0].tensors == tensors
    assert (found[0].product == (32, 32, 32)) == (op == "aten.mm")


def test_the_hosts_part_is_neither_lost_nor_doubled() -> None:
    """Ten adds in 100 us, each 2 us at its smallest size: the host takes 8 us for each, the kernel's own are its own.
    What was measured for more than half of the step is not taken off."""
    from preflop.measure.calibrate import _Host, _launch_s

    small = reading("aten.add", Family.ELEMENTWISE, 16, 192, 2e-6)
    found = dataclasses.replace(MEASURED, readings=[*MEASURED.readings, small])
    host = _Host(lambda: None, {"aten.add": 10}, [90e-6, 100e-6, 500e-6])
    assert _launch_s(host, found) == pytest.approx(8e-6)
    slow = dataclasses.replace(found, readings=[reading("aten.add", Family.ELEMENTWISE, 16, 192, 9e-6)])
    assert _launch_s(host, slow) == pytest.approx(5e-6)


def test_freed_memory_is_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who set glibc's limits by the environment keeps them."""
    from preflop.measure.pages import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory() is False


def test_operands_take_turns() -> None:
    """Each call takes the next set: a tensor just touched would be in the nearest cache."""
    from preflop.measure.calibrate import _in_turn

    seen: list[int] = []
    call = _in_turn([lambda: seen.append(0), lambda: seen.append(1)])
    for _ in range(3):
        call()
    assert seen == [0, 1, 0]


def test_results_are_kept_until_their_turn() -> None:
    """A result that died at once would leave its memory, still in the cache, to the next one."""
    from preflop.measure.calibrate import _in_turn

    seen: list[int] = []

    def spied(*shape: int) -> torch.Tensor:
        made = torch.zeros(*shape)
        seen.append(made.data_ptr())
        return made

    call = _in_turn([lambda: spied(2**16)] * 3)
    for _ in range(3):
        call()
    assert len(set(seen)) == 3


def test_readings_are_brought_to_one_pace() -> None:
    """What computes is read as at the machine's usual speed; what moves stays as read."""
    from preflop.measure.calibrate import _at_pace

    product, moved = MEASURED.readings[0], MEASURED.readings[2]
    assert _at_pace(product, around_s=2e-3, reference_s=1e-3).seconds == pytest.approx(0.005)
    assert _at_pace(moved, around_s=2e-3, reference_s=1e-3) == moved


def test_a_step_is_judged_at_the_machines_speed_now() -> None:
    """A reference that takes 1.5 of its calibrated time: so is the step expected to."""
    from preflop.measure.step_time import TimeVerification

    given = {
        "model": "m", "lower_s": 0.5, "predicted_s": 1.0, "upper_s": 2.0, "measured_s": 1.5, "fastest_s": 1.4,
        "slowest_s": 1.6, "steps": 5, "threads": 2, "clock": "wall clock", "tolerance": 0.2, "assumptions": (),
    }  # fmt: skip
    assert TimeVerification(**given, pace=1.5).verifies and not TimeVerification(**given).verifies
    assert TimeVerification(**given, pace=1.5).to_dict()["predicted_now_s"] == 1.5


def test_a_long_call_is_timed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds is not called five times; what is short is, and warmed up."""
    from preflop.measure import speed

    calls: list[None] = []
    where = torch.device("cpu")
    speed.seconds_of(lambda: calls.append(None), where)
    assert len(calls) == 2 + speed.FEWEST_CALLS
    monkeypatch.setattr(speed, "_LONG_S", -1.0)
    calls.clear()
    speed.seconds_of(lambda: calls.append(None), where)
    assert len(calls) == 2


def test_what_runs_before_a_timed_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are filled before each call: a clock that only the call moves shows the call's seconds."""
    from preflop.measure import speed

    moved, order = [0.0], list[str]()
    monkeypatch.setattr(speed, "now", lambda where: moved[0])

    def call() -> None:
        moved[0] += 2.0
        order.append("call")

    def before() -> None:
        moved[0] += 100.0
        order.append("before")

    monkeypatch.setattr(speed, "_LONG_S", 1000.0)
    assert speed.seconds_of(call, torch.device("cpu"), before=before) == 2.0
    assert order[-2:] == ["before", "call"]


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
