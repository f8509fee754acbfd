"""LSTM, GRU and plain RNN as CUDA runs them: one cuDNN call for the whole stack.

torch's composite asks cuDNN on CUDA and runs cell by cell, or oneDNN layer by layer, on a CPU, which keep
other things for backward. While a recording runs, kernels under AutogradCPU make cuDNN's call instead.
Source: aten/src/ATen/native/RNN.cpp (`use_cudnn`, the `*_cudnn_stub`s) and native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from preflop.record.target_kernels import composite

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]

# cudnnRNNMode_t, and what each keeps per hidden unit: the gates before and after activation share memory.
_RELU, _TANH, _LSTM, _GRU = range(4)
# Numbers kept per row, hidden unit, layer and direction: gates, cell and output of an LSTM (4 + 1 + 1);
# gates, the candidate's recurrent part and the output of a GRU (3 + 1 + 1); a plain cell's output and sum.
# cuDNN does not publish the size of its reserve: this is what its backward needs by the equations.
_KEPT = {_RELU: 2, _TANH: 2, _LSTM: 6, _GRU: 5}

ASSUMED = (
    "recurrent layers run on cuDNN, which does not say what it keeps for backward: "
    "the gates, cells and outputs of every layer are assumed."
)


def install(library: torch.library.Library, assumed: Callable[[str], None]) -> None:
    """Give `library` (of namespace "aten") the recurrent kernels."""
    library.impl("lstm.input", _lstm(assumed), "AutogradCPU")
    library.impl("lstm.data", _packed_lstm(assumed), "AutogradCPU")
    for name, mode in (("gru", _GRU), ("rnn_tanh", _TANH), ("rnn_relu", _RELU)):
        packet = getattr(aten, name)
        library.impl(f"{name}.input", _plain(packet.input, mode, assumed), "AutogradCPU")
        library.impl(f"{name}.data", _packed(packet.data, mode, assumed), "AutogradCPU")
    library.impl("_cudnn_rnn_backward", _backward_shapes, "Meta")


def install_autocast(
    library: torch.library.Library, lower: Callable[[Any], Any], excluded: Callable[[], Any]
) -> None:
    """Under autocast inputs and weights are cast, the weights anew in every call.

    Source: native/cudnn/RNN.cpp, `_cudnn_rnn_cast_reflatten`, which is registered for CUDA apart from the
    lists of autocast_mode.h.
    """
    op = aten._cudnn_rnn.default

    def cast(x: torch.Tensor, weight: Tensors, stride: int, buffer: Any, hx: Any, cx: Any, *rest: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        flat = [one.to(dtype) for one in weight]
        x, hx, cx = lower(x), lower(hx), lower(cx)
        with excluded():
            return op(x, flat, stride, flat[0].detach(), hx, cx, *rest)

    library.impl("_cudnn_rnn", cast, "AutocastCPU")


def reserve_bytes(args: tuple[Any, ...]) -> int:
    """Bytes that the call `_cudnn_rnn(*args)` keeps for backward beside its inputs and results."""
    x, mode, hidden, layers = args[0], args[6], args[7], args[9]
    if not args[12]:
        return 0
    directions = 2 if args[13] else 1
    rows = prod(x.shape[:-1])
    return int(_KEPT[mode] * rows * hidden * layers * directions * x.itemsize)


def _runs_on_cudnn(x: torch.Tensor, weights: Tensors) -> bool:
    """`use_cudnn`: any floating dtype but fp64, and every weight there."""
    return isinstance(x, FakeTensor) and x.dtype != torch.float64 and len(weights) > 0


def _call(
    x: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None, weights: Tensors, biases: bool, mode: int,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool, batch_sizes: list[int],
) -> Any:  # fmt: skip
    hidden = hx.shape[-1] if cx is None else cx.shape[-1]
    projected = hx.shape[-1] if hx.shape[-1] != hidden else 0
    stride = (4 if biases else 2) + (1 if projected else 0)
    # A module on CUDA holds its weights flattened in one buffer; any of them stands for it.
    return aten._cudnn_rnn(
        x, list(weights), stride, weights[0].detach(), hx, cx, mode, hidden, projected, layers, batch_first,
        dropout, train, bidirectional, batch_sizes, None,
    )  # fmt: skip


def _lstm(assumed: Callable[[str], None]) -> Callable[..., Any]:
    def lstm(
        x: torch.Tensor, hx: Tensors, weights: Tensors, biases: bool, layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not _runs_on_cudnn(x, weights):
            return composite(
                aten.lstm.input, x, hx, weights, biases, layers, dropout, train, bidirectional, batch_first
            )
        assumed(ASSUMED)
        h, c = hx[0], hx[1]
        return tuple(
            _call(x, h, c, weights, biases, _LSTM, layers, dropout, train, bidirectional, batch_first, [])[:3]
        )

    return lstm


def _packed_lstm(assumed: Callable[[str], None]) -> Callable[..., Any]:
    def lstm(
        x: torch.Tensor, batch_sizes: torch.Tensor, hx: Tensors, weights: Tensors, biases: bool, layers: int,
        dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        if not _runs_on_cudnn(x, weights) or isinstance(batch_sizes, FakeTensor):
            return composite(
                aten.lstm.data, x, batch_sizes, hx, weights, biases, layers, dropout, train, bidirectional
            )
        assumed(ASSUMED)
        sizes = [int(size) for size in batch_sizes.tolist()]
        h, c = hx[0], hx[1]
        return tuple(
            _call(x, h, c, weights, biases, _LSTM, layers, dropout, train, bidirectional, False, sizes)[:3]
        )

    return lstm


def _plain(op: Any, mode: int, assumed: Callable[[str], None]) -> Callable[..., Any]:
    def rnn(
        x: torch.Tensor, hx: torch.Tensor, weights: Tensors, biases: bool, layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not _runs_on_cudnn(x, weights):
            return composite(op, x, hx, weights, biases, layers, dropout, train, bidirectional, batch_first)
        assumed(ASSUMED)
        return tuple(
            _call(x, hx, None, weights, biases, mode, layers, dropout, train, bidirectional, batch_first, [])[
                :2
            ]
        )

    return rnn


def _packed(op: Any, mode: int, assumed: Callable[[str], None]) -> Callable[..., Any]:
    def rnn(
        x: torch.Tensor, batch_sizes: torch.Tensor, hx: torch.Tensor, weights: Tensors, biases: bool,
        layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        if not _runs_on_cudnn(x, weights) or isinstance(batch_sizes, FakeTensor):
            return composite(op, x, batch_sizes, hx, weights, biases, layers, dropout, train, bidirectional)
        assumed(ASSUMED)
        sizes = [int(size) for size in batch_sizes.tolist()]
        return tuple(
            _call(x, hx, None, weights, biases, mode, layers, dropout, train, bidirectional, False, sizes)[:2]
        )

    return rnn


def _backward_shapes(*args: Any) -> Any:
    """What `_cudnn_rnn_backward` returns: a gradient like each of x, hx, cx and the weights asked for."""
    x, weight, hx, cx, wanted = args[0], args[1], args[4], args[5], args[21]
    return (
        torch.empty_like(x) if wanted[0] else None,
        torch.empty_like(hx) if wanted[1] else None,
        torch.empty_like(cx) if wanted[2] and cx is not None else None,
        [torch.empty_like(one) for one in weight] if wanted[3] else [],
    )
