"""78 mistakes that public tables and code made about devices: Preflop makes none of them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from preflop.errors import UnknownDevice
from preflop.hardware.allocator import CachingAllocator
from preflop.hardware.allocator_settings import AllocatorSettings
from preflop.hardware.catalog import devices, find, match_torch_name
from preflop.hardware.checksum import clock_flops_per_s
from preflop.hardware.device import MissingFigure

TABLE = Path(__file__).parents[1] / "data" / "wrong_in_public_code.csv"
with TABLE.open(encoding="utf-8", newline="") as _file:
    ROWS = {int(row["n"]): row for row in csv.DictReader(_file)}

TERA = 1e12


def holds(name: str, dtype: str, right_tflops: float, wrong_tflops: float | None = None) -> None:
    """The device of that name has the right dense peak, and not the wrong one."""
    value = find(name).peak_flops_per_s(dtype) / TERA
    assert value == pytest.approx(right_tflops, rel=1e-3)
    if wrong_tflops is not None:
        assert abs(value - right_tflops) < abs(value - wrong_tflops)


def resolves(reported: str, device_id: str, right_tflops: float, wrong_tflops: float | None = None) -> None:
    """What torch reports leads to that device, with its dense bf16 peak."""
    assert match_torch_name(reported).id == device_id
    holds(reported, "bfloat16", right_tflops, wrong_tflops)


def unknown(*names: str) -> None:
    """A name that the catalog has not is an error, as an id and as what torch reports."""
    for name in names:
        for lookup in (find, match_torch_name):
            with pytest.raises(UnknownDevice):
                lookup(name)


def lacks(name: str, dtype: str) -> None:
    """The device has no peak of that dtype and says so."""
    with pytest.raises(MissingFigure):
        find(name).peak_flops_per_s(dtype)


def row_7() -> None:
    assert find("l4").bandwidth_bytes_per_s == pytest.approx(300e9)


def row_8() -> None:
    resolves("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb", 989.4)


def row_9() -> None:
    holds("h100", "bfloat16", 989.4, 1979)
    holds("h100-pcie", "bfloat16", 756, 1513)
    holds("h200", "bfloat16", 989.4, 1979)
    holds("a100", "bfloat16", 312)


def row_22() -> None:
    resolves("NVIDIA L40", "l40", 181.05, 121)
    resolves("NVIDIA L40S", "l40s", 362.05, 121)
    resolves("NVIDIA L4", "l4", 121)


def row_30() -> None:
    resolves("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", 364.2, 182.1)
    unknown("NVIDIA RTX A6000 ADA")


def row_38() -> None:
    resolves("NVIDIA L40S", "l40s", 362.05, 312)
    resolves("nvidia l40s", "l40s", 362.05, 312)


def row_39() -> None:
    rights = {"4090": 165.2, "a10g": 70, "h800": 989.5, "mi350x": 2309.6, "l4": 121}
    for name, right in rights.items():
        holds(name, "bfloat16", right, 312)
    holds("t4", "float16", 65, 312)
    holds("v100", "float16", 125, 312)
    for name in ("t4", "v100"):
        lacks(name, "bfloat16")


def row_41() -> None:
    # 1024 EUs x 512 FLOPs x 1.6 GHz = 839e12; 1.3 GHz would be 682e12.
    max_1550 = find("max-1550")
    assert float(max_1550.figure("boost_clock_hz").value) == pytest.approx(1.6e9)
    holds("max-1550", "bfloat16", 832, clock_flops_per_s(1024, 512, 1.3e9) / TERA)


def row_44() -> None:
    # Nothing of the machine is read: the name given decides (test_catalog checks the room's imports).
    resolves("NVIDIA A10G", "a10g", 70)
    resolves("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb", 989.4)


def row_50() -> None:
    unknown("NVIDIA RTX A4000", "RTX A4000")
    resolves("NVIDIA A40", "a40", 149.7)


def row_51() -> None:
    unknown("NVIDIA GeForce RTX 3070 Ti", "RTX 3070 Ti")
    assert clock_flops_per_s(48, 512, 1.77e9) / TERA == pytest.approx(43.5, rel=1e-3)


def row_56() -> None:
    resolves("NVIDIA H200", "h200-sxm-141gb", 989.4, 312)
    resolves("NVIDIA L4", "l4", 121, 312)
    unknown("NVIDIA H300")


def row_57() -> None:
    resolves("NVIDIA GH200 480GB", "gh200-96gb", 989.4, 312)
    unknown("NVIDIA Rubin R100")


def row_58() -> None:
    with_an_a100s_peak = {d.id for d in devices() if float(d.peaks.get("bfloat16", ABSENT).value) == 312e12}
    assert all(device_id.startswith(("a100-", "a800-")) for device_id in with_an_a100s_peak)


def row_60() -> None:
    assert find("a10").memory_sold_bytes == 24 * 10**9


def row_61() -> None:
    assert find("v100-16gb").memory_sold_bytes == 16 * 10**9
    assert find("v100-16gb").memory_bytes < 17 * 10**9


def row_64() -> None:
    # Sold in bits per second, kept in bytes per second.
    for name, gigabits in (("h100", 400), ("a100", 200), ("trn2", 200), ("b300", 800)):
        assert find(name).inter_node_bytes_per_s == pytest.approx(gigabits * 1e9 / 8)
    for device in devices():
        assert (device.inter_node_bytes_per_s or 0) <= 100e9


def row_65() -> None:
    a100 = find("a100-pcie-80gb")
    assert a100.figure("device_link_one_way_bytes_per_s").value == 300e9
    assert a100.figure("device_link_peers").value == 1
    assert a100.figure("pcie_one_way_bytes_per_s").value == 31e9
    assert "device_link_peers" not in find("a100-sxm").figures


def row_66() -> None:
    assert find("h100").bandwidth_bytes_per_s == pytest.approx(3352e9)


def row_67() -> None:
    holds("h100", "bfloat16", 989.4, 1000)
    holds("h100", "float8_e4m3fn", 1978.9, 2000)
    row_66()


def row_70() -> None:
    # FP8 came to NVIDIA with compute capability 8.9 (Ada) and 9.0 (Hopper).
    before = [d for d in devices() if d.compute_capability is not None and d.compute_capability < (8, 9)]
    assert len(before) == 18
    for device in before:
        lacks(device.id, "float8_e4m3fn")


def row_71() -> None:
    holds("gb300", "int8", 165, 5000)
    holds("b300", "int8", 150, 4500)


def row_73() -> None:
    assert find("h100-pcie").figure("memory_type").value == "HBM2e"


def row_74() -> None:
    holds("a100", "bfloat16", 312, 77.6)
    holds("h100", "bfloat16", 989.4, 494)


def row_75() -> None:
    holds("tpu-v6e", "bfloat16", 918, 230)
    holds("trn2", "bfloat16", 667, 420)


def row_77() -> None:
    holds("h20", "int8", 296, 148)
    holds("b200", "int8", 4500, 2250)
    holds("h100-pcie", "int8", 1513, 1600)


def row_78() -> None:
    # A request below the split limit may not take a block at or above it: a new segment is needed.
    mib = 2**20
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:32"))
    allocator.free(allocator.malloc(40 * mib))
    allocator.malloc(24 * mib)
    assert allocator.reserved_bytes == (40 + 24) * mib
    # And one above it takes no block more than 20 MiB larger.
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:32"))
    allocator.free(allocator.malloc(60 * mib))
    allocator.malloc(40 * mib)
    assert allocator.reserved_bytes == (60 + 40) * mib


class _Absent:
    value = 0.0


ABSENT = _Absent()

# Rows that say no more than "this device has this dense peak of this dtype, not that one":
# row -> (name to look up, dtypes). The numbers are the table's own.
PEAKS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("h100", ("bfloat16", "float16")),
    2: ("h100", ("float8_e4m3fn", "int8")),
    3: ("h100", ("tf32",)),
    4: ("l4", ("bfloat16",)),
    5: ("l4", ("float8_e4m3fn", "int8")),
    6: ("l4", ("tf32",)),
    10: ("h100", ("float16",)),
    11: ("rtx-4090", ("bfloat16",)),
    12: ("rtx-4090", ("bfloat16",)),
    13: ("rtx-3090", ("bfloat16",)),
    14: ("rtx-4090", ("bfloat16",)),
    15: ("b300", ("bfloat16",)),
    16: ("h100", ("float8_e4m3fn",)),
    17: ("rtx-4090", ("bfloat16", "float16")),
    18: ("rtx-4080", ("bfloat16", "float16")),
    19: ("rtx-3090", ("bfloat16", "float16")),
    20: ("rtx-a6000", ("bfloat16", "float16")),
    21: ("a10g", ("bfloat16", "float16")),
    24: ("rtx-a6000", ("float32",)),
    25: ("rtx-a6000", ("tf32",)),
    29: ("NVIDIA RTX A6000", ("bfloat16",)),
    31: ("l4", ("bfloat16",)),
    32: ("l40s", ("bfloat16",)),
    33: ("rtx-pro-6000", ("bfloat16",)),
    34: ("rtx-4090", ("int8",)),
    35: ("rtx-5090", ("int8",)),
    36: ("h100-nvl", ("bfloat16",)),
    40: ("mi300x", ("bfloat16",)),
    46: ("h100", ("float64",)),
    47: ("h100-pcie", ("float64",)),
    49: ("mi300x", ("bfloat16",)),
    55: ("b100", ("bfloat16",)),
    59: ("b300", ("float32",)),
    62: ("mi210", ("int8",)),
    68: ("tpu-v3", ("bfloat16",)),
    69: ("tpu-v6e", ("bfloat16",)),
    72: ("mi355x", ("bfloat16",)),
    76: ("h100", ("float16",)),
}
# Rows about what torch reports: row -> (that name, device, right bf16 TFLOP/s, wrong one).
NAMES: dict[int, tuple[str, str, float, float | None]] = {
    23: ("NVIDIA H200", "h200-sxm-141gb", 989.4, None),
    26: ("NVIDIA H100 NVL", "h100-nvl-94gb", 835.5, 756),
    27: ("NVIDIA A10G", "a10g", 70, 125),
    28: ("NVIDIA H200", "h200-sxm-141gb", 989.4, None),
    37: ("NVIDIA H200 NVL", "h200-nvl-141gb", 835.5, 989),
    45: ("NVIDIA A10G", "a10g", 70, 125),
    48: ("NVIDIA H200 NVL", "h200-nvl-141gb", 835.5, 989.5),
    52: ("NVIDIA H800", "h800-sxm-80gb", 989.5, 756),
    53: ("AMD Instinct MI250X", "mi250x-gcd", 191.5, 383),
    54: ("NVIDIA L40", "l40", 181.05, 121),
}
# Rows whose right figure stands in words in the table: row -> (name, dtype, right, wrong).
WORDED: dict[int, tuple[str, str, float, float]] = {
    42: ("trn2", "bfloat16", 667, 158),
    43: ("gb200", "bfloat16", 2450, 2500),
    63: ("mi250x", "int8", 191.5, 766),
}


def special_rows() -> dict[int, Callable[[], None]]:
    """The rows above that have a function of their own."""
    return {int(name[4:]): f for name, f in globals().items() if name.startswith("row_")}


@pytest.mark.parametrize("n", sorted(PEAKS))
def test_the_dense_peak_is_the_right_one(n: int) -> None:
    """The catalog holds the table's right figure, and is nearer to it than to the printed one."""
    name, dtypes = PEAKS[n]
    for dtype in dtypes:
        holds(name, dtype, float(ROWS[n]["right_tflops"]), float(ROWS[n]["printed_tflops"]))


@pytest.mark.parametrize("n", sorted(NAMES))
def test_what_torch_reports_leads_to_the_right_card(n: int) -> None:
    """The name resolves to its own device and that device's peak."""
    resolves(*NAMES[n])


@pytest.mark.parametrize("n", sorted(WORDED))
def test_the_figure_is_per_device_as_torch_sees_it(n: int) -> None:
    """One chip, one GCD, one GPU of a superchip: never another unit."""
    holds(*WORDED[n])


@pytest.mark.parametrize("n", sorted(special_rows()))
def test_the_mistake_is_not_made(n: int) -> None:
    """A row of another kind (name, fallback, unit, memory, algorithm) has a check of its own."""
    special_rows()[n]()


def test_every_row_is_checked_once() -> None:
    """All 78 rows of the table are in exactly one of the four lists."""
    checked = [*PEAKS, *NAMES, *WORDED, *special_rows()]
    assert sorted(checked) == sorted(ROWS) == list(range(1, 79))
