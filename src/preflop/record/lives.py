"""Records what holds a step's tensors, beside what it does (see `tape.lives`).

Autograd's saved tensors go through hooks (torch.autograd.graph.saved_tensors_hooks) that keep a *holder*
without memory: shape, strides and the number of the storage. So Python alone keeps a tensor's memory alive,
and it is seen when it lets go. When backward asks, it is given new fake memory that goes by the same number.
A storage on the tape dies when its memory is gone and no holder is left, which is when it would have died.

Real tensors (ids, masks) are given back with their values; parameters as they are.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from preflop.record.storages import StorageTable
from preflop.tape import lives as words
from preflop.tape.events import Call, Phase, Signature, Tape
from preflop.tape.replay import CALL, DEATH, events_of, retold
from preflop.tape.stack import Refused

if TYPE_CHECKING:
    from preflop.record.fake import FakeKernels
    from preflop.record.recorder import Recorder


class LongTable(StorageTable):
    """A table whose storages live on while a holder stands for them."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = defaultdict(int)
        """Storage id -> holders that stand for it."""
        self.memories: dict[int, int] = defaultdict(int)
        """Storage id -> pieces of memory that go by the number: the first, and what backward was given."""
        self.dropped: Callable[[int], None] = lambda number: None

    def living(self) -> set[int]:
        """The storages that are alive, in memory or by a holder."""
        return super().living() | {number for number, count in self.holders.items() if count}

    def give(self, tensor: torch.Tensor, number: int, gone: Callable[[], None]) -> None:
        """Enter new memory under the number of a storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        self.alive[key] = number
        self.memories[number] += 1
        place = -1 - len(self._watches)
        while place in self._watches:
            place -= 1
        self._watches[place] = weakref.ref(storage, partial(self._given_died, number, key, place, gone))

    def release(self, number: int) -> None:
        """A holder is gone."""
        self.holders[number] -= 1
        self._look(number)

    def _given_died(
        self, number: int, key: int, place: int, gone: Callable[[], None], _: object
    ) -> None:
        self._watches.pop(place, None)
        if self.alive.get(key) == number:
            del self.alive[key]
        gone()
        self.memories[number] -= 1
        self._look(number)

    def _died(self, number: int, key: int, _: object) -> None:
        self._watches.pop(number, None)
        if self.alive.get(key) == number:
            del self.alive[key]
        if self.holders[number] or self.memories[number]:
            self.dropped(number)
        self.memories[number] -= 1
        self._look(number)

    def _enter(self, tensor: torch.Tensor, **born: Any) -> int:
        known = len(self.storages)
        number = super()._enter(tensor, **born)
        if number == known:
            self.memories[number] += 1
        return number

    def _look(self, number: int) -> None:
        if not self.holders[number] and not self.memories[number] and self.storages[number].died is None:
            self.storages[number].died = self.next_tick()


@dataclass(eq=False, slots=True)
class _Region:
    """One call of a module's forward."""

    module: int
    unpacked: bool = False


@dataclass(eq=False, slots=True)
class _Saved:
    """What is known of one tensor that autograd saved."""

    number: int
    """Its storage."""
    regions: tuple[_Region, ...]
    """The calls of modules that were running, outermost first."""
    given: bool = False
    """Whether backward was given the tensor,"""
    held: bool = False
    """and still has it."""
    let_go: int = 0
    """Tick at which it let go."""
    released: bool = False

    @property
    def module(self) -> int:
        """The innermost module that was running."""
        return self.regions[-1].module if self.regions else 0


class _Holder:
    """Stands in the autograd graph for a saved tensor; autograd gives it up by dropping it."""

    __slots__ = ("contents", "lives", "saved")

    def __init__(self, lives: Lives, saved: _Saved, contents: Contents | torch.Tensor) -> None:
        self.lives, self.saved, self.contents = lives, saved, contents

    def __del__(self) -> None:
        self.lives.released(self.saved)


Contents = Callable[["FakeKernels"], torch.Tensor]
"""Makes new memory with what a saved tensor showed."""


