"""The operators that `preflop calibrate` measures, each at several sizes, dtypes and variants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

Make = Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class Case:
    """One operator at one size."""

    op: str
    """As the tape names it: "aten.gelu_backward"."""
    dtype: str
    make: Make
    """Makes the operands, and gives the call: the operator, or what autograd runs as its backward."""


def cases(where: torch.device) -> Iterator[Case]:
    """All of them. The order does not matter."""
    for dtype in ("float32", "bfloat16", "float16"):
        yield from _matmuls(where, dtype)
        yield from _attention(where, dtype)
        yield from _pointwise(where, dtype)
        yield from _casts(where, dtype)
        yield from _rows(where, dtype)
    yield from _images(where)
    yield from _lists(where)
    yield from _convolutions(where)
    yield from _recurrent(where)


def _tensor(where: torch.device, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.full(shape, 0.7, device=where, dtype=getattr(torch, dtype))


# -- what computes ------------------------------------------------------------------------------------

_SIDES = (32, 128, 512, 2048)
_LARGE_SIDES = (128, 512, 2048, 8192)
"""Rows, inner sizes and columns on a GPU."""
_LAYOUTS = (("mm", "NT"), ("mm", "NN"), ("mm", "TN"), ("addmm", "NT"))
"""A linear layer without bias, the gradient of its input, of its weight, and a linear layer with bias."""


def _matmuls(where: torch.device, dtype: str) -> Iterator[Case]:
    sides: tuple[int, ...] = _LARGE_SIDES if where.type == "cuda" else _SIDES
    if where.type == "cpu" and not _computes_in(dtype):
        sides = sides[1:3]  # emulated: slow, and what is reached is much the same at every size
    for m, k, n in itertools.product(sides, sides, sides):
        for op, layout in _LAYOUTS:
            yield Case(f"aten.{op}", dtype, _product(where, dtype, (m, k, n), op, layout))
    for batch, length, width in ((4, 64, 32), (16, 128, 64), (32, 256, 64), (64, 512, 64)):
        yield Case("aten.bmm", dtype, _bmm(where, dtype, batch, length, width))


def _computes_in(dtype: str) -> bool:
    """Whether this CPU has arithmetic for it that oneDNN's matmuls use."""
    if dtype == "float32" or not torch.backends.mkldnn.is_available():
        return dtype == "float32"
    if dtype == "bfloat16":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _product(where: torch.device, dtype: str, sizes: tuple[int, int, int], op: str, layout: str) -> Make:
    m, k, n = sizes

    def make() -> Callable[[], Any]:
        a = _tensor(where, k, m, dtype=dtype).t() if layout[0] == "T" else _tensor(where, m, k, dtype=dtype)
        b = _tensor(where, n, k, dtype=dtype).t() if layout[1] == "T" else _tensor(where, k, n, dtype=dtype)
        if op == "mm":
            return lambda: torch.mm(a, b)
        bias = _tensor(where, n, dtype=dtype)
        return lambda: torch.addmm(bias, a, b)

    return make


def _bmm(where: torch.device, dtype: str, batch: int, length: int, width: int) -> Make:
    def make() -> Callable[[], Any]:
        a = _tensor(where, batch, length, width, dtype=dtype)
        b = _tensor(where, batch, width, length, dtype=dtype)
        return lambda: torch.bmm(a, b)

    return make


def _convolutions(where: torch.device) -> Iterator[Case]:
    for batch, channels, side, kernel in (
        (2, 16, 16, 3), (8, 16, 32, 3), (4, 32, 16, 3), (8, 32, 32, 3), (4, 64, 28, 3), (8, 64, 56, 1),
        (8, 64, 56, 3), (8, 128, 28, 3), (8, 256, 14, 3), (8, 256, 14, 1),
    ):  # fmt: skip
        for name, backward in (("aten.convolution", False), ("aten.convolution_backward", True)):
            yield Case(name, "float32", _convolution(where, batch, channels, side, kernel, backward))


