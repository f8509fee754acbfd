"""Recurrent layers that one call runs whole.

Each weight matrix meets every row of every time step: 2 · rows · weight elements. (Layers that arrive
decomposed come as addmm and cell kernels.)
"""

from __future__ import annotations

from preflop.ops.arguments import argument, need, product, tensors
from preflop.ops.registry import Kind, Work, flops, flops_of_used
from preflop.tape.events import Signature, TensorMeta


def _matrix_elements(weights: tuple[TensorMeta, ...]) -> int:
    """Elements of the matrices among the weights; biases are not counted."""
    return sum(meta.elements for meta in weights if len(meta.shape) == 2)


def _layer_weights(sig: Signature) -> tuple[TensorMeta, TensorMeta]:
    return need(sig, 1, "weight0"), need(sig, 2, "weight1")


@flops("aten.mkldnn_rnn_layer")
def mkldnn_forward(sig: Signature) -> Work:
    """FLOPs of one layer and direction on CPU, x (T, B, I): 2·T·B·(G·H·I + G·H·H), G gates.

    The gates' element-wise arithmetic is inside the kernel and not counted.
    """
    x = need(sig, 0, "input")
    return Work(2 * product(x.shape[:-1]) * _matrix_elements(_layer_weights(sig)), Kind.MATMUL)


@flops_of_used("aten.mkldnn_rnn_layer_backward")
def mkldnn_backward_used(sig: Signature, used: tuple[bool, ...]) -> Work:
    """FLOPs of the gradients that are used (outputs: x, w_input, w_hidden, b, b, h0, c0).

    Weights: one product per step, 2·T·B·(G·H·I + G·H·H). Hidden: T - 1 steps back, one more for h0
    (or c0). x: 2·T·B·G·H·I. The kernel has no output mask and computes all: hardware FLOPs.
    """
    x = need(sig, 0, "input")
    w_input, w_hidden = _layer_weights(sig)
    rows = product(x.shape[:-1])
    batch = need(sig, 5, "hx_").shape[-2]
    steps_back = rows - batch
    everything = 4 * rows * (w_input.elements + w_hidden.elements)
    count = 2 * steps_back * w_hidden.elements
    count += 2 * rows * w_input.elements * (used[0] + used[1])
    count += 2 * rows * w_hidden.elements * used[2]
    count += 2 * batch * w_hidden.elements * any(used[5:7])
    return Work(count, Kind.MATMUL, everything)


@flops("aten.mkldnn_rnn_layer_backward")
def mkldnn_backward(sig: Signature) -> Work:
    """FLOPs of all gradients of one layer and direction."""
    return mkldnn_backward_used(sig, (True,) * 7)


@flops("aten._cudnn_rnn", "aten.miopen_rnn")
def cudnn_forward(sig: Signature) -> Work:
    """FLOPs of a whole recurrent stack on a GPU: 2 · rows · elements of all weight matrices."""
    x = need(sig, 0, "input")
    return Work(2 * product(x.shape[:-1]) * _matrix_elements(tensors(sig, 1, "weight")), Kind.MATMUL)


@flops("aten._cudnn_rnn_backward")
def cudnn_backward(sig: Signature) -> Work:
    """FLOPs of its gradients by output_mask (x, h0, c0, weights): weights cost one forward; going
    back costs one forward less the first layer's input matrices where x needs no gradient, and less
    one step of the hidden matrices where h0 and c0 need none."""
    x, weights = need(sig, 0, "input"), tensors(sig, 1, "weight")
    mask = argument(sig, 21, "output_mask", (True, True, True, True))
    rows, matrices = product(x.shape[:-1]), [w for w in weights if len(w.shape) == 2]
    every = sum(w.elements for w in matrices)
    per_direction = len(matrices) // max(1, _directions_and_layers(sig))
    first = [w for i, w in enumerate(matrices) if i % per_direction == 0][: _directions(sig)]
    hidden = [w for i, w in enumerate(matrices) if i % per_direction != 0]
    hidden_rows = need(sig, 4, "hx").shape[-2]
    back = 2 * rows * every
    back -= 0 if mask[0] else 2 * rows * sum(w.elements for w in first)
    back -= 0 if mask[1] or mask[2] else 2 * hidden_rows * sum(w.elements for w in hidden)
    return Work(back + (2 * rows * every if mask[3] else 0), Kind.MATMUL)


def _directions(sig: Signature) -> int:
    return 2 if argument(sig, 17, "bidirectional", False) else 1


def _directions_and_layers(sig: Signature) -> int:
    return _directions(sig) * int(argument(sig, 13, "num_layers", 1))


@flops("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def composite(sig: Signature) -> Work:
    """FLOPs of a whole recurrent stack where it arrives undivided (inference mode): 2 · rows ·
    elements of the weight matrices. Packed data are (rows, width), padded ones (T, B, width)."""
    x = need(sig, 0, "input")
    params = 3 if sig.overload == "data" else 2
    return Work(2 * product(x.shape[:-1]) * _matrix_elements(tensors(sig, params, "params")), Kind.MATMUL)


@flops("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def cell(sig: Signature) -> Work:
    """FLOPs of one step that arrives undivided (inference mode): 2 · B · (G·H·I + G·H·H)."""
    x = need(sig, 0, "input")
    matrices = (need(sig, 2, "w_ih"), need(sig, 3, "w_hh"))
    return Work(2 * product(x.shape[:-1]) * _matrix_elements(matrices), Kind.MATMUL)
