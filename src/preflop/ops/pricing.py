"""The price of one call: its work and the bytes it moves, from the families' formulas.

This is the one place that knows all families; ledgers ask here.
"""

from __future__ import annotations

from collections.abc import Sequence

from preflop.ops import (  # noqa: F401  (each registers its formulas)
    attention,
    convolution,
    embedding,
    fp8,
    fused,
    linear_algebra,
    matmul,
    normalization,
    optimizer,
    pointwise,
    recurrent,
    spectral,
    transfer,
    view,
    workspace,
    workspace_cuda,
    workspace_images,
    workspace_lstm,
    workspace_onednn,
)
from preflop.ops.moved import general, is_view
from preflop.ops.registry import FLOPS, FLOPS_OF_USED, TRAFFIC, WORKSPACE, WORKSPACE_CUDA, Kind, Moved, Work
from preflop.tape.events import Signature

FREE = Work(0, Kind.OTHER)


def work(sig: Signature, used: tuple[bool, ...] | None = None) -> Work | None:
    """Arithmetic of one call; None where no formula is known.

    Args:
        used: per output, whether anything used it, for operators registered with `flops_of_used`.
    """
    if used is not None and sig.op in FLOPS_OF_USED:
        return FLOPS_OF_USED[sig.op](sig, used)
    formula = FLOPS.get(sig.op)
    if formula is not None:
        return formula(sig)
    if is_view(sig) or not (sig.outputs or sig.writes):
        return FREE
    return None


def moved(sig: Signature, storages: Sequence[int] | None = None) -> Moved:
    """Bytes one call reads and writes: each distinct storage range once.

    Args:
        storages: the call's storage ids, inputs then outputs: tensors that share one are not counted
            twice. None takes every tensor to have its own.
    """
    formula = TRAFFIC.get(sig.op)
    if formula is not None and not is_view(sig):
        return formula(sig)
    return general(sig, storages)


def inside_bytes(sig: Signature, *, cuda: bool) -> int:
    """Bytes that the kernel of one call allocates inside itself; 0 where no rule is known.

    Args:
        cuda: by the rules of CUDA's kernels, else by those of CPU kernels.
    """
    formula = (WORKSPACE_CUDA if cuda else WORKSPACE).get(sig.op)
    return 0 if formula is None else formula(sig)