def _convolution(
    where: torch.device, batch: int, channels: int, side: int, kernel: int, backward: bool
) -> Make:
    def make() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        w = _tensor(where, channels, channels, kernel, kernel)
        ones, pad, none = [1, 1], [kernel // 2, kernel // 2], [0, 0]
        if not backward:
            return lambda: aten.convolution(x, w, None, ones, pad, ones, False, none, 1)
        mask, gradient = [True, True, False], torch.ones_like(x)
        return lambda: aten.convolution_backward(gradient, x, w, None, ones, pad, ones, False, none, 1, mask)

    return make


def _recurrent(where: torch.device) -> Iterator[Case]:
    if where.type != "cpu":
        return  # cuDNN runs a whole stack as one call, whose figures the recording assumes
    for length, batch, width in (
        (16, 4, 32), (32, 8, 64), (64, 16, 64), (64, 16, 128), (32, 8, 256), (64, 32, 256), (64, 16, 512),
    ):  # fmt: skip
        yield Case("aten.mkldnn_rnn_layer", "float32", _lstm(length, batch, width, False))
        yield Case("aten.mkldnn_rnn_layer_backward", "float32", _lstm(length, batch, width, True))


def _lstm(length: int, batch: int, width: int, backward: bool) -> Make:
    def make() -> Callable[[], Any]:
        layer = torch.nn.LSTM(width, width)
        x = torch.rand(length, batch, width, requires_grad=True)

        def forward() -> Any:
            with torch.enable_grad():
                return layer(x)[0]

        if not backward:
            return forward
        return _backward_of(forward, [x, *layer.parameters()])

    return make


def _backward_of(forward: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """The backward of a forward that is run once, as a call that can be repeated."""
    with torch.enable_grad():
        out = forward()
    gradient = torch.ones_like(out)

    def call() -> Any:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return call


def _attention(where: torch.device, dtype: str) -> Iterator[Case]:
    if where.type != "cpu":
        return  # fused CUDA attention: the published curves stand
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    for batch, heads, length, width in (
        (4, 4, 32, 32), (2, 4, 64, 32), (16, 4, 64, 32), (8, 4, 128, 32), (4, 4, 256, 32), (1, 12, 128, 64),
        (4, 8, 128, 64), (4, 8, 256, 64), (2, 8, 1024, 64),
    ):  # fmt: skip
        yield Case(name, dtype, _sdpa(dtype, batch, heads, length, width, False))
        yield Case(f"{name}_backward", dtype, _sdpa(dtype, batch, heads, length, width, True))


def _sdpa(dtype: str, batch: int, heads: int, length: int, width: int, backward: bool) -> Make:
    """Heads lie side by side in each token, as the linear layer before attention leaves them."""

    def make() -> Callable[[], Any]:
        of_a_token = torch.rand(3, batch, length, heads, width).to(getattr(torch, dtype))
        qkv = [x.transpose(1, 2).requires_grad_() for x in of_a_token]

        def forward() -> Any:
            with torch.enable_grad():
                return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

        return _backward_of(forward, qkv) if backward else forward

    return make


# -- what moves ---------------------------------------------------------------------------------------

_ELEMENTS = (2**7, 2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)

_TWO: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "add_": lambda a, b: a.add_(b, alpha=1e-9), "copy_": lambda a, b: a.copy_(b),
    "gelu_backward": aten.gelu_backward,
    "threshold_backward": lambda a, b: aten.threshold_backward(a, b, 0),
    "silu_backward": aten.silu_backward,
    "tanh_backward": aten.tanh_backward,
    "sigmoid_backward": aten.sigmoid_backward,
    "lerp_": lambda a, b: a.lerp_(b, 0.1), "addcmul_": lambda a, b: a.addcmul_(b, b, value=1e-9),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b, value=1e-9),
}  # fmt: skip
_ONE: dict[str, Callable[..., Any]] = {
    "gelu": aten.gelu, "tanh": torch.tanh, "relu": torch.relu, "silu": aten.silu, "sigmoid": torch.sigmoid,
    "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "mul_": lambda a: a.mul_(0.999999),
    "bernoulli_": lambda a: a.bernoulli_(0.9), "clone": torch.clone, "fill_": lambda a: a.fill_(1.0),
    "zeros_like": torch.zeros_like, "native_dropout": lambda a: aten.native_dropout(a, 0.1, True),
}  # fmt: skip
# Kernels of one name that compute different things (`ops.variants`).
_VARIANTS: tuple[tuple[str, Callable[..., Any], int], ...] = (
    ("gelu", lambda a: aten.gelu(a, approximate="tanh"), 1),
    ("gelu_backward", lambda a, b: aten.gelu_backward(a, b, approximate="tanh"), 2),
    ("pow", lambda a: torch.pow(a, 2.0), 1), ("pow", lambda a: torch.pow(a, 3.0), 1),
)  # fmt: skip
_ALSO_16_BIT = frozenset((
    "add", "mul", "add_", "mul_", "gelu", "gelu_backward", "silu", "silu_backward", "relu", "threshold_backward",
    "clone", "copy_", "pow", "native_dropout", "zeros_like", "lerp_", "addcmul_", "addcdiv_", "sqrt", "div",
))  # fmt: skip
"""Those that models and optimizers run in 16 bits; of the others their family stands in."""


