"""What the ranks of a shared step send each other: its collectives, in order."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.ops.collective import ALL_GATHER, COLLECTIVES
from preflop.tape.events import Phase, Tape


@dataclass(frozen=True, slots=True)
class Message:
    """One collective."""

    op: str
    phase: Phase
    bytes: int
    """Of the whole tensor: gathered, before it is scattered, or reduced."""


@dataclass(frozen=True, slots=True)
class Communication:
    """Collectives of the steady step."""

    ranks: int | None
    """None: there are none."""
    microbatches: int
    messages: tuple[Message, ...]

    @property
    def bytes(self) -> int:
        """Of all whole tensors together."""
        return sum(message.bytes for message in self.messages)


def communication(tape: Tape) -> Communication:
    """The collectives that a transform put on the tape.

    >>> communication(Tape(subject=None))
    Communication(ranks=None, microbatches=0, messages=())

    Does not count: what a model sends by itself.
    """
    messages = []
    ranks = None
    microbatches = 0
    ops = [signature.op for signature in tape.signatures]
    if not any(op in COLLECTIVES for op in ops):
        return Communication(None, 0, ())
    for call in tape.steady():
        microbatches = max(microbatches, call.microbatch + 1)
        if ops[call.signature] in COLLECTIVES:
            signature = tape.signatures[call.signature]
            ranks = int(signature.args[0])
            whole = signature.outputs if signature.op == ALL_GATHER else signature.inputs
            messages.append(Message(signature.op, call.phase, sum(meta.bytes for meta in whole)))
    return Communication(ranks, microbatches, tuple(messages))
