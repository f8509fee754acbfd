"""FSDP2: the step of one of several ranks that share weights, gradients and optimizer states.

What torch.distributed.fsdp.fully_shard does of it, a block at a time and the rest of the model as one more (torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py):

1. A parameter is cut along its first dimension, padded to equal parts. Gradients and states are as its part.
2. Before a block's forward one flat tensor gathers its weights, and they are copied out of it. The flat one lives until
   the next block's is there, the weights until the block's forward has ended; the rest's until its backward has.
3. Before a block's backward its weights are gathered again: flat while the block after it works, then copied out; the
   next flat one is gathered at once (backward prefetch).
4. After a block's backward its gradients are copied into a flat tensor, which lives until the next block's is made;
   each rank receives its part of their sum.
5. The update runs on the parts.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from preflop.errors import BadNumber
from preflop.ops.collective import ALL_GATHER, COLLECTIVES, COPY_IN, COPY_OUT, REDUCE_SCATTER
from preflop.tape.events import Call, Mark, Phase, Role, Signature, Storage, Tape, TensorMeta
from preflop.tape.replay import BIRTH, CALL, MARK, events_of, unborn
from preflop.tape.stack import Refused
from preflop.units import DTYPE_BYTES

_CONTAINERS = ("ModuleList", "Sequential", "ModuleDict")
_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)
REST = ""
"""The unit of all parameters that no block has."""


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """How a step is shared, besides over how many ranks."""

    regathers: bool = True
    """Blocks' weights are freed after forward and gathered again (`reshard_after_forward`)."""
    keeps_last: bool = False
    """The last block's are not freed: backward begins with it."""
    kept_dtype: str = ""
    """Of the parts, where weights are kept in another than the recorded one, in which they are gathered and used
    (`MixedPrecisionPolicy.param_dtype`). Only of a tape without an optimizer."""
    reduced_dtype: str = ""
    """Of gradients as they are summed (`reduce_dtype`); "": as they are computed."""
    states: int = 0
    """Of each kept number, which an optimizer outside of the tape makes after the first backward."""


def fully_sharded(tape: Tape, *, degree: int, how: Sharded = Sharded()) -> Tape:
    """The tape of rank 0 of `degree`, each with a batch as recorded.

    Raises:
        BadNumber: degree is less than 1. Refused: another dtype is kept than the recorded update's.
    """
    if degree < 1:
        raise BadNumber(f"degree is {degree}; it must be a whole number of at least 1.")
    if how.kept_dtype and any(call.phase is Phase.OPTIMIZER for call in tape.calls):
        raise Refused("the recorded update is not in the dtype in which weights are kept")
    return tape if degree == 1 else _Sharding(tape, degree, how).run()


def blocks_of(tape: Tape) -> tuple[str, ...]:
    """Paths of the repeated blocks: members, alike in class, of the outermost lists of modules with children.

    The same as `recompute="block"` chooses in a module.
    """
    types = dict(zip(tape.modules, tape.module_types, strict=True))
    children: dict[str, list[str]] = defaultdict(list)
    for path in tape.modules:
        if path:
            children[path.rpartition(".")[0]].append(path)
    found: list[str] = []
    for container in tape.modules:
        if types[container] not in _CONTAINERS or any(container.startswith(f"{block}.") for block in found):
            continue
        kinds: dict[str, list[str]] = defaultdict(list)
        for member in children[container]:
            if children[member] and types[member] not in _CONTAINERS:
                kinds[types[member]].append(member)
        found += [member for members in kinds.values() if len(members) > 1 for member in members]
    return tuple(found)


