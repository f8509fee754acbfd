"""What CPU kernels allocate inside themselves, one operator at a time: rule against profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from preflop.measure.operators import OperatorReading, operator_readings
from preflop.ops.pricing import inside_bytes
from preflop.ops.workspace import threads, vector_bytes, vectors
from preflop.ops.workspace_lstm import lstm_reserve_bytes
from preflop.record.subject_tape import vector_bytes_here
from tests.zoo.conftest import THREADS

aten = torch.ops.aten
WRAPPED_NUMBERS_BYTES = 64
"""Python numbers that a kernel wraps in tensors are not counted."""
BARRIERS_BYTES = 16_384
"""Per extra thread oneDNN's convolutions take some room for barriers and padded biases."""

x86 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the rules of oneDNN's layouts are those of AVX-512 and AVX2",
)


@pytest.fixture(autouse=True)
def this_cpu() -> Iterator[None]:
    """Layouts for the vectors of the CPU that runs the tests."""
    with vectors(vector_bytes_here()):
        yield


def reading(run: Callable[[], object], op: str) -> OperatorReading:
    """The one call of `op` in a run, warm: oneDNN's first call may differ."""
    run()
    return next(found for found in operator_readings(run) if found.signature.op == op)


def apart(found: OperatorReading) -> int:
    """Rule minus profiler, in bytes."""
    with threads(THREADS):
        return inside_bytes(found.signature, cuda=False) - found.workspace_bytes


def channels_swapped(*shape: int) -> torch.Tensor:
    """A tensor whose two middle dimensions are swapped in memory."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)


NORMALIZATION = {
    "layer_norm": lambda: aten.native_layer_norm(channels_swapped(4, 8, 16), [16], None, None, 1e-5),
    "group_norm_backward": lambda: aten.native_group_norm_backward(
        torch.randn(4, 64, 10, 10), torch.randn(4, 64, 10, 10), torch.randn(4, 8), torch.randn(4, 8),
        torch.randn(64), 4, 64, 100, 8, [True, True, True],
    ),
    "layer_norm_backward": lambda: aten.native_layer_norm_backward(
        channels_swapped(4, 8, 512), torch.randn(4, 8, 512), [512], torch.randn(4, 8, 1), torch.rand(4, 8, 1),
        torch.randn(512), torch.randn(512), [True, True, True],
    ),
}  # fmt: skip
OPERATORS: dict[str, Callable[[], object]] = {
    "aten.native_layer_norm": NORMALIZATION["layer_norm"],
    "aten.native_layer_norm_backward": NORMALIZATION["layer_norm_backward"],
    "aten.native_group_norm_backward": NORMALIZATION["group_norm_backward"],
    "aten._safe_softmax": lambda: aten._safe_softmax(torch.randn(2, 3, 20, 30), -1),
    "aten.cumsum": lambda: aten.cumsum(torch.ones(100, 7, dtype=torch.bool), 0),
    "aten.sort": lambda: aten.sort(torch.randn(10, 1024)),
    "aten.mean": lambda: aten.mean(torch.randn(8, 100).bfloat16(), [1]),
    "aten.add": lambda: aten.add(torch.randn(100, 30), torch.randn(100, 30).bfloat16()),
    "aten.mul_": lambda: aten.mul_(torch.randn(100, 30).bfloat16(), torch.randn(100, 30)),
    "aten.mse_loss": lambda: aten.mse_loss(torch.randn(1000), torch.randn(1000)),
    "aten.embedding_dense_backward": lambda: aten.embedding_dense_backward(
        channels_swapped(4, 8, 16), torch.randint(50, (4, 8)), 50, -1, False
    ),
    "aten.binary_cross_entropy_with_logits": lambda: aten.binary_cross_entropy_with_logits(
        torch.randn(1000), torch.rand(1000)
    ),
}


@pytest.mark.parametrize("op", OPERATORS)
def test_small_kernels(op: str) -> None:
    """The rule is the reading but for wrapped numbers."""
    assert abs(apart(reading(OPERATORS[op], op))) <= WRAPPED_NUMBERS_BYTES


@pytest.mark.parametrize("shape", [(4, 64, 32, 32), (256, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Forward takes its statistics twice, backward one activation-sized temporary."""
    x = torch.randn(shape).to(dtype)
    channel = torch.ones(shape[1])

    def forward() -> object:
        return aten.native_batch_norm(x, channel, channel, channel.clone(), channel.clone(), True, 0.1, 1e-5)

    _, mean, scale = forward()  # type: ignore[misc]
    assert apart(reading(forward, "aten.native_batch_norm")) == 0
    backward = reading(
        lambda: aten.native_batch_norm_backward(
            x, x, channel, channel, channel, mean, scale, True, 1e-5, [True, True, True]
        ),
        "aten.native_batch_norm_backward",
    )
    assert apart(backward) == 0
    assert backward.workspace_bytes == x.nbytes


