"""What a step keeps whatever its batch, and which precisions and optimizers would make that smaller.

Arithmetic on bytes per parameter alone: `plan/what_if.py` prices each change whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.errors import UnknownOptimizer
from preflop.optimizers import IN_BACKWARD, find_optimizer
from preflop.plan.what_if import OPTIMIZERS_TRIED
from preflop.precision import PRECISIONS, Precision

if TYPE_CHECKING:
    from preflop.account import Memory
    from preflop.tape.events import SubjectInfo


def room_bytes(memory: Memory) -> int:
    """What a device that was found too small or large enough has beside the context and NCCL."""
    return memory.needs_bytes + (memory.spare_bytes or 0) - memory.outside_bytes


@dataclass(frozen=True, slots=True)
class Smaller:
    """Names of single changes that keep fewer bytes, and whose weights, gradients and states the device holds."""

    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    in_backward: str | None
    """The given optimizer with its updates in backward, which free each gradient; None where that is no change, or
    gradients are summed over microbatches."""


def smaller(memory: Memory, subject: SubjectInfo | None) -> Smaller:
    """Precisions of fewer bytes per parameter than the given one and optimizers with fewer or smaller states.

    Left out are those whose weights, gradients and states alone are more than the device has. Nothing is named
    where the given precision is not one of Preflop's, whose bytes are not known.
    """
    precision = PRECISIONS.get(subject.precision) if subject is not None else None
    if precision is None:
        return Smaller((), (), None)
    own = _optimizer(memory, subject)
    in_backward = f"{subject.optimizer}{IN_BACKWARD}" if subject and own.can_free_gradients else None
    room = room_bytes(memory) - memory.columns.buffers.bytes

    def kept(precision: Precision, states: int, quantised: bool) -> int:
        trained = precision.gradient_bytes + precision.state_bytes(states, quantised=quantised)
        return precision.parameter_bytes * memory.columns.parameters.elements + trained * own.trained

    limit = min(kept(precision, own.states, own.quantised) - 1, room)
    without_gradients = kept(precision, own.states, own.quantised) - precision.gradient_bytes * own.trained
    tried = [find_optimizer(name) for name in OPTIMIZERS_TRIED]
    return Smaller(
        tuple(name for name, other in PRECISIONS.items() if kept(other, own.states, own.quantised) <= limit),
        # Muon leaves some parameters to AdamW: how many, its bytes per parameter do not say.
        tuple(
            other.name
            for other in tried
            if not other.matrices_only
            and kept(precision, other.states_per_parameter, other.quantised) <= limit
        ),
        in_backward if without_gradients <= room else None,
    )


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """The given optimizer, as its bytes are counted."""

    states: int
    """Per parameter."""
    quantised: bool
    trained: int
    """Elements of the parameters that it updates."""
    can_free_gradients: bool = False
    """It is one of Preflop's, updates at the end of the step, and sums no gradients until then."""


def _optimizer(memory: Memory, subject: SubjectInfo | None) -> _Optimizer:
    """By its name, else (an optimizer of one's own) by the states that were recorded."""
    gradients, states = memory.columns.gradients.elements, memory.columns.optimizer_states.elements
    try:
        spec = find_optimizer((subject and subject.optimizer) or "")
    except UnknownOptimizer:
        return _Optimizer(states // gradients if gradients else 0, False, gradients)
    each = spec.states_per_parameter
    # Updates in backward free gradients one by one: then the states say how many are trained.
    trained = max(gradients, states // each if each else 0)
    once = subject is not None and subject.microbatches == 1
    return _Optimizer(each, spec.quantised, trained, once and not spec.in_backward)
