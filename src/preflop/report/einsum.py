"""`preflop einsum`: a named expression's cost, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from preflop.report.counts import short_dtype
from preflop.report.tables import Heading, Table, without_empty_columns
from preflop.timing.einsum import EinsumCost, ExpressionCost
from preflop.units import bytes_text, si_text, time_text


def einsum_json(cost: EinsumCost) -> dict[str, Any]:
    """Every figure; shapes, strides and is_view are of patterns, order of three operands or more."""
    forward = asdict(cost.forward)
    del forward["operand"]
    found: dict[str, Any] = {
        "schema": "preflop.einsum/1",
        "expression": cost.expression,
        "kind": cost.kind,
        "sizes": cost.sizes,
        "dtype": cost.dtype,
        "out_dtype": cost.out_dtype,
        "device": cost.device_id,
        "ridge_point": cost.ridge_point,
        "forward": forward,
        "backward": [asdict(gradient) for gradient in cost.backward],
        "order": [_step_json(step) for step in cost.order],
        "written_order_flops": cost.written_order_flops,
        "assumptions": list(cost.assumptions),
    }
    if cost.shapes is not None and cost.strides is not None:
        found["shape_before"], found["shape_after"] = map(list, cost.shapes)
        found["strides_before"], found["strides_after"] = map(list, cost.strides)
        found["is_view"] = cost.is_view
    return found


def _step_json(step: Any) -> dict[str, Any]:
    cost = asdict(step.cost)
    del cost["operand"]
    return {"operands": list(step.operands), "result_bytes": step.result_bytes, **cost}


def headline(cost: EinsumCost) -> str:
    """What was asked: expression, sizes, dtype and device on one line."""
    sizes = " ".join(f"{axis}={size}" for axis, size in cost.sizes.items())
    dtype = short_dtype(cost.dtype)
    where = f" on {cost.device_id}" if cost.device_id else ""
    return f"{cost.expression}   {sizes}   {dtype}{where}"


def cost_table(cost: EinsumCost) -> Table:
    """One row forward, one per gradient."""
    rows = [_cells("forward", cost.forward), *(_cells(f"d {_short(g.operand)}", g) for g in cost.backward)]
    return without_empty_columns(Table("", _HEADINGS, tuple(rows)))


_HEADINGS = (
    Heading("", False),
    Heading("expression", False),
    Heading("FLOPs"),
    Heading("read"),
    Heading("written"),
    Heading("FLOPs/B"),
    Heading("bound", False),
    Heading("at least"),
    Heading("expected"),
)


def _cells(name: str, cost: ExpressionCost) -> tuple[str, ...]:
    intensity = cost.arithmetic_intensity
    return (
        name,
        cost.expression,
        si_text(cost.flops),
        bytes_text(cost.read_bytes),
        bytes_text(cost.write_bytes),
        "" if intensity is None else f"{intensity:.1f}",
        cost.bound or "",
        _time(cost.time_s),
        _time(cost.expected_s),
    )


def _short(operand: str | None) -> str:
    """Of "step 1: b s f" the part that names it."""
    return (operand or "").partition(":")[0]


def _time(seconds: float | None) -> str:
    return "" if seconds is None else time_text(seconds)


def order_table(cost: EinsumCost) -> Table:
    """The cheapest order of several operands."""
    rows = [
        (
            str(number + 1),
            " x ".join(step.operands),
            step.cost.expression,
            si_text(step.cost.flops),
            bytes_text(step.result_bytes),
            _time(step.cost.time_s),
        )
        for number, step in enumerate(cost.order)
    ]
    headings = (
        Heading("step"), Heading("operands", False), Heading("expression", False), Heading("FLOPs"),
        Heading("result"), Heading("at least"),
    )  # fmt: skip
    return without_empty_columns(Table("cheapest order", headings, tuple(rows)))


def sentences(cost: EinsumCost) -> list[str]:
    """What the figures mean, a line each."""
    said = []
    if cost.shapes is not None and cost.strides is not None:
        said.append(f"shape {cost.shapes[0]} with strides {cost.strides[0]}")
        said.append(f"   to {cost.shapes[1]} with strides {cost.strides[1]}")
        copied = cost.forward.copied_bytes
        verdict = "view" if cost.is_view else f"copy of {bytes_text(copied)}" if copied else "new tensor"
        said.append(f"{verdict}: {cost.forward.note}")
    elif cost.ridge_point is not None:
        said.append(
            f"ridge point {cost.ridge_point:.1f} FLOPs per byte: "
            "below it bandwidth is the bound, above it compute"
        )
    if cost.written_order_flops is not None and cost.forward.flops:
        ratio = cost.written_order_flops / cost.forward.flops
        said.append(
            f"from left to right: {si_text(cost.written_order_flops)} FLOPs, "
            f"{ratio:.3g} times the cheapest order"
        )
    said.extend(
        f"d {_short(g.operand)}: {g.note}" for g in cost.backward if g.note and cost.kind == "product"
    )
    return said


def show_einsum(cost: EinsumCost) -> None:
    """Print the cost."""
    from preflop.report import terminal

    parts = [terminal.text(headline(cost), "bold"), terminal.table(cost_table(cost))]
    if cost.order:
        parts.append(terminal.table(order_table(cost)))
    parts.extend(terminal.text(line) for line in sentences(cost))
    terminal.print_parts(terminal.make_console(), parts)
