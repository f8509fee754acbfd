"""What oneDNN's LSTM keeps for backward, and what it allocates inside (aten/src/ATen/native/mkldnn/RNN.cpp)."""

from __future__ import annotations

from preflop.ops.arguments import argument
from preflop.ops.onednn import PAGE_BYTES, rounded
from preflop.ops.registry import workspace
from preflop.ops.workspace import contiguous_copy_bytes
from preflop.tape.events import Signature
from preflop.units import DTYPE_BYTES

_LINE = 16
"""fp32 numbers of one cache line."""


def _leading_dimension(columns: int) -> int:
    """Columns of a matrix in memory: whole cache lines, and not a multiple of 256 (4 KiB aliasing).

    Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, `get_good_ld`.

    >>> _leading_dimension(70), _leading_dimension(512)
    (80, 528)
    """
    padded = rounded(columns, _LINE)
    return padded + _LINE if padded % 256 == 0 else padded


def lstm_reserve_bytes(length: int, batch: int, input_size: int, hidden_size: int) -> int:
    """Bytes of the fourth output of `mkldnn_rnn_layer`, which forward keeps for backward.

    Gates of every step; hidden and cell states and their gradients (one step and one layer more: five
    arrays); and the outputs. Each begins on a page of its own. Fake kernels say 0.
    Source: oneDNN, src/cpu/rnn/rnn_utils.cpp, `set_offsets`; measured for hidden sizes that are whole
    cache lines (other sizes come out up to 3 % high).

    >>> lstm_reserve_bytes(64, 8, 256, 128)
    5812224
    """
    item = DTYPE_BYTES["float32"]
    gates = length * batch * _leading_dimension(4 * hidden_size) * item
    rows = 2 * (length + 1) * batch
    layer_states = rows * _leading_dimension(max(input_size, hidden_size)) * item
    cell_states = rows * _leading_dimension(hidden_size) * item
    outputs = length * batch * hidden_size * item
    arrays = (gates, *(layer_states,) * 3, *(cell_states,) * 2, outputs)
    return sum(rounded(size, PAGE_BYTES) for size in arrays)


_RNN_SCRATCHPAD_REST_BYTES = 12_856
"""Everything in the scratchpad but the gates: three pages and a header, the same for all shapes
measured."""


def _lstm_running_bytes(sig: Signature, length: int, batch: int) -> int:
    """Both weights with padded rows, and the gates in a scratchpad."""
    weights = 0
    for position in (1, 2):
        rows, columns = sig.inputs[position].shape
        weights += columns * _leading_dimension(rows) * DTYPE_BYTES["float32"]
    gates = length * batch * _leading_dimension(sig.inputs[1].shape[0]) * DTYPE_BYTES["float32"]
    return weights + rounded(gates, PAGE_BYTES) + _RNN_SCRATCHPAD_REST_BYTES


@workspace("aten.mkldnn_rnn_layer")
def lstm_layer(sig: Signature) -> int:
    """The sum of both biases, reordered weights, and the scratchpad with the gates.

    Source: aten/src/ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn_layer`.
    """
    length, batch, _ = sig.inputs[0].shape
    bias = sig.inputs[1].shape[0] * DTYPE_BYTES["float32"]
    return bias + _lstm_running_bytes(sig, length, batch)


@workspace("aten.mkldnn_rnn_layer_backward")
def lstm_layer_backward(sig: Signature) -> int:
    """The same, zeros for the gradients that are missing, and weights once more where rows are padded.

    Source: aten/src/ATen/native/mkldnn/RNN.cpp, `mkldnn_rnn_layer_backward`.
    """
    length, batch, _ = sig.inputs[0].shape
    hidden = sig.inputs[2].shape[1]
    item = DTYPE_BYTES["float32"]
    bias = sig.inputs[1].shape[0] * item
    absent = (argument(sig, 11, "grad_hy"), argument(sig, 12, "grad_cy"))
    missing = sum(value is None for value in absent)
    zeros = missing * batch * hidden * item
    again = 0
    for position in (1, 2):
        rows, columns = sig.inputs[position].shape
        if _leading_dimension(columns) != columns:
            again += rows * _leading_dimension(columns) * item
    copy = contiguous_copy_bytes(sig.inputs[10]) if len(sig.inputs) > 10 else 0
    return bias + zeros + copy + again + _lstm_running_bytes(sig, length, batch)
