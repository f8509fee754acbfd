"""Linears of the blocks in fp8, an assumption about time: the 16-bit tape's matmuls as scaled ones, and their casts."""

from __future__ import annotations

import dataclasses
import math
import re

from preflop.account import OperatorRow

_LINEAR = ("aten.mm", "aten.addmm")
_SIXTEEN_BITS = ("bfloat16", "float16")
_OPERAND = re.compile(r"\((\d+), (\d+)\)")

ASSUMPTION = (
    "fp8: linears of the blocks multiply in fp8; each operand is read once in 16 bits and written twice in 8, as it is "
    "and transposed, with its largest value for the next step's scale (delayed scaling)"
)


def in_fp8(row: OperatorRow) -> list[OperatorRow]:
    """The row itself, or a scaled matmul and the casts of its operands.

    TransformerEngine casts and transposes in one kernel: the input and the weight in forward, the gradient in backward,
    once for both of its products. Source: NVIDIA Transformer Engine, docs "Using FP8", `cast_transpose`.
    Does not count: what is kept for backward in 8 bits instead of 16.

    >>> bf16 = OperatorRow("aten.mm", "forward", "blocks.*.up", None, 1, "(8, 16) x (16, 32) -> (8, 32)", "bfloat16",
    ...     8192, 1280, 512, None, None, None, "matmul")
    >>> scaled, cast = in_fp8(bf16)
    >>> scaled.read_bytes, scaled.dtype, cast.read_bytes, cast.write_bytes
    (640, 'float8_e4m3fn', 1280, 1280)
    """
    sizes = [int(rows) * int(columns) for rows, columns in _OPERAND.findall(row.shapes.partition("->")[0])]
    linear = row.op in _LINEAR and row.dtype in _SIXTEEN_BITS and row.module.startswith("blocks.")
    if not linear or len(sizes) < 2:
        return [row]
    first, second = sizes[-2], sizes[-1]
    read_bytes = row.calls * (first + second)
    scaled = dataclasses.replace(row, op="aten._scaled_mm", dtype="float8_e4m3fn", read_bytes=read_bytes)
    cast = math.floor(first / 2) if row.phase == "backward" else first + second
    moved = 2 * cast * row.calls
    return [
        scaled,
        dataclasses.replace(
            row, op="preflop.cast_transpose", kind="other", dtype="float32", flops=0, attended_flops=None,
            read_bytes=moved, write_bytes=moved,
        ),
    ]  # fmt: skip
