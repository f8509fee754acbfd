"""Small tapes made by hand, so that ledgers, reports and files are tested without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from preflop.tape.events import (
    Call,
    Mark,
    ParameterInfo,
    Phase,
    Ref,
    Role,
    Signature,
    Storage,
    SubjectInfo,
    Tape,
    TensorMeta,
)
from preflop.units import DTYPE_BYTES


def meta(shape: tuple[int, ...], dtype: str = "float32") -> TensorMeta:
    """A contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorMeta(tuple(shape), tuple(reversed(strides)), 0, dtype)


@dataclass
class Builder:
    """Writes a tape event by event, ticking as the recorder does: births, then the call, then deaths."""

    tape: Tape = field(default_factory=lambda: Tape(subject=None))
    tick: int = 0
    step: int = 0
    microbatch: int = 0
    phase: Phase = Phase.OTHER

    def tensor(self, shape: tuple[int, ...], role: Role, dtype: str = "float32", name: str = "") -> int:
        """A storage that no call made; born now (at 0 before the first tick)."""
        size = meta(shape, dtype).elements * DTYPE_BYTES[dtype]
        self.tape.storages.append(Storage(size, dtype, shape, self.tick, None, role, name))
        return len(self.tape.storages) - 1

    def call(
        self,
        op: str,
        inputs: list[int],
        outputs: list[tuple[int, ...]] | None = None,
        *,
        role: Role = Role.TEMPORARY,
        module: str = "",
        source: str = "",
        dtype: str | None = None,
        writes: tuple[int, ...] = (),
        kwargs: tuple[tuple[str, object], ...] = (),
    ) -> list[int]:
        """One operator call; returns the storages it made."""
        ins = [meta(self.tape.storages[i].shape, self.tape.storages[i].dtype) for i in inputs]
        kind = dtype or (ins[0].dtype if ins else "float32")
        outs = [meta(shape, kind) for shape in outputs or []]
        made = []
        for out in outs:
            self.tick += 1
            number = len(self.tape.calls)
            self.tape.storages.append(
                Storage(out.bytes, kind, out.shape, self.tick, None, role, "", number)
            )
            made.append(len(self.tape.storages) - 1)
        self.tick += 1
        signature = Signature(
            op, "default", tuple(Ref(i) for i in range(len(ins))), kwargs, tuple(ins), tuple(outs),
            (None,) * len(outs), writes,
        )  # fmt: skip
        self.tape.calls.append(
            Call(
                self._index(self.tape.signatures, signature), (*inputs, *made), self.tick, self.phase,
                self.step, self.microbatch, self._module(module), self._index(self.tape.sources, source),
            )
        )  # fmt: skip
        return made

    def free(self, *storages: int) -> None:
        for storage in storages:
            self.tick += 1
            self.tape.storages[storage].died = self.tick

    def mark(self, name: str) -> None:
        self.tick += 1
        self.tape.marks.append(Mark(self.tick, name, self.step, self.microbatch))

    def parameter(
        self, name: str, shape: tuple[int, ...], dtype: str = "float32", kind: str = "Linear"
    ) -> int:
        storage = self.tensor(shape, Role.PARAMETER, dtype, name)
        self.tape.parameters.append(ParameterInfo(name, shape, dtype, True, storage, kind))
        return storage

    def _module(self, path: str) -> int:
        index = self._index(self.tape.modules, path)
        while len(self.tape.module_types) < len(self.tape.modules):
            self.tape.module_types.append("Linear")
        return index

    @staticmethod
    def _index(table: list, value: object) -> int:
        if value not in table:
            table.append(value)
        return table.index(value)


def linear_step(
    *, tokens: int = 512, width: int = 256, device: str = "cpu", precision: str = "fp32"
) -> Tape:
    """Two SGD-with-momentum steps of one linear layer: forward mm, its weight gradient, the update.

    With fp32, in bytes: weight w = 4·width², input x = output y = 4·tokens·width. The steady peak is in
    the update, whose temporary is as large as the weight, or in backward, where y and the gradient live.
    """
    b = Builder()
    b.tape.subject = SubjectInfo(
        "linear", precision, "sgd", 1, "none", f"1 x {tokens} tokens", tokens, 1, device, "2.13.0"
    )
    weight = b.parameter("fc.weight", (width, width))
    x = b.tensor((tokens, width), Role.INPUT, name="x")
    state = -1
    for step in range(2):
        b.step = step
        b.mark("step")
        b.phase = Phase.FORWARD
        (y,) = b.call("aten.mm", [x, weight], [(tokens, width)], role=Role.ACTIVATION, module="fc",
                      source="model.py:7")  # fmt: skip
        b.mark("forward_end")
        b.phase = Phase.BACKWARD
        (grad,) = b.call("aten.mm", [x, y], [(width, width)], role=Role.GRADIENT, module="fc",
                         source="model.py:7")  # fmt: skip
        # The operands of a real weight gradient are (width, tokens) and (tokens, width).
        _transpose_first_input(b.tape)
        b.free(y)
        b.mark("backward_end")
        b.phase = Phase.OPTIMIZER
        if step == 0:
            (state,) = b.call("aten.clone", [grad], [(width, width)], role=Role.OPTIMIZER_STATE)
        (scaled,) = b.call("aten.mul", [state], [(width, width)])
        b.call("aten.add_", [weight, scaled], writes=(0,))
        b.free(scaled)
        b.mark("optimizer_end")
        b.free(grad)
        b.mark("step_end")
    b.tape.steps = 2
    return b.tape


def _transpose_first_input(tape: Tape) -> None:
    call = tape.calls[-1]
    old = tape.signatures[call.signature]
    first = old.inputs[0]
    turned = TensorMeta(first.shape[::-1], first.stride[::-1], 0, first.dtype)
    inputs = (turned, *old.inputs[1:])
    new = Signature(old.op, old.overload, old.args, old.kwargs, inputs, old.outputs, old.aliases, old.writes)
    tape.signatures[call.signature] = new
