"""Normalisation layers: element-wise work (kind OTHER) and what they read.

Per element: mean 1; variance 3 (subtract, square, add); normalise 2 (subtract, multiply); weight 1; bias 1.
"""

from __future__ import annotations

from preflop.ops.arguments import argument, need, tensor
from preflop.ops.moved import distinct_bytes, general
from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature

STATISTICS_FLOPS = 4
NORMALISE_FLOPS = 2


def _work(sig: Signature, each: int) -> Work:
    return Work(each * need(sig, 0, "input").elements, Kind.OTHER)


def _affine(sig: Signature, weight: int, bias: int) -> int:
    given = (tensor(sig, weight, "weight"), tensor(sig, bias, "bias"))
    return sum(meta is not None for meta in given)


@flops("aten.native_layer_norm", "aten.layer_norm")
def layer_norm(sig: Signature) -> Work:
    """FLOPs per element: statistics 4, normalise 2, weight and bias one each."""
    return _work(sig, STATISTICS_FLOPS + NORMALISE_FLOPS + _affine(sig, 2, 3))


@flops("aten.native_group_norm", "aten.instance_norm")
def group_norm(sig: Signature) -> Work:
    """FLOPs per element, as for layer_norm."""
    return _work(sig, STATISTICS_FLOPS + NORMALISE_FLOPS + _affine(sig, 1, 2))


@flops("aten.group_norm")
def group_norm_composite(sig: Signature) -> Work:
    """FLOPs per element, as for layer_norm (input, groups, weight, bias)."""
    return _work(sig, STATISTICS_FLOPS + NORMALISE_FLOPS + _affine(sig, 2, 3))


@flops("aten._fused_rms_norm", "aten.rms_norm")
def rms_norm(sig: Signature) -> Work:
    """FLOPs per element: square, add, multiply by the reciprocal root, weight."""
    return _work(sig, 3 + (tensor(sig, 2, "weight") is not None))


@flops("aten.native_layer_norm_backward", "aten.native_group_norm_backward", "aten._fused_rms_norm_backward")
def norm_backward(sig: Signature) -> Work:
    """FLOPs per element: normalised input 2; its gradient 8 (weight, two sums of one and two, four to
    join them); the weight's 2; the bias's 1. Gradients that output_mask leaves out cost nothing."""
    mask_position = {"aten.native_layer_norm_backward": 7, "aten.native_group_norm_backward": 9}
    mask = argument(sig, mask_position.get(sig.op, 5), "output_mask", (True, True, True))
    wants = [bool(flag) for flag in mask] + [False] * (3 - len(mask))
    return _work(sig, 2 + 8 * wants[0] + 2 * wants[1] + wants[2])


BATCH_NORM_TRAINING = {
    "aten.native_batch_norm": 5,
    "aten._native_batch_norm_legit": 5,
    "aten.cudnn_batch_norm": 5,
    "aten.miopen_batch_norm": 5,
    "aten.batch_norm": 5,
}


def _batch_norm_trains(sig: Signature) -> bool:
    if sig.op == "aten._batch_norm_with_update":
        return True
    if sig.op in ("aten._batch_norm_no_update", "aten._native_batch_norm_legit_no_training"):
        return False
    position = 3 if sig.overload == "no_stats" else BATCH_NORM_TRAINING[sig.op]
    return bool(argument(sig, position, "training", True))


@flops(
    *BATCH_NORM_TRAINING,
    "aten._batch_norm_with_update",
    "aten._batch_norm_no_update",
    "aten._native_batch_norm_legit_no_training",
)
def batch_norm(sig: Signature) -> Work:
    """FLOPs per element: statistics 4 (in training), normalise 2, weight and bias one each."""
    statistics = STATISTICS_FLOPS if _batch_norm_trains(sig) else 0
    return _work(sig, statistics + NORMALISE_FLOPS + _affine(sig, 1, 2))


@flops(
    "aten.native_batch_norm_backward",
    "aten.cudnn_batch_norm_backward",
    "aten.miopen_batch_norm_backward",
    "aten.batch_norm_backward",
)
def batch_norm_backward(sig: Signature) -> Work:
    """FLOPs per element of all three gradients: 13, as for layer_norm."""
    return _work(sig, 13)


@traffic("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
def batch_norm_moved(sig: Signature) -> Moved:
    """The running statistics are read in evaluation, and read and written in training (the schema of
    this operator does not say that it writes them)."""
    moved = general(sig)
    running = [tensor(sig, 3, "running_mean"), tensor(sig, 4, "running_var")]
    written = sum(distinct_bytes(meta) for meta in running if meta is not None)
    return Moved(moved.read_bytes, moved.write_bytes + (written if _batch_norm_trains(sig) else 0))


@traffic("aten.native_layer_norm_backward")
def layer_norm_backward_moved(sig: Signature) -> Moved:
    """Everything given is read but the bias, whose value no gradient depends on."""
    moved = general(sig)
    bias = tensor(sig, 6, "bias")
    unread = 0 if bias is None else distinct_bytes(bias)
    return Moved(moved.read_bytes - unread, moved.write_bytes)
