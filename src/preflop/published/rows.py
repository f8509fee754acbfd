"""Rows of published tables, read from CSV files as their authors and collectors wrote them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from preflop.errors import BadFile, PreflopError


class CannotBuild(PreflopError):
    """This row is not predicted, and why."""


class Table(str, Enum):
    """What a row measures, told by the columns of its file."""

    MEMORY = "memory"
    THROUGHPUT = "throughput"
    COMPUTE = "compute"
    RATIO = "ratio"
    LATENCY = "latency"
    COMMUNICATION = "communication"


# The columns that only this table has.
_TELLING: tuple[tuple[Table, frozenset[str]], ...] = (
    (Table.MEMORY, frozenset({"mem_gib", "mem_stat"})),
    (Table.LATENCY, frozenset({"label_all_e2e_latency", "model_name"})),
    (Table.RATIO, frozenset({"params_recomputed_T"})),
    (Table.COMPUTE, frozenset({"train_flops"})),
    (Table.COMMUNICATION, frozenset({"collective"})),
    (Table.THROUGHPUT, frozenset({"step_time_s", "mfu_pct"})),
)

_NEUSIGHT = "NeuSight"


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str
    grade: str
    table: Table
    fields: Mapping[str, str]
    folder: Path

    def text(self, name: str) -> str:
        """A field, "" where the row has none."""
        return (self.fields.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """A field as a number; None where it is empty or words."""
        try:
            return float(self.text(name).replace(",", ""))
        except ValueError:
            return None

    def whole(self, name: str) -> int | None:
        """A field as a whole number; None where it is empty, words or a fraction."""
        value = self.number(name)
        return int(value) if value is not None and value == int(value) else None

    def needed(self, name: str) -> int:
        """A field without which nothing can be built.

        Raises:
            CannotBuild: the row does not have it.
        """
        value = self.whole(name)
        if value is None:
            raise CannotBuild(f"the row gives no {name}")
        return value


def read_rows(folder: str | Path, source: str | None = None) -> list[Row]:
    """Every row of every CSV file in a folder.

    Args:
        source: keep only sources whose name contains this, whatever its case.

    Raises:
        BadFile: no such folder, no CSV file in it, or a file with other columns than those known.
    """
    place = Path(folder)
    files = sorted(place.glob("*.csv"))
    if not files:
        raise BadFile(
            f"no CSV file in {str(place)!r}.\n"
            "  Needed: a folder with files such as memory.csv and throughput.csv."
        )
    rows = [row for file in files for row in _read(file)]
    if source is not None:
        wanted = source.casefold()
        rows = [row for row in rows if wanted in row.source.casefold()]
    return rows


def _read(file: Path) -> list[Row]:
    try:
        with file.open(encoding="utf-8", newline="") as handle:
            reader = csv.DictReader(handle)
            columns = frozenset(reader.fieldnames or ())
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadFile(f"cannot read {file}: {error}.") from error
    table = next((table for table, telling in _TELLING if telling <= columns), None)
    if table is None:
        known = "; ".join(f"{t.value}: {', '.join(sorted(columns))}" for t, columns in _TELLING)
        raise BadFile(f"{file.name} has none of the columns that tell what it measures.\n  Known: {known}.")
    return [_row(file, table, number, line) for number, line in enumerate(lines, start=2)]


def _row(file: Path, table: Table, number: int, line: dict[str, str]) -> Row:
    source = (line.get("source") or "").strip() or (_NEUSIGHT if table is Table.LATENCY else file.stem)
    name = (line.get("id") or "").strip() or f"{file.stem}:{number}"
    return Row(name, source, (line.get("grade") or "").strip(), table, line, file.parent)


def neusight_models(folder: Path) -> dict[str, Any]:
    """Sizes of the latency table's models, from the JSON file beside it.

    Raises:
        CannotBuild: there is no such file.
    """
    file = folder / "neusight_models.json"
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise CannotBuild(f"no readable {file.name} beside the table gives this model's sizes") from error
