"""Reentrant recomputation (torch.utils.checkpoint, `use_reentrant=True`), of a step that recomputes nothing.

What torch makes of a chosen module's call (`CheckpointFunction` in torch/utils/checkpoint.py):

1. Forward runs without gradients: nothing is kept of it but what it was given, and a copy of the CPU's random
   state. Some operators do less there (`transforms.no_grad`).
2. When backward reaches it, its calls are made again, all of them and with gradients, on what it was given. A
   backward of its own follows. It makes the recorded calls over what was made again, with one difference:
   Python holds the gradient that came in until all is done, so the engine cannot add to it in place and makes
   a new tensor of the sum.
3. Then all that is let go: what was given and returned, and the gradient that came in. The random state, and
   what was given by keyword or within a container, stay with the node, until the loss is let go.

The engine takes nodes in the order of forward, last first (by sequence number: `CompareNodeTaskTime` in
torch/csrc/autograd/engine.h), so a module's backward is one stretch of the recorded calls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from preflop.tape import lives
from preflop.tape.events import Call, Mark, Phase, Role, Signature, Tape, TensorMeta
from preflop.tape.replay import BIRTH, CALL, DEATH
from preflop.tape.stack import Refused
from preflop.transforms.held import Key, Played, is_note, key_of, random_state
from preflop.transforms.no_grad import copies_for_backward, without_gradients
from preflop.transforms.regions import Span, floating, spans_of

_TRAILING = (lives.DROP, lives.RELEASE, lives.LET_GO, lives.ESCAPE, lives.GONE)
"""Notes after the last call of a stretch of backward that belong to it still."""


@dataclass(eq=False, slots=True)
class _Saved:
    """One tensor that autograd keeps."""

    storage: int
    region: _Region | None
    holds: int | None = None
    """The storage of the new tape that is held for it."""


@dataclass(eq=False, slots=True)
class _Region:
    """A span while it is played."""

    span: Span
    state: int
    """The copy of the random state, on the new tape."""
    saved: list[_Saved] = field(default_factory=list)
    again: dict[int, int] = field(default_factory=dict)
    """Recorded storage -> that of the new tape which was made again."""
    frame: list[int] = field(default_factory=list)
    """Storages of the new tape that the frame of its backward holds."""
    waits: bool = True
    """Its backward has not run."""


class Reentrant(Played):
    """Plays the recorded events, chosen modules as torch runs them."""

    def __init__(self, tape: Tape, chosen: set[int]) -> None:
        super().__init__(tape)
        self.chosen = chosen
        self.spans = iter(spans_of(tape, chosen))
        self.starts: dict[int, _Region] = {}
        """First call of its backward -> region."""
        self.open: _Region | None = None
        """The region whose forward runs,"""
        self.running: _Region | None = None
        """and the one whose backward does."""
        self.unwanted: int | None = None
        """The random state that a chosen module without gradients holds."""
        self.nodes: list[_Region] = []
        """Those of the microbatch, whose nodes live until the loss is let go."""
        self.kept: dict[Key, list[_Saved]] = defaultdict(list)
        self.escaped: dict[Key, list[_Saved]] = defaultdict(list)
        self.sums: dict[int, int] = {}
        """Recorded storage that was added to in place -> the sum."""
        self.unmade: dict[int, int] = {}
        """Of the open region: calls that are not made without gradients -> what they would make."""

    # -- events ------------------------------------------------------------------------------------

    def play(self, kind: int, index: int) -> None:
        """One event; before it, what the end or the start of a region's backward brings."""
        if self.running is not None and not self._goes_on(self.running, kind, index):
            self._end(self.running)
        region = self._starting(kind, index)
        if region is not None:
            self._run_again(region)
        super().play(kind, index)

    def mark(self, mark: Mark) -> None:
        """A moment; when backward is over the loss is let go, and with it the regions' nodes."""
        if mark.name == "backward_end":
            for region in self.nodes:
                self._let_go(region)
                self.holds.release(region.state)
                for storage in region.span.hidden:
                    self.holds.release(storage)
            self.nodes = []
        super().mark(mark)

    def python_lets_go(self, number: int) -> None:
        """As before, of the sum where there is one."""
        if number in self.python:
            self.python.remove(number)
            self.holds.release(self.sums.get(number, number))

    def birth(self, number: int) -> None:
        """As before, but for what is not made."""
        if number not in self.unmade.values():
            super().birth(number)

    def call(self, index: int) -> None:
        """A call in a region's forward, in its backward, or elsewhere."""
        if index in self.unmade:
            return
        call = self.tape.calls[index]
        signature = self.tape.signatures[call.signature]
        if self.open is not None:
            self._call_without_gradients(self.open, call, signature)
        elif self.running is not None:
            self._call_in_backward(self.running, call, signature)
        else:
            self.write(call, tuple(self._living(self.sums.get(s, s), call) for s in call.storages))

    def _living(self, number: int, call: Call) -> int:
        if number not in self.holds.counts:
            raise Refused(f"{self.ops[call.signature]} uses a tensor that would be gone")
        return number

    # -- forward -----------------------------------------------------------------------------------

    def note(self, call: Call) -> None:
        """What holds tensors, and where regions begin and end."""
        op = self.ops[call.signature]
        if op == lives.DROP:
            self.python_lets_go(call.storages[0])
        elif op == lives.ENTER and call.module in self.chosen:
            self._enter(call)
        elif op == lives.EXIT and call.module in self.chosen:
            self._exit()
        elif op == lives.SAVE:
            saved = _Saved(call.storages[0], self.open)
            self.kept[key_of(call)].append(saved)
            if self.open is not None:
                self.open.saved.append(saved)
            else:
                saved.holds = self.holds.hold(saved.storage)
        elif op == lives.RELEASE:
            self.forget(self.kept[key_of(call)].pop())
        elif op == lives.ESCAPE:
            self.escaped[key_of(call)].append(self.kept[key_of(call)].pop())
        elif op == lives.GONE:
            self.forget(self.escaped[key_of(call)].pop())

    def forget(self, saved: _Saved) -> None:
        """Autograd keeps the tensor no more."""
        if saved.holds is not None:
            self.holds.release(saved.holds)
            saved.holds = None

    def _enter(self, call: Call) -> None:
        grad, _, nbytes = self.tape.signatures[call.signature].args[:3]
        state = self.holds.new(random_state(nbytes), made=False)
        if not grad:
            self.unwanted = state
            return
        span = next(self.spans)
        self.open = region = _Region(span, state)
        self.nodes.append(region)
        self.unmade = copies_for_backward(self.tape, self.forward_calls(span))
        for storage in (*span.given, *span.hidden):
            self.holds.hold(storage)
        if span.backward:
            self.starts[span.backward.start] = region

    def _exit(self) -> None:
        region, self.open = self.open, None
        self.unmade = {}
        if region is not None:
            self._check(region.span)
            self._check_casts(region.span)
        elif self.unwanted is not None:
            self.holds.release(self.unwanted)
            self.unwanted = None

    def forward_calls(self, span: Span) -> list[int]:
        """The calls of a span's forward, without notes."""
        calls = (index for kind, index in span.events if kind == CALL)
        return [index for index in calls if not is_note(self.ops[self.tape.calls[index].signature])]

    def _check_casts(self, span: Span) -> None:
        """Autocast casts the detached input once, for it is a leaf, where it casts another each time."""
        casts: Counter[int] = Counter()
        for index in self.forward_calls(span):
            call = self.tape.calls[index]
            signature = self.tape.signatures[call.signature]
            if signature.op == "aten._to_copy" and call.storages[0] in span.given:
                narrower = signature.outputs[0].itemsize < signature.inputs[0].itemsize
                casts[call.storages[0]] += narrower and signature.inputs[0].dtype == "float32"
        if max(casts.values(), default=0) > 1:
            raise Refused("autocast casts several times what a chosen module was given")

    def _check(self, span: Span) -> None:
        """What a module keeps for later, or hands through, may be another when it runs again."""
        if not all(self.is_cast(number) for number in (span.born & self.python) - set(span.returned)):
            raise Refused("a chosen module keeps a tensor that it does not return")
        if set(span.returned) - span.born:
            raise Refused("a chosen module returns what it was given")

    def is_cast(self, number: int) -> bool:
        """Whether autocast's cache may have given the tensor."""
        maker = self.tape.storages[number].call
        if maker < 0 or self.ops[self.tape.calls[maker].signature] != "aten._to_copy":
            return False
        return self.tape.storages[self.tape.calls[maker].storages[0]].role is Role.PARAMETER

    def _call_without_gradients(self, region: _Region, call: Call, signature: Signature) -> None:
        if call.phase is Phase.BACKWARD:
            raise Refused("backward runs inside a chosen module")
        given = (*region.span.given, *region.span.hidden)
        if any(call.storages[place] in given for place in signature.writes):
            raise Refused(f"{signature.op} writes into what a chosen module was given")
        new = without_gradients(signature)
        for storage, made in zip(call.storages[len(signature.inputs) :], new.outputs):
            if made not in signature.outputs:
                entry = self.holds.storages[storage]
                entry.bytes, entry.shape = made.shape[-1], made.shape
        number = None if new is signature else self.number_of(new)
        self.write(call, tuple(self._living(s, call) for s in call.storages), signature=number)

    # -- backward ----------------------------------------------------------------------------------

    def _starting(self, kind: int, index: int) -> _Region | None:
        """The region whose backward begins with the event."""
        if kind == BIRTH:
            return self.starts.pop(self.tape.storages[index].call, None)
        if kind != CALL:
            return None
        call = self.tape.calls[index]
        if self.ops[call.signature] == lives.UNPACK:
            region = self.kept[key_of(call)][-1].region
            if region is not None and region.waits:
                if not region.span.backward:
                    raise Refused("backward of a chosen module is not seen")
                return self.starts.pop(region.span.backward.start, None)
        return self.starts.pop(index, None)

    def _goes_on(self, region: _Region, kind: int, index: int) -> bool:
        """Whether an event belongs to the running backward."""
        last = region.span.backward[-1]
        if kind == CALL:
            return index <= last or self.ops[self.tape.calls[index].signature] in _TRAILING
        if kind == BIRTH:
            return self.tape.storages[index].call <= last
        return kind == DEATH

    def _run_again(self, region: _Region) -> None:
        """All of a region's forward, with gradients."""
        span = region.span
        if len(floating(self.tape, span.returned)) > 1:
            raise Refused("a chosen module returns several tensors")
        self.running, region.waits = region, False
        region.frame = [self.holds.hold(self.sums.get(s, s)) for s in span.coming]
        state = self.holds.new(self.holds.storages[region.state], made=False)
        _Again(self, region).run()
        self.holds.release(state)

    def _call_in_backward(self, region: _Region, call: Call, signature: Signature) -> None:
        """A call of a region's own backward."""
        storages = [region.again.get(s, self.sums.get(s, s)) for s in call.storages]
        changed = self.origin(region.span, call)
        into = call.storages[0] if call.storages else -1
        if signature.op == "aten.add_" and storages[0] in region.frame and into in region.span.coming:
            self._add_anew(call, signature, into, storages, changed)
            return
        for storage in storages:
            self._living(storage, call)
        self.write(call, tuple(storages), **changed)

    def origin(self, span: Span, call: Call) -> dict[str, int]:
        """Backward runs the module's forward, not what called it: neither its name nor that line is known. What
        stores a parameter's gradient is the parameter's module's, and has no line."""
        own = call.module == span.module and call.source != 0
        return {
            "module": 0 if own or not self.within(call.module, span.module) else call.module,
            "source": 0 if call.source == span.source else call.source,
        }

    def _add_anew(
        self, call: Call, old: Signature, into: int, storages: list[int], changed: dict[str, int]
    ) -> None:
        """The engine adds to a gradient that Python holds: the sum is new."""
        signature = dataclasses.replace(old, op="aten.add", aliases=(None,), writes=())
        total = self.holds.new(self.tape.storages[into], made=True)
        self.write(call, (*storages[:-1], total), signature=self.number_of(signature), **changed)
        self.holds.release(storages[0])
        self.sums[into] = total

    def _end(self, region: _Region) -> None:
        """The frame of a region's backward is left."""
        self.running = None
        self._hand_on(region)
        for saved in region.saved:
            self.forget(saved)
        for number in region.frame:
            self.holds.release(number)
        region.frame = []
        self._let_go(region)

    def _let_go(self, region: _Region) -> None:
        given, region.span.given = region.span.given, ()
        for storage in given:
            self.holds.release(storage)

    def _hand_on(self, region: _Region) -> None:
        """Gradients of what the region was given: autograd stores them as it does a parameter's."""
        span = region.span
        left = [
            number
            for number in self.python
            if self.tape.storages[number].call in span.backward and not self.tape.storages[number].name
        ] + [number for number in span.coming if number in self.sums and number in self.python]
        if not left:
            raise Refused("a chosen module is given nothing that wants a gradient; torch would not train it")
        for number in left:
            self._check_taken(span, number)
            self.holds.storages[self.sums.get(number, number)].role = Role.GRADIENT

    def _check_taken(self, span: Span, number: int) -> None:
        """Autograd takes a gradient over where it lies in memory as its tensor does; else it copies it."""
        lies = next(meta for meta in self._shown(number, reversed(span.backward)))
        forward = self.forward_calls(span)
        given = [meta for storage in span.given for meta in self._shown(storage, forward)]
        if not any(meta.shape == lies.shape for meta in given):
            raise Refused("a gradient leaves a chosen module that is of nothing it was given")
        if not any((meta.shape, meta.stride) == (lies.shape, lies.stride) for meta in given):
            raise Refused("the gradient of what a chosen module was given lies otherwise in memory")

    def _shown(self, storage: int, calls: Iterable[int]) -> Iterator[TensorMeta]:
        """How calls see a storage, in each its last sight first."""
        for index in calls:
            call = self.tape.calls[index]
            signature = self.tape.signatures[call.signature]
            metas = (*signature.inputs, *signature.outputs)
            for meta, one in reversed(list(zip(metas, call.storages))):
                if one == storage:
                    yield meta


