"""Chunked loss: the head and the cross entropy of each microbatch replaced by one that goes chunk by chunk.

What is replaced is found on the tape: from the matrix product that makes the logits to the loss that no
further call changes, and in backward from the loss's gradient to those of the head's input and weight. What
replaces it is a tape of that loss alone (`record.loss_tape`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from preflop.tape.events import Call, Mark, Phase, Role, Storage, Tape, TensorMeta
from preflop.tape.head import Head
from preflop.tape.replay import BIRTH, CALL, DEATH, MARK, events_of, unborn
from preflop.tape.stack import Refused
from preflop.transforms.accumulation import STORES

# Calls that prepare the product's operands, or pass the logits on with all of their elements.
_PREPARES = frozenset(
    f"aten.{name}" for name in ("t", "transpose", "view", "_unsafe_view", "detach", "_to_copy", "clone")
)
ASSUMPTION = (
    "chunked loss: cross entropy within a chunk is written out in torch's operators; a fused kernel (Liger) "
    "makes the gradient in the chunk's logits and moves and holds less"
)
_PASSES = frozenset({"aten._to_copy"})
_LABELS = frozenset(f"aten.{name}" for name in ("constant_pad_nd", "slice", "clone", "view", "_to_copy"))
_PRODUCTS = ("aten.mm", "aten.addmm")
_DETACH = "aten.detach"
"""Costs nothing; hooks on saved tensors, under which shipped tapes are recorded, make some in backward."""
_OF_LOSS = frozenset({"aten.nll_loss_backward", "aten._log_softmax_backward_data"})


@dataclass(slots=True)
class _Spot:
    """Head and loss of one microbatch."""

    head: Head
    outside: dict[str, int]
    """What the loss reads, as the piece names it -> storage."""
    loss: int
    forward: set[int] = field(default_factory=set)
    """Calls that are replaced."""
    backward: set[int] = field(default_factory=set)
    slope: int = -1
    """Storage of the loss's own gradient."""
    grads: dict[str, int] = field(default_factory=dict)
    """What backward goes on with, as the piece names it -> storage."""
    stores: dict[str, Call] = field(default_factory=dict)
    """Calls that store a gradient of the head, or add it to the one there is, by whose it is."""


def head_of(tape: Tape) -> Head:
    """The tape's head and loss.

    Raises:
        Refused: it has none that can be replaced; the reason names the call.
    """
    return _spots(tape)[0].head


def with_chunked_loss(tape: Tape, piece: Tape) -> Tape:
    """The tape with each microbatch's head and loss replaced.

    Args:
        tape: of a loop that does not keep the logits after the loss.
        piece: what `record_loss` recorded for this tape's head.

    Raises:
        Refused: there is no head and loss to be replaced; the reason names the call.
    """
    return _Replacing(tape, piece, _spots(tape)).run()


# -- where it is ------------------------------------------------------------------------------------


def _spots(tape: Tape) -> list[_Spot]:
    """The head and loss of each microbatch of each step, in order."""
    if tape.subject is None:
        raise Refused("only the tape of a training step has a loss")
    if (tape.subject.optimizer or "").endswith("-in-backward"):
        raise Refused("the updates in backward stand between the loss's gradients: chunk the loss first")
    found = []
    for begin, middle, end in _microbatches(tape):
        spot = _forward_spot(tape, [i for i in range(begin, middle) if tape.calls[i].phase is Phase.FORWARD])
        _find_backward(tape, spot, range(middle, end))
        found.append(spot)
    if not found:
        raise Refused("the tape has no forward pass with a loss")
    return found


def _microbatches(tape: Tape) -> Iterator[tuple[int, int, int]]:
    """Calls' numbers at which a microbatch begins, its backward begins, and it ends."""
    begin = middle = position = 0
    for mark in sorted(tape.marks, key=lambda mark: mark.tick):
        while position < len(tape.calls) and tape.calls[position].tick < mark.tick:
            position += 1
        if mark.name == "step":
            begin = position
        elif mark.name == "forward_end":
            middle = position
        elif mark.name == "backward_end":
            yield begin, middle, position
            begin = position


