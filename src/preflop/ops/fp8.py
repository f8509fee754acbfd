"""Casts to fp8 by a scale that is known before, as Transformer Engine fuses them: one kernel reads a tensor once."""

from __future__ import annotations

from preflop.ops.moved import distinct_bytes
from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature

CAST, CAST_TRANSPOSE = "preflop.fp8_cast", "preflop.fp8_cast_transpose"
BIAS_CAST, BIAS_CAST_TRANSPOSE = "preflop.fp8_bias_cast", "preflop.fp8_bias_cast_transpose"
CASTS = (CAST, CAST_TRANSPOSE, BIAS_CAST, BIAS_CAST_TRANSPOSE)
"""With the transpose as well; with the sum over rows, a bias's gradient."""

# Times the scale; magnitude, and the larger of it and the largest so far.
_CAST_FLOPS = 3


@flops(*CASTS)
def cast(sig: Signature) -> Work:
    """FLOPs of a cast: 3 per element (scale, magnitude, maximum), 1 more for a bias's gradient."""
    summed = 1 if sig.op in (BIAS_CAST, BIAS_CAST_TRANSPOSE) else 0
    return Work((_CAST_FLOPS + summed) * sig.inputs[0].elements, Kind.OTHER)


@traffic(*CASTS)
def cast_moved(sig: Signature) -> Moved:
    """The tensor is read once and every result written; of scales and largest values, one number each."""
    number = sig.inputs[1].itemsize
    written = sum(distinct_bytes(meta) for meta in sig.outputs)
    return Moved(distinct_bytes(sig.inputs[0]) + number, written + number)
