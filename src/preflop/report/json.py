"""The account as the contract's JSON: schema "preflop.account/1" (`account.schema.json` beside this file).

Bytes and FLOPs are integers, times are seconds, null where it does not apply.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preflop.account import Account, Column, Columns, DeviceFacts, Flops, Memory, OperatorRow
    from preflop.tape.events import SubjectInfo

SCHEMA = "preflop.account/1"


def account_to_dict(account: Account) -> dict[str, Any]:
    """The contract's object. Everything in it is a plain dict, list, string, number or None."""
    return {
        "schema": SCHEMA,
        "subject": _subject(account.tape.subject),
        "device": None if account.device is None else _device(account.device),
        "verdict": account.verdict,
        "memory": _memory(account.memory),
        "flops": _flops(account.flops),
        "traffic": dataclasses.asdict(account.traffic),
        "time": dataclasses.asdict(account.time),
        "operators": [_operator(row) for row in account.operators],
        "copies": [dataclasses.asdict(row) for row in account.copies],
        "assumptions": list(account.assumptions),
        "evidence": None if account.evidence is None else dataclasses.asdict(account.evidence),
    }


def _subject(subject: SubjectInfo | None) -> dict[str, Any]:
    if subject is None:
        return {
            "model": "a recorded call",
            "precision": "as recorded",
            "optimizer": None,
            "microbatches": 1,
            "recompute": "none",
        }
    return dataclasses.asdict(subject)


def _device(device: DeviceFacts) -> dict[str, Any]:
    return dataclasses.asdict(device)


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "peak_bytes": memory.peak_bytes,
        "first_step_peak_bytes": memory.first_step_peak_bytes,
        "peak_phase": memory.peak_phase,
        "peak_op": memory.peak_op,
        "peak_module": memory.peak_module,
        "peak_source": memory.peak_source or None,
        "reserved_bytes": memory.reserved_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "context_bytes": memory.context_bytes,
        "communicator_bytes": memory.communicator_bytes,
        "fits": memory.fits,
        "spare_bytes": memory.spare_bytes,
        "expandable_spare_bytes": memory.expandable_spare_bytes,
        "columns": _columns(memory.columns),
        "at_peak": dataclasses.asdict(memory.at_peak),
    }


def _columns(columns: Columns) -> dict[str, Any]:
    return {
        field.name: _column(getattr(columns, field.name)) for field in dataclasses.fields(columns)
    }


def _column(column: Column) -> dict[str, Any]:
    return {
        "bytes": column.bytes,
        "elements": column.elements,
        "dtypes": {
            name: {"bytes": size, "elements": elements}
            for name, (size, elements) in column.dtypes.items()
        },
    }


def _flops(flops: Flops) -> dict[str, Any]:
    figures = dataclasses.asdict(flops)
    figures["differences"] = [dataclasses.asdict(item) for item in flops.differences]
    return figures


def _operator(row: OperatorRow) -> dict[str, Any]:
    return dataclasses.asdict(row)
