"""The account of a step: every number the report shows, as frozen dataclasses.

`account_tape` reads a tape with the ledgers and, where there is a device, times it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from preflop.tape.events import Tape


@dataclass(frozen=True, slots=True)
class Column:
    """One of the memory columns. Bytes are per storage; elements and bytes per dtype."""

    bytes: int
    elements: int
    dtypes: dict[str, tuple[int, int]]
    """dtype -> (bytes, elements)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The memory table: what the step keeps, each column at the moment when it is complete."""

    parameters: Column
    gradients: Column
    optimizer_states: Column
    activations: Column
    """What forward leaves alive for backward (at the end of the last microbatch's forward)."""
    buffers: Column
    inputs: Column


@dataclass(frozen=True, slots=True)
class AtPeak:
    """Bytes alive at the peak; they sum to it exactly."""

    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    temporaries: int
    buffers: int
    inputs: int
    workspace: int
    """What the kernel running at the peak takes inside itself."""


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Bytes alive after one event of the steady step, by category (same names as `AtPeak`)."""

    tick: int
    phase: str
    alive: AtPeak


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive through the step, and whether they fit."""

    peak_bytes: int
    """Peak of the steady-state step (optimizer states exist)."""
    first_step_peak_bytes: int
    peak_phase: str
    peak_op: str
    """The operator running at the peak."""
    peak_module: str
    peak_source: str
    columns: Columns
    at_peak: AtPeak
    timeline: Sequence[TimelinePoint]
    """The steady step, one point per event."""
    lasting_bytes: int
    """Most that is alive whatever the batch: parameters, gradients, optimizer states and buffers."""
    lasting_and_optimizer_bytes: int
    """The same with what the optimizer makes and frees besides."""
    reserved_bytes: int | None = None
    """What the device's caching allocator would have reserved; None on a CPU."""
    allocated_bytes: int | None = None
    """Peak of what it would have handed out, rounded, with workspaces: what
    `torch.cuda.max_memory_allocated` reads. None on a CPU."""
    context_bytes: int | None = None
    """CUDA context and kernels, outside the allocator: measured, or a stand-in that assumptions name."""
    communicator_bytes: int | None = None
    """What NCCL holds for the ranks' collectives, outside the allocator: measured elsewhere, with bounds in the
    assumptions. None without collectives."""
    fits: bool | None = None
    spare_bytes: int | None = None
    """Usable device memory minus what is needed; negative when it does not fit."""
    expandable_spare_bytes: int | None = None
    """The same with expandable segments, where the step does not fit only for how the allocator places its
    blocks; None elsewhere."""

    @property
    def gapless_spare_bytes(self) -> int | None:
        """What would be to spare if the allocator left no gaps between what it hands out: where this is negative,
        no setting of it helps. None where no memory is known."""
        if self.spare_bytes is None or self.allocated_bytes is None or self.reserved_bytes is None:
            return self.spare_bytes
        return self.spare_bytes + self.reserved_bytes - self.allocated_bytes

    @property
    def needs_bytes(self) -> int:
        """What `fits` is judged by: what the allocator reserves (the peak, where none was replayed), the
        context, and NCCL."""
        reserved = self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes
        return reserved + self.outside_bytes

    @property
    def outside_bytes(self) -> int:
        """What is held outside the allocator: the context and NCCL."""
        return (self.context_bytes or 0) + (self.communicator_bytes or 0)


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why the counted FLOPs differ from a rule of thumb."""

    flops: int
    """Counted minus rule: positive where the rule forgets work, negative where it invents some."""
    why: str


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of the step, by phase and by kind, with the rule of thumb beside them."""

    forward: int
    backward: int
    recompute: int
    optimizer: int
    total: int
    """Sum of the four phases and of `by_kind` (element-wise work included, as `other`)."""
    by_kind: dict[str, int]
    """matmul, attention, convolution, other."""
    model: int
    """Forward + backward of matmul, attention and convolution; no recompute. What MFU counts."""
    hardware: int
    """model + recomputed work + what attention kernels recompute inside. What HFU counts."""
    six_nd: int | None
    """6 x parameters x tokens of the step; None where there are no tokens."""
    attended: int
    """model, counting only the attended pairs of causal or masked attention."""
    differences: tuple[Difference, ...]
    """Why `model` differs from `six_nd`, largest first; they sum to `model - six_nd` exactly."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Operators that could not be priced -> calls."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that the step moves, as ideal kernels without fusion would."""

    read_bytes: int
    write_bytes: int
    arithmetic_intensity: float | None
    """FLOPs per byte of the step; None when nothing moves."""


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """Calls of the steady step that are alike: same operator, phase, module (layer numbers replaced
    by *), line, shapes and dtype. Figures are for all `calls` together."""

    op: str
    phase: str
    module: str
    source: str | None
    calls: int
    shapes: str
    """"(8192, 768) x (768, 2304) -> (8192, 2304)"."""
    dtype: str
    flops: int
    read_bytes: int
    write_bytes: int
    arithmetic_intensity: float | None
    bound: str | None
    """"compute" or "bandwidth"; None without a device."""
    time_s: float | None
    """Lower bound: max(FLOPs / peak, bytes / bandwidth); None without a device."""
    kind: str = "other"
    """matmul, attention, convolution or other."""
    attended_flops: int | None = None
    """Only the attended pairs of causal or masked attention; None: the same as `flops`. Lower bounds of
    time use it: a kernel may skip the rest."""
    variant: str = ""
    """Which kernel of the operator its arguments choose (`ops.variants`): a matmul's layout, GELU's approximation."""
    tensors: int = 1
    """How many tensors one call works through one by one: those of a foreach or fused optimizer's list."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of the step on the device: bounds and expectation. All None without a device."""

    lower_s: float | None
    expected_s: float | None
    upper_s: float | None
    bound: str | None
    """What most of the step's time is: "compute" or "bandwidth" (by share of `lower_s`), or "launch"
    where the host cannot launch kernels as fast as the device runs them."""
    mfu: float | None
    """Model FLOPs / (expected_s x dense peak), else of lower_s (then an upper bound; `mfu_basis`)."""
    mfu_basis: str | None
    tokens_per_s: float | None
    peak_flops_per_s: float | None
    peak_dtype: str | None


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One copy that nobody asked for by name: where, why, how many bytes, and what to write instead."""

    kind: str
    source: str | None
    module: str
    calls: int
    bytes: int
    """Written, by all calls together."""
    reason: str
    instead: str | None
    phase: str = ""
    read_bytes: int = 0
    kernel: bool = True
    """torch's profiler shows an aten::copy_ for it (not for cat, stack and masks written out)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the report says of the device."""

    id: str
    name: str
    memory_bytes: int | None
    """What torch reports as total memory where known, else the capacity as sold."""
    memory_basis: str
    bandwidth_bytes_per_s: float | None
    peak_flops_per_s: dict[str, float]
    """dtype -> dense peak."""
    alloc_conf: str = ""
    """What PYTORCH_CUDA_ALLOC_CONF sets there."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A run that others measured and published, and what Preflop says of it."""

    id: str
    source: str
    model: str
    device: str
    setting: str
    measured: float
    """Bytes or seconds."""
    predicted: float
    error: float
    """Relative: 0.1 is ten percent too much."""


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """How far published runs of this kind were from their predictions, put around this one."""

    low: float
    high: float
    """Between them lie `share` of the measurements, if this run errs as those did."""
    share: float
    rows: int
    sources: int
    kind: str
    """Which published rows, in words."""
    median_abs_error: float
    under: float
    """Share of those rows that were predicted too small."""
    nearest: tuple[PublishedRow, ...]
    """Training steps of whole models, the most alike first; none where there are no tokens to compare by."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one figure stands on."""

    figure: str
    how: str
    """"counted", "rule" (restated from a kernel's or allocator's source), "measured rates" or "assumed"."""
    words: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the figures stand on, and what published runs say of them."""

    standing: tuple[Standing, ...]
    memory: ErrorBar | None
    """Around the allocated peak; None where no published row is of this kind."""
    time: ErrorBar | None
    """Around the expected time."""


@dataclass(frozen=True)
class Priced:
    """The figures of one training step: what choices are compared by."""

    tape: Tape
    device: DeviceFacts | None
    memory: Memory
    flops: Flops
    traffic: Traffic
    time: Time
    operators: tuple[OperatorRow, ...]
    """Largest time (or FLOPs) first."""


@dataclass(frozen=True)
class Account(Priced):
    """Everything Preflop says about one training step: its figures, and words about them."""

    copies: tuple[CopyRow, ...]
    assumptions: tuple[str, ...]
    verdict: str
    """One sentence: what bounds the step and what to change first."""
    evidence: Evidence | None = None
    """What the figures stand on; None for accounts made without it."""