def _pointwise(where: torch.device, dtype: str) -> Iterator[Case]:
    """Element-wise operators, each on its own: some compute more than they move."""
    every = (*((name, call, 2) for name, call in _TWO.items()), *((name, call, 1) for name, call in _ONE.items()))
    for name, call, operands in (*every, *_VARIANTS):
        if dtype != "float32" and name not in _ALSO_16_BIT:
            continue
        for elements in _ELEMENTS:
            yield Case(f"aten.{name}", dtype, _of_size(where, call, elements, operands, dtype))


def _casts(where: torch.device, dtype: str) -> Iterator[Case]:
    """To 16 bits from 32 and back, as autocast casts weights and what goes into a layer."""
    to = torch.bfloat16 if dtype == "float32" else torch.float32
    for elements in _ELEMENTS:
        yield Case("aten._to_copy", dtype, _of_size(where, lambda a: a.to(to), elements, 1, dtype))


def _of_size(where: torch.device, call: Callable[..., Any], elements: int, operands: int, dtype: str) -> Make:
    def make() -> Callable[[], Any]:
        tensors = [_tensor(where, elements, dtype=dtype) for _ in range(operands)]
        return lambda: call(*tensors)

    return make


def _lists(where: torch.device) -> Iterator[Case]:
    """Optimizers and clipping over a list of tensors, as torch's own functions run them: what their Python takes for
    each tensor is in the time. On a CPU one kernel follows the other, on a GPU a list is one."""
    for elements, count in ((2**7, 48), (2**10, 48), (2**13, 48), (2**16, 48), (2**20, 4), (2**23, 2)):
        for name, make in _list_calls(where, elements, count).items():
            yield Case(f"aten.{name}", "float32", make)


def _list_calls(where: torch.device, elements: int, count: int) -> dict[str, Make]:
    def tensors() -> list[torch.Tensor]:
        return [_tensor(where, elements) for _ in range(count)]

    def norm() -> Callable[[], Any]:
        given = tensors()
        return lambda: torch.nn.utils.get_total_norm(given)

    def scaled() -> Callable[[], Any]:
        given, length = parameters(), torch.ones((), device=where)
        return lambda: torch.nn.utils.clip_grads_with_norm_(given, 1.0, length)

    def adamw() -> Callable[[], Any]:
        return torch.optim.AdamW(parameters(), lr=1e-9, fused=True).step

    def parameters() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(tensor) for tensor in tensors()]
        for parameter in made:
            parameter.grad = _tensor(where, elements)
        return made

    return {"_foreach_norm": norm, "_foreach_mul_": scaled, "_fused_adamw_": adamw}


def _rows(where: torch.device, dtype: str) -> Iterator[Case]:
    """Operators over rows: softmax, norms, sums, lookups."""
    for rows, width in ((16, 64), (128, 128), (512, 256), (2048, 512), (4096, 1024), (4096, 4096)):
        for name, make in _row_calls(where, rows, width, dtype).items():
            yield Case(f"aten.{name.partition('(')[0]}", dtype, make)


