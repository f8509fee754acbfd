"""Convolution: every tap of the kernel is counted, also those that meet padding (the field's usual
convention; dilation changes nothing). Bias is not counted.
"""

from __future__ import annotations

from preflop.ops.arguments import argument, multiply_add_flops, need, product, tensor
from preflop.ops.registry import Kind, Moved, Work, flops, traffic
from preflop.tape.events import Signature, TensorMeta


def convolution_flops(x: TensorMeta, weight: TensorMeta, y: TensorMeta, transposed: bool) -> int:
    """FLOPs of one convolution.

    A weight is (out, in / groups, *kernel), transposed (in, out / groups, *kernel): all but its first
    axis is what one element of the *output* (transposed: of the *input*) meets. So
    2 · elements(output or input) · weight elements / weight.shape[0]; groups need no special case.
    Source: torch.nn.Conv2d and ConvTranspose2d, shapes of the weights.
    """
    elements = x.elements if transposed else y.elements
    return multiply_add_flops(x) * elements * product(weight.shape[1:])


@flops("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def convolution(sig: Signature) -> Work:
    """FLOPs of a convolution, transposed or not."""
    x, weight = need(sig, 0, "input"), need(sig, 1, "weight")
    transposed = bool(argument(sig, 6, "transposed", False))
    return Work(convolution_flops(x, weight, sig.outputs[0], transposed), Kind.CONVOLUTION)


@flops(
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
    "aten.mkldnn_convolution",
    "aten.cudnn_convolution",
    "aten.cudnn_convolution_relu",
    "aten.cudnn_convolution_add_relu",
    "aten.miopen_convolution",
    "aten.slow_conv3d",
    "aten.slow_conv3d_forward",
    "aten.conv_depthwise3d",
    "aten._conv_depthwise2d",
    "aten._slow_conv2d_forward",
    "aten.thnn_conv2d",
    "aten.slow_conv_dilated2d",
    "aten.slow_conv_dilated3d",
    "aten.miopen_depthwise_convolution",
    "mkldnn._convolution_pointwise",
    "aten._convolution_mode",
)
def forward_only(sig: Signature) -> Work:
    """FLOPs of a convolution that is never transposed."""
    x, weight = need(sig, 0, "input"), need(sig, 1, "weight")
    return Work(convolution_flops(x, weight, sig.outputs[0], False), Kind.CONVOLUTION)


@flops(
    "aten.conv_transpose1d",
    "aten.conv_transpose2d",
    "aten.conv_transpose3d",
    "aten.cudnn_convolution_transpose",
    "aten.slow_conv_transpose2d",
    "aten.slow_conv_transpose3d",
    "aten.miopen_convolution_transpose",
    "mkldnn._convolution_transpose_pointwise",
)
def transposed_only(sig: Signature) -> Work:
    """FLOPs of a transposed convolution."""
    x, weight = need(sig, 0, "input"), need(sig, 1, "weight")
    return Work(convolution_flops(x, weight, sig.outputs[0], True), Kind.CONVOLUTION)


@flops("aten.conv_tbc")
def time_batch_channel(sig: Signature) -> Work:
    """FLOPs of conv_tbc: input (T, B, in), weight (k, in, out): 2 · T'·B·out · k·in."""
    x, weight = need(sig, 0, "self"), need(sig, 1, "weight")
    taps = weight.shape[0] * weight.shape[1]
    return Work(multiply_add_flops(x) * sig.outputs[0].elements * taps, Kind.CONVOLUTION)


def _backward_mask(sig: Signature) -> tuple[bool, bool, bool]:
    position = 9 if sig.op == "aten.convolution_backward_overrideable" else 10
    mask = argument(sig, position, "output_mask", (True, True, True))
    return bool(mask[0]), bool(mask[1]), bool(mask[2])


@flops("aten.convolution_backward", "aten.convolution_backward_overrideable")
def backward(sig: Signature) -> Work:
    """FLOPs of the gradients output_mask asks for: input and weight each cost one forward.

    Each pair (input element, output element) joined by a tap in forward is joined once again in the
    gradient of the input and once in that of the weight. Groups therefore cost no more in backward.
    """
    grad, x, weight = need(sig, 0, "grad_output"), need(sig, 1, "input"), need(sig, 2, "weight")
    transposed = bool(argument(sig, 6 if "overrideable" in sig.op else 7, "transposed", False))
    one = convolution_flops(x, weight, grad, transposed)
    wants_input, wants_weight, _ = _backward_mask(sig)
    return Work(one * (wants_input + wants_weight), Kind.CONVOLUTION)


@traffic("aten.convolution_backward", "aten.convolution_backward_overrideable")
def backward_moved(sig: Signature) -> Moved:
    """The output's gradient is read; the weight only for the input's gradient, the input only for the
    weight's."""
    from preflop.ops.moved import distinct_bytes

    wants_input, wants_weight, _ = _backward_mask(sig)
    read = distinct_bytes(need(sig, 0, "grad_output"))
    if wants_input:
        read += distinct_bytes(need(sig, 2, "weight"))
    x = tensor(sig, 1, "input")
    if wants_weight and x is not None:
        read += distinct_bytes(x)
    return Moved(read, sum(distinct_bytes(meta) for meta in sig.outputs))
