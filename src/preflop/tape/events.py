"""The dataclasses of a tape. Read this file first; every other room reads or writes these.

A tape is a list of *calls* (one per operator that reached the dispatcher) over a table of *storages*
(one per piece of memory). Time on a tape is a counter, the *tick*: each call, each birth and each
death of a storage has its own tick, so that sorting by tick replays the step exactly.

What many calls share (operator, shapes, strides, dtypes, scalar arguments) is a `Signature`, kept once.
A ledger prices each signature once and multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from preflop.errors import BadTape, described
from preflop.units import AVX512_BYTES, DTYPE_BYTES

HOST = "host"
"""Device of storages that wait in the host's memory while the rest is on a device."""


class Phase(str, Enum):
    """Which part of the step a call belongs to."""

    __hash__ = str.__hash__  # Enum's own is Python code, and a step hashes its phases a hundred thousand times

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Role(str, Enum):
    """What a storage is for. A storage has one role; the last one it had is kept."""

    __hash__ = str.__hash__

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    BUFFER = "buffer"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """How one tensor lies in its storage: sizes and strides in elements, offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    """torch's name without the module: "float32", "bfloat16", "int64"."""
    device: str = "cpu"

    @property
    def elements(self) -> int:
        """Number of elements of the tensor (not of its storage)."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the elements seen through this tensor (an expanded one counts repeats)."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an argument list where a tensor stood: the index into `Signature.inputs`."""

    index: int


@dataclass(frozen=True, slots=True)
class Signature:
    """What one kind of call looks like. `args` and `kwargs` hold numbers, strings, None, bools,
    tuples of these, and `Ref`s for tensors, exactly as the operator's schema has them (defaults that
    the caller left out are absent)."""

    op: str
    """Namespace and name without overload: "aten.mm", "aten._scaled_dot_product_flash_attention"."""
    overload: str
    """"default", "Tensor", "dim_IntList"..."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorMeta, ...]
    """Every tensor among args and kwargs, in order of appearance (lists flattened)."""
    outputs: tuple[TensorMeta, ...]
    """Every tensor returned, in order (nested results flattened, None left out)."""
    aliases: tuple[int | None, ...]
    """Per output: the input whose storage it shares (a view, or the input itself), else None (fresh)."""
    writes: tuple[int, ...]
    """Inputs that the call mutates, by the operator's schema."""
    attended_pairs: int | None = None
    """For attention with a mask whose values were known while recording: (query, key) pairs attended,
    summed over batch (not over heads) as broadcast to the call. None: not known, or no mask."""


@dataclass(slots=True)
class Call:
    """One operator call. Not changed once it is written; not frozen, because a frozen one takes six times as
    long to make and a tape has a hundred thousand."""

    signature: int
    """Index into `Tape.signatures`."""
    storages: tuple[int, ...]
    """Storage ids of the signature's inputs, then of its outputs."""
    tick: int
    phase: Phase
    step: int
    """Optimizer step, from 0. The last step is the steady state; ledgers read that one."""
    microbatch: int
    module: int
    """Index into `Tape.modules`: dotted path of the module that ran it ("" is the root)."""
    source: int
    """Index into `Tape.sources`: "file.py:12" of the user's line, or "" where there is none."""


@dataclass(slots=True)
class Storage:
    """One piece of memory."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of the first tensor that showed it."""
    born: int
    """Tick. 0: was there before the first recorded step."""
    died: int | None
    """Tick. None: outlives the recording."""
    role: Role
    name: str = ""
    """Name of the parameter, buffer, state or input, where it has one."""
    call: int = -1
    """Index of the call that made it, -1 if none did."""
    device: str = "cpu"

    @property
    def elements(self) -> int:
        """Elements that fit in it."""
        return self.bytes // DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the loop. Names: "step" (a step begins), "forward_end" (the loss is known, backward
    has not begun), "backward_end", "optimizer_end" (gradients are still there), "step_end"."""

    tick: int
    name: str
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One distinct parameter (tied names appear once)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    storage: int
    module_type: str
    """Class name of the module that holds it: "Embedding", "Linear"."""


@dataclass(frozen=True, slots=True)
class SubjectInfo:
    """What was recorded, as the report shows it."""

    model: str
    precision: str
    optimizer: str | None
    microbatches: int
    recompute: str
    batch: str
    """Words: "8 x 1024 tokens", "input_ids (2, 7) int64"."""
    tokens: int | None
    """Tokens (or, for images, None) of one microbatch on one device."""
    samples: int | None
    device: str
    """Device id whose rules the recording followed, or "cpu"."""
    torch_version: str = ""
    cpu_threads: int = 1
    """Threads of the CPU that recorded: some CPU kernels take scratch once per thread."""
    cpu_vector_bytes: int = AVX512_BYTES
    """Width of a vector register of the CPU that recorded, 64 with AVX-512 and 32 with AVX2: oneDNN's
    layouts of convolutions are made of blocks that fill one."""


@dataclass(slots=True)
class Tape:
    """A recorded training run of (usually) two optimizer steps."""

    subject: SubjectInfo | None
    signatures: list[Signature] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    modules: list[str] = field(default_factory=lambda: [""])
    module_types: list[str] = field(default_factory=lambda: [""])
    """Class name of each module of `modules`."""
    sources: list[str] = field(default_factory=lambda: [""])
    marks: list[Mark] = field(default_factory=list)
    parameters: list[ParameterInfo] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    steps: int = 1
    """Number of optimizer steps recorded. The last one is the steady state."""

    def steady(self) -> list[Call]:
        """The calls of the last recorded step."""
        last = self.steps - 1
        return [call for call in self.calls if call.step == last]


def require_tape(value: Any, who: str) -> None:
    """Refuse what is no tape, where a tape is read.

    Args:
        who: the function that was called, for the message.

    Raises:
        BadTape: it is something else; the message says where a tape comes from.
    """
    if isinstance(value, Tape):
        return
    held = isinstance(getattr(value, "tape", None), Tape)
    how = (
        "Give its .tape." if held else "preflop.record(fn, ...) makes one; so does preflop.account(...).tape."
    )
    raise BadTape(f"{who} needs a tape, and was given {described(value)}.\n  {how}")
