"""What this machine's kernels reach: matmul by size and dtype, bytes moved by operator and size, launching.

`calibrate` measures single operators and gives a `Calibration`; `calibration_text` writes it as the TOML that
`timing.this` reads, so that `device="this"` predicts for this machine. Shares are of the best rate measured,
which therefore stands where a catalog has a data sheet's peak: nothing here is a data-sheet figure.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from typing import Any

import torch

from preflop.ledgers.operators import operator_rows
from preflop.measure.clock import now
from preflop.record.call_tape import record_call
from preflop.timing.kernels import Family, family, size_of
from preflop.timing.this import SCHEMA

aten = torch.ops.aten

BUDGET_S = 0.08
"""Time spent on one operator at one size, after one call to warm up."""
FEWEST_CALLS = 3
_WARM_UP = 2
_FOOTPRINT_BYTES, _MOST_COPIES = 48 * 2**20, 48
"""How much is touched, and by how many sets of operands, before the first set's turn comes again."""
_TINY = 16
"""Elements of an operator that does nothing but be called."""


@dataclass(frozen=True)
class Case:
    """One operator at one size."""

    op: str
    """As the tape names it: "aten.gelu_backward"."""
    dtype: str
    make: Callable[[], Callable[[], Any]]
    """Makes the operands, and gives the call."""
    only: bool = True
    """The call is this operator alone; else it is what autograd runs and its whole time is the operator's."""


@dataclass(frozen=True)
class Reading:
    """One operator at one size, measured."""

    op: str
    kind: Family
    dtype: str
    flops: int
    """Of one call; only attended pairs of attention, as times are predicted."""
    moved: int
    seconds: float
    """Of one call, without the time of calling."""


@dataclass
class Calibration:
    """All readings of a machine."""

    name: str
    vendor: str
    records_as: str
    """The device by whose rules a step is recorded: "cpu" or a catalog id."""
    launch_s: float
    threads: int
    memory_bytes: int
    readings: list[Reading] = field(default_factory=list)
    context_bytes: int | None = None
    """Of the accelerator: its memory in use outside of the allocator."""

    @property
    def is_cpu(self) -> bool:
        """Whether the host runs the kernels itself, so that calling and computing take turns."""
        return self.records_as == "cpu"


def calibrate(
    device: str | None = None,
    *,
    budget_s: float = BUDGET_S,
    progress: Callable[[str], None] = lambda words: None,
) -> Calibration:
    """Measure this machine.

    Args:
        device: "cpu" or "cuda"; by default the GPU where there is one.
        budget_s: seconds per operator and size.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = _machine(where)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        found.launch_s = _launch_s(where)
        call_s = _call_s(where)
        for case in _cases(where):
            progress(f"measuring {case.op} {case.dtype}")
            reading = _read(case, where, call_s if found.is_cpu else 0.0, budget_s)
            if reading is not None:
                found.readings.append(reading)
    return found


def _machine(where: torch.device) -> Calibration:
    if where.type == "cuda":
        from preflop.errors import UnknownDevice
        from preflop.hardware.catalog import find

        properties = torch.cuda.get_device_properties(where)
        free, total = torch.cuda.mem_get_info(where)
        try:
            records_as = find(properties.name).id
        except UnknownDevice:
            major, minor = torch.cuda.get_device_capability(where)
            records_as = "h100-sxm5-80gb" if (major, minor) >= (9, 0) else "a100-sxm4-80gb"
        context = total - free - torch.cuda.memory_reserved(where)
        return Calibration(
            properties.name, "NVIDIA", records_as, 0.0, torch.get_num_threads(), total, context_bytes=context
        )
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        memory = 0
    return Calibration(_cpu_name(), "CPU", "cpu", 0.0, torch.get_num_threads(), memory)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


# -- clock --------------------------------------------------------------------------------------------


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def seconds_of(call: Callable[[], Any], where: torch.device, budget_s: float) -> float:
    """Seconds of one call: the median of as many as the budget holds, at least `FEWEST_CALLS`."""
    for _ in range(_WARM_UP):
        call()
    _wait(where)
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < FEWEST_CALLS or (time.perf_counter() < end and len(taken) < 1000):
        start = now(where)
        call()
        _wait(where)
        taken.append(now(where) - start)
    return median(taken)


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A call that takes the next set of operands each time: in a step they were last touched long before,
    and are not in the nearest cache."""
    turn = itertools.cycle(calls)

    def call() -> Any:
        return next(turn)()

    return call