def _forward_spot(tape: Tape, calls: list[int]) -> _Spot:
    losses = [i for i in calls if _op(tape, i) == "aten.nll_loss_forward"]
    if not losses:
        raise Refused("no cross entropy over classes (aten.nll_loss_forward) makes its loss")
    last = losses[-1]
    after = [i for i in calls if i > last]
    if after:
        raise Refused(f"the loss goes on after the cross entropy, by {_op(tape, after[0])}")
    scores, target = tape.calls[last].storages[:2]
    softmax = _maker(tape, scores, "aten._log_softmax")
    chain = {last, softmax}
    logits = tape.calls[softmax].storages[0]
    product = tape.storages[logits].call
    while product >= 0 and _op(tape, product) in _PASSES:
        chain.add(product)
        logits = tape.calls[product].storages[0]
        product = tape.storages[logits].call
    if product < 0 or _op(tape, product) not in _PRODUCTS:
        name = "memory that no call made" if product < 0 else _op(tape, product)
        raise Refused(f"the logits reach the cross entropy by {name}, not from a linear head")
    signature = tape.signatures[tape.calls[product].signature]
    if signature.outputs[0].elements != tape.signatures[tape.calls[softmax].signature].inputs[0].elements:
        raise Refused("the cross entropy sees only a part of the logits")
    return _spot_of(tape, calls, chain | {product}, product, target, last)


def _spot_of(
    tape: Tape, calls: list[int], chain: set[int], product: int, target: int, last: int
) -> _Spot:
    operands = tape.calls[product].storages[: len(tape.signatures[tape.calls[product].signature].inputs)]
    sources = [_source(tape, storage, calls) for storage in operands]
    members = set(operands) | set(sources)
    position = calls.index(product)
    while position > 0:
        before = calls[position - 1]
        other = tape.calls[before].module != tape.calls[product].module
        if other or _op(tape, before) not in _PREPARES or not set(tape.calls[before].storages) <= members:
            break
        position -= 1
    inside = calls[position:]
    own = {s for i in chain for s in tape.calls[i].storages} | members
    labels, chain_of_labels = _labels(tape, target, inside)
    for index in inside:
        storages = set(tape.calls[index].storages)
        passes = index in chain or (_op(tape, index) in _PREPARES and storages <= own)
        if not passes and index not in chain_of_labels:
            raise Refused(f"{_op(tape, index)} stands between the head and the loss")
    named = dict(zip(("bias", "hidden", "weight")[3 - len(sources) :], sources))
    metas = {name: _meta(tape, storage, inside) for name, storage in named.items()}
    metas["weight"] = _upright(tape, named["weight"], metas["weight"])
    next_token = any(_op(tape, i) == "aten.constant_pad_nd" for i in chain_of_labels)
    head = Head(
        metas["hidden"], metas["weight"], metas.get("bias"), _meta(tape, labels, inside), next_token
    )
    loss = tape.calls[last].storages[len(tape.signatures[tape.calls[last].signature].inputs)]
    return _Spot(head, {**named, "labels": labels}, loss, set(inside))


def _op(tape: Tape, index: int) -> str:
    return tape.signatures[tape.calls[index].signature].op


def _maker(tape: Tape, storage: int, op: str) -> int:
    call = tape.storages[storage].call
    if call < 0 or _op(tape, call) != op:
        raise Refused(f"the cross entropy reads no {op}")
    return call


def _source(tape: Tape, storage: int, calls: list[int]) -> int:
    """What an operand was before it was cast or copied for the product."""
    while (call := tape.storages[storage].call) >= calls[0] and _op(tape, call) in ("aten._to_copy", "aten.clone"):
        storage = tape.calls[call].storages[0]
    return storage


def _labels(tape: Tape, target: int, inside: list[int]) -> tuple[int, set[int]]:
    """The labels as they were given, and the calls that made the target of them."""
    made = {target}
    storage = target
    while (call := tape.storages[storage].call) in inside:
        if _op(tape, call) not in _LABELS:
            raise Refused(f"{_op(tape, call)} makes the labels")
        storage = tape.calls[call].storages[0]
        made.add(storage)
    chain = {
        i for i in inside if _op(tape, i) in _LABELS and set(tape.calls[i].storages) <= made
    }
    return storage, chain


def _meta(tape: Tape, storage: int, inside: list[int]) -> TensorMeta:
    """How the storage is seen first."""
    for index in inside:
        call = tape.calls[index]
        for number, meta in zip(call.storages, tape.signatures[call.signature].inputs):
            if number == storage:
                return meta
    raise Refused("an operand of the head is not read by it")


