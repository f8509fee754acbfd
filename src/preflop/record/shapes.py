"""Shapes of each module's inputs and outputs as formulas in batch and sequence, and broadcasts by accident.

The model is recorded at several coprime sizes. A size that is the same everywhere is a constant; any
other must be a formula in batch and sequence that passes through all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from preflop.errors import BadSubject, PreflopError
from preflop.record.prepare import batch_text, map_tensors, tensors_of
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject
from preflop.tape.events import Phase, Signature, Tape
from preflop.tape.formula import Point, SizeFormula, fit

Shape = tuple[int, ...]

# Coprime with each other, and with what models are made of (multiples of 2).
_BATCHES, _SEQUENCES = (3, 5, 7), (7, 11, 13)
_BROADCASTING = {"aten.add", "aten.sub", "aten.mul", "aten.div", "aten.maximum", "aten.minimum", "aten.pow"}


@dataclass(frozen=True, slots=True)
class NamedShape:
    """One tensor that a module takes or gives."""

    sizes: tuple[SizeFormula | None, ...]
    """None: a size that is no formula in batch and sequence."""
    seen: tuple[Shape, ...]
    """The shape at each of the recorded sizes."""
    dtype: str

    @property
    def text(self) -> str:
        """As people write it: "(batch, seq, 768)"."""
        inner = ", ".join("?" if size is None else size.text for size in self.sizes)
        return f"({inner}{',' if len(self.sizes) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class ModuleShapes:
    """What one module takes and gives, at its first call."""

    name: str
    kind: str
    """Class name."""
    inputs: tuple[NamedShape, ...]
    outputs: tuple[NamedShape, ...]


@dataclass(frozen=True, slots=True)
class Accident:
    """A place that depends on two sizes being equal by accident."""

    source: str
    module: str
    what: str


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shape contracts of a model."""

    points: tuple[Point, ...]
    """(batch, sequence) of each recording."""
    modules: tuple[ModuleShapes, ...]
    accidents: tuple[Accident, ...]


@dataclass(slots=True)
class _Seen:
    """Shapes at one recording: module -> (class, inputs, outputs), as (shape, dtype)."""

    modules: dict[str, tuple[str, list[tuple[Shape, str]], list[tuple[Shape, str]]]] = field(
        default_factory=dict
    )
    tape: Tape | None = None


def shapes(subject_at: Callable[[int, int], Subject], asked: Point, *, sequence: bool) -> Shapes:
    """Shape contracts of what `subject_at(batch, sequence)` makes.

    Args:
        asked: the sizes that the user runs: where those work and coprime ones do not, equal sizes are
            an accident.
        sequence: whether there is a sequence to vary.

    Raises:
        PreflopError: the model does not run at the sizes asked for.
    """
    at_home = _seen(subject_at(*asked))
    points = _points(asked, sequence)
    found: list[_Seen] = []
    for point in points:
        try:
            found.append(_seen(subject_at(*point)))
        except PreflopError as error:
            if not any(words in str(error) for words in _MUST_MATCH):
                raise _other_sizes(point, error) from error
            return Shapes((asked,), _modules([at_home], (asked,)), (_failed(point, error),))
    every, sizes = [at_home, *found], (asked, *points)
    return Shapes(sizes, _modules(every, sizes), tuple(_accidents(every, sizes)))


# What torch says when two sizes that should agree do not.
_MUST_MATCH = (
    "must match the size",
    "must match the existing size",
    "shapes cannot be multiplied",
    "broadcast",
)


def _other_sizes(point: Point, error: PreflopError) -> BadSubject:
    return BadSubject(
        f"the model runs at the sizes asked for, not at batch {point[0]} and sequence {point[1]}: its shapes "
        f"cannot be told from several sizes.\n  {error}"
    )


def _points(asked: Point, sequence: bool) -> tuple[Point, ...]:
    if not sequence:
        return tuple((batch, asked[1]) for batch in _BATCHES)
    pairs = [(3, 7), (5, 7), (3, 11), (5, 11), (7, 13)]
    return tuple(pairs)


def resized(batch: Any, point: Point, asked: Point) -> Any:
    """A batch of tensors with its leading size, and its sequence, changed: values are repeated.

    The first axis of every tensor is the batch where it has that size; the second of whole numbers is
    the sequence.
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach()
        if made.ndim and made.shape[0] == asked[0]:
            made = _along(made, 0, point[0])
        if made.ndim > 1 and made.shape[1] == asked[1] and not made.is_floating_point():
            made = _along(made, 1, point[1])
        return made

    return map_tensors(change, batch)


def _along(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    return tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])


# ------------------------------------------------------------------------------------------- watching


def _seen(subject: Subject) -> _Seen:
    seen = _Seen()
    with _watching(seen):
        seen.tape = record_subject(subject)
    return seen


@contextmanager
def _watching(seen: _Seen) -> Iterator[None]:
    """Notes shapes at each module's first call, for the time of the recording."""
    names: dict[int, str] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is None or name in seen.modules:
            return
        given = [*_tensors(inputs), *_tensors(_keywords(module))]
        seen.modules[name] = (type(module).__name__, given, _tensors(output))

    def enter(module: nn.Module, _: Any) -> None:
        if not names:
            names.update({id(child): name for name, child in module.named_modules()})

    handles = [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(note),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keywords(module: nn.Module) -> Any:
    """Keyword arguments of the call that this hook is called for: a global hook is not given them."""
    frame = sys._getframe(2)
    return frame.f_locals.get("kwargs", {}) if frame.f_code.co_name in ("inner", "_call_impl") else {}


def _tensors(value: Any) -> list[tuple[Shape, str]]:
    if isinstance(value, torch.Tensor):
        return [(tuple(value.shape), str(value.dtype).removeprefix("torch."))]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _tensors(part)]
    return []


