"""Where operator formulas are registered and looked up.

Adding an operator is one decorated function in its family's file::

    @flops("aten.mm")
    def mm(sig: Signature) -> Work: ...

A formula sees a `Signature`: shapes, strides, dtypes and scalar arguments, never data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from preflop.tape.events import Signature


class Kind(str, Enum):
    """What kind of arithmetic: the first three count towards model FLOPs, the last never does."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic of one call. 1 multiply-add = 2 FLOPs."""

    flops: int
    """By the mathematics of the call (attention in full, whatever its mask)."""
    kind: Kind
    hardware_flops: int | None = None
    """With what the kernel recomputes inside (attention backward); None: the same as `flops`."""
    attended_flops: int | None = None
    """Only the (query, key) pairs that the mask or causality leaves; None: the same as `flops`."""
    parts: tuple[Work, ...] = ()
    """For a fused operator that does several kinds of work (a whole encoder layer): its parts. They
    sum to `flops`."""
    estimate: bool = False
    """The count is a published estimate or a bound, not exact (FFT; packed sequences of unknown
    lengths). Listed beside matmul-like work even where `kind` is OTHER."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes one call reads and writes: each distinct storage range once."""

    read_bytes: int
    write_bytes: int


FlopsFormula = Callable[[Signature], Work]
FlopsOfUsedFormula = Callable[[Signature, tuple[bool, ...]], Work]
TrafficFormula = Callable[[Signature], Moved]
WorkspaceFormula = Callable[[Signature], int]

_Formula = TypeVar("_Formula", bound=Callable[..., object])

FLOPS: dict[str, FlopsFormula] = {}
FLOPS_OF_USED: dict[str, FlopsOfUsedFormula] = {}
TRAFFIC: dict[str, TrafficFormula] = {}
WORKSPACE: dict[str, WorkspaceFormula] = {}
WORKSPACE_CUDA: dict[str, WorkspaceFormula] = {}


def _register(table: dict[str, _Formula], names: tuple[str, ...], formula: _Formula) -> _Formula:
    for name in names:
        if name in table:
            raise ValueError(f"{name} already has a formula")
        table[name] = formula
    return formula


def flops(*names: str) -> Callable[[FlopsFormula], FlopsFormula]:
    """Register the FLOPs formula of operators, by name without overload ("aten.mm")."""
    return lambda formula: _register(FLOPS, names, formula)


def flops_of_used(*names: str) -> Callable[[FlopsOfUsedFormula], FlopsOfUsedFormula]:
    """Register FLOPs that depend on which outputs are used, for operators whose kernel has no output
    mask (mkldnn_rnn_layer_backward). Takes the signature and, per output, whether anything used it."""
    return lambda formula: _register(FLOPS_OF_USED, names, formula)


def traffic(*names: str) -> Callable[[TrafficFormula], TrafficFormula]:
    """Register bytes moved, where the general rule (inputs read, fresh or written outputs written)
    does not hold: gathers, scatters, views."""
    return lambda formula: _register(TRAFFIC, names, formula)


def workspace(*names: str) -> Callable[[WorkspaceFormula], WorkspaceFormula]:
    """Register bytes that the CPU kernel allocates inside itself and frees before it returns: they
    never reach the dispatcher. Each rule states its reason and was measured with torch's profiler."""
    return lambda formula: _register(WORKSPACE, names, formula)


def workspace_cuda(*names: str) -> Callable[[WorkspaceFormula], WorkspaceFormula]:
    """The same for the CUDA kernel, for tapes that were recorded as a GPU runs them. Each rule cites the
    kernel's source, or says that it is an assumption."""
    return lambda formula: _register(WORKSPACE_CUDA, names, formula)