def _row_calls(where: torch.device, rows: int, width: int, dtype: str) -> dict[str, Make]:
    def given(call: Callable[..., Any]) -> Make:
        def make() -> Callable[[], Any]:
            x = _tensor(where, rows, width, dtype=dtype)
            return lambda: call(x)

        return make

    def pair(call: Callable[..., Any]) -> Make:
        def make() -> Callable[[], Any]:
            gradient, x = (_tensor(where, rows, width, dtype=dtype) for _ in range(2))
            return lambda: call(gradient, x)

        return make

    kind = getattr(torch, dtype)
    weight = torch.ones(width, device=where, dtype=kind)
    ids = torch.arange(rows, device=where)
    labels = ids % width
    one = torch.ones((), device=where, dtype=kind)

    def norm_backward() -> Callable[[], Any]:
        x = _tensor(where, rows, width, dtype=dtype)
        y, mean, rstd = aten.native_layer_norm(x, [width], weight, weight, 1e-5)
        return lambda: aten.native_layer_norm_backward(
            y, x, [width], mean, rstd, weight, weight, [True, True, True]
        )

    return {
        "_softmax": given(lambda x: aten._softmax(x, -1, False)),
        "_log_softmax": given(lambda x: aten._log_softmax(x, -1, False)),
        "_softmax_backward_data": pair(lambda g, x: aten._softmax_backward_data(g, x, -1, kind)),
        "_log_softmax_backward_data": pair(lambda g, x: aten._log_softmax_backward_data(g, x, -1, kind)),
        "native_layer_norm": given(lambda x: aten.native_layer_norm(x, [width], weight, weight, 1e-5)),
        "native_layer_norm_backward": norm_backward,
        "nll_loss_backward": given(
            lambda x: aten.nll_loss_backward(one, x, labels, None, 2, -100, torch.ones_like(one))
        ),
        # Over the rows, whose elements lie apart.
        "_softmax(strided)": given(lambda x: aten._softmax(x, 0, False)),
        "_log_softmax(strided)": given(lambda x: aten._log_softmax(x, 0, False)),
        "_softmax_backward_data(strided)": pair(lambda g, x: aten._softmax_backward_data(g, x, 0, kind)),
        "_log_softmax_backward_data(strided)": pair(lambda g, x: aten._log_softmax_backward_data(g, x, 0, kind)),
        "clone(transposed)": given(lambda x: aten.clone(x.t(), memory_format=torch.contiguous_format)),
        "copy_(transposed)": pair(lambda a, b: a.t().copy_(b.view(width, rows))),
        "sum": given(lambda x: torch.sum(x, 0, keepdim=True)),
        "cat": given(lambda x: torch.cat((x, x), -1)),
        "embedding": given(lambda x: aten.embedding(x, ids)),
        "index_select": given(lambda x: torch.index_select(x, 0, ids)),
        "embedding_dense_backward": given(lambda x: aten.embedding_dense_backward(x, ids, rows, -1, False)),
    }


def _images(where: torch.device) -> Iterator[Case]:
    """Operators over images: batch norm and pooling."""
    for batch, channels, side in ((2, 16, 16), (4, 64, 28), (8, 64, 56), (16, 128, 56)):
        for name, make in _image_calls(where, batch, channels, side).items():
            yield Case(f"aten.{name}", "float32", make)


def _image_calls(
    where: torch.device, batch: int, channels: int, side: int
) -> dict[str, Make]:
    weight = torch.ones(channels, device=where)

    def batch_norm() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        return lambda: aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)

    def batch_norm_backward() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        y, mean, rstd = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
        return lambda: aten.native_batch_norm_backward(
            y, x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True]
        )

    def pool() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        return lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])

    def pool_backward() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        out, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
        return lambda: aten.max_pool2d_with_indices_backward(
            out, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices
        )

    return {
        "native_batch_norm": batch_norm,
        "native_batch_norm_backward": batch_norm_backward,
        "max_pool2d_with_indices": pool,
        "max_pool2d_with_indices_backward": pool_backward,
    }
