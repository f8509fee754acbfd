"""Activation offload: what a block keeps for backward waits in the host's memory.

The tape must be annotated (`tape.lives`): it says what autograd keeps, in which block, and when backward asks
for it. When a block's forward ends, each floating tensor that autograd kept in it, and that is no parameter,
buffer or input, is copied to the host; its device memory dies as soon as nothing else holds it. When backward
first asks for something that the block kept, all of them come back, and the host's memory is free again. A
tensor that several blocks keep goes once and comes back once.

So do torch.autograd.graph.save_on_cpu (tensor by tensor), torchtune's OffloadActivations
(torchtune/training/_activation_offloading.py) and TransformerEngine's CPU offloading (layer by layer).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field

from preflop.errors import BadNumber, BadSubject
from preflop.ops.transfer import TO_DEVICE, TO_HOST
from preflop.recomputation import NO_BLOCKS
from preflop.tape import lives
from preflop.tape.events import HOST, Call, Phase, Ref, Role, Signature, Storage, Tape, TensorMeta
from preflop.tape.stack import Refused
from preflop.transforms.held import Key, Played

LEAST_BYTES = 1024
"""Smaller tensors stay. Source: torchtune, `OffloadActivations(min_offload_size=1024)`."""
ASSUMPTION = (
    "offload: transfers run beside the kernels, both ways at the link's rate; host memory is pinned, and a "
    "tensor's device memory is free when its copy is queued"
)
_FLOATS = ("float", "bfloat", "complex")


def offload(tape: Tape, *, least_bytes: int = LEAST_BYTES) -> Tape:
    """The tape of the same step whose blocks keep their activations on the host.

    Args:
        tape: annotated, of a step that recomputes nothing.
        least_bytes: tensors in less memory stay on the device.

    Returns:
        A plain tape. Storages on the host have the device "host".

    Raises:
        BadNumber: `least_bytes` is negative.
        BadSubject: the model has no repeated blocks.
        Refused: what would happen does not follow from the tape.
    """
    if least_bytes < 0:
        raise BadNumber(f"least_bytes is {least_bytes}; it must be a whole number of at least 0.")
    if tape.subject is None or not lives.annotated(tape):
        raise Refused("the tape does not say what held its tensors")
    if any(call.phase is Phase.RECOMPUTE for call in tape.calls):
        raise Refused("the model recomputes: what it keeps is made again, not fetched")
    if not any(signature.op == lives.ENTER and signature.args[1] for signature in tape.signatures):
        raise BadSubject(NO_BLOCKS)
    return _Offload(tape, least_bytes).run()


@dataclass(eq=False, slots=True)
class _Moved:
    """A storage that waits on the host."""

    like: Storage
    device: int | None
    """Its storage on the device; None while it is on the host."""
    host: int | None = None
    left: int = 0
    """Kept tensors that show it and were not let go."""
    blocks: list[_Block] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Block:
    """One call of a block's forward in which gradients are wanted."""

    module: int
    moved: list[_Moved] = field(default_factory=list)
    """All that it kept, in the order in which it kept them."""
    back: bool = False


@dataclass(eq=False, slots=True)
class _Saved:
    """One tensor that autograd keeps: on the host, or by a storage that it holds."""

    block: _Block | None
    moved: _Moved | None = None
    holds: int | None = None