class Lives:
    """Hooks and notes of one recording."""

    def __init__(self, recorder: Recorder, table: LongTable) -> None:
        self.recorder = recorder
        self.table = table
        self.reasons: dict[str, None] = {}
        """Why the tape cannot be transformed."""
        self._open: list[_Region] = []
        self._notes: list[Call] = []
        self._signatures: dict[Signature, int] = {}
        self._kept: dict[tuple[int, int], list[_Saved]] = defaultdict(list)
        self._closed = False
        self._state_bytes = torch.default_generator.get_state().nbytes
        table.dropped = self._dropped

    def hooks(self) -> Any:
        """The context in which autograd keeps holders."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def wrap(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Note the calls of every module's forward. `model` must be a copy that nobody else holds."""
        ids = {id(block) for block in blocks}
        for name, module in model.named_modules():
            if name:
                module.forward = partial(self._forward, module.forward, id(module), id(module) in ids)

    def _forward(
        self, forward: Callable[..., Any], key: int, block: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        module = self.recorder.origins.number_of(key)
        if module is None or not self.recorder.recording:
            return forward(*args, **kwargs)
        given, how = self._given(args, kwargs)
        entered = words.note(words.ENTER, torch.is_grad_enabled(), block, self._state_bytes, *how)
        self._note(entered, module, given, source=self.recorder.origins.line())
        self._open.append(_Region(module))
        result = None
        try:
            result = forward(*args, **kwargs)
            return result
        finally:
            self._open.pop()
            made = dict.fromkeys(self.recorder.storage_of(t) for t in tensors_within(result))
            self._note(words.note(words.EXIT), module, tuple(made))

    def _given(self, args: Any, kwargs: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The storages of the tensors that a module is given; and, where some are not given by position, which
        are and whether one of the others wants a gradient (`tape.lives`)."""
        every = list(tensors_within((args, kwargs)))
        direct = {self.recorder.storage_of(one) for one in args if isinstance(one, torch.Tensor)}
        storages = tuple(dict.fromkeys(self.recorder.storage_of(one) for one in every))
        if direct.issuperset(storages):
            return storages, ()
        wanting = any(one.requires_grad for one in every if self.recorder.storage_of(one) not in direct)
        return storages, (tuple(number in direct for number in storages), wanting)

    # -- what autograd keeps -----------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Holder:
        number = self.recorder.storage_of(tensor)
        saved = _Saved(number, tuple(self._open))
        contents = self._contents(tensor, number)
        self.table.holders[number] += 1
        self._kept[saved.module, number].append(saved)
        self._note(words.note(words.SAVE), saved.module, (number,))
        return _Holder(self, saved, contents)

    def _contents(self, tensor: torch.Tensor, number: int) -> Contents | torch.Tensor:
        """What to give backward: a parameter as it is, else something that holds no memory of the step."""
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            self.reasons.setdefault("autograd keeps a tensor whose layout is not followed")
            return tensor
        geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        dtype, storage = tensor.dtype, tensor.untyped_storage()
        if type(tensor) is FakeTensor:
            return partial(_made_anew, storage.nbytes(), dtype, geometry)
        if self.table.storages[number].born == 0:
            return tensor
        with _disable_current_modes():
            values = storage.clone()
        return partial(_copied, values, dtype, geometry)

    def _unpack(self, holder: _Holder) -> torch.Tensor:
        saved = holder.saved
        if any(not region.unpacked for region in saved.regions):
            for region in saved.regions:
                region.unpacked = True
            self._note(words.note(words.UNPACK), saved.module, (saved.number,), Phase.BACKWARD)
        if saved.given and saved.regions:
            self.reasons.setdefault("backward asks for a saved tensor twice")
        saved.given = True
        if isinstance(holder.contents, torch.Tensor):
            return holder.contents
        with _disable_current_modes(), torch.no_grad():
            tensor = holder.contents(self.recorder.kernels)
        saved.held = True
        self.table.give(tensor, saved.number, partial(self._let_go, saved))
        return tensor

    def _let_go(self, saved: _Saved) -> None:
        """Backward let go of what it was given."""
        if self._closed:
            return
        saved.held = False
        saved.let_go = self.table.next_tick()
        if saved.released:
            self._note(words.note(words.GONE), saved.module, (saved.number,), Phase.BACKWARD)

    def released(self, saved: _Saved) -> None:
        """Autograd gave up a saved tensor."""
        if self._closed:
            return
        saved.released = True
        self._unpair(saved)
        if saved.let_go and self.recorder.calls and saved.let_go < self.recorder.calls[-1].tick:
            self._note(words.note(words.LET_GO), saved.module, (saved.number,), Phase.BACKWARD, saved.let_go)
        op = words.ESCAPE if saved.held else words.RELEASE
        self._note(words.note(op), saved.module, (saved.number,), Phase.BACKWARD)
        self.table.release(saved.number)

    def _unpair(self, saved: _Saved) -> None:
        """Who reads the tape takes the last one of a module's saves of a storage; it must be alike."""
        alike = self._kept[saved.module, saved.number]
        if alike[-1].regions != saved.regions:
            self.reasons.setdefault("a module that runs several times gives up its tensors in another order")
        alike.remove(saved)

    def _dropped(self, number: int) -> None:
        if not self._closed:
            self._note(words.note(words.DROP), 0, (number,))

    def _note(
        self,
        signature: Signature,
        module: int,
        storages: tuple[int, ...],
        phase: Phase = Phase.FORWARD,
        tick: int | None = None,
        source: int = 0,
    ) -> None:
        recorder = self.recorder
        self._notes.append(
            Call(
                self._signatures.setdefault(signature, len(self._signatures)),
                storages,
                self.table.next_tick() if tick is None else tick,
                phase,
                recorder.step,
                recorder.microbatch,
                module,
                source,
            )
        )

    # -- the tape ----------------------------------------------------------------------------------

    def close(self) -> None:
        """The recording is over; what dies now says nothing."""
        self._closed = True

    def write_into(self, tape: Tape) -> Tape:
        """The tape with the notes in their places.

        Raises:
            Refused: something was seen that the notes cannot say.
        """
        if self.reasons:
            raise Refused("; ".join(self.reasons))
        base = len(tape.signatures)
        notes = [dataclasses.replace(n, signature=n.signature + base) for n in self._notes]
        order = sorted(range(len(tape.calls) + len(notes)), key=lambda i: _tick(tape.calls, notes, i))
        places = {index: place for place, index in enumerate(order)}
        every = [*tape.calls, *notes]
        for storage in tape.storages:
            storage.call = places[storage.call] if storage.call >= 0 else -1
        noted = dataclasses.replace(
            tape, signatures=[*tape.signatures, *self._signatures], calls=[every[index] for index in order]
        )
        return retold(noted, _settled(noted))


def _tick(calls: list[Call], notes: list[Call], index: int) -> int:
    return calls[index].tick if index < len(calls) else notes[index - len(calls)].tick


def _settled(tape: Tape) -> Iterator[tuple[int, int]]:
    """The tape's events. Deaths and drops with nothing between them come in the order in which the storages
    were made (see `StorageTable.order_deaths`)."""
    run: list[tuple[int, int, tuple[int, int]]] = []
    for event in events_of(tape):
        number = _goes(tape, event)
        if number is not None:
            run.append((number, event[0], event))
            continue
        yield from (event for _, _, event in sorted(run))
        run = []
        yield event
    yield from (event for _, _, event in sorted(run))


def _goes(tape: Tape, event: tuple[int, int]) -> int | None:
    """The storage that dies or is dropped in the event."""
    kind, index = event
    if kind == DEATH:
        return index
    if kind == CALL and tape.signatures[tape.calls[index].signature].op == words.DROP:
        return tape.calls[index].storages[0]
    return None


def _made_anew(nbytes: int, dtype: torch.dtype, geometry: Any, kernels: FakeKernels) -> torch.Tensor:
    elem = torch.empty(0, dtype=dtype, device="meta")
    elem.set_(torch.UntypedStorage(nbytes, device="meta"), *geometry)
    return kernels.wrap(elem)


def _copied(
    values: torch.UntypedStorage, dtype: torch.dtype, geometry: Any, _: FakeKernels
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(values.clone(), *geometry)


def tensors_within(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors that an argument keeps alive, through containers and plain objects."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    else:
        seen.add(id(value))
        if isinstance(value, dict):
            held = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            held = list(value)
        else:
            held = list(getattr(value, "__dict__", {}).values())
        for item in held:
            yield from tensors_within(item, seen)
