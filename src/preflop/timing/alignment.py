"""Which matmuls tensor cores are not fed well: rows of a matrix that do not begin at multiples of 16 bytes.

cuBLAS asks that the contiguous size of each matrix of a product is a multiple of 16 bytes: 8 numbers of 16 bits. It
multiplies others too, but slower. By how much, nobody measured for the devices and shapes here, so it is said and not
priced. Source: cuBLAS, section "Tensor Core Usage" (https://docs.nvidia.com/cuda/cublas/#tensor-core-usage).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from preflop.account import OperatorRow
from preflop.hardware.device import Device
from preflop.timing.roofline import RooflineRow

_ALIGNED_BYTES = 16
_BYTES = {"bfloat16": 2, "float16": 2, "tf32": 4, "float8": 1, "int8": 1}
"""Formats that tensor cores multiply at a rate of their own."""
_PADDED_TO = 64
"""The multiple of 16-bit numbers that is most efficient on an A100. Source: NVIDIA, Matrix Multiplication Background
User's Guide (DU-09799-001), "Tensor Core Requirements"."""
_LEAST_SHARE = 0.01
"""Of the least time: below it there is nothing to gain that shows in a step."""
_MATRIX = re.compile(r"\(([^()]*)\)")


def unaligned(rows: Sequence[RooflineRow], device: Device) -> Iterator[str]:
    """What to say of the matmuls that are not aligned, where they take a part of the step that is worth it."""
    if device.vendor != "NVIDIA":
        return
    shares: dict[tuple[int, int, str], float] = {}
    whole_s = sum(row.row.time_s or 0.0 for row in rows)
    for row in rows:
        each = _BYTES.get(row.ceiling.dtype)
        if each is None or not row.row.variant or row.row.kind != "matmul":
            continue
        multiple = _ALIGNED_BYTES // each
        odd = [size for size in contiguous_sizes(row.row) if size % multiple]
        if odd:
            key = max(odd), multiple, row.row.module
            shares[key] = shares.get(key, 0.0) + (row.row.time_s or 0.0)
    for (size, multiple, module), seconds in sorted(shares.items(), key=lambda item: -item[1]):
        if seconds < _LEAST_SHARE * whole_s:
            return
        padded = -(-size // _PADDED_TO) * _PADDED_TO
        yield (
            f"matmuls of {module or 'the model'} ({seconds / whole_s:.0%} of the least time) have size {size:,}, no "
            f"multiple of {multiple}: tensor cores are slower there, nobody measured how much, and expected times "
            f"have nothing of it; padded to {padded:,}, {padded / size - 1:.2%} more FLOPs, they are not"
        )


def contiguous_sizes(row: OperatorRow) -> tuple[int, ...]:
    """The sizes along which both factors and the result of a matmul lie in memory, by its layout.

    >>> linear = OperatorRow("aten.addmm", "forward", "", None, 1, "(6) x (4, 8) x (8, 6) -> (4, 6)", "bfloat16",
    ...     384, 0, 0, None, None, None, "matmul", variant="NT")
    >>> contiguous_sizes(linear)
    (8, 8, 6)
    """
    *factors, result = _MATRIX.findall(row.shapes)
    if len(factors) < 2 or not all(size.strip().isdigit() for size in f"{factors[-2]}, {result}".split(",")):
        return ()
    rows, inner = (int(size) for size in factors[-2].split(",")[-2:])
    columns = int(result.split(",")[-1])
    return (
        rows if row.variant[0] == "T" else inner, inner if row.variant[1] == "T" else columns, columns,
    )  # fmt: skip
