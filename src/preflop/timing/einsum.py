"""A named expression priced on a device: FLOPs, bytes, intensity, bound and time, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflop.account import OperatorRow
from preflop.errors import BadExpression, BadNumber
from preflop.formulas import einsum as products_of
from preflop.formulas import pattern as patterns
from preflop.formulas.einsum import Expression, Pair, Product
from preflop.hardware.device import Device, peak_name
from preflop.strides import Sizes
from preflop.timing.roofline import BANDWIDTH, COMPUTE, RooflineRow, device_ridge_point, on_roofline
from preflop.timing.step import step_time
from preflop.units import DTYPE_BYTES

# Dtypes that name only a width: fp8 of either kind, fp4, and TF32, which is kept in four bytes.
_BITS = {**{name: 8 * size for name, size in DTYPE_BYTES.items()}, "float8": 8, "float4": 4, "tf32": 32}


@dataclass(frozen=True, slots=True)
class ExpressionCost:
    """One expression: all kernels that it takes, together."""

    expression: str
    operand: str | None
    """Backward: whose gradient this is ("b s d", or "step 1: b s f" for an intermediate result)."""
    flops: int
    read_bytes: int
    write_bytes: int
    arithmetic_intensity: float | None
    """FLOPs per byte; None where nothing moves."""
    bound: str | None
    """"compute" or "bandwidth": which of them most of `time_s` is; None without a device."""
    time_s: float | None
    """Lower bound, the sum over kernels of max(FLOPs / peak, bytes / bandwidth)."""
    expected_s: float | None
    """At rates that were measured, launches included; None where nobody measured the device."""
    copied_bytes: int = 0
    """Of `write_bytes`: written only because the result could not be a view."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of the order in which several operands are multiplied."""

    operands: tuple[str, ...]
    cost: ExpressionCost
    result_bytes: int


