"""DistributedDataParallel: the step of one of several ranks that each keep everything and average gradients.

torch copies gradients into buckets that live as long as the wrapper, the size of all of them together, sums each
bucket when its last gradient is there, and copies it back at the end of backward (torch/csrc/distributed/c10d/
reducer.cpp; `gradient_as_bucket_view=False` and `bucket_cap_mb=25`, the defaults). With
`gradient_as_bucket_view=True` gradients are views of the buckets: nothing is copied back and no memory added.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from preflop.errors import BadNumber
from preflop.ops.collective import ALL_REDUCE, COPY_IN, COPY_OUT
from preflop.tape.events import Call, Phase, Role, Signature, Storage, Tape, TensorMeta
from preflop.tape.replay import BIRTH, DEATH, MARK, events_of
from preflop.units import DTYPE_BYTES

# dist._DEFAULT_FIRST_BUCKET_BYTES and DistributedDataParallel's bucket_cap_mb: a bucket is closed when it has so many.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


@dataclass
class Bucket:
    """Gradients that are summed together."""

    parameters: list[int] = field(default_factory=list)
    """Numbers in `Tape.parameters`."""
    elements: int = 0
    dtype: str = ""

    @property
    def bytes(self) -> int:
        """Of the flat tensor."""
        return self.elements * DTYPE_BYTES[self.dtype]


def buckets_of(tape: Tape) -> list[Bucket]:
    """The buckets, in the order in which backward fills them: from the second step on the order in which gradients
    came, each dtype by itself (`compute_bucket_assignment_by_size`)."""
    ready = {name: place for place, name in enumerate(_in_order(tape))}
    numbered = [(ready[p.name], number, p) for number, p in enumerate(tape.parameters) if p.name in ready]
    found: list[Bucket] = []
    limits: dict[str, int] = defaultdict(lambda: FIRST_BUCKET_BYTES)
    opened: dict[str, Bucket] = {}
    for _, number, parameter in sorted(numbered, key=lambda one: one[0]):
        if parameter.dtype not in opened:
            opened[parameter.dtype] = Bucket(dtype=parameter.dtype)
            found.append(opened[parameter.dtype])
        bucket = opened[parameter.dtype]
        bucket.parameters.append(number)
        bucket.elements += prod(parameter.shape)
        if bucket.bytes >= limits[parameter.dtype]:
            del opened[parameter.dtype]
            limits[parameter.dtype] = BUCKET_BYTES
    return found


def data_parallel(tape: Tape, *, degree: int) -> Tape:
    """The tape of one of `degree` ranks, each with a batch as recorded; every backward sums gradients.

    Raises:
        BadNumber: degree is less than 1.
    """
    if degree < 1:
        raise BadNumber(f"degree is {degree}; it must be a whole number of at least 1.")
    return tape if degree == 1 else _Parallel(tape, degree).run()


def _in_order(tape: Tape) -> list[str]:
    """Names of parameters by when their gradients are complete in the last step's first microbatch."""
    last: dict[str, int] = {}
    names = {p.name for p in tape.parameters}
    for call in tape.steady():
        if call.phase is Phase.BACKWARD and call.microbatch == 0:
            for number in call.storages:
                storage = tape.storages[number]
                if storage.role is Role.GRADIENT and storage.name in names:
                    last[storage.name] = call.tick
    return sorted(last, key=lambda name: last[name])