def part(shape: Sequence[int], degree: int) -> tuple[int, ...]:
    """Shape of rank 0's part, padded as the others' are.

    >>> part((10, 6), 4), part((), 4)
    ((3, 6), ())
    """
    return (-(-shape[0] // degree), *shape[1:]) if shape else ()


@dataclass
class _Unit:
    """A block, or the rest."""

    parameters: list[int] = field(default_factory=list)
    """Storages."""
    first: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    """(step, microbatch, whether backward) -> its first call; the same of the last."""
    last: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    flat: int | None = None
    """Gathered and not yet copied out."""
    whole: dict[int, int] = field(default_factory=dict)
    """Parameter's storage -> the gathered weight's, while there is one."""
    gradients: dict[int, int] = field(default_factory=dict)
    """Whole gradients that wait for the end of the block's backward: parameter -> storage, as written."""
    summed: int | None = None
    """The step's part of the gradients."""


class _Sharding:
    def __init__(self, tape: Tape, degree: int, how: Sharded) -> None:
        self.tape, self.degree, self.how = tape, degree, how
        self.signatures = list(tape.signatures)
        self.known = {signature: number for number, signature in enumerate(tape.signatures)}
        self.storages = [unborn(storage) for storage in tape.storages]
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.tick = 0
        self.at = (0, 0)
        self.held: int | None = None
        self.sent: int | None = None
        self.units = self._units()
        self.unit_of = {storage: unit for unit in self.units.values() for storage in unit.parameters}
        self.parameter_of = {p.name: p.storage for p in tape.parameters}
        self.shapes = {p.storage: p.shape for p in tape.parameters}
        self.order = list(self.units.values())
        self._find_calls()
        self.gone: set[int] = set()
        self.moved: dict[int, int] = {}

    # -- what belongs where ---------------------------------------------------------------------------

    def _units(self) -> dict[str, _Unit]:
        units = {path: _Unit() for path in (*blocks_of(self.tape), REST)}
        self.paths = [self._unit_path(path, units) for path in self.tape.modules]
        for parameter in self.tape.parameters:
            path = self._unit_path(parameter.name, units)
            if parameter.storage not in units[path].parameters:
                units[path].parameters.append(parameter.storage)
        return {path: unit for path, unit in units.items() if unit.parameters}

    @staticmethod
    def _unit_path(path: str, units: dict[str, _Unit]) -> str:
        while path and path not in units:
            path = path.rpartition(".")[0]
        return path

    def _find_calls(self) -> None:
        for index, call in enumerate(self.tape.calls):
            if call.phase not in (Phase.FORWARD, *_BACKWARD):
                continue
            key = (call.step, call.microbatch, call.phase in _BACKWARD)
            for path in {self.paths[call.module], REST}:
                unit = self.units.get(path)
                if unit is not None:
                    unit.first.setdefault(key, index)
                    unit.last[key] = index
        forward = (0, 0, False)
        self.order.sort(key=lambda unit: unit.last.get(forward, -1))

    # -- playing --------------------------------------------------------------------------------------

    def run(self) -> Tape:
        for storage in self._parts():
            self._shrink(self.storages[storage])
        begins, ends = self._turns()
        for kind, index in events_of(self.tape):
            if kind == CALL:
                for unit, backward in begins.get(index, ()):
                    self._begin(unit, backward, self.tape.calls[index])
                self._call(index)
                for unit, backward in ends.get(index, ()):
                    self._end(unit, backward, self.tape.calls[index])
            elif kind == MARK:
                self._mark(self.tape.marks[index])
            elif kind == BIRTH:
                self._birth(index)
            elif index not in self.gone:
                self._death(index)
        return dataclasses.replace(
            self.tape, signatures=self.signatures, calls=self.calls, storages=self.storages, marks=self.marks,
            assumptions=[*self.tape.assumptions, self._assumption()],
        )  # fmt: skip

    def _assumption(self) -> str:
        blocks = len([path for path in self.units if path != REST])
        return (
            f"FSDP2 over {self.degree} ranks, as rank 0 of torch.distributed.fsdp.fully_shard: {blocks} blocks one by "
            f"one and the rest of the model, weights {'gathered again in' if self.how.regathers else 'kept until'} "
            "backward; each rank has a batch of its own, and every backward sums gradients"
        )

    def _parts(self) -> set[int]:
        """Storages of parameters, and what an update makes and keeps."""
        made = set(self.unit_of)
        for call in self.tape.calls:
            signature = self.tape.signatures[call.signature]
            if call.phase is Phase.OPTIMIZER:
                outs = call.storages[len(signature.inputs) :]
                made.update(out for out, alias in zip(outs, signature.aliases, strict=True) if alias is None)
        states = (n for n, storage in enumerate(self.tape.storages) if storage.role is Role.OPTIMIZER_STATE)
        return made.union(states)

    def _shrink(self, storage: Storage) -> None:
        shape = part(storage.shape, self.degree)
        elements = storage.elements * prod(shape) // max(prod(storage.shape), 1)
        kept = self.how.kept_dtype if storage.role is Role.PARAMETER and self.how.kept_dtype else storage.dtype
        storage.bytes, storage.shape, storage.dtype = elements * DTYPE_BYTES[kept], shape, kept

    def _turns(self) -> tuple[dict[int, list[tuple[_Unit, bool]]], dict[int, list[tuple[_Unit, bool]]]]:
        """Call -> units whose forward or backward begins with it; and whose ends. The rest begins first, ends last."""
        begins: dict[int, list[tuple[_Unit, bool]]] = defaultdict(list)
        ends: dict[int, list[tuple[_Unit, bool]]] = defaultdict(list)
        rest = self.units.get(REST)
        outside = [rest] if rest is not None else []
        blocks = [unit for unit in self.order if unit is not rest]
        for unit in (*outside, *blocks):
            for (_, _, backward), index in unit.first.items():
                begins[index].append((unit, backward))
        for unit in (*blocks, *outside):
            for (_, _, backward), index in unit.last.items():
                ends[index].append((unit, backward))
        return begins, ends

    def _begin(self, unit: _Unit, backward: bool, near: Call) -> None:
        if not unit.whole:
            self._gather(unit, near)
            self._copy_out(unit, near)
            assert unit.flat is not None
            if backward:
                self._kill(unit.flat)
            else:
                self._let_go()  # only now: `wait_for_unshard` has a variable that holds the one before
                self.held = unit.flat
            unit.flat = None
        if backward:
            place = self.order.index(unit)
            before = self.order[place - 1] if place else None
            if before is not None and not before.whole and before.flat is None:
                self._gather(before, near)

    def _end(self, unit: _Unit, backward: bool, near: Call) -> None:
        rest = unit is self.units.get(REST)
        if not backward and (rest or not self.how.regathers or (self.how.keeps_last and unit is self._last_block())):
            return
        self._reshard(unit)
        if backward:
            self._reduce(unit, near)
        if rest:
            self._drop_sent()

    def _last_block(self) -> _Unit | None:
        blocks = [unit for unit in self.order if unit is not self.units.get(REST)]
        return blocks[-1] if blocks else None

    def _mark(self, mark: Mark) -> None:
        if mark.name == "forward_end":
            self._let_go()
        if mark.name == "backward_end":
            self._drop_sent()
            for unit in self.units.values():
                if unit.flat is not None:
                    self._kill(unit.flat)
                    unit.flat = None
                self._reshard(unit)
        if mark.name == "step_end":
            if mark.step == 0:
                self._make_states()
            for unit in self.units.values():
                if unit.summed is not None:
                    self._kill(unit.summed)
                    unit.summed = None
        self.marks.append(dataclasses.replace(mark, tick=self._next()))

    def _make_states(self) -> None:
        for number in self.unit_of if self.how.states else ():
            storage = self.storages[number]
            for _ in range(self.how.states):
                made = self._new(storage.elements, storage.dtype, f"state of {storage.name}")
                self.storages[made].role = Role.OPTIMIZER_STATE

    # -- weights --------------------------------------------------------------------------------------

    def _padded(self, parameters: Sequence[int]) -> int:
        """Elements of the parameters as they are gathered."""
        return sum(self.degree * prod(part(self.shapes[number], self.degree)) for number in parameters)

    def _gather(self, unit: _Unit, near: Call) -> None:
        if unit.flat is not None:
            return
        dtype = self.tape.storages[unit.parameters[0]].dtype
        elements = self._padded(unit.parameters)
        sent = None
        if self.how.kept_dtype not in ("", dtype):
            sent = self._new(elements // self.degree, dtype, "cast weights")
        unit.flat = self._new(elements, dtype, "gathered weights")
        own = [(self.storages[number].shape, self.storages[number].dtype) for number in unit.parameters]
        self._emit(COPY_IN, [*own], [((elements // self.degree,), dtype)], unit.parameters, [unit.flat], near)
        if sent is not None:
            self._kill(sent)
        flat = [((elements,), dtype)]
        self._emit(ALL_GATHER, [((elements // self.degree,), dtype)], flat, [unit.flat], [unit.flat], near)

    def _copy_out(self, unit: _Unit, near: Call) -> None:
        assert unit.flat is not None
        outs = []
        for number in unit.parameters:
            recorded = self.tape.storages[number]
            shape = (self._padded([number]),)
            unit.whole[number] = self._new(shape[0], recorded.dtype, f"gathered {recorded.name}")
            outs.append((shape, recorded.dtype))
        flat = self.storages[unit.flat]
        self._emit(COPY_OUT, [(flat.shape, flat.dtype)], outs, [unit.flat], list(unit.whole.values()), near)

    def _let_go(self) -> None:
        """Free the flat weights of the unit before."""
        if self.held is not None:
            self._kill(self.held)
            self.held = None

    def _reshard(self, unit: _Unit) -> None:
        for number in unit.whole.values():
            self._kill(number)
        unit.whole = {}

    # -- gradients ------------------------------------------------------------------------------------

    def _drop_sent(self) -> None:
        if self.sent is not None:
            self._kill(self.sent)
            self.sent = None

    def _reduce(self, unit: _Unit, near: Call) -> None:
        """Sum the unit's gradients over the ranks and keep the part."""
        self._drop_sent()
        if not unit.gradients:
            return
        computed = self.tape.storages[next(iter(unit.gradients))].dtype
        dtype = self.how.reduced_dtype or computed
        elements = self._padded(list(unit.gradients))
        ins = [(self.shapes[number], computed) for number in unit.gradients]
        self.sent = self._new(elements, dtype, "gradients to scatter")
        flat = [((elements,), dtype)]
        self._emit(COPY_IN, ins, flat, list(unit.gradients.values()), [self.sent], near)
        for number in unit.gradients.values():
            self._kill(number)
        unit.gradients = {}
        received = self._new(elements // self.degree, dtype, "gradients")
        self._emit(REDUCE_SCATTER, flat, [((elements // self.degree,), dtype)], [self.sent], [received], near)
        kept = self.how.kept_dtype or computed
        if kept != dtype:
            cast = self._new(elements // self.degree, kept, "gradients")
            self._kill(received)
            received = cast
        if unit.summed is None:
            unit.summed = received
            self.storages[received].role = Role.GRADIENT
        else:
            own = ((elements // self.degree,), kept)
            self._emit("aten.add_", [own, own], [own], [unit.summed, received], [unit.summed], near, writes=True)
            self._kill(received)

    # -- events ---------------------------------------------------------------------------------------

    def _next(self) -> int:
        self.tick += 1
        return self.tick

    def _birth(self, index: int) -> None:
        self.storages[index].born = self._next()

    def _death(self, index: int) -> None:
        self.storages[index].died = self._next()

    def _kill(self, number: int) -> None:
        if self.storages[number].died is None:
            self.storages[number].died = self._next()

    def _new(self, elements: int, dtype: str, name: str) -> int:
        self.storages.append(
            Storage(elements * DTYPE_BYTES[dtype], dtype, (elements,), self._next(), None, Role.TEMPORARY, name)
        )
        return len(self.storages) - 1

    def _emit(
        self,
        op: str,
        ins: Sequence[tuple[tuple[int, ...], str]],
        outs: Sequence[tuple[tuple[int, ...], str]],
        reads: Sequence[int],
        makes: Sequence[int],
        near: Call,
        *,
        writes: bool = False,
    ) -> None:
        """A call of FSDP's own, beside a recorded one."""
        degree = (self.degree,) if op in COLLECTIVES else ()
        signature = Signature(
            op, "default", degree, (), tuple(_meta(*one) for one in ins), tuple(_meta(*one) for one in outs),
            tuple(0 if writes else None for _ in outs), (0,) if writes else (),
        )  # fmt: skip
        number = self._signature(signature)
        storages = (*reads, *makes)
        phase = Phase.FORWARD if near.phase is Phase.FORWARD else Phase.BACKWARD
        self.calls.append(
            dataclasses.replace(near, signature=number, storages=storages, tick=self._next(), phase=phase)
        )

    def _signature(self, signature: Signature) -> int:
        if signature not in self.known:
            self.known[signature] = len(self.signatures)
            self.signatures.append(signature)
        return self.known[signature]

    def _call(self, index: int) -> None:
        call = self.tape.calls[index]
        if call.phase is Phase.OPTIMIZER:
            self._update(call)
            return
        if call.phase in _BACKWARD and self._keeps_gradient(call):
            return
        # A weight stays the parameter that it is, whichever copy of it is read: ledgers ask which parameters work.
        self.calls.append(dataclasses.replace(call, tick=self._next()))

    def _keeps_gradient(self, call: Call) -> bool:
        """Note a whole gradient that autograd stores, to be summed later; True where the call falls away because the
        parts are added instead."""
        for number in call.storages:
            storage = self.tape.storages[number]
            if storage.role is not Role.GRADIENT or number in self.gone or storage.name not in self.parameter_of:
                continue
            parameter = self.parameter_of[storage.name]
            self.unit_of[parameter].gradients[parameter] = number
            self.storages[number].role = Role.TEMPORARY
            self.moved[number] = parameter
            self.gone.add(number)
        op = self.tape.signatures[call.signature].op
        first = call.storages[0] if call.storages else -1
        if op != "aten.add_" or first not in self.moved or self.storages[first].died is None:
            return False
        parameter, added = self.moved[first], call.storages[1]
        self.unit_of[parameter].gradients[parameter] = added
        self.gone.add(added)
        return True

    def _update(self, call: Call) -> None:
        """A call of the update, on the parts."""
        signature = self.tape.signatures[call.signature]
        count = len(signature.inputs)
        storages = []
        for number in call.storages:
            parameter = self.moved.get(number)
            summed = None if parameter is None else self.unit_of[parameter].summed
            storages.append(number if summed is None else summed)
        smaller = dataclasses.replace(
            signature,
            inputs=tuple(_cut(meta, self.degree) for meta in signature.inputs),
            outputs=tuple(_cut(meta, self.degree) for meta in signature.outputs),
        )
        assert len(storages) == count + len(signature.outputs)
        number = self._signature(smaller)
        self.calls.append(
            dataclasses.replace(call, signature=number, storages=tuple(storages), tick=self._next())
        )


def _meta(shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """A contiguous tensor."""
    return TensorMeta(shape, tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))), 0, dtype)


def _cut(meta: TensorMeta, degree: int) -> TensorMeta:
    return dataclasses.replace(meta, shape=part(meta.shape, degree), offset=0)