class _Again:
    """A region's forward once more."""

    def __init__(self, player: Reentrant, region: _Region) -> None:
        self.player, self.region = player, region
        self.tape, self.holds = player.tape, player.holds
        self.python: set[int] = set()
        """Recorded storages whose new ones Python holds."""
        self.graph: dict[Key, list[_Saved]] = defaultdict(list)
        self.saved = iter(region.saved)

    def run(self) -> None:
        for kind, index in self.region.span.events:
            if kind == BIRTH:
                storage = self.tape.storages[index]
                self.region.again[index] = self.holds.new(storage, made=storage.call >= 0)
                self.python.add(index)
            elif kind == DEATH:
                self._python_lets_go(index)
            elif kind == CALL and is_note(self.player.ops[self.tape.calls[index].signature]):
                self._note(self.tape.calls[index])
            elif kind == CALL:
                self._call(self.tape.calls[index])
        for number in sorted(self.python):
            if number in self.region.span.returned:
                self.region.frame.append(self.region.again[number])
            else:
                self.holds.release(self.region.again[number])

    def _python_lets_go(self, number: int) -> None:
        if number in self.python:
            self.python.remove(number)
            self.holds.release(self.region.again[number])

    def _call(self, call: Call) -> None:
        at = self.tape.calls[self.region.span.backward.start]
        self.player.write(
            call, tuple(self._meant(s) for s in call.storages), phase=Phase.RECOMPUTE,
            step=at.step, microbatch=at.microbatch, **self.player.origin(self.region.span, call),
        )  # fmt: skip

    def _meant(self, number: int) -> int:
        found = self.region.again.get(number, number)
        if found == number and self.player.is_cast(number):
            raise Refused("a cast of a parameter is shared between a chosen module and others")
        if found not in self.holds.counts:
            raise Refused("a chosen module uses a tensor from outside that would be gone")
        return found

    def _note(self, call: Call) -> None:
        op = self.player.ops[call.signature]
        if op == lives.DROP:
            self._python_lets_go(call.storages[0])
        elif op == lives.SAVE:
            saved = next(self.saved)
            saved.holds = self.holds.hold(self._meant(saved.storage))
            self.graph[key_of(call)].append(saved)
        elif op in (lives.RELEASE, lives.ESCAPE):
            self.player.forget(self.graph[key_of(call)].pop())
