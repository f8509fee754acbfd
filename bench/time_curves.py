"""Writes timing/curves.toml: what single kernels reached, from NeuSight's published operator measurements.

    git clone https://github.com/sitar-lab/NeuSight && python bench/time_curves.py NeuSight/.git > curves.toml

Each figure is a median over the measurements of one bucket: single operators of the shapes that models
have (its "test" set, from which its own predictor did not learn). No step's time enters.
"""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from preflop.errors import UnknownDevice
from preflop.hardware.catalog import find
from preflop.hardware.device import Device

ROOT = "scripts/asplos/data/dataset"
COMMIT = "6945927"
FEWEST = 4
"""Measurements that a bucket needs."""
# Smaller calls were measured with the time of their launch, which is counted apart.
SMALLEST_FLOPS = 3e9
SMALLEST_BYTES = 7e7
BINARY = {"add", "mul", "div", "pow"}
# As the repository writes them, where the catalog's torch names differ.
NAMES = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
}


HEADER = f"""\
# What kernels reached as a function of their size, as [size, share] points; between them by the logarithm.
# matmul_float32: FLOPs of a call, share of the dense fp32 peak. batched_float32: FLOPs per byte, the same.
# elementwise, softmax, norm: bytes of a call, share of the bandwidth as sold.
# Medians of single-kernel measurements (torch 2.1, fp32). Written by bench/time_curves.py.

[sources]
neusight = "sitar-lab/NeuSight@{COMMIT} {ROOT}: test: single operators"
"""


def rows(git: str, kind: str) -> Iterator[dict[str, str]]:
    """Measurements of one kind of operator: of the shapes of models, on every device of the repository.

    The random shapes of its "train" set are left out: their sides are odd numbers, and kernels for those
    are others.
    """
    yield from read(git, f"{ROOT}/test/{kind}.csv")


def read(git: str, path: str) -> list[dict[str, str]]:
    """One CSV file; nothing where the repository lacks it."""
    out = subprocess.run(
        ["git", "-C", git, "show", f"HEAD:{path}"], capture_output=True, text=True, check=False
    )
    return list(csv.DictReader(io.StringIO(out.stdout)))


def device_of(row: dict[str, str]) -> Device | None:
    try:
        return find(NAMES.get(row["Device"], row["Device"]))
    except UnknownDevice:
        return None


def bucket(value: float) -> float:
    """Middle of a third of a decade."""
    return 10 ** (round(math.log10(value) * 3) / 3)


def matmuls(found: Iterable[dict[str, str]]) -> dict[str, dict[float, list[float]]]:
    """Device -> FLOPs of one call -> shares of the fp32 peak."""
    out: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        device = device_of(row)
        if device is None:
            continue
        batch, m, n, k = (int(float(row[name])) for name in ("B", "M", "N", "K"))
        flops = 2 * batch * m * n * k
        if flops >= SMALLEST_FLOPS:
            rate = flops / (float(row["Latency"]) * 1e-3)
            out[device.id][bucket(flops)].append(rate / device.peak_flops_per_s("float32"))
    return out


def products(found: Iterable[dict[str, str]]) -> dict[str, dict[float, list[float]]]:
    """Device -> FLOPs per byte -> shares of the fp32 peak, where compute is the bound."""
    out: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        device = device_of(row)
        if device is None:
            continue
        batch, m, n, k = (int(float(row[name])) for name in ("B", "M", "N", "K"))
        flops, moved = 2 * batch * m * n * k, 4 * batch * (m * k + k * n + m * n)
        peak = device.peak_flops_per_s("float32")
        if flops < SMALLEST_FLOPS or flops / peak < moved / device.bandwidth_bytes_per_s:
            continue
        out[device.id][bucket(flops / moved)].append(flops / (float(row["Latency"]) * 1e-3) / peak)
    return out


def moving(found: Iterable[dict[str, str]]) -> dict[str, dict[float, list[float]]]:
    """Device -> bytes -> shares of the bandwidth as sold."""
    out: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        device = device_of(row)
        if device is None:
            continue
        tensors = 3 if row["OPName"] in BINARY else 2
        moved = 4 * tensors * int(float(row["B"])) * int(float(row["H"]))
        if moved < SMALLEST_BYTES:
            continue
        rate = moved / (float(row["Latency"]) * 1e-3)
        out[device.id][bucket(moved)].append(rate / device.bandwidth_bytes_per_s)
    return out


def line(name: str, points: dict[float, list[float]]) -> str | None:
    """One curve as TOML."""
    kept = [(x, median(ys)) for x, ys in sorted(points.items()) if len(ys) >= FEWEST]
    if not kept:
        return None
    return f"{name} = [{', '.join(f'[{x:.3g}, {y:.3f}]' for x, y in kept)}]"


def main(git: str) -> None:
    print(HEADER)
    linear, bmm = matmuls(rows(git, "linear")), products(rows(git, "bmm"))
    elementwise = moving(rows(git, "elem"))
    softmax, norm = moving(rows(git, "softmax")), moving(rows(git, "ln"))
    for device in sorted({*linear, *bmm, *elementwise}):
        lines = [f'[devices.{device}]', 'source = "neusight"']
        lines.append(line("matmul_float32", linear[device]) or "")
        lines.append(line("batched_float32", bmm[device]) or "")
        for name, found in (("elementwise", elementwise), ("softmax", softmax), ("norm", norm)):
            lines.append(line(name, found[device]) or "")
        print("\n".join(part for part in lines if part), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1])