class _Parallel:
    def __init__(self, tape: Tape, degree: int) -> None:
        self.tape, self.degree = tape, degree
        self.signatures = list(tape.signatures)
        self.known = {signature: number for number, signature in enumerate(tape.signatures)}
        self.buckets = buckets_of(tape)
        first = len(tape.storages)
        self.flat = range(first, first + len(self.buckets))
        self.storages = [dataclasses.replace(storage) for storage in tape.storages]
        for number, bucket in enumerate(self.buckets):
            self.storages.append(
                Storage(
                    bucket.bytes, bucket.dtype, (bucket.elements,), 0, None, Role.BUFFER, f"DDP bucket {number}"
                )
            )

    def run(self) -> Tape:
        """After the call that completes a bucket it is filled and summed; after backward's last all are copied back."""
        completes, ends = self._moments()
        calls: list[Call] = []
        marks = list(self.tape.marks)
        tick = 0
        for kind, index in events_of(self.tape):
            tick += 1
            if kind == MARK:
                marks[index] = dataclasses.replace(marks[index], tick=tick)
            elif kind == BIRTH:
                self.storages[index].born = tick
            elif kind == DEATH:
                self.storages[index].died = tick
            else:
                recorded = self.tape.calls[index]
                own = [recorded]
                for number in completes.get(index, ()):
                    own += self._summed(number, recorded)
                if index in ends:
                    own += [self._call(COPY_OUT, number, recorded, out=True) for number in range(len(self.buckets))]
                calls += [dataclasses.replace(call, tick=tick + after) for after, call in enumerate(own)]
                tick += len(own) - 1
        said = (
            f"DDP over {self.degree} ranks: gradients are copied into buckets of their size and back, and every "
            "backward sums them; each rank has a batch of its own"
        )
        return dataclasses.replace(
            self.tape, signatures=self.signatures, calls=calls, storages=self.storages, marks=marks,
            assumptions=[*self.tape.assumptions, said],
        )  # fmt: skip

    def _moments(self) -> tuple[dict[int, list[int]], set[int]]:
        """Call -> buckets that are complete after it; and the last call of each backward."""
        bucket_of = {
            self.tape.parameters[number].name: place
            for place, bucket in enumerate(self.buckets)
            for number in bucket.parameters
        }
        last: dict[tuple[int, int, int], int] = {}
        ends: dict[tuple[int, int], int] = {}
        for index, call in enumerate(self.tape.calls):
            if call.phase not in (Phase.BACKWARD, Phase.RECOMPUTE):
                continue
            ends[call.step, call.microbatch] = index
            for number in call.storages:
                storage = self.tape.storages[number]
                if storage.role is Role.GRADIENT and storage.name in bucket_of:
                    last[call.step, call.microbatch, bucket_of[storage.name]] = index
        completes: dict[int, list[int]] = defaultdict(list)
        for (_, _, place), index in last.items():
            completes[index].append(place)
        return completes, set(ends.values())

    def _summed(self, number: int, near: Call) -> list[Call]:
        bucket = self.buckets[number]
        flat = TensorMeta((bucket.elements,), (1,), 0, bucket.dtype)
        reduced = Signature(ALL_REDUCE, "default", (self.degree,), (), (flat,), (flat,), (0,), (0,))
        summed = dataclasses.replace(
            near, signature=self._signature(reduced), storages=(self.flat[number], self.flat[number])
        )
        return [self._call(COPY_IN, number, near, out=False), summed]

    def _call(self, op: str, number: int, near: Call, *, out: bool) -> Call:
        bucket = self.buckets[number]
        flat = TensorMeta((bucket.elements,), (1,), 0, bucket.dtype)
        shapes = [self.tape.parameters[one].shape for one in bucket.parameters]
        whole = tuple(_meta(shape, bucket.dtype) for shape in shapes)
        ins, outs = ((flat,), whole) if out else (whole, (flat,))
        gradients = self._gradients(bucket, near)
        storages = (self.flat[number], *gradients) if out else (*gradients, self.flat[number])
        signature = Signature(op, "default", (), (), ins, outs, tuple(None for _ in outs), ())
        return dataclasses.replace(near, signature=self._signature(signature), storages=storages)

    def _gradients(self, bucket: Bucket, near: Call) -> Sequence[int]:
        """The gradients' storages of the step."""
        alive = {
            storage.name: number
            for number, storage in enumerate(self.tape.storages)
            if storage.role is Role.GRADIENT and storage.born <= near.tick
        }
        return [alive[self.tape.parameters[number].name] for number in bucket.parameters]

    def _signature(self, signature: Signature) -> int:
        if signature not in self.known:
            self.known[signature] = len(self.signatures)
            self.signatures.append(signature)
        return self.known[signature]


def _meta(shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """A contiguous tensor."""
    return TensorMeta(shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))), 0, dtype)
