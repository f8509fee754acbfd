"""Records the shipped tapes: `python -m preflop.tapes.build [ARCHITECTURE ...]`. Needs torch.

Each model is recorded at a few small sizes and fitted (`preflop.parametric`); models of one
architecture whose steps make the same calls share one structure.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
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
from preflop.tapes.store import OPTIMIZER, PRECISIONS, index

DATA = Path(__file__).with_name("data")
# The devices whose kernels are recorded: one A100-like and one Hopper. Others join where their step
# makes the same calls.
_REPRESENTATIVES = ("h100-sxm5-80gb", "a100-sxm4-80gb")


def build(names: list[str]) -> None:
    """Record the tapes of the named architectures (all, where none is named); write files and index."""
    groups: dict[tuple[str, str], list[ModelFacts]] = defaultdict(list)
    for facts in models():
        if not names or facts.architecture.value in names:
            for precision in sorted(set(PRECISIONS.values())):
                groups[facts.architecture.value, precision].append(facts)
    kept = [entry for entry in index() if names and entry["architecture"] not in names]
    rows = list(kept)
    for (architecture, precision), members in groups.items():
        for number, entry in enumerate(_entries(members, precision)):
            file = f"{architecture}.{precision}.{number}.json.gz"
            text = json.dumps(entry, separators=(",", ":"), allow_nan=False)
            raw = gzip.compress(text.encode(), compresslevel=9, mtime=0)
            write_atomically(DATA / file, raw)
            domains = {name: model["domain"] for name, model in entry["models"].items()}
            rows.append(
                {
                    "file": file,
                    "architecture": architecture,
                    "precision": precision,
                    "capabilities": entry["capabilities"],
                    "models": domains,
                }
            )
            print(f"{file}: {len(raw):,} bytes, {', '.join(domains)}", flush=True)
    rows.sort(key=lambda row: str(row["file"]))
    text = json.dumps({"torch": torch.__version__, "files": rows}, indent=1)
    write_atomically(DATA / "index.json", text.encode())
    for stale in {path.name for path in DATA.glob("*.gz")} - {row["file"] for row in rows}:
        (DATA / stale).unlink()


def _entries(members: list[ModelFacts], precision: str) -> list[dict[str, Any]]:
    """One entry per structure; models whose tapes merge share it."""
    clusters: list[tuple[list[str], list[tuple[str, ParametricTape]], list[tuple[int, int]]]] = []
    for facts in members:
        for tape, capabilities in _tapes(facts, precision):
            for _, cluster, others in clusters:
                if others == capabilities and _merges([t for _, t in cluster] + [tape]):
                    cluster.append((facts.name, tape))
                    break
            else:
                clusters.append(([], [(facts.name, tape)], capabilities))
    entries = []
    for _, cluster, capabilities in clusters:
        symbolic, sizes = merge([tape for _, tape in cluster])
        listed: dict[str, Any] = {}
        for (name, tape), rows in zip(cluster, sizes):
            listed[name] = {
                "sizes": [list(row) for row in rows],
                "stacks": [dataclasses.asdict(stack) for stack in tape.stacks],
                "domain": dataclasses.asdict(tape.domain),
            }
        entries.append(
            {
                "capabilities": [list(c) for c in capabilities],
                "models": listed,
                "tape": tape_to_json(symbolic),
            }
        )
    return entries


def _merges(tapes: list[ParametricTape]) -> bool:
    try:
        merge(tapes)
    except NotPolynomial:
        return False
    return True


def _tapes(facts: ModelFacts, precision: str) -> list[tuple[ParametricTape, list[tuple[int, int]]]]:
    """The model's parametric tapes, each with the compute capabilities that it holds for."""
    found: list[tuple[ParametricTape, list[tuple[int, int]]]] = []
    pending = _capabilities()
    for device in _REPRESENTATIVES:
        own = next(d.compute_capability for d in devices() if d.id == device)
        if own not in pending:
            continue
        alike = [c for c, other in pending.items() if c == own or _alike(facts, precision, device, other)]
        for capability in alike:
            pending.pop(capability)
        for after, most in _regimes(facts):
            try:
                tapes = parametric_tapes(
                    _subject_at(facts, precision, device),
                    has_sequence=not facts.is_image,
                    after=after,
                    most_seq=most,
                )
            except (NotPolynomial, Refused) as refused:
                print(f"  {facts.name} {precision} {device}: left out, {refused}")
                continue
            found.extend((tape, sorted(alike)) for tape in tapes)
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
    def subject_at(batch: int, seq: int | None) -> Subject:
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


def _regimes(facts: ModelFacts) -> list[tuple[int, int | None]]:
    """(after, most): sequence lengths up to the window, and beyond it."""
    if facts.window is None or (facts.max_positions or 0) <= facts.window:
        return [(0, facts.max_positions)]
    return [(0, facts.window), (facts.window, facts.max_positions)]


if __name__ == "__main__":
    build(sys.argv[1:])
