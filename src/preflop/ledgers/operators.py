"""Operators of the steady step: like calls on one row, with FLOPs and bytes, without time.

May import: tape, ops, account (its dataclasses), ledgers. Never torch, never a device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from preflop.account import OperatorRow
from preflop.ledgers.flops import priced
from preflop.ledgers.tally import Origin, dtypes
from preflop.ledgers.traffic import bytes_by_origin
from preflop.ops.arguments import result
from preflop.ops.registry import Kind
from preflop.ops.variants import tensors_of, variant
from preflop.tape.events import Phase, Signature, Tape, TensorMeta

SHAPES_SHOWN = 4
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_T = TypeVar("_T")
_Key = tuple[int, Phase, int, int]
"""Numbers of a row's work, module and line, and its phase."""


@dataclass(slots=True)
class _Sums:
    calls: int = 0
    flops: int = 0
    attended_flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    kind: Kind = Kind.OTHER


def operator_rows(tape: Tape) -> list[OperatorRow]:
    """Rows of the steady step, most FLOPs first, then most bytes. Times are left open.

    Alike means: same operator, phase, module (numbers in its path replaced by *), line, shapes, dtype and
    variant. FLOPs include element-wise work, so that the rows' FLOPs sum to the total. Calls that do no
    arithmetic and move nothing (views) are left out.
    """
    rows = _Rows(tape)
    for origin, calls, price in priced(tape):
        sums = rows.at(origin)
        sums.calls += calls
        if price is not None:
            sums.flops += price.flops * calls
            sums.attended_flops += calls * (
                price.flops if price.attended_flops is None else price.attended_flops
            )
            sums.kind = price.kind
    for origin, calls, bytes_moved in bytes_by_origin(tape):
        sums = rows.at(origin)
        sums.read_bytes += bytes_moved.read_bytes * calls
        sums.write_bytes += bytes_moved.write_bytes * calls
    found = [rows.row(key, sums) for key, sums in rows.sums.items()]
    found = [row for row in found if row.flops or row.read_bytes or row.write_bytes]
    return sorted(found, key=lambda row: (-row.flops, -row.read_bytes - row.write_bytes))


class _Rows:
    """Sums per row, found by where a call comes from."""

    def __init__(self, tape: Tape) -> None:
        self.sums: defaultdict[_Key, _Sums] = defaultdict(_Sums)
        self._sources = tape.sources
        signatures = zip(tape.signatures, dtypes(tape), strict=True)
        self._works, self._work = numbered(
            (sig.op, shapes_text(sig), dtype, variant(sig), tensors_of(sig)) for sig, dtype in signatures
        )
        self._modules, self._module = numbered(starred(name) for name in tape.modules)

    def at(self, origin: Origin) -> _Sums:
        signature, phase, module, source = origin
        return self.sums[self._work[signature], phase, self._module[module], source]

    def row(self, key: _Key, sums: _Sums) -> OperatorRow:
        work, phase, module, source = key
        op, shapes, dtype, which, tensors = self._works[work]
        moved = sums.read_bytes + sums.write_bytes
        return OperatorRow(
            op=op,
            phase=phase.value,
            module=self._modules[module],
            source=self._sources[source] or None,
            calls=sums.calls,
            shapes=shapes,
            dtype=dtype,
            flops=sums.flops,
            read_bytes=sums.read_bytes,
            write_bytes=sums.write_bytes,
            arithmetic_intensity=sums.flops / moved if moved else None,
            bound=None,
            time_s=None,
            kind=sums.kind.value,
            attended_flops=sums.attended_flops if sums.attended_flops != sums.flops else None,
            variant=which,
            tensors=tensors,
        )


def numbered(values: Iterable[_T]) -> tuple[list[_T], list[int]]:
    """The distinct values, and for each value its place among them: what many share is compared by number.

    >>> numbered(["a", "b", "a"])
    (['a', 'b'], [0, 1, 0])
    """
    places: dict[_T, int] = {}
    found = [places.setdefault(value, len(places)) for value in values]
    return list(places), found


def starred(path: str) -> str:
    """A module path with the numbers among its names replaced, so that layers are alike.

    >>> starred("blocks.11.mlp.fc1"), starred("0")
    ('blocks.*.mlp.fc1', '*')
    """
    return _NUMBER.sub("*", path)


def shapes_text(sig: Signature) -> str:
    """Shapes of what a call takes and gives.

    >>> a, b = TensorMeta((2, 3), (3, 1), 0, "float32"), TensorMeta((3, 4), (4, 1), 0, "float32")
    >>> c = TensorMeta((2, 4), (4, 1), 0, "float32")
    >>> shapes_text(Signature("aten.mm", "default", (), (), (a, b), (c,), (None,), ()))
    '(2, 3) x (3, 4) -> (2, 4)'
    """
    return f"{_joined(sig.inputs)} -> {_joined(result(sig))}".strip()


def _joined(metas: tuple[TensorMeta, ...]) -> str:
    shown = " x ".join(str(meta.shape) for meta in metas[:SHAPES_SHOWN])
    more = len(metas) - SHAPES_SHOWN
    return f"{shown} x {more} more" if more > 0 else shown
