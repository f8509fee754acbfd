"""`preflop shapes`: what each module takes and gives, as formulas, and broadcasts by accident."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from preflop.report.tables import Heading, Table

if TYPE_CHECKING:
    from preflop.record.shapes import Shapes


def shapes_json(found: Shapes) -> dict[str, Any]:
    """Every module's shapes, and the accidents."""
    return {
        "schema": "preflop.shapes/1",
        "recorded_at": [{"batch": batch, "sequence": sequence} for batch, sequence in found.points],
        "modules": [
            {
                "name": module.name,
                "type": module.kind,
                "inputs": [_tensor_json(tensor) for tensor in module.inputs],
                "outputs": [_tensor_json(tensor) for tensor in module.outputs],
            }
            for module in found.modules
        ],
        "accidents": [
            {"source": one.source or None, "module": one.module, "what": one.what} for one in found.accidents
        ],
    }


def _tensor_json(tensor: Any) -> dict[str, Any]:
    return {"shape": tensor.text, "dtype": tensor.dtype, "seen": [list(shape) for shape in tensor.seen]}


def shapes_table(found: Shapes) -> Table:
    """One row per module, layers that are alike on one row."""
    from preflop.ledgers.operators import starred

    rows: dict[tuple[str, str, str, str], int] = {}
    for module in found.modules:
        inputs = " ".join(tensor.text for tensor in module.inputs)
        outputs = " ".join(tensor.text for tensor in module.outputs)
        key = (starred(module.name) or "(model)", module.kind, inputs, outputs)
        rows[key] = rows.get(key, 0) + 1
    cells = tuple(
        (name if count == 1 else f"{name} x {count}", kind, inputs, outputs)
        for (name, kind, inputs, outputs), count in rows.items()
    )
    headings = (
        Heading("module", False),
        Heading("type", False),
        Heading("takes", False),
        Heading("gives", False),
    )
    return Table("", headings, cells)


def show_shapes(found: Shapes) -> None:
    """Print the shapes, then what depends on sizes being equal by accident."""
    from preflop.report import terminal

    parts = [terminal.table(shapes_table(found))]
    for one in found.accidents:
        where = " ".join(word for word in (one.source, one.module) if word)
        parts.append(terminal.bullet(f"{where}: {one.what}" if where else one.what, "bold"))
    if not found.accidents:
        sizes = ", ".join(f"{batch} x {sequence}" for batch, sequence in found.points)
        parts.append(terminal.text(f"no broadcast by accident (recorded at batch x sequence {sizes})"))
    terminal.print_parts(terminal.make_console(), parts)