@pytest.mark.parametrize(
    ("query", "keys"), [((4, 4, 128, 32), 128), ((1, 2, 1024, 64), 1024), ((2, 2, 200, 33), 300)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention(query: tuple[int, ...], keys: int, *, causal: bool) -> None:
    """Scratch of one block per thread, forward and backward; backward copies dO besides."""
    q = torch.randn(query)
    k, v = torch.randn(2, query[0], query[1], keys, query[3])
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward = getattr(aten, name)
    assert apart(reading(lambda: forward(q, k, v, 0.0, causal), f"aten.{name}")) == 0
    out, logsumexp = forward(q, k, v, 0.0, causal)
    backward = getattr(aten, f"{name}_backward")
    found = reading(
        lambda: backward(torch.ones_like(out), q, k, v, out, logsumexp, 0.0, causal), f"aten.{name}_backward"
    )
    assert apart(found) == 0


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_embedding_bags(mode: int) -> None:
    """Sum, mean and maximum, with a gradient that is not contiguous."""
    weight, indices = torch.randn(300, 16), torch.randint(300, (500,))
    offsets = torch.arange(0, 500, 5)

    def forward() -> object:
        return aten._embedding_bag(weight, indices, offsets, False, mode, False, None)

    _, bag, size, chosen = forward()  # type: ignore[misc]
    gradient = torch.randn(16, 100).t()
    found = reading(
        lambda: aten._embedding_bag_backward(
            gradient, indices, offsets, bag, size, chosen, 300, False, mode, False, None
        ),
        "aten._embedding_bag_backward",
    )
    assert abs(apart(reading(forward, "aten._embedding_bag"))) <= 1024
    assert abs(apart(found)) <= 2 * WRAPPED_NUMBERS_BYTES


CONVOLUTIONS = {
    "3x3": (4, 64, 64, 32, 3, 1, 1),
    "3x3, weights larger than activations": (4, 512, 512, 4, 3, 1, 1),
    "1x1": (4, 64, 128, 32, 1, 1, 1),
    "1x1, stride 2": (4, 256, 512, 16, 1, 2, 1),
    "7x7 on an image": (4, 3, 64, 64, 7, 2, 1),
    "depthwise": (4, 64, 64, 32, 3, 1, 64),
    "8 groups": (4, 64, 64, 32, 3, 1, 8),
    "channels that are no whole blocks": (4, 20, 30, 32, 3, 1, 1),
    "depthwise 7x7, by gemm": (4, 64, 64, 32, 7, 1, 64),
    "narrow groups, by gemm": (4, 64, 64, 32, 3, 1, 32),
}


@x86
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    """Operands and results in blocks of 16 channels, and shared weight gradients: what is left is
    small beside the activations."""
    batch, inner, outer, side, kernel, stride, groups = CONVOLUTIONS[case]
    x = torch.randn(batch, inner, side, side)
    weight = torch.randn(outer, inner // groups, kernel, kernel)
    shape = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    forward = reading(lambda: aten.convolution(x, weight, None, *shape), "aten.convolution")
    assert abs(apart(forward)) <= BARRIERS_BYTES
    y = aten.convolution(x, weight, None, *shape)
    mask = [inner > 3, True, False]
    backward = reading(
        lambda: aten.convolution_backward(y, x, weight, None, *shape, mask), "aten.convolution_backward"
    )
    strided = 0.05 * x.nbytes if kernel == 1 and stride == 2 else 0
    # What threads sum into by themselves is not counted for 1 x 1 kernels with AVX2.
    sums = THREADS * weight.nbytes if kernel == 1 and vector_bytes() == 32 else 0
    assert abs(apart(backward)) <= BARRIERS_BYTES + strided + sums


def run_convolution(
    sizes: tuple[int, ...], *, transposed: bool, padding: int = 0, dilation: int = 1, groups: int = 1
) -> tuple[OperatorReading, OperatorReading]:
    """A convolution's two calls, as the profiler reads them."""
    batch, inner, outer, side, kernel, stride = sizes
    x = torch.randn(batch, inner, side, side)
    weight = torch.randn(*((inner, outer) if transposed else (outer, inner // groups)), kernel, kernel)
    shape = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)
    y = aten.convolution(x, weight, None, *shape)
    forward = reading(lambda: aten.convolution(x, weight, None, *shape), "aten.convolution")
    mask = [True, True, False]
    backward = reading(
        lambda: aten.convolution_backward(y, x, weight, None, *shape, mask), "aten.convolution_backward"
    )
    return forward, backward


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Without barriers and shared sums: the layouts alone."""
    torch.set_num_threads(1)
    with threads(1):
        yield


@x86
@pytest.mark.parametrize("outer", [1, 2, 3, 4, 8, 24])
@pytest.mark.parametrize("inner", [3, 16, 24])
@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 2), (2, 3)])
@pytest.mark.parametrize("transposed", [True, False])
def test_few_channels(
    one_thread: None, transposed: bool, stride: int, kernel: int, inner: int, outer: int
) -> None:
    """Images of few channels are read as they lie, strides have a kernel of their own, and a transposed
    convolution is the gradient of one: to the byte."""
    for found in run_convolution((2, inner, outer, 16, kernel, stride), transposed=transposed):
        assert inside_bytes(found.signature, cuda=False) == found.workspace_bytes


@x86
@pytest.mark.parametrize("inner", [12, 17, 40, 64, 72])
def test_blocks_of_a_strided_kernel(one_thread: None, inner: int) -> None:
    """The weight's channels are padded to the block that the kernel chooses: to the byte."""
    for found in run_convolution((2, inner, 48, 4, 3, 2), transposed=False, padding=1):
        assert inside_bytes(found.signature, cuda=False) == found.workspace_bytes


GEMM: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "larger than the image": ((2, 16, 8, 4, 7, 1), {"padding": 3}),
    "dilated": ((2, 16, 8, 16, 3, 1), {"padding": 1, "dilation": 2}),
    "groups that fill no block": ((2, 44, 44, 16, 3, 1), {"padding": 1, "groups": 4}),
    "a part of the positions at once": ((2, 16, 8, 20, 14, 1), {"padding": 7}),
}


@x86
@pytest.mark.skipif(vector_bytes_here() > 32, reason="measured with AVX2")
@pytest.mark.parametrize(("channels", "groups", "side", "kernel"), [(64, 64, 2, 3), (64, 64, 8, 7), (16, 1, 2, 3)])
def test_channels_last_gradients(one_thread: None, channels: int, groups: int, side: int, kernel: int) -> None:
    """A gemm's scratch has the image besides; wide depthwise kernels pad each channel to a block: to the byte."""
    x = torch.randn(2, channels, side, side).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels // groups, kernel, kernel)
    shape = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    y = aten.convolution(x, weight, None, *shape)
    backward = reading(
        lambda: aten.convolution_backward(y, x, weight, None, *shape, [True, True, False]),
        "aten.convolution_backward",
    )
    assert inside_bytes(backward.signature, cuda=False) == backward.workspace_bytes


@x86
@pytest.mark.skipif(vector_bytes_here() > 32, reason="AVX2 has no kernel for these; AVX-512 has for some")
@pytest.mark.parametrize("case", GEMM)
def test_gradients_by_gemm(one_thread: None, case: str) -> None:
    """Backward, where oneDNN has no kernel of its own: to the byte."""
    sizes, more = GEMM[case]
    backward = run_convolution(sizes, transposed=False, **more)[1]
    assert inside_bytes(backward.signature, cuda=False) == backward.workspace_bytes


NATIVE: dict[str, dict[str, object]] = {
    "image": {},
    "image, channels last": {"last": ("x", "y")},
    "gradient channels last": {"last": ("y",)},
    "1x1": {"kernel": 1, "last": ("y",)},
    "dilated": {"dilation": 2},
    "groups": {"groups": 4},
    "groups, channels last": {"groups": 4, "last": ("x", "y")},
    "groups, dilated": {"groups": 4, "dilation": 2},
    "groups of one sample": {"groups": 4, "batch": 1},
    "groups of a sequence": {"groups": 4, "axes": 1, "kernel": 1, "last": ("x",)},
    "groups, transposed": {"groups": 4, "transposed": True, "stride": 2},
    "transposed, channels last": {"transposed": True, "last": ("x", "y")},
    "volume": {"axes": 3},
    "volume, groups": {"axes": 3, "groups": 2},
    "volume, 1x1": {"axes": 3, "kernel": 1},
    "input's gradient only": {"wanted": (True, False)},
    "volume, input's gradient only": {"axes": 3, "wanted": (True, False)},
    "groups, weight's gradient only": {"groups": 4, "wanted": (False, True)},
}


def run_native(
    batch: int = 2,
    axes: int = 2,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    transposed: bool = False,
    last: tuple[str, ...] = (),
    wanted: tuple[bool, bool] = (True, True),
) -> list[OperatorReading]:
    """Both calls of a convolution in fp64, which oneDNN does not know."""
    inner, outer, side = 8, 12, (40, 10, 6)[axes - 1]
    channels = (inner, outer // groups) if transposed else (outer, inner // groups)
    x = torch.randn(batch, inner, *[side] * axes, dtype=torch.float64)
    weight = torch.randn(*channels, *[kernel] * axes, dtype=torch.float64)
    x = channels_innermost(x) if "x" in last else x
    sizes = ([stride] * axes, [kernel // 2] * axes, [dilation] * axes, transposed, [0] * axes, groups)
    y = torch.randn_like(aten.convolution(x, weight, None, *sizes)).contiguous()
    y = channels_innermost(y) if "y" in last else y
    return [
        reading(lambda: aten.convolution(x, weight, None, *sizes), "aten.convolution"),
        reading(
            lambda: aten.convolution_backward(y, x, weight, None, *sizes, [*wanted, False]),
            "aten.convolution_backward",
        ),
    ]


def channels_innermost(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, its channels next to each other in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("case", NATIVE)
def test_convolutions_by_torch(one_thread: None, case: str) -> None:
    """Columns, slices of groups and their results before they are joined: to the byte."""
    for found in run_native(**NATIVE[case]):  # type: ignore[arg-type]
        assert inside_bytes(found.signature, cuda=False) == found.workspace_bytes


IMAGES = {
    "small result": ((2, 8, 8, 8), 16),
    "large result": ((2, 8, 40, 40), 80),
    "large picture": ((2, 3, 40, 40), 80),
    "mask": ((2, 1, 8, 8), 16),
    "shrunk": ((2, 2, 90, 90), 30),
}
INTERPOLATIONS: dict[str, tuple[object, ...]] = {
    "upsample_nearest2d": (),
    "_upsample_nearest_exact2d": (),
    "upsample_bilinear2d": (False,),
    "upsample_bicubic2d": (False,),
}


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "cut"])
@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolation(name: str, layout: str, case: str) -> None:
    """Copies to channels last or tables of what is read, and backward's dense gradients: to the byte."""
    shape, side = IMAGES[case]

    def laid(height: int) -> torch.Tensor:
        made = torch.randn(*shape[:2], height, height + (layout == "cut"))[..., :height]
        return made.contiguous(memory_format=torch.channels_last) if layout == "channels last" else made

    given, extra = (laid(shape[2]), laid(side)), INTERPOLATIONS[name]
    forward = reading(lambda: getattr(aten, name)(given[0], [side, side], *extra), f"aten.{name}")
    backward = reading(
        lambda: getattr(aten, f"{name}_backward")(given[1], [side, side], list(shape), *extra),
        f"aten.{name}_backward",
    )
    assert (apart(forward), apart(backward)) == (0, 0)


@pytest.mark.parametrize("name", ["nearest3d", "trilinear3d", "nearest1d", "linear1d"])
@pytest.mark.parametrize("last", [False, True])
def test_interpolation_of_volumes_and_sequences(name: str, *, last: bool) -> None:
    """Only volumes that lie channels last take that kernel."""
    axes = int(name[-2])
    x, y = (torch.randn(2, 8, *[side] * axes) for side in (8, 16))
    if last:
        x, y = channels_innermost(x), channels_innermost(y)
    op, extra = f"upsample_{name}", () if "nearest" in name else (False,)
    forward = reading(lambda: getattr(aten, op)(x, [16] * axes, *extra), f"aten.{op}")
    backward = reading(
        lambda: getattr(aten, f"{op}_backward")(y, [16] * axes, list(x.shape), *extra), f"aten.{op}_backward"
    )
    assert (apart(forward), apart(backward)) == (0, 0)


@pytest.mark.parametrize("layout", ["dense", "channels last", "cut", "cut channels last"])
@pytest.mark.parametrize("name", ["max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"])
def test_pooling(name: str, layout: str) -> None:
    """What does not lie dense is copied, backward by the format of the result's gradient: to the byte."""

    def laid(side: int) -> torch.Tensor:
        made = torch.randn(2, 12 if "cut" in layout else 8, side, side)
        if "last" in layout:
            made = made.contiguous(memory_format=torch.channels_last)
        return made[:, :8]

    x, dense, gradient = laid(9), torch.randn(2, 8, 9, 9), laid(8)
    sizes = ([8, 8],) if "adaptive" in name else ([2, 2], [1, 1])
    rest: tuple[object, ...] = {"m": ([0, 0], [1, 1], False), "a": ([0, 0], False, True, None)}.get(name[0], ())
    forward = reading(lambda: getattr(aten, name)(x, *sizes), f"aten.{name}")
    sizes = () if "adaptive" in name else sizes
    indices = aten.max_pool2d_with_indices(dense, [2, 2], [1, 1])[1:] if name[0] == "m" else ()
    backward = reading(
        lambda: getattr(aten, f"{name}_backward")(gradient, dense, *sizes, *rest, *indices),
        f"aten.{name}_backward",
    )
    assert (apart(forward), apart(backward)) == (0, 0)


TRANSPOSED = {
    "padded": (2, 64, 32, 17, 4, 2, 1),
    "wide kernel, by gemm": (2, 24, 4, 16, 16, 8, 4),
    "more than one block": (2, 40, 100, 16, 3, 2, 1),
    "1x1, stride 2": (2, 64, 80, 16, 1, 2, 0),
    "by torch, too small for oneDNN": (1, 8, 5, 10, 3, 2, 0),
    "one channel made": (2, 8, 1, 16, 3, 1, 0),
    "by torch, 1x1": (2, 64, 13, 16, 1, 1, 0),
}


@x86
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolutions(one_thread: None, case: str) -> None:
    """Gradients of an input of strided convolutions have scratch of their own: to the byte."""
    *sizes, padding = TRANSPOSED[case]
    for found in run_convolution(tuple(sizes), transposed=True, padding=padding):
        assert inside_bytes(found.signature, cuda=False) == found.workspace_bytes


@x86
@pytest.mark.parametrize(
    ("length", "batch", "inner", "hidden"),
    [(16, 4, 64, 128), (64, 8, 256, 128), (20, 5, 64, 80), (1, 1, 16, 16)],
)
def test_lstm(length: int, batch: int, inner: int, hidden: int) -> None:
    """oneDNN's LSTM: what forward keeps for backward, and what each takes meanwhile, to the byte."""
    layer = torch.nn.LSTM(inner, hidden)
    x = torch.randn(length, batch, inner, requires_grad=True)

    def step() -> None:
        layer(x)[0].sum().backward()

    step()
    found = {item.signature.op: item for item in operator_readings(step)}
    forward = found["aten.mkldnn_rnn_layer"]
    assert forward.signature.outputs[3].bytes == lstm_reserve_bytes(length, batch, inner, hidden)
    assert apart(forward) == 0
    assert abs(apart(found["aten.mkldnn_rnn_layer_backward"])) <= WRAPPED_NUMBERS_BYTES


@pytest.mark.parametrize(
    ("shape", "size"),
    [((3, 32, 32), 0.0), ((2, 2, 16, 16), 1.0), ((32, 32), 1.0), ((1, 32, 32), 9.0), ((3, 1, 1), 1.0)],
)
def test_matrix_exponential(shape: tuple[int, ...], size: float) -> None:
    """A batch whatever its norm, and one matrix of a large norm: to the indices of the batch."""
    given = size * torch.randn(shape)
    found = reading(lambda: aten.linalg_matrix_exp(given), "aten.linalg_matrix_exp")
    assert abs(apart(found)) <= WRAPPED_NUMBERS_BYTES


def test_the_exponential_of_a_small_matrix_takes_less() -> None:
    """The price of one matrix is the upper one, as the stated assumption says."""
    found = reading(lambda: aten.linalg_matrix_exp(torch.zeros(32, 32)), "aten.linalg_matrix_exp")
    matrix = found.signature.outputs[0].bytes
    assert abs(found.workspace_bytes - 4 * matrix) <= WRAPPED_NUMBERS_BYTES
    assert apart(found) > 7 * matrix


def test_a_wrong_rule_is_found() -> None:
    """The comparison can fail: with one thread too many, attention's scratch is half as much again."""
    q = torch.randn(4, 4, 128, 32)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    found = reading(lambda: getattr(aten, name)(q, q, q), f"aten.{name}")
    with threads(THREADS + 1):
        assert inside_bytes(found.signature, cuda=False) == found.workspace_bytes * (THREADS + 1) // THREADS
