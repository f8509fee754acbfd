"""Records the shipped tapes: `python -m preflop.tapes.build [ARCHITECTURE ...]`. Needs torch.

Each model is recorded at a few small sizes and fitted (`preflop.parametric`); models of one
architecture whose steps make the same calls share one structure.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import sys
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from preflop.files import write_atomically
from preflop.hardware.catalog import devices
from preflop.models.catalog import ModelFacts, models
from preflop.parametric import parametric_tapes
from preflop.record.subject_tape import record_cut
from preflop.subject import Subject, resolve
from preflop.tape.events import Tape
from preflop.tape.file import tape_to_json
from preflop.tape.sizes import NotPolynomial, ParametricTape, merge
from preflop.tape.stack import Refused
from preflop.tapes.store import OPTIMIZER, PRECISIONS, domain_to_json, index

DATA = Path(__file__).with_name("data")
# The devices whose kernels are recorded: one A100-like and one Hopper. Others join where their step
# makes the same calls.
_REPRESENTATIVES = ("h100-sxm5-80gb", "a100-sxm4-80gb")


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A model's parametric tape, and where it holds."""

    model: str
    architecture: str
    precision: str
    capabilities: tuple[tuple[int, int], ...]
    tape: ParametricTape


def build(names: list[str]) -> None:
    """Record the tapes of the named architectures (all, where none is named); write files and index."""
    made: list[Recorded] = []
    for facts in models():
        if not names or facts.architecture.value in names:
            for precision in sorted(set(PRECISIONS.values())):
                made.extend(_tapes(facts, precision))
                print(f"{facts.name} {precision}: recorded", flush=True)
    write(made, [entry for entry in index() if names and entry["architecture"] not in names])


def write(made: list[Recorded], kept: list[dict[str, Any]]) -> None:
    """Write the recorded tapes, those that merge in one file, and the index.

    Args:
        kept: rows of the index that stay as they are.
    """
    rows = list(kept)
    numbers: dict[str, int] = defaultdict(int)
    for cluster in _clusters(made):
        first = cluster[0]
        group = f"{first.architecture}.{first.precision}"
        file = f"{group}.{numbers[group]}.json.xz"
        numbers[group] += 1
        text = json.dumps(_entry(cluster), separators=(",", ":"), allow_nan=False)
        raw = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        write_atomically(DATA / file, raw)
        rows.append(
            {
                "file": file,
                "architecture": first.architecture,
                "precision": first.precision,
                "capabilities": [list(capability) for capability in first.capabilities],
                "models": {one.model: domain_to_json(one.tape.domain) for one in cluster},
            }
        )
        print(f"{file}: {len(raw):,} bytes, {', '.join(one.model for one in cluster)}", flush=True)
    rows.sort(key=lambda row: str(row["file"]))
    text = json.dumps({"torch": torch.__version__, "files": rows}, separators=(",", ":"))
    write_atomically(DATA / "index.json", text.encode())
    for stale in {path.name for path in DATA.glob("*.xz")} - {str(row["file"]) for row in rows}:
        (DATA / stale).unlink()


def _clusters(made: list[Recorded]) -> list[list[Recorded]]:
    """Tapes that share one structure, together; a model stands in a cluster once."""
    clusters: list[list[Recorded]] = []
    for one in made:
        for cluster in clusters:
            first = cluster[0]
            alike = (one.architecture, one.precision, one.capabilities) == (
                first.architecture, first.precision, first.capabilities,
            )  # fmt: skip
            own = all(one.model != other.model for other in cluster)
            if alike and own and _merges([first.tape, one.tape]):
                cluster.append(one)
                break
        else:
            clusters.append([one])
    return clusters


def _entry(cluster: list[Recorded]) -> dict[str, Any]:
    merged = merge([one.tape for one in cluster])
    listed = {
        one.model: {
            "sizes": [list(row) for row in sizes],
            "constants": constants,
            "stacks": [dataclasses.asdict(stack) for stack in one.tape.stacks],
            "domain": domain_to_json(one.tape.domain),
        }
        for one, sizes, constants in zip(cluster, merged.sizes, merged.constants)
    }
    return {"models": listed, "tape": tape_to_json(merged.tape)}


def _merges(tapes: list[ParametricTape]) -> bool:
    try:
        merge(tapes)
    except NotPolynomial:
        return False
    return True


def _tapes(facts: ModelFacts, precision: str) -> list[Recorded]:
    """The model's parametric tapes, each with the compute capabilities that it holds for."""
    found: list[Recorded] = []
    pending = _capabilities()
    for device in _REPRESENTATIVES:
        own = next(d.compute_capability for d in devices() if d.id == device)
        if own not in pending:
            continue
        alike = [c for c, other in pending.items() if c == own or _alike(facts, precision, device, other)]
        for capability in alike:
            pending.pop(capability)
        for axes in facts.regimes:
            try:
                tapes = parametric_tapes(_subject_at(facts, precision, device), axes=axes, lives=True)
            except (NotPolynomial, Refused) as refused:
                print(f"  {facts.name} {precision} {device}: left out, {refused}")
                continue
            found.extend(
                Recorded(facts.name, facts.architecture.value, precision, tuple(sorted(alike)), tape)
                for tape in tapes
            )
    return found


def _capabilities() -> dict[tuple[int, int], str]:
    """Each CUDA compute capability from 8.0 on, with a device of the catalog that has it."""
    table: dict[tuple[int, int], str] = {}
    for device in devices():
        capability = device.compute_capability
        if capability is not None and capability >= (8, 0):
            table.setdefault(capability, device.id)
    return table


def _subject_at(facts: ModelFacts, precision: str, device: str) -> Any:
    def subject_at(batch: int, seq: int | None = None) -> Subject:
        size = {"batch_size": batch} | ({} if seq is None else {"sequence_length": seq})
        return resolve(facts.name, size, precision=precision, optimizer=OPTIMIZER, device=device)

    return subject_at


def _alike(facts: ModelFacts, precision: str, one: str, other: str) -> bool:
    """Whether the two devices' steps make the same calls.

    Kernels are chosen by what attention looks like; models that do not differ in that need one look.
    """
    key = (
        facts.architecture, facts.head_dim, facts.heads == facts.kv_heads, facts.attention_dropout,
        facts.attention_softcap, precision, one, other,
    )  # fmt: skip
    if key not in _ALIKE:
        tapes = [_sample(facts, precision, device) for device in (one, other)]
        _ALIKE[key] = all(
            getattr(tapes[0], part) == getattr(tapes[1], part)
            for part in ("signatures", "calls", "storages")
        )
    return _ALIKE[key]


_ALIKE: dict[tuple[object, ...], bool] = {}


@lru_cache(maxsize=16)
def _sample(facts: ModelFacts, precision: str, device: str) -> Tape:
    return record_cut(_subject_at(facts, precision, device)(2, None if facts.is_image else 128)).tape


if __name__ == "__main__":
    build(sys.argv[1:])