@dataclass(frozen=True, slots=True)
class EinsumCost:
    """What an expression costs, forward and for each operand's gradient."""

    expression: str
    kind: str
    """"product", "rearrange", "reduce" or "repeat"."""
    sizes: dict[str, int]
    dtype: str
    out_dtype: str
    device_id: str | None
    ridge_point: float | None
    forward: ExpressionCost
    backward: tuple[ExpressionCost, ...]
    order: tuple[StepCost, ...] = ()
    """Three operands or more: the cheapest order, step by step."""
    written_order_flops: int | None = None
    """FLOPs of multiplying from left to right instead."""
    shapes: tuple[Sizes, Sizes] | None = None
    """A pattern's shape before and after."""
    strides: tuple[Sizes, Sizes] | None = None
    is_view: bool | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Pricing:
    """What turns elements into bytes and seconds."""

    dtype: str
    out_dtype: str
    device: Device | None

    def read_bytes(self, elements: int) -> int:
        """Bytes of elements of an operand, whole bytes."""
        return -(-elements * _BITS[self.dtype] // 8)

    def write_bytes(self, elements: int) -> int:
        """Bytes of elements of the result, whole bytes."""
        return -(-elements * _BITS[self.out_dtype] // 8)


def einsum_cost(
    expression: str,
    sizes: Mapping[str, int] | None = None,
    *,
    dtype: str = "bf16",
    out_dtype: str | None = None,
    device: str | None = None,
    reduction: str = "sum",
    layout: str | None = None,
    strides: Sequence[int] | None = None,
    **axes: int,
) -> EinsumCost:
    """FLOPs, bytes, arithmetic intensity, bound and time of a named expression, forward and backward.

    Args:
        expression: a product, "b s d, d f -> b s f", or a pattern of one tensor, "b s (h d) -> b h s d"
            (axes lost are reduced, axes gained are repeated).
        sizes: axis to size; also as keywords.
        dtype: of the operands: "bf16", "fp32", "tf32", "fp8", "float16"...
        out_dtype: of the result; the operands' by default.
        device: a name of `preflop hardware`; None, or "cpu": no time.
        reduction: of axes that a pattern loses: "sum", "mean", "max", "min" or "prod".
        layout: a pattern's operand in memory, axes outermost first ("b s h d"); contiguous by default.
        strides: the same as strides in elements, one per axis of the operand.

    >>> cost = einsum_cost("b s d, d f -> b s f", b=8, s=2048, d=4096, f=14336, device="h100-sxm")
    >>> cost.forward.flops, cost.forward.bound, [grad.expression for grad in cost.backward]
    (1924145348608, 'compute', ['b s f, d f -> b s d', 'b s d, b s f -> d f'])

    Counts each distinct element read or written once, as an ideal kernel would; a step's result is
    written and read again. Source: formulas/einsum.py, formulas/pattern.py.

    Raises:
        BadExpression: the expression cannot be read.
        PreflopError: an unknown dtype or device.
    """
    all_sizes = _checked({**(sizes or {}), **axes})
    pricing = _pricing(dtype, out_dtype, device)
    if patterns.is_pattern(expression):
        where = (layout, None if strides is None else tuple(strides))
        return _pattern_cost(patterns.parse(expression, all_sizes), pricing, reduction, *where)
    if layout is not None or strides is not None:
        raise BadExpression(
            "a layout or strides are of a pattern of one tensor; matmuls take their operands as they lie.\n"
            "  Leave them out, or price the operand's rearrangement on its own."
        )
    return _product_cost(products_of.parse(expression, all_sizes), pricing)


def _checked(sizes: dict[str, Any]) -> dict[str, int]:
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise BadNumber(f"the size of axis {axis} is {size!r}.\n  Needed: a whole number, 1 or more.")
    return sizes


def _pricing(dtype: str, out_dtype: str | None, device: str | None) -> _Pricing:
    name, out = peak_name(dtype), peak_name(out_dtype or dtype)
    for given, known in ((dtype, name), (out_dtype or dtype, out)):
        if known not in _BITS:
            short = "fp64, fp32, tf32, bf16, fp16, fp8, fp4, int8"
            raise BadExpression(f"no dtype named {given!r}.\n  Known: {short}, and torch's own names.")
    found = None
    if device is not None and device != "cpu":
        from preflop.timing.this import device_with_figures

        found = device_with_figures(device)
    return _Pricing(name, out, found)


# ------------------------------------------------------------------------------------------ products


def _product_cost(expression: Expression, pricing: _Pricing) -> EinsumCost:
    order = products_of.contraction_order(expression)
    steps = [_step_cost(pair, pricing) for pair in order]
    several = len(expression.operands) > 2
    forward = _cost(
        expression.text,
        [product for pair in order for product in products_of.products(pair.expression)],
        pricing,
    )
    backward = [cost for pair in reversed(order) for cost in _gradients(pair, pricing, several)]
    written = None
    if several:
        pairs = products_of.written_order(expression)
        written = sum(product.flops for pair in pairs for product in products_of.products(pair.expression))
    return EinsumCost(
        expression.text, "product", dict(expression.sizes), pricing.dtype, pricing.out_dtype,
        pricing.device.id if pricing.device else None, _ridge(pricing),
        forward, tuple(backward), tuple(steps) if several else (), written,
        assumptions=tuple(_said(pricing, several)),
    )  # fmt: skip


def _step_cost(pair: Pair, pricing: _Pricing) -> StepCost:
    cost = _cost(pair.expression.text, products_of.products(pair.expression), pricing)
    return StepCost(pair.names, cost, pricing.write_bytes(pair.expression.elements(pair.expression.result)))


def _gradients(pair: Pair, pricing: _Pricing, several: bool) -> Iterable[ExpressionCost]:
    """The gradient of each operand of one step, as autograd computes them."""
    for number, axes in enumerate(pair.expression.operands):
        asked, kernels = products_of.gradient(pair.expression, number)
        name = " ".join(axes)
        operand = f"{pair.names[number]}: {name}" if several else name
        alone = [axis for axis in axes if axis not in asked.result]
        note = f"then expanded over {', '.join(alone)}, a view" if alone else ""
        yield _cost(asked.text, kernels, pricing, operand=operand, note=note)


# ------------------------------------------------------------------------------------------ patterns


def _pattern_cost(
    pattern: patterns.Pattern, pricing: _Pricing, reduction: str, layout: str | None, strides: Sizes | None
) -> EinsumCost:
    if layout is not None and strides is not None:
        raise BadExpression("layout and strides say the same thing twice.\n  Give one of them.")
    steps = patterns.laid_out(pattern, layout) if layout is not None else strides
    done = patterns.moved(pattern, steps, reduction)
    forward = _moved_cost(pattern.text, done, pricing)
    backward, said = _pattern_backward(pattern, pricing, reduction, done)
    return EinsumCost(
        pattern.text, pattern.kind, dict(pattern.sizes), pricing.dtype, pricing.out_dtype,
        pricing.device.id if pricing.device else None, _ridge(pricing), forward, backward,
        shapes=(done.shape_before, done.shape_after), strides=(done.strides_before, done.strides_after),
        is_view=done.is_view, assumptions=said,
    )  # fmt: skip


def _pattern_backward(
    pattern: patterns.Pattern, pricing: _Pricing, reduction: str, done: patterns.Moved
) -> tuple[tuple[ExpressionCost, ...], tuple[str, ...]]:
    """The gradient takes the pattern backwards; it is taken to arrive contiguous."""
    back = patterns.reversed_pattern(pattern)
    operand = pattern.text.partition("->")[0].strip()
    said = ("the result's gradient is taken to be contiguous",)
    if pattern.kind == "rearrange" or (pattern.kind == "reduce" and reduction == "sum"):
        return (_moved_cost(back.text, patterns.moved(back), pricing, operand),), said
    if pattern.kind == "repeat":
        summed = patterns.moved(back)
        return (_moved_cost(back.text, summed, pricing, operand),), said
    elements = _elements(done.shape_before)
    if reduction == "mean":
        kernel = [("other", elements, _elements(done.shape_after), elements)]
        return (_priced(back.text, kernel, pricing, operand=operand, note="divided by the count"),), said
    return (), (f"the gradient of {reduction} is not priced: it depends on where the values are",)


def _elements(shape: Sizes) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _moved_cost(
    text: str, done: patterns.Moved, pricing: _Pricing, operand: str | None = None
) -> ExpressionCost:
    kernel = [("other", done.flops, done.read_elements, done.write_elements)]
    kernels = [] if done.is_view else kernel
    copied = pricing.write_bytes(done.copied_elements)
    return _priced(text, kernels, pricing, operand=operand, copied=copied, note=done.reason)


# -------------------------------------------------------------------------------------------- prices


def _cost(
    text: str, kernels: Sequence[Product], pricing: _Pricing, operand: str | None = None, note: str = ""
) -> ExpressionCost:
    plain = [(kernel.kind, kernel.flops, kernel.read_elements, kernel.write_elements) for kernel in kernels]
    return _priced(text, plain, pricing, operand=operand, note=note)


def _priced(
    text: str,
    kernels: Sequence[tuple[str, int, int, int]],
    pricing: _Pricing,
    *,
    operand: str | None = None,
    copied: int = 0,
    note: str = "",
) -> ExpressionCost:
    """Kernels as (kind, FLOPs, elements read, elements written), summed and placed under the roof."""
    rows = [
        _row(kind, flops, pricing.read_bytes(read), pricing.write_bytes(write), pricing.dtype)
        for kind, flops, read, write in kernels
    ]
    flops = sum(row.flops for row in rows)
    read, write = sum(row.read_bytes for row in rows), sum(row.write_bytes for row in rows)
    intensity = flops / (read + write) if rows else None
    bound, lower_s, expected_s = _times(rows, pricing)
    return ExpressionCost(
        text, operand, flops, read, write, intensity, bound, lower_s, expected_s,
        copied, note,
    )  # fmt: skip


def _row(kind: str, flops: int, read_bytes: int, write_bytes: int, dtype: str) -> OperatorRow:
    return OperatorRow(
        op="einsum", phase="", module="", source=None, calls=1, shapes="", dtype=dtype, flops=flops,
        read_bytes=read_bytes, write_bytes=write_bytes,
        arithmetic_intensity=flops / (read_bytes + write_bytes), bound=None, time_s=None, kind=kind,
    )  # fmt: skip


def _times(rows: Sequence[OperatorRow], pricing: _Pricing) -> tuple[str | None, float | None, float | None]:
    """(what bounds it, seconds it cannot beat, seconds to expect)."""
    device = pricing.device
    if device is None:
        return None, None, None
    if not rows:
        return None, 0.0, 0.0
    placed = [on_roofline(row, device, pricing.dtype == "tf32") for row in rows]
    if any(place.row.time_s is None for place in placed):
        return None, None, None
    flops = sum(row.flops for row in rows if row.kind == "matmul")
    timed = step_time(placed, device, model_flops=flops, tokens=None).time
    return _bound(placed), timed.lower_s, timed.expected_s


def _bound(placed: Sequence[RooflineRow]) -> str | None:
    """What most of the time is made of."""
    seconds = {COMPUTE: 0.0, BANDWIDTH: 0.0}
    for place in placed:
        if place.row.bound is None:
            return None
        seconds[place.row.bound] += place.row.time_s or 0.0
    return max(seconds, key=lambda name: seconds[name])


def _ridge(pricing: _Pricing) -> float | None:
    return None if pricing.device is None else device_ridge_point(pricing.device, pricing.dtype)


def _said(pricing: _Pricing, several: bool) -> Iterable[str]:
    yield "each operand is read once and each result written once, as an ideal kernel would"
    if pricing.out_dtype != pricing.dtype:
        yield f"backward reads the result's gradient as {pricing.dtype} and writes {pricing.out_dtype}"
    if several:
        yield (
            "operands are multiplied in the order shown, and each step's result is written and read again; "
            "torch does so only where opt_einsum is installed, else from left to right"
        )
    if pricing.device is not None and _ridge(pricing) is None:
        yield (
            f"{pricing.device.name} prints no dense peak for {pricing.dtype}: time is that of its bytes alone"
        )