def _upright(tape: Tape, storage: int, seen: TensorMeta) -> TensorMeta:
    """The weight as the module holds it."""
    for info in tape.parameters:
        if info.storage == storage and len(info.shape) == 2:
            return TensorMeta(info.shape, (info.shape[1], 1), 0, info.dtype)
    raise Refused(f"the head's weight of shape {seen.shape} is no parameter")


def _find_backward(tape: Tape, spot: _Spot, calls: range) -> None:
    """The calls of backward that belong to the head and the loss, and what they hand on."""
    first = next((i for i in calls if _op(tape, i) == "aten.nll_loss_backward"), None)
    if first is None:
        raise Refused("backward has no gradient of the cross entropy")
    spot.slope = tape.calls[first].storages[0]
    made = {s for i in spot.forward for s in tape.calls[i].storages} - set(spot.outside.values())
    flowing = set[int]()
    """Gradients of the scores and the logits."""
    module = next(tape.calls[i].module for i in spot.forward if _op(tape, i) in _PRODUCTS)
    names = {storage: name for name, storage in spot.outside.items()}
    index = first
    while index in calls and _of_head(tape, spot, index, made, flowing, names, module):
        spot.backward.add(index)
        index += 1
    if "hidden" not in spot.grads and "weight" not in spot.grads:
        raise Refused("the head's gradients are not made right after the loss's")


def _of_head(
    tape: Tape, spot: _Spot, index: int, made: set[int], flowing: set[int], names: dict[int, str], module: int
) -> bool:
    """Whether a call of backward belongs to the head and the loss; notes what it makes."""
    call = tape.calls[index]
    signature = tape.signatures[call.signature]
    reads, writes = call.storages[: len(signature.inputs)], call.storages[len(signature.inputs) :]
    if signature.op in _OF_LOSS:
        flowing.update(writes)
        return True
    handed = signature.op == _DETACH and tape.storages[reads[0]].role is not Role.GRADIENT
    if handed and (reads[0] in made or reads[0] in names):
        return True
    if signature.op in STORES and tape.storages[writes[0]].role is Role.GRADIENT:
        stored = {tape.storages[s].name: n for s, n in names.items()}.get(tape.storages[writes[0]].name)
        if stored is not None:
            spot.stores[stored] = call
            spot.grads[stored] = writes[0]
        return stored is not None
    known = {storage: name for name, storage in spot.grads.items()}
    if signature.op == "aten.add_" and reads[1] in known:
        added = tape.storages[reads[0]].role is Role.GRADIENT
        if added:
            spot.stores[known[reads[1]]] = call
        return added
    if signature.op in (*_PRODUCTS, "aten.sum") and set(reads) & flowing:
        kind = "bias"
        if signature.op != "aten.sum":
            weight = _of(tape, reads, spot.outside["weight"], made)
            kind = "hidden" if weight else "weight"
        spot.grads[kind] = writes[0]
        return True
    if signature.op not in _PREPARES:
        return False
    if reads[0] in flowing or (reads[0] in made and reads[0] not in names):
        flowing.update(writes)
        return True
    if reads[0] in known:
        if known[reads[0]] == "hidden" and call.module != module:
            return False
        spot.grads[known[reads[0]]] = writes[0]
        return True
    return reads[0] in names and call.module == module


def _of(tape: Tape, reads: tuple[int, ...], weight: int, made: set[int]) -> bool:
    """Whether a product reads the weight, or its cast."""
    for storage in reads:
        if storage == weight:
            return True
        call = tape.storages[storage].call
        if storage in made and call >= 0 and tape.calls[call].storages[0] == weight:
            return True
    return False


# -- replacing it -----------------------------------------------------------------------------------


