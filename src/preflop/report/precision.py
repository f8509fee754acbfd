"""`preflop precision`: recipes by bytes per parameter, and what a step keeps in fp32."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from preflop.account import Account
from preflop.formulas.recipes import RECIPES, Recipe
from preflop.plan.precision import PrecisionAdvice
from preflop.report.json import account_to_dict
from preflop.report.tables import Heading, Table, short_op
from preflop.units import bytes_text, time_text


def recipes_json() -> dict[str, Any]:
    """Every recipe, in bytes per parameter."""
    return {"schema": "preflop.precision/1", "recipes": [_recipe_json(recipe) for recipe in RECIPES]}


def _recipe_json(recipe: Recipe) -> dict[str, Any]:
    return {
        **asdict(recipe),
        "bytes_per_parameter": recipe.bytes,
        "peak_bytes_per_parameter": recipe.peak_bytes,
    }


def precision_json(account: Account, advice: PrecisionAdvice) -> dict[str, Any]:
    """The advice for one model."""
    whole = account_to_dict(account)
    return {
        "schema": "preflop.precision/1",
        "subject": whole["subject"],
        "device": whole["device"],
        "precision": advice.precision,
        "parameters": advice.parameters,
        "kept_in_fp32": [asdict(row) for row in advice.kept],
        "extra_bytes": advice.extra_bytes,
        "casts": {"calls": advice.cast_calls, "bytes": advice.cast_bytes, "time_s": advice.cast_s},
        "recipes": [
            {**_recipe_json(cost.recipe), "total_bytes": cost.total_bytes, "peak_bytes": cost.peak_bytes}
            for cost in advice.recipes
        ],
    }


def recipes_table(advice: PrecisionAdvice | None = None) -> Table:
    """One row per recipe; with a model, what it takes for that model."""
    headings = [
        Heading("recipe", False), Heading("weight"), Heading("grad"), Heading("master"),
        Heading("states"), Heading("bytes"), Heading("peak"),
    ]  # fmt: skip
    if advice is not None:
        headings.append(Heading("this model"))
    headings.append(Heading("--precision", False))
    rows = []
    for number, recipe in enumerate(RECIPES):
        cells = [
            recipe.name, str(recipe.weight), str(recipe.gradient), str(recipe.master or ""),
            str(recipe.states), str(recipe.bytes), str(recipe.peak_bytes) if recipe.transient else "",
        ]  # fmt: skip
        if advice is not None:
            cells.append(bytes_text(advice.recipes[number].peak_bytes))
        rows.append((*cells, recipe.precision or ""))
    return Table("bytes per parameter with AdamW", tuple(headings), tuple(rows))


def recipe_notes() -> list[str]:
    """Where each recipe is used, and what its peak holds more."""
    notes = []
    for recipe in RECIPES:
        peak = f"; {recipe.transient} more: {recipe.transient_when}" if recipe.transient else ""
        notes.append(f"{recipe.name}: {recipe.used}{peak}")
    return notes


def kept_table(advice: PrecisionAdvice, top: int) -> Table:
    """Operators that run in fp32 although the step is in half precision."""
    rows = [
        (
            short_op(row.op), row.phase, row.module or "(model)", f"{row.calls:,}",
            bytes_text(row.moved_bytes), bytes_text(row.extra_bytes),
            "" if row.extra_s is None else time_text(row.extra_s),
            "matrix units idle" if row.matmul else "",
        )
        for row in advice.kept[:top]
    ]  # fmt: skip
    headings = (
        Heading("operator", False), Heading("phase", False), Heading("module", False), Heading("calls"),
        Heading("moves"), Heading("more than in half"), Heading("at least"), Heading("", False),
    )  # fmt: skip
    return Table("kept in fp32", headings, tuple(rows))


def casts_sentence(advice: PrecisionAdvice) -> str:
    """What casting between formats costs."""
    time = "" if advice.cast_s is None else f", at least {time_text(advice.cast_s)}"
    return f"casts: {advice.cast_calls:,}, writing {bytes_text(advice.cast_bytes)}{time} (`preflop copies`)"


def show_recipes() -> None:
    """Print the recipes."""
    from preflop.report import terminal

    parts = [terminal.table(recipes_table()), *(terminal.bullet(note) for note in recipe_notes())]
    terminal.print_parts(terminal.make_console(), parts)


def show_precision(account: Account, advice: PrecisionAdvice, top: int) -> None:
    """Print the advice for one model."""
    from preflop.report import tables, terminal

    parts = [terminal.text(tables.headline(account), "bold")]
    if advice.kept:
        parts.append(terminal.table(kept_table(advice, top)))
        more = len(advice.kept) - top
        if more > 0:
            parts.append(terminal.text(f"and {more} more: --top {len(advice.kept)}"))
        parts.append(
            terminal.text(
                f"kept in fp32, all of them move {bytes_text(advice.extra_bytes)} more than in half"
            )
        )
    else:
        parts.append(
            terminal.text(f"{advice.precision}: nothing is kept in another format than it computes in")
        )
    parts.append(terminal.text(casts_sentence(advice)))
    parts.append(terminal.table(recipes_table(advice)))
    parts.extend(terminal.bullet(note) for note in recipe_notes())
    terminal.print_parts(terminal.make_console(), parts)
