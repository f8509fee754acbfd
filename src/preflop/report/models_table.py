"""`preflop models`: all named models in one table, or every fact of one; and both as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from preflop.models.catalog import ModelFacts, RopeScaling

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = ("model", "family", "parameters", "layers", "hidden", "heads/kv", "ffn", "vocab", "context")

LEGEND = (
    "Parameters as published, tied ones once. Context in tokens; - does not apply.\n"
    "Every fact with its source: preflop models NAME"
)


def models_json(models: Sequence[ModelFacts]) -> dict[str, Any]:
    """Every fact of every given model."""
    return {"schema": "preflop.models/1", "models": [_model_json(facts) for facts in models]}


def model_json(facts: ModelFacts) -> dict[str, Any]:
    """Every fact of one model."""
    return {"schema": "preflop.models/1", "model": _model_json(facts)}


def _model_json(facts: ModelFacts) -> dict[str, Any]:
    return asdict(facts)


def model_row(facts: ModelFacts) -> tuple[str, ...]:
    """One line of the list.

    >>> from preflop.models.catalog import find
    >>> model_row(find("llama-3-8b"))
    ('llama-3-8b', 'llama', '8,030,261,248', '32', '4096', '32/8', '14336', '128256', '8192')
    """
    heads = "-" if facts.heads is None else f"{facts.heads}/{facts.kv_heads}"
    return (
        facts.name,
        facts.family,
        f"{facts.parameters:,}",
        str(facts.layers),
        str(facts.hidden),
        heads,
        _or_dash(facts.ffn),
        _or_dash(facts.vocab),
        _or_dash(facts.max_positions),
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def models_table(models: Sequence[ModelFacts]) -> Table:
    """The list of models, names and families to the left, numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        text = heading in ("model", "family")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    for facts in models:
        table.add_row(*model_row(facts))
    return table


def model_text(facts: ModelFacts) -> str:
    """Every fact of one model that applies to it, one a line; what is built; where the numbers are from."""
    lines = [f"{facts.name}: {facts.title}", ""]
    apart = ("name", "title", "note", "source", "parameters_source", "aliases")
    lines += [
        f"  {key:<18} {_fact_text(value)}"
        for key, value in _facts_in_order(facts)
        if key not in apart and value is not None and value != ()
    ]
    lines += ["", *([facts.note] if facts.note else [])]
    lines += [f"Count: {facts.parameters_source}", f"Dimensions: {facts.source}"]
    if facts.aliases:
        lines.append(f"Also called: {', '.join(facts.aliases)}")
    return "\n".join(lines)


def _facts_in_order(facts: ModelFacts) -> list[tuple[str, Any]]:
    return [(key, getattr(facts, key)) for key in facts.__dataclass_fields__]


def _fact_text(value: Any) -> str:
    """A fact as people read it.

    >>> _fact_text(124439808), _fact_text(True), _fact_text((3, 4, 6, 3)), _fact_text(1e-05)
    ('124,439,808', 'yes', '3 4 6 3', '1e-05')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, RopeScaling):
        return ", ".join(f"{key} {one:g}" for key, one in asdict(value).items())
    return str(getattr(value, "value", value))
