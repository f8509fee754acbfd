"""Fused optimizer kernels: element-wise work over lists of parameters, gradients and states."""

from __future__ import annotations

from preflop.ops.arguments import keyword, tensors
from preflop.ops.moved import distinct_bytes, general
from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature

# Operations per parameter element, from the update rules in torch.optim's documentation.
# Adam: first moment 3 (lerp), second moment 4 (scale, square, scale, add), root 1, divide by the bias
# correction 1, add eps 1, update 3 (divide, scale, subtract); weight decay 2 more.
ADAM_FLOPS = 13
ADAGRAD_FLOPS = 7
SGD_FLOPS = 2
DECAY_FLOPS = 2
MOMENTUM_FLOPS = 3
# Of each 8-bit state: times its absmax; magnitude, largest, divide by it, and 8 comparisons to halve 256 codes
# down to the nearest. Source: bitsandbytes, csrc/kernels.cu, `kOptimizerStatic8bit2StateBlockwise`.
REQUANTISE_FLOPS = 12


def _parameters(sig: Signature) -> int:
    return sum(meta.elements for meta in tensors(sig, 0, "self"))


def _decay(sig: Signature) -> int:
    return DECAY_FLOPS if keyword(sig, "weight_decay", 0.0) else 0


@flops("aten._fused_adam_", "aten._fused_adamw_", "aten._fused_adam", "aten._fused_adamw")
def adam(sig: Signature) -> Work:
    """FLOPs of one Adam step: 13 per parameter, 2 more with weight decay, 1 with amsgrad."""
    amsgrad = 1 if keyword(sig, "amsgrad", False) else 0
    return Work((ADAM_FLOPS + _decay(sig) + amsgrad) * _parameters(sig), Kind.OTHER)


@flops("preflop.adamw_32bit_")
def adamw_32bit(sig: Signature) -> Work:
    """FLOPs of AdamW on one parameter: 13 per element, and 2 of weight decay."""
    return Work((ADAM_FLOPS + DECAY_FLOPS) * sig.inputs[0].elements, Kind.OTHER)


@flops("preflop.adamw_8bit_")
def adamw_8bit(sig: Signature) -> Work:
    """FLOPs of AdamW with two 8-bit states: AdamW's, and 12 per element to read and write each state."""
    each = ADAM_FLOPS + DECAY_FLOPS + 2 * REQUANTISE_FLOPS
    return Work(each * sig.inputs[0].elements, Kind.OTHER)


@flops("aten._fused_sgd_", "aten._fused_sgd")
def sgd(sig: Signature) -> Work:
    """FLOPs of one SGD step: 2 per parameter, 3 more with momentum, 2 with weight decay."""
    momentum = MOMENTUM_FLOPS if keyword(sig, "momentum", 0.0) else 0
    return Work((SGD_FLOPS + momentum + _decay(sig)) * _parameters(sig), Kind.OTHER)


@flops("aten._fused_adagrad_", "aten._fused_adagrad")
def adagrad(sig: Signature) -> Work:
    """FLOPs of one Adagrad step: 7 per parameter, 2 more with weight decay."""
    return Work((ADAGRAD_FLOPS + _decay(sig)) * _parameters(sig), Kind.OTHER)


@traffic("aten._fused_adam_", "aten._fused_adamw_", "aten._fused_sgd_", "aten._fused_adagrad_")
def fused_moved(sig: Signature) -> Moved:
    """Parameters, gradients and states are read; parameters and states written. Gradients are written
    only when a gradient scaler asks the kernel to unscale them (their schema says always)."""
    moved = general(sig)
    if keyword(sig, "grad_scale") is not None:
        return moved
    gradients = sum(distinct_bytes(meta) for meta in tensors(sig, 1, "grads"))
    return Moved(moved.read_bytes, moved.write_bytes - gradients)
