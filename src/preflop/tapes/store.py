"""Finds and reads a shipped tape. No torch.

One data file holds one symbolic tape (see `tape.sizes`) and, for each model that shares it, its sizes;
`index.json` says which file holds what.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

from preflop.recomputation import NONE
from preflop.tape.events import Tape
from preflop.tape.file import tape_from_json
from preflop.tape.sizes import SEQUENCE, Domain, ParametricTape, Span, basis_names, filled
from preflop.tape.stack import CutTape, Refused, Stack
from preflop.transforms.depth import unfold
from preflop.transforms.recompute import recompute_at_any_size

OPTIMIZER = "adamw"
# Precisions that have files. tf32 is fp32 with another peak: the same calls on the same bytes.
PRECISIONS = {"fp32": "fp32", "tf32": "fp32", "bf16-mixed": "bf16-mixed", "bf16": "bf16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What a shipped tape must have been recorded for."""

    model: str
    architecture: str
    precision: str
    capability: tuple[int, int]
    """CUDA compute capability."""
    size: tuple[int, ...]
    """Batch, and the sequence length where there is one."""
    recompute: str = NONE


def shipped_tape(wanted: Wanted) -> Tape | None:
    """The tape of two AdamW steps, or None where none ships for it (then it is recorded)."""
    try:
        cut = shipped_cut(wanted)
        return None if cut is None else unfold(cut)
    except Refused:
        return None


def shipped_cut(wanted: Wanted, *, lives: bool = False) -> CutTape | None:
    """The same with its stacks of blocks still cut down.

    Args:
        lives: annotated with what held its tensors, as it stands in its file; recomputes nothing then.

    Raises:
        Refused: what would be recomputed does not follow from the shipped tape.
    """
    for file, domain in _held(wanted):
        if domain.holds(*wanted.size):
            found = (
                annotated(file, wanted.model) if lives else parametric(file, wanted.model, wanted.recompute)
            )
            return CutTape(found.at(*wanted.size), found.stacks)
    return None


def shipped_parametric(wanted: Wanted) -> list[ParametricTape]:
    """The shipped parametric tapes of the model, whatever the size: each with the domain it holds in."""
    try:
        return [parametric(file, wanted.model, wanted.recompute) for file, _ in _held(wanted)]
    except Refused:
        return []


def _held(wanted: Wanted) -> Iterator[tuple[str, Domain]]:
    """Data files that hold the model's tapes for the precision and device, and where each holds."""
    precision = PRECISIONS.get(wanted.precision)
    for entry in index():
        if (entry["architecture"], entry["precision"]) != (wanted.architecture, precision):
            continue
        domain = entry["models"].get(wanted.model)
        if domain is not None and list(wanted.capability) in entry["capabilities"]:
            yield entry["file"], domain_from_json(domain)


@lru_cache(maxsize=1)
def index() -> list[dict[str, Any]]:
    """What ships: per file its architecture, precision, capabilities, and each model's domain."""
    try:
        entries: list[dict[str, Any]] = json.loads(_data("index.json"))["files"]
    except FileNotFoundError:
        return []
    return entries


@lru_cache(maxsize=16)
def parametric(file: str, model: str, recompute: str = NONE) -> ParametricTape:
    """The parametric tape of one model in a data file, of a step that recomputes so.

    Raises:
        Refused: what would be recomputed does not follow from the shipped tape.
    """
    return recompute_at_any_size(annotated(file, model), how=recompute)


@lru_cache(maxsize=8)
def annotated(file: str, model: str) -> ParametricTape:
    """The parametric tape of one model as it stands in a data file: with what held its tensors."""
    entry = json.loads(lzma.decompress(_data(file)))
    own = entry["models"][model]
    domain = domain_from_json(own["domain"])
    return ParametricTape(
        tape=filled(tape_from_json(entry["tape"]), own["constants"]),
        sizes=tuple(tuple(row) for row in own["sizes"]),
        stacks=tuple(Stack(**stack) for stack in own["stacks"]),
        domain=domain,
        axes=SEQUENCE if domain.spans else (),
        tokens=BATCH_TIMES_SEQUENCE if domain.spans else None,
    )


BATCH_TIMES_SEQUENCE = tuple(int(name == "B*S") for name in basis_names(SEQUENCE))
"""Tokens of a named model's batch."""


def domain_from_json(stored: dict[str, Any]) -> Domain:
    """Where a shipped tape holds: named models have one sequence, or none."""
    batches = stored["least_batch"], stored["most_batch"]
    if stored["least_seq"] is None:
        return Domain(*batches)
    return Domain(*batches, (Span(stored["least_seq"], stored["most_seq"], stored["seq_multiple"]),))


def domain_to_json(domain: Domain) -> dict[str, Any]:
    """The inverse of `domain_from_json`."""
    span = domain.spans[0] if domain.spans else None
    return {
        "least_batch": domain.least_batch,
        "most_batch": domain.most_batch,
        "least_seq": None if span is None else span.least,
        "most_seq": None if span is None else span.most,
        "seq_multiple": 1 if span is None else span.multiple,
    }


def _data(name: str) -> bytes:
    return resources.files("preflop.tapes").joinpath("data", name).read_bytes()
