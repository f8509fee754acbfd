"""Precision advice: what autocast keeps in fp32 and what that costs; bytes per parameter by recipe."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.account import Account, OperatorRow
from preflop.formulas.recipes import RECIPES, Recipe
from preflop.precision import find_precision
from preflop.timing.roofline import MATMUL_LIKE

_FP32 = "float32"


@dataclass(frozen=True, slots=True)
class KeptInFp32:
    """One operator that runs in fp32 although the step is in half precision."""

    op: str
    phase: str
    module: str
    source: str | None
    calls: int
    moved_bytes: int
    extra_bytes: int
    """More than in half precision: half of what it moves."""
    extra_s: float | None
    """The time of these bytes, a lower bound; None without a device."""
    matmul: bool
    """It would run on the matrix units: its FLOPs are slower too."""


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """One recipe for this model's parameters."""

    recipe: Recipe
    total_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PrecisionAdvice:
    """What the step's precision costs, and what other recipes would."""

    precision: str
    autocast: bool
    parameters: int
    kept: tuple[KeptInFp32, ...]
    """Largest first; empty where the step is not in half precision."""
    cast_bytes: int
    """Written by casts between formats."""
    cast_calls: int
    cast_s: float | None
    recipes: tuple[RecipeCost, ...]

    @property
    def extra_bytes(self) -> int:
        """What all operators kept in fp32 move more than in half precision."""
        return sum(row.extra_bytes for row in self.kept)


def precision_advice(account: Account) -> PrecisionAdvice:
    """Read from the account: nothing is recorded anew."""
    subject = account.tape.subject
    name = subject.precision if subject is not None else "fp32"
    precision = find_precision(name)
    half = (precision.autocast_dtype or precision.parameter_dtype) in ("bfloat16", "float16")
    bandwidth = account.device.bandwidth_bytes_per_s if account.device is not None else None
    kept = tuple(_kept(row, bandwidth) for row in account.operators if half and _runs_in_fp32(row))
    casts = [row for row in account.copies if row.kind == "cast"]
    moved = sum(row.bytes + row.read_bytes for row in casts)
    parameters = account.memory.columns.parameters.elements
    return PrecisionAdvice(
        precision=name,
        autocast=precision.autocast_dtype is not None,
        parameters=parameters,
        kept=tuple(sorted(kept, key=lambda row: -row.extra_bytes)),
        cast_bytes=sum(row.bytes for row in casts),
        cast_calls=sum(row.calls for row in casts),
        cast_s=moved / bandwidth if bandwidth else None,
        recipes=tuple(
            RecipeCost(recipe, recipe.bytes * parameters, recipe.peak_bytes * parameters)
            for recipe in RECIPES
        ),
    )


def _runs_in_fp32(row: OperatorRow) -> bool:
    """Computes in fp32, outside of the optimizer, and is no cast or copy."""
    copying = row.op in ("aten._to_copy", "aten.copy_", "aten.clone", "aten.cat", "aten.stack")
    return row.dtype == _FP32 and row.phase != "optimizer" and row.flops > 0 and not copying


def _kept(row: OperatorRow, bandwidth: float | None) -> KeptInFp32:
    moved = row.read_bytes + row.write_bytes
    extra = moved // 2
    return KeptInFp32(
        row.op, row.phase, row.module, row.source, row.calls, moved, extra,
        extra / bandwidth if bandwidth else None, row.kind in MATMUL_LIKE,
    )  # fmt: skip