class _Offload(Played):
    """Plays the recorded events; what a block kept goes when it ends, and comes when it is asked for."""

    def __init__(self, tape: Tape, least_bytes: int) -> None:
        super().__init__(tape)
        self.least_bytes = least_bytes
        self.block: _Block | None = None
        self.moved: dict[int, _Moved] = {}
        """By recorded storage."""
        self.kept: dict[Key, list[_Saved]] = defaultdict(list)
        self.escaped: dict[Key, list[_Saved]] = defaultdict(list)

    def run(self) -> Tape:
        tape = super().run()
        return dataclasses.replace(tape, assumptions=[*tape.assumptions, ASSUMPTION])

    def call(self, index: int) -> None:
        call = self.tape.calls[index]
        self.write(call, self._meant(call))

    def _meant(self, call: Call) -> tuple[int, ...]:
        """The storages of the new tape that a call uses."""
        found = []
        for storage in call.storages:
            moved = self.moved.get(storage)
            original = storage if storage in self.holds.counts else None
            choice = original
            if moved is not None and moved.device is not None and call.phase is Phase.BACKWARD:
                inside = any(self.within(call.module, block.module) for block in moved.blocks)
                choice = moved.device if inside or original is None else original
            if choice is None:
                raise Refused(f"{self.ops[call.signature]} uses a tensor that would be on the host")
            found.append(choice)
        return tuple(found)

    # -- notes -------------------------------------------------------------------------------------

    def note(self, call: Call) -> None:
        op = self.ops[call.signature]
        key = (call.module, call.storages[0]) if call.storages else (call.module, -1)
        if op == lives.DROP:
            self.python_lets_go(call.storages[0])
        elif op == lives.ENTER:
            wanted, block = self.tape.signatures[call.signature].args[:2]
            if block and wanted:
                if self.block is not None:
                    raise Refused("one block runs inside another")
                self.block = _Block(call.module)
        elif op == lives.EXIT:
            if self.block is not None and call.module == self.block.module:
                self._leave(self.block, call)
                self.block = None
        elif op == lives.SAVE:
            self.kept[key].append(self._save(call.storages[0]))
        elif op == lives.UNPACK:
            block = self.kept[key][-1].block
            if block is not None and not block.back:
                self._fetch(block, call)
        elif op == lives.LET_GO:
            if self.kept[key][-1].moved is not None:
                self._forget(self.kept[key][-1])
        elif op == lives.RELEASE:
            self._forget(self.kept[key].pop())
        elif op == lives.ESCAPE:
            self.escaped[key].append(self.kept[key].pop())
        elif op == lives.GONE:
            self._forget(self.escaped[key].pop())

    def _save(self, number: int) -> _Saved:
        if self.block is None or not self._goes(number):
            return _Saved(self.block, holds=self.holds.hold(number))
        moved = self.moved.get(number)
        if moved is None:
            moved = self.moved[number] = _Moved(self.tape.storages[number], self.holds.hold(number))
        moved.left += 1
        if self.block not in moved.blocks:
            moved.blocks.append(self.block)
            self.block.moved.append(moved)
        return _Saved(self.block, moved)

    def _goes(self, number: int) -> bool:
        storage = self.tape.storages[number]
        return (
            storage.born > 0
            and storage.role in (Role.ACTIVATION, Role.TEMPORARY)
            and storage.bytes >= self.least_bytes
            and storage.dtype.startswith(_FLOATS)
        )

    def _forget(self, saved: _Saved) -> None:
        """Neither autograd nor backward has the tensor any more."""
        moved, saved.moved = saved.moved, None
        if saved.holds is not None:
            self.holds.release(saved.holds)
            saved.holds = None
        if moved is None:
            return
        moved.left -= 1
        if not moved.left:
            held = moved.host if moved.device is None else moved.device
            assert held is not None
            self.holds.release(held)
            moved.device = moved.host = None

    # -- there and back ----------------------------------------------------------------------------

    def _leave(self, block: _Block, at: Call) -> None:
        """What the block kept and no other did before goes to the host."""
        for moved in block.moved:
            if moved.device is not None and moved.left:
                moved.host = self._transfer(TO_HOST, block, moved, moved.device, at)
                self.holds.release(moved.device)
                moved.device = None

    def _fetch(self, block: _Block, at: Call) -> None:
        """What the block kept comes back, unless it is there already or was let go."""
        block.back = True
        for moved in block.moved:
            if moved.device is None and moved.host is not None:
                moved.device = self._transfer(TO_DEVICE, block, moved, moved.host, at)
                self.holds.release(moved.host)
                moved.host = None

    def _transfer(self, op: str, block: _Block, moved: _Moved, source: int, at: Call) -> int:
        """One copy over the link: the whole storage, once."""
        new = dataclasses.replace(
            moved.like, role=Role.TEMPORARY, name="", shape=(moved.like.elements,),
            device=HOST if op == TO_HOST else moved.like.device,
        )  # fmt: skip
        target = self.holds.new(new, made=True)
        meta = TensorMeta((moved.like.elements,), (1,), 0, moved.like.dtype)
        copy = self.number_of(Signature(op, "default", (Ref(0),), (), (meta,), (meta,), (None,), ()))
        phase = Phase.FORWARD if op == TO_HOST else Phase.BACKWARD
        self.write(at, (source, target), signature=copy, phase=phase, module=block.module, source=0)
        return target