# ------------------------------------------------------------------------------------------- formulas


def _modules(found: Sequence[_Seen], points: Sequence[Point]) -> tuple[ModuleShapes, ...]:
    modules = []
    for name, (kind, inputs, outputs) in found[0].modules.items():
        others = [seen.modules[name] for seen in found if name in seen.modules]
        if len(others) != len(found):
            continue
        taken = _named([other[1] for other in others], len(inputs), points)
        given = _named([other[2] for other in others], len(outputs), points)
        modules.append(ModuleShapes(name, kind, taken, given))
    return tuple(modules)


def _named(
    found: Sequence[list[tuple[Shape, str]]], count: int, points: Sequence[Point]
) -> tuple[NamedShape, ...]:
    if any(len(tensors) != count for tensors in found):
        return ()
    return tuple(_one([tensors[index] for tensors in found], points) for index in range(count))


def _one(tensors: Sequence[tuple[Shape, str]], points: Sequence[Point]) -> NamedShape:
    seen = tuple(shape for shape, _ in tensors)
    axes = {len(shape) for shape in seen}
    if len(axes) != 1:
        return NamedShape((), seen, tensors[0][1])
    sizes = tuple(fit(points, [shape[axis] for shape in seen]) for axis in range(axes.pop()))
    return NamedShape(sizes, seen, tensors[0][1])


# ------------------------------------------------------------------------------------------ accidents


def _failed(point: Point, error: PreflopError) -> Accident:
    """It runs at the sizes asked for and not at coprime ones: something needs them to agree."""
    first, *rest = str(error).splitlines()
    said = " ".join([first, *(line.strip() for line in rest)])
    where = f"batch {point[0]}, sequence {point[1]}"
    return Accident("", "", f"does not run at {where}, while the sizes asked for do: {said}")


def _accidents(found: Sequence[_Seen], points: Sequence[Point]) -> Iterator[Accident]:
    """Operators that broadcast one axis of batch or sequence against another: (batch, 1) with (batch,)
    gives (batch, batch), the wrong answer that no error reports."""
    tapes = [seen.tape for seen in found if seen.tape is not None]
    first = tapes[0]
    told: set[tuple[str, str]] = set()
    calls = [tape.steady() for tape in tapes]
    if len({len(of) for of in calls}) != 1:
        return
    for index, call in enumerate(calls[0]):
        signatures = [tape.signatures[of[index].signature] for tape, of in zip(tapes, calls, strict=True)]
        if call.phase is not Phase.FORWARD or not _broadcasts(signatures):
            continue
        text = _doubled(signatures, points)
        source = first.sources[call.source]
        if text is not None and (source, text) not in told:
            told.add((source, text))
            yield Accident(source, first.modules[call.module], text)


def _broadcasts(signatures: Sequence[Signature]) -> bool:
    sig = signatures[0]
    if sig.op.rstrip("_") not in _BROADCASTING or len(sig.inputs) != 2:
        return False
    return {meta.shape for meta in sig.inputs} != {sig.inputs[0].shape} and "float" in sig.inputs[0].dtype


def _doubled(signatures: Sequence[Signature], points: Sequence[Point]) -> str | None:
    """The result has one varying size on two axes, and each operand has it on one only."""
    result = _formulas([sig.outputs[0].shape for sig in signatures], points)
    operands = [_formulas([sig.inputs[number].shape for sig in signatures], points) for number in range(2)]
    varying = [size for size in result if size is not None and size.depends]
    for size in varying:
        if result.count(size) > 1 and all(operand.count(size) == 1 for operand in operands):
            shown = [_text(operand) for operand in operands]
            name = signatures[0].op.removeprefix("aten.")
            return f"{name} broadcasts {shown[0]} with {shown[1]} to {_text(result)}: one axis against itself"
    return None


def _formulas(seen: Sequence[Shape], points: Sequence[Point]) -> list[SizeFormula | None]:
    return [fit(points, [shape[axis] for shape in seen]) for axis in range(len(seen[0]))]


def _text(sizes: Sequence[SizeFormula | None]) -> str:
    inner = ", ".join("?" if size is None else size.text for size in sizes)
    return f"({inner}{',' if len(sizes) == 1 else ''})"


def _check_not_empty(batch: Any) -> None:
    """Sizes are told by their names from a batch that has some.

    Raises:
        BadSubject: not one of its tensors has an element.
    """
    tensors = list(tensors_of(batch))
    if tensors and all(not tensor.numel() for tensor in tensors):
        raise BadSubject(
            f"the batch is empty: {batch_text(batch)} has no element.\n"
            "  Give at least one sample of at least one position."
        )


def need_sizes(batch: Any) -> Point:
    """Batch and sequence of a batch of tensors: the leading size, and the second of whole numbers.

    Raises:
        BadSubject: the tensors have no leading size in common.
    """
    leading: set[int] = set()
    second: set[int] = set()

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim:
            leading.add(tensor.shape[0])
        if tensor.ndim > 1 and not tensor.is_floating_point():
            second.add(tensor.shape[1])
        return tensor

    _check_not_empty(batch)
    map_tensors(look, batch)
    if len(leading) != 1:
        raise BadSubject(
            f"the batch's tensors have the leading sizes {sorted(leading)}.\n"
            "  Needed: one, which is the batch, to see which sizes follow it."
        )
    return leading.pop(), second.pop() if len(second) == 1 else 1