class _Replacing:
    """Plays the tape, and at each spot the piece."""

    def __init__(self, tape: Tape, piece: Tape, spots: list[_Spot]) -> None:
        self.tape, self.piece = tape, piece
        self.signatures = [*tape.signatures, *piece.signatures]
        self.sources = list(tape.sources)
        self.calls: list[Call] = []
        self.marks: list[Mark] = []
        self.storages: list[Storage] = []
        self.born: list[Storage] = []
        self.tick = 0
        self.spot_of = {
            index: spot for spot in spots for index in (*spot.forward, *spot.backward)
        }
        self.sums = {index: spot for spot in spots for index in self._sums(spot)}
        """Calls that add another use's gradient to that of a tied weight -> the spot of the latter."""
        self.gone = {
            number
            for number, storage in enumerate(tape.storages)
            if storage.born > 0 and (storage.call in self.spot_of or storage.call in self.sums)
        }
        self.number: dict[int, int] = {}
        for old, storage in enumerate(tape.storages):
            if old not in self.gone:
                self.number[old] = len(self.storages)
                self.storages.append(unborn(storage))
        self.early = self._early(spots)
        """Inputs of heads that nothing reads after the loss: they die there."""
        self.names = {
            storage.name: number
            for number, storage in enumerate(piece.storages)
            if storage.role is not Role.GRADIENT and storage.name
        }
        self.grads = {
            storage.name: number
            for number, storage in enumerate(piece.storages)
            if storage.role is Role.GRADIENT
        }
        self.added: set[int] = set()
        """Gradients whose death is played already."""
        self.slopes = {spot.slope for spot in spots}
        self.parts = self._parts()
        self.last_use = max(
            index for index, call in enumerate(piece.calls) if self.names["slope"] in call.storages
        )

    def _parts(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The piece's events in forward and in backward."""
        forward: list[tuple[int, int]] = []
        backward: list[tuple[int, int]] = []
        part = forward
        for kind, index in events_of(self.piece):
            if kind == MARK:
                part = backward
            else:
                part.append((kind, index))
        return forward, backward

    def _sums(self, spot: _Spot) -> Iterator[int]:
        """The engine adds in place where only it holds the first gradient: that of the loss is nobody's view,
        as that of a plain head is (a product turned round)."""
        for index in range(max(spot.backward) + 1, len(self.tape.calls)):
            call = self.tape.calls[index]
            if call.phase is not Phase.BACKWARD or call.step != self.tape.calls[max(spot.backward)].step:
                return
            signature = self.tape.signatures[call.signature]
            if signature.op == "aten.add" and call.storages[0] == spot.grads.get("weight"):
                yield index

    def _early(self, spots: list[_Spot]) -> dict[int, int]:
        """Hidden storage -> the call after which it dies, where only the head kept it for backward."""
        last: dict[int, int] = {}
        for index, call in enumerate(self.tape.calls):
            if index not in self.spot_of:
                for storage in call.storages:
                    last[storage] = index
        found = {}
        for spot in spots:
            hidden, end = spot.outside["hidden"], max(spot.forward)
            died = self.tape.storages[hidden].died
            later = died is not None and spot.backward and died > self.tape.calls[min(spot.backward)].tick
            if later and last.get(hidden, -1) < end:
                found[hidden] = end
        return found

    def run(self) -> Tape:
        done: set[int] = set()
        for kind, index in events_of(self.tape):
            call = index if kind == CALL else self.tape.storages[index].call if kind == BIRTH else -1
            spot = self.spot_of.get(call)
            if spot is not None:
                forward = call in spot.forward
                key = min(spot.forward if forward else spot.backward)
                if key not in done:
                    done.add(key)
                    self._play_piece(spot, self.tape.calls[call], forward=forward)
                continue
            if kind == DEATH and (index in self.early or index in self.slopes or index in self.added):
                continue
            summed = self.sums.get(call)
            if summed is not None:
                if kind == CALL:
                    self._add_in_place(summed, index)
                continue
            self._play(kind, index)
        parameters = [
            dataclasses.replace(info, storage=self.number[info.storage]) for info in self.tape.parameters
        ]
        return dataclasses.replace(
            self.tape, signatures=self.signatures, calls=self.calls, storages=self.storages,
            sources=self.sources, marks=self.marks, assumptions=[*self.tape.assumptions, ASSUMPTION],
            parameters=parameters,
        )  # fmt: skip

    def _play(self, kind: int, index: int) -> None:
        if kind in (BIRTH, DEATH) and index not in self.number:
            return
        self.tick += 1
        if kind == CALL:
            call = self.tape.calls[index]
            if self.tape.signatures[call.signature].op == _DETACH and call.storages[0] not in self.number:
                return
            storages = tuple(self.number[storage] for storage in call.storages)
            self._write(dataclasses.replace(call, storages=storages, tick=self.tick))
        elif kind == MARK:
            self.marks.append(dataclasses.replace(self.tape.marks[index], tick=self.tick))
        elif kind == BIRTH:
            self._birth(self.storages[self.number[index]])
        else:
            self.storages[self.number[index]].died = self.tick

    def _add_in_place(self, spot: _Spot, index: int) -> None:
        """The sum of a tied weight's gradients, into the loss's own."""
        call = self.tape.calls[index]
        old = self.tape.signatures[call.signature]
        first, total = call.storages[0], call.storages[-1]
        into = self.number.pop(first)
        self.number[total] = into
        self._take_role(into, total)
        meta = old.outputs[0]
        signature = dataclasses.replace(
            old, op="aten.add_", inputs=(meta, *old.inputs[1:]), outputs=(meta,), aliases=(0,), writes=(0,)
        )
        self.tick += 1
        self.signatures.append(signature)
        self._write(
            dataclasses.replace(
                call, signature=len(self.signatures) - 1, tick=self.tick,
                storages=(into, *(self.number[s] for s in call.storages[1:-1]), into),
            )
        )  # fmt: skip

    def _play_piece(self, spot: _Spot, at: Call, *, forward: bool) -> None:
        """Write the loss's forward, or its backward."""
        if forward:
            self.inside = {
                self.names[name]: self.number[storage] for name, storage in spot.outside.items()
            }
        else:
            self.inside[self.names["slope"]] = self.number[spot.slope]
        for kind, index in self.parts[0 if forward else 1]:
            if kind == CALL:
                self._play_call(spot, index, at)
                if index == self.last_use:
                    self.tick += 1
                    self.storages[self.number[spot.slope]].died = self.tick
                continue
            self.tick += 1
            storage = self._storage(index)
            if kind == BIRTH:
                self._birth(storage)
            else:
                storage.died = self.tick
        if forward:
            self.ended = self.tick
            self.number[spot.loss] = self.inside[self.names["loss"]]
            if spot.outside["hidden"] in self.early:
                self.tick += 1
                hidden = self.storages[self.number[spot.outside["hidden"]]]
                hidden.died, hidden.role = self.tick, Role.TEMPORARY
            return
        for name, old in spot.grads.items():
            new = self.inside[self.grads[name]]
            self._take_role(new, old)
            self.number[old] = new

    def _take_role(self, new: int, old: int) -> None:
        """A gradient that is made in forward is an activation, where it is nobody's in the end."""
        entry, before = self.storages[new], self.tape.storages[old]
        entry.role, entry.name = before.role, before.name
        if entry.role is Role.TEMPORARY and entry.born < self.ended:
            entry.role = Role.ACTIVATION

    def _play_call(self, spot: _Spot, index: int, at: Call) -> None:
        call = self.piece.calls[index]
        module = 0
        signature = self.piece.signatures[call.signature]
        stored = self.piece.storages[call.storages[-1]]
        if call.phase is Phase.BACKWARD and signature.op in STORES and stored.role is Role.GRADIENT:
            if stored.name not in spot.stores:
                return
            module = spot.stores[stored.name].module
            if self.tape.signatures[spot.stores[stored.name].signature].op == "aten.add_":
                self._add_to_gradient(spot, stored.name, call.storages[0], at)
                return
        self.tick += 1
        source = self.piece.sources[call.source]
        if source not in self.sources:
            self.sources.append(source)
        self._write(
            dataclasses.replace(
                call,
                signature=len(self.tape.signatures) + call.signature,
                storages=tuple(self._number(storage) for storage in call.storages),
                tick=self.tick, step=at.step, microbatch=at.microbatch, module=module,
                source=self.sources.index(source),
            )
        )  # fmt: skip

    def _add_to_gradient(self, spot: _Spot, name: str, new: int, at: Call) -> None:
        """Of a further microbatch: the gradient is added to the one there is, and let go."""
        call = spot.stores[name]
        gradient = self.number[call.storages[0]]
        self.tick += 1
        self._write(
            dataclasses.replace(call, tick=self.tick, storages=(gradient, self._number(new), gradient))
        )
        self.tick += 1
        self._storage(new).died = self.tick
        self.added.add(spot.grads[name])

    def _number(self, number: int) -> int:
        """The new tape's storage for one of the piece's."""
        if number not in self.inside:
            self.inside[number] = len(self.storages)
            storage = unborn(self.piece.storages[number])
            storage.name = ""
            self.storages.append(storage)
        return self.inside[number]

    def _storage(self, number: int) -> Storage:
        return self.storages[self._number(number)]

    def _birth(self, storage: Storage) -> None:
        storage.born = self.tick
        self.born.append(storage)

    def _write(self, call: Call) -> None:
        for made in self.born:
            made.call = len(self.calls)
        self.born.clear()
        self.calls.append(call)