def _call_s(where: torch.device) -> float:
    """Seconds that one operator takes which has nothing to do, called from a loop."""
    a = torch.zeros(_TINY, device=where)
    b = torch.zeros(_TINY, device=where)
    repeats = 200

    def many() -> None:
        for _ in range(repeats):
            torch.add(a, b)

    return seconds_of(many, where, 0.3) / repeats


def _launch_s(where: torch.device) -> float:
    """Seconds of the host per kernel of a training step: forward and backward of layers with nothing to do.

    Modules, autograd and views included, which a bare call is not.
    """
    layers = [
        torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(16)
    ]
    model = torch.nn.Sequential(*layers).to(where)
    x = torch.zeros(2, 8, device=where)

    def step() -> None:
        with torch.enable_grad():
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    kernels = sum(
        row.calls for row in operator_rows(record_call(step, (), {})) if row.read_bytes + row.write_bytes
    )
    return seconds_of(step, where, 0.5) / kernels


def _read(case: Case, where: torch.device, launch_s: float, budget_s: float) -> Reading | None:
    """One reading; None where torch has no such kernel here."""
    try:
        call = case.make()
        rows = [row for row in operator_rows(record_call(call, (), {})) if row.op == case.op]
        moved = max(sum(row.read_bytes + row.write_bytes for row in rows), 1)
        copies = [call, *(case.make() for _ in range(min(_FOOTPRINT_BYTES // moved, _MOST_COPIES)))]
        seconds = seconds_of(_in_turn(copies), where, budget_s)
    except (RuntimeError, NotImplementedError):
        return None
    flops = sum(row.flops if row.attended_flops is None else row.attended_flops for row in rows)
    moved = sum(row.read_bytes + row.write_bytes for row in rows)
    if not rows or not moved:
        return None
    kind = family(case.op, rows[0].kind)
    calls = sum(row.calls for row in rows)
    net = max(seconds / calls - launch_s, seconds / calls * 0.05)
    return Reading(case.op, kind, case.dtype, flops // calls, moved // calls, net)


# -- cases --------------------------------------------------------------------------------------------


def _cases(where: torch.device) -> Iterator[Case]:
    dtypes = ["float32", "bfloat16"] + (["float16"] if where.type == "cuda" else [])
    for dtype in dtypes:
        yield from _matmuls(where, dtype)
    yield from _convolutions(where)
    yield from _recurrent(where)
    yield from _attention(where)
    yield from _pointwise(where)
    yield from _rows(where)


def _tensor(where: torch.device, *shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.rand(*shape, device=where).to(getattr(torch, dtype)).add_(0.5)


# Rows, inputs and outputs of linear layers, narrow and wide, over few and many tokens: a call's rate depends on
# its FLOPs per byte as much as on its FLOPs.
_LINEAR = (
    (256, 64, 64), (256, 128, 512), (1024, 128, 128), (1024, 128, 512), (1024, 256, 1024), (64, 768, 768),
    (128, 768, 3072), (512, 768, 768), (2048, 768, 768), (2048, 768, 3072), (128, 768, 16384), (512, 128, 8192),
)  # fmt: skip


def _matmuls(where: torch.device, dtype: str) -> Iterator[Case]:
    largest = 8192 if where.type == "cuda" else 1024
    shapes = [(n, n, n) for n in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= largest]
    shapes += [(m, k, n) for m, k, n in _LINEAR if m <= 2 * largest]
    for m, k, n in shapes:
        for layout in ("NT", "NN", "TN"):
            yield Case("aten.mm", dtype, _mm(where, dtype, (m, k, n), layout))
    for batch, length, width in ((4, 64, 32), (16, 128, 64), (32, 256, 64), (64, 512, 64)):
        yield Case("aten.bmm", dtype, _bmm(where, dtype, batch, length, width))


def _mm(
    where: torch.device, dtype: str, sizes: tuple[int, int, int], layout: str
) -> Callable[[], Callable[[], Any]]:
    """A linear layer's forward (NT), the gradient of its input (NN) or of its weight (TN)."""
    m, k, n = sizes

    def make() -> Callable[[], Any]:
        a = _tensor(where, k, m, dtype=dtype).t() if layout[0] == "T" else _tensor(where, m, k, dtype=dtype)
        b = _tensor(where, n, k, dtype=dtype).t() if layout[1] == "T" else _tensor(where, k, n, dtype=dtype)
        return lambda: torch.mm(a, b)

    return make


def _bmm(
    where: torch.device, dtype: str, batch: int, length: int, width: int
) -> Callable[[], Callable[[], Any]]:
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
        yield Case("aten.convolution", "float32", _convolution(where, batch, channels, side, kernel, False))
        yield Case(
            "aten.convolution_backward", "float32", _convolution(where, batch, channels, side, kernel, True)
        )


def _convolution(
    where: torch.device, batch: int, channels: int, side: int, kernel: int, backward: bool
) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        w = _tensor(where, channels, channels, kernel, kernel)
        ones, pad, none = [1, 1], [kernel // 2, kernel // 2], [0, 0]
        if not backward:
            return lambda: aten.convolution(x, w, None, ones, pad, ones, False, none, 1)
        mask = [True, True, False]
        return lambda: aten.convolution_backward(x, x, w, None, ones, pad, ones, False, none, 1, mask)

    return make


def _recurrent(where: torch.device) -> Iterator[Case]:
    if where.type != "cpu":
        return  # cuDNN runs a whole stack as one call, whose figures the recording assumes
    for length, batch, width in (
        (16, 4, 32), (32, 8, 64), (64, 16, 64), (64, 16, 128), (32, 8, 256), (64, 32, 256), (64, 16, 512),
    ):  # fmt: skip
        yield Case("aten.mkldnn_rnn_layer", "float32", _lstm(length, batch, width, False))
        yield Case("aten.mkldnn_rnn_layer_backward", "float32", _lstm(length, batch, width, True), only=False)


def _lstm(length: int, batch: int, width: int, backward: bool) -> Callable[[], Callable[[], Any]]:
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


def _attention(where: torch.device) -> Iterator[Case]:
    if where.type != "cpu":
        return  # fused CUDA attention: the published curves stand
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    for batch, heads, length, width in (
        (4, 4, 32, 32), (16, 4, 64, 32), (8, 4, 128, 32), (4, 8, 128, 64), (4, 8, 256, 64), (2, 8, 1024, 64),
    ):  # fmt: skip
        yield Case(name, "float32", _sdpa(batch, heads, length, width, False))
        yield Case(f"{name}_backward", "float32", _sdpa(batch, heads, length, width, True), only=False)


def _sdpa(batch: int, heads: int, length: int, width: int, backward: bool) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        qkv = [torch.rand(batch, heads, length, width, requires_grad=True) for _ in range(3)]

        def forward() -> Any:
            with torch.enable_grad():
                return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

        return _backward_of(forward, qkv) if backward else forward

    return make


_SIZES = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**24)


def _pointwise(where: torch.device) -> Iterator[Case]:
    """Element-wise operators, each on its own: some compute more than they move."""
    two: dict[str, Callable[..., Any]] = {
        "add": torch.add, "mul": torch.mul, "div": torch.div, "add_": lambda a, b: a.add_(b, alpha=1e-9),
        "mul_": lambda a, b: a.mul_(0.999999),
        "gelu_backward": aten.gelu_backward, "copy_": lambda a, b: a.copy_(b),
        "threshold_backward": lambda a, b: aten.threshold_backward(a, b, 0),
        "silu_backward": aten.silu_backward,
        "tanh_backward": aten.tanh_backward,
        "sigmoid_backward": aten.sigmoid_backward,
        "lerp_": lambda a, b: a.lerp_(b, 0.1), "addcmul_": lambda a, b: a.addcmul_(b, b, value=1e-9),
        "addcdiv_": lambda a, b: a.addcdiv_(b, b, value=1e-9),
    }  # fmt: skip
    one: dict[str, Callable[..., Any]] = {
        "gelu": aten.gelu, "tanh": torch.tanh, "relu": torch.relu, "silu": aten.silu, "sigmoid": torch.sigmoid,
        "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
        "bernoulli_": lambda a: a.bernoulli_(0.9), "clone": torch.clone, "fill_": lambda a: a.fill_(1.0),
        "zeros_like": torch.zeros_like, "native_dropout": lambda a: aten.native_dropout(a, 0.1, True),
    }  # fmt: skip
    # Operators that compute one of several things; the tape's rows do not say which, so a size's time is their median.
    variants: list[tuple[str, Callable[..., Any], int]] = [
        ("gelu", lambda a: aten.gelu(a, approximate="tanh"), 1),
        ("gelu_backward", lambda a, b: aten.gelu_backward(a, b, approximate="tanh"), 2),
        ("pow", lambda a: torch.pow(a, 2.0), 1), ("pow", lambda a: torch.pow(a, 3.0), 1),
    ]  # fmt: skip
    every = [
        *((name, call, 2) for name, call in two.items()),
        *((name, call, 1) for name, call in one.items()),
    ]
    for name, call, operands in (*every, *variants):
        for size in _SIZES:
            yield Case(f"aten.{name}", "float32", _of_size(where, call, size, operands))


def _of_size(
    where: torch.device, call: Callable[..., Any], size: int, operands: int
) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        tensors = [_tensor(where, size) for _ in range(operands)]
        return lambda: call(*tensors)

    return make


def _rows(where: torch.device) -> Iterator[Case]:
    """Operators over rows: softmax, norms, sums, lookups, pooling."""
    for rows, width in ((16, 64), (128, 128), (512, 256), (2048, 512), (4096, 1024), (4096, 4096)):
        for name, make in _row_calls(where, rows, width).items():
            yield Case(f"aten.{name}", "float32", make)
    for batch, channels, side in ((2, 16, 16), (4, 64, 28), (8, 64, 56), (16, 128, 56)):
        for name, make in _image_calls(where, batch, channels, side).items():
            yield Case(f"aten.{name}", "float32", make)


def _row_calls(where: torch.device, rows: int, width: int) -> dict[str, Callable[[], Callable[[], Any]]]:
    def given(call: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = _tensor(where, rows, width)
            return lambda: call(x)

        return make

    weight = torch.ones(width, device=where)
    ids = torch.arange(rows, device=where) % rows

    def norm_backward() -> Callable[[], Any]:
        x = _tensor(where, rows, width)
        _, mean, rstd = aten.native_layer_norm(x, [width], weight, weight, 1e-5)
        return lambda: aten.native_layer_norm_backward(
            x, x, [width], mean, rstd, weight, weight, [True, True, True]
        )

    return {
        "_softmax": given(lambda x: aten._softmax(x, -1, False)),
        "_log_softmax": given(lambda x: aten._log_softmax(x, -1, False)),
        "_softmax_backward_data": given(lambda x: aten._softmax_backward_data(x, x, -1, torch.float32)),
        "_log_softmax_backward_data": given(
            lambda x: aten._log_softmax_backward_data(x, x, -1, torch.float32)
        ),
        "native_layer_norm": given(lambda x: aten.native_layer_norm(x, [width], weight, weight, 1e-5)),
        "native_layer_norm_backward": norm_backward,
        "sum": given(lambda x: torch.sum(x, 0, keepdim=True)),
        "cat": given(lambda x: torch.cat((x, x), -1)),
        "embedding": given(lambda x: aten.embedding(x, ids)),
        "embedding_dense_backward": given(lambda x: aten.embedding_dense_backward(x, ids, rows, -1, False)),
    }


def _image_calls(
    where: torch.device, batch: int, channels: int, side: int
) -> dict[str, Callable[[], Callable[[], Any]]]:
    weight = torch.ones(channels, device=where)

    def batch_norm() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        return lambda: aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)

    def batch_norm_backward() -> Callable[[], Any]:
        x = _tensor(where, batch, channels, side, side)
        _, mean, rstd = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
        return lambda: aten.native_batch_norm_backward(
            x, x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True]
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


# -- file ---------------------------------------------------------------------------------------------

_BY_FLOPS = (Family.MATMUL, Family.BATCHED, Family.CONVOLUTION, Family.RECURRENT)


def _computes(reading: Reading) -> bool:
    return reading.kind in _BY_FLOPS or reading.kind.attends


def calibration_text(found: Calibration) -> str:
    """The calibration as TOML. Peaks are the best rates measured; curves are shares of them."""
    peaks = {
        dtype: max(r.flops / r.seconds for r in found.readings if _computes(r) and r.dtype == dtype)
        for dtype in dict.fromkeys(r.dtype for r in found.readings if _computes(r))
    }
    bandwidth = max(r.moved / r.seconds for r in found.readings if not _computes(r))
    lines = [
        f'schema = "{SCHEMA}"',
        f'measured_at = "{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, torch {torch.__version__}"',
        "",
        "[device]",
        f'name = "{found.name}"',
        f'vendor = "{found.vendor}"',
        f'arch = "{found.records_as}"',
        f'records_as = "{found.records_as}"',
        f"serial = {str(found.is_cpu).lower()}",
        f"threads = {found.threads}",
        "",
        "[figures]",
        f"torch_total_memory_bytes = {found.memory_bytes}",
        f"memory_bandwidth_bytes_per_s = {bandwidth:.6g}",
    ]
    if found.context_bytes is not None:
        lines.append(f"context_bytes = {found.context_bytes}")
    lines += ["", "# The best rate measured of each dtype, FLOP/s.", "[peaks]"]
    lines += [f"{dtype} = {rate:.6g}" for dtype, rate in peaks.items()]
    if "float32" not in peaks:
        lines.append(f"float32 = {max(peaks.values()):.6g}")
    lines += ["", "[launch]", f"launch_s = {found.launch_s:.4g}"]
    lines.append(f"smallest_kernel_s = {0.0 if found.is_cpu else found.launch_s / 4:.4g}")
    return "\n".join([*lines, "", *_curves(found, peaks, bandwidth)]) + "\n"


def _curves(found: Calibration, peaks: dict[str, float], bandwidth: float) -> Iterator[str]:
    moving = [reading for reading in found.readings if not _computes(reading)]
    yield "# [bytes, share of the best]; sizes as in timing/curves.toml."
    yield "[curves]"
    yield 'source = "preflop calibrate"'
    for name, readings in _grouped(moving, lambda reading: reading.kind.value):
        yield _curve(name, readings, bandwidth)
    yield ""
    yield "[curves.ops]"
    for name, readings in _grouped(moving, lambda reading: f'"{reading.op}"'):
        yield _curve(name, readings, bandwidth)
    computing = [reading for reading in found.readings if _computes(reading)]
    yield ""
    yield "# [FLOPs, bytes, share of the best] of single calls."
    yield "[curves.surfaces]"
    for name, readings in _grouped(computing, lambda reading: f'"{reading.kind.value} {reading.dtype}"'):
        yield _surface(name, readings, peaks)
    for name, readings in _grouped(computing, lambda reading: f'"{reading.op} {reading.dtype}"'):
        yield _surface(name, readings, peaks)


def _grouped(
    readings: Iterable[Reading], key: Callable[[Reading], str]
) -> Iterator[tuple[str, list[Reading]]]:
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    yield from found.items()


def _curve(name: str, readings: Sequence[Reading], bandwidth: float) -> str:
    points: dict[float, list[float]] = {}
    for reading in readings:
        size = float(f"{size_of(reading.kind, reading.flops, reading.moved):.3g}")
        points.setdefault(size, []).append(reading.seconds * bandwidth / reading.moved)
    shown = ", ".join(f"[{size:.4g}, {1 / median(taken):.4g}]" for size, taken in sorted(points.items()))
    return f"{name} = [{shown}]"


def _surface(name: str, readings: Sequence[Reading], peaks: dict[str, float]) -> str:
    points: dict[tuple[int, int], list[float]] = {}
    for reading in readings:
        times_the_least = reading.seconds * peaks[reading.dtype] / reading.flops
        points.setdefault((reading.flops, reading.moved), []).append(times_the_least)
    shown = ", ".join(
        f"[{flops:.4g}, {moved:.4g}, {1 / median(taken):.4g}]"
        for (flops, moved), taken in sorted(points.items())
    )
    return f"{name} = [{shown}]"
