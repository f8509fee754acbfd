"""Where on an annotated tape chosen modules run: their forward, and the stretch of backward that is theirs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from preflop.tape import lives
from preflop.tape.events import Call, Phase, Tape
from preflop.tape.replay import BIRTH, CALL, events_of
from preflop.tape.stack import Refused
from preflop.transforms.held import inside, is_note

SUMS = ("aten.add", "aten.add_")
"""How the engine adds the gradients of a tensor that is used twice."""


@dataclass(eq=False, slots=True)
class Span:
    """One call of a chosen module in which gradients are wanted."""

    module: int
    source: int
    """The line that called it."""
    given: tuple[int, ...]
    """Storages of the tensors that it was given by position."""
    hidden: tuple[int, ...]
    """Of those that it was given by keyword or within a container."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """What happens in its forward, notes included."""
    returned: tuple[int, ...] = ()
    born: set[int] = field(default_factory=set)
    """Storages that its forward makes."""
    backward: range = range(0)
    """Its calls in backward, and the notes among them."""
    coming: tuple[int, ...] = ()
    """Storages of the gradients that come in."""


def spans_of(tape: Tape, chosen: set[int]) -> list[Span]:
    """The calls of chosen modules in which gradients are wanted, in order.

    Raises:
        Refused: one runs inside another, or several times in a microbatch; or backward does not have it in one
            piece.
    """
    spans: list[Span] = []
    places: dict[tuple[int, int, int], Span] = {}
    span: Span | None = None
    for kind, index in events_of(tape):
        if span is not None:
            span.events.append((kind, index))
            if kind == BIRTH:
                span.born.add(index)
        if kind != CALL or tape.calls[index].module not in chosen:
            continue
        call = tape.calls[index]
        signature = tape.signatures[call.signature]
        if signature.op == lives.EXIT and span is not None:
            span.events.pop()
            span.returned = call.storages
            spans.append(span)
            span = None
        elif signature.op == lives.ENTER and signature.args[0]:
            if span is not None:
                raise Refused("one chosen module runs inside another")
            span = _begun(tape, call)
            if places.setdefault((call.module, call.step, call.microbatch), span) is not span:
                raise Refused("a chosen module runs several times")
    _find_backward(tape, chosen, places)
    return spans


def _begun(tape: Tape, call: Call) -> Span:
    """A span at its `life.enter`."""
    direct, wanting = lives.given_directly(tape.signatures[call.signature], len(call.storages))
    if wanting:
        raise Refused("a chosen module is given, by keyword or in a container, a tensor that wants a gradient")
    given = tuple(s for s, is_direct in zip(call.storages, direct) if is_direct)
    return Span(call.module, call.source, given, tuple(s for s in call.storages if s not in given))


def _find_backward(tape: Tape, chosen: set[int], places: dict[tuple[int, int, int], Span]) -> None:
    """Each span's stretch of backward, and the gradients that come into it."""
    outer = {number: _outer(tape, number, chosen) for number in range(len(tape.modules))}
    found: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(tape.calls):
        if call.phase is Phase.BACKWARD and not is_note(tape.signatures[call.signature].op):
            span = places.get((outer[call.module], call.step, call.microbatch))
            if span is not None:
                found[id(span)].append(index)
    last = -1
    by_start = sorted((span for span in places.values() if found[id(span)]), key=lambda s: found[id(s)][0])
    for span in by_start:
        indices = found[id(span)]
        if indices[0] < last:
            raise Refused("backward leaves a chosen module and comes back to it")
        last = indices[-1]
        span.backward = range(indices[0], last + 1)
        span.coming = _coming(tape, span)


def _outer(tape: Tape, number: int, chosen: set[int]) -> int:
    """The chosen module that a module is, or is inside; -1 for none."""
    return next((outer for outer in chosen if inside(tape, number, outer)), -1)


def _coming(tape: Tape, span: Span) -> tuple[int, ...]:
    """The gradients that a stretch of backward reads and does not make."""
    reads: Counter[int] = Counter()
    added: Counter[int] = Counter()
    first = tape.calls[span.backward.start]
    for index in span.backward:
        call = tape.calls[index]
        signature = tape.signatures[call.signature]
        for place, storage in enumerate(call.storages[: len(signature.inputs)]):
            maker = tape.storages[storage].call
            if maker < 0 or maker in span.backward or tape.calls[maker].phase is not Phase.BACKWARD:
                continue
            made = tape.calls[maker]
            if (made.step, made.microbatch) == (first.step, first.microbatch):
                reads[storage] += 1
                added[storage] += signature.op in SUMS and place == 0
    inside = _hands_through(tape, span)
    for storage, count in reads.items():
        if count == added[storage] or (added[storage] and not inside) or tape.storages[storage].name:
            raise Refused("what a chosen module was given, or a parameter of its, is used elsewhere too")
    return tuple(reads)


def _hands_through(tape: Tape, span: Span) -> bool:
    """Whether the gradient that comes in is itself that of a tensor which is used twice in the span: by a sum
    (x + f(x)) the gradient of what is returned reaches both, unchanged."""
    read: Counter[int] = Counter()
    terms: dict[int, set[int]] = defaultdict(set)
    for kind, index in span.events:
        if kind != CALL:
            continue
        call = tape.calls[index]
        signature = tape.signatures[call.signature]
        if is_note(signature.op):
            continue
        reads = call.storages[: len(signature.inputs)]
        read.update(s for s, alias in zip(reads, range(len(reads))) if alias not in signature.aliases)
        if signature.op in SUMS and {meta.shape for meta in signature.inputs} == {signature.outputs[0].shape}:
            terms[call.storages[-1]].update(reads)
    look, seen = list(span.returned), set(span.returned)
    while look:
        for term in terms[look.pop()]:
            if term in span.given or read[term] > 1:
                return True
            if term not in seen:
                seen.add(term)
                look.append(term)
    return False


def floating(tape: Tape, storages: tuple[int, ...]) -> list[int]:
    """Those that hold floating or complex numbers: what autograd differentiates."""
    return [s for s in storages if tape.storages[s].dtype.startswith(("float", "bfloat", "complex"))]

