"""Prediction and reading side by side: two real steps here, against the recorded ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from preflop.account import Account, TimelinePoint
from preflop.accounting import account_tape
from preflop.errors import BadSubject
from preflop.measure.memory import MeasuredSteps, build, check_fits, measure_steps
from preflop.optimizers import IN_BACKWARD
from preflop.precision import find_precision
from preflop.record.subject_tape import record_subject
from preflop.subject import Subject
from preflop.tape.events import Phase, Signature

if TYPE_CHECKING:
    from preflop.tape.events import Tape

TOLERANCE = 1e-3
"""Relative difference of the peaks within which a step verifies."""
WORKSPACE_TOLERANCE = 5e-3
"""The same for steps with convolutions, whose oneDNN scratch is not all a matter of shapes."""

SLACK_BYTES = 512
"""Always let pass: numbers that torch wraps in tensors for the time of a call (8 and 4 bytes each)."""

# Operators that FlopCounterMode counts as nothing. Source: torch/utils/
# flop_counter.py, `flop_registry`.
_COUNTED_AS_NOTHING = {
    "aten.dot": "dot product",
    "aten.mv": "matrix times vector",
    "aten.addmv": "matrix times vector",
    "aten.addr": "outer product",
    "aten.mkldnn_rnn_layer": "LSTM",
    "aten.mkldnn_rnn_layer_backward": "LSTM backward",
    "aten.addmm_": "matrix product added in place",
    "aten._int_mm": "int8 matmul",
    "aten._grouped_mm": "grouped matmul",
    "aten._sparse_addmm": "sparse matmul",
    "aten._sparse_mm": "sparse matmul",
    "aten._euclidean_dist": "distances by a matmul inside",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Relative: 0.01 is one percent predicted too much."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


@dataclass(frozen=True, slots=True)
class FlopsComparison:
    """FLOPs of matmul, attention and convolution: ours, and torch's FlopCounterMode on real tensors."""

    predicted: int
    counted: int | None
    """None: the step does not run under FlopCounterMode, for the reason in `oracle_wrong`."""
    oracle_wrong: tuple[str, ...]
    """Where FlopCounterMode is known to be wrong in this step; then the two need not agree."""

    @property
    def agrees(self) -> bool | None:
        """Whether the two are equal; None where the oracle cannot tell."""
        if self.predicted == self.counted:
            return True
        return None if self.oracle_wrong else False


@dataclass(frozen=True)
class Verification:
    """Whether this machine's real step is what was predicted, and where it is not."""

    model: str
    steady: Comparison
    first: Comparison
    phases: tuple[Comparison, ...]
    """Peaks of the steady step's phases: where a difference is."""
    flops: FlopsComparison
    tolerance: float
    threads: int
    torch_version: str
    peak_op: str
    """The operator predicted to run at the peak."""
    assumptions: tuple[str, ...]

    @property
    def slack_bytes(self) -> int:
        """What is let pass whatever the tolerance is: it decides for very small models."""
        return SLACK_BYTES

    @property
    def memory_verifies(self) -> bool:
        """Both peaks are within the tolerance, or within `slack_bytes` where that is more."""
        return all(
            abs(one.predicted_bytes - one.measured_bytes)
            <= max(self.tolerance * one.measured_bytes, self.slack_bytes)
            for one in (self.steady, self.first)
        )

    @property
    def verifies(self) -> bool:
        """Memory verifies, and FLOPs agree wherever the oracle is right."""
        return self.memory_verifies and self.flops.agrees is not False

    def to_dict(self) -> dict[str, Any]:
        """JSON of `preflop verify`, schema "preflop.verify/1"."""
        return {
            "schema": "preflop.verify/1",
            "model": self.model,
            "verifies": self.verifies,
            "memory": {
                "verifies": self.memory_verifies,
                "tolerance": self.tolerance,
                "slack_bytes": self.slack_bytes,
                "steady": _comparison_dict(self.steady),
                "first_step": _comparison_dict(self.first),
                "phases": [_comparison_dict(phase) for phase in self.phases],
                "peak_op": self.peak_op,
            },
            "flops": {**asdict(self.flops), "agrees": self.flops.agrees},
            "threads": self.threads,
            "torch_version": self.torch_version,
            "assumptions": list(self.assumptions),
        }


def _comparison_dict(comparison: Comparison) -> dict[str, Any]:
    return {**asdict(comparison), "error": comparison.error}


def verify_subject(
    subject: Subject, *, tolerance: float | None = None, progress: Callable[[str], None] = lambda words: None
) -> Verification:
    """Record the subject, run two real steps of it here, and compare.

    Args:
        tolerance: relative difference of the peaks that is let pass; by default 0.1 %, with
            convolutions 0.5 %.
        progress: told in words what is being done.

    Raises:
        PreflopError: the subject cannot be recorded, or not be run on this machine.
    """
    if subject.device != "cpu":
        raise BadSubject(
            f"a real step runs on this machine's CPU, and the subject is recorded for {subject.device}.\n"
            "  Leave device out."
        )
    progress("recording")
    account = account_tape(record_subject(subject))
    check_fits(account.memory.first_step_peak_bytes)
    progress("running two steps")
    measured = measure_steps(subject)
    progress("counting FLOPs of a real step")
    flops = _compare_flops(account, subject)
    if tolerance is None:
        tolerance = WORKSPACE_TOLERANCE if _has_convolution(account.tape) else TOLERANCE
    return _verification(account, measured, flops, tolerance)


def _verification(
    account: Account, measured: MeasuredSteps, flops: FlopsComparison, tolerance: float
) -> Verification:
    memory, subject = account.memory, account.tape.subject
    return Verification(
        model=subject.model if subject is not None else "",
        steady=Comparison("steady step", memory.peak_bytes, measured.steady_peak_bytes),
        first=Comparison("first step", memory.first_step_peak_bytes, measured.first_step_peak_bytes),
        phases=tuple(_phases(memory.timeline, measured, in_backward=_in_backward(account))),
        flops=flops,
        tolerance=tolerance,
        threads=measured.threads,
        torch_version=measured.torch_version,
        peak_op=memory.peak_op,
        assumptions=(*account.tape.assumptions, *_limits(account)),
    )


HALF_LIMIT = (
    "16-bit matmuls, convolutions and recurrent layers of a CPU allocate buffers inside that only some rules "
    "price: in 16-bit precisions a difference of some percent says nothing of a GPU, which has none of them"
)


_HALF = ("bfloat16", "float16")
_MATMULS = ("aten.mm", "aten.addmm", "aten.bmm")


def _limits(account: Account) -> tuple[str, ...]:
    """Where a CPU reading is known to say less."""
    subject = account.tape.subject
    half = subject is not None and find_precision(subject.precision).compute_dtype in _HALF
    # Muon's Newton-Schulz products run in bf16 whatever the precision.
    half = half or any(row.op in _MATMULS and row.dtype in _HALF for row in account.operators)
    return (HALF_LIMIT,) if half else ()


def _in_backward(account: Account) -> bool:
    subject = account.tape.subject
    return subject is not None and (subject.optimizer or "").endswith(IN_BACKWARD)


def _phases(
    timeline: Sequence[TimelinePoint], measured: MeasuredSteps, *, in_backward: bool
) -> list[Comparison]:
    """Peak of each phase of the steady step; recomputation belongs to backward, and so does an update
    that runs in it."""
    inside = {Phase.RECOMPUTE.value, Phase.OPTIMIZER.value} if in_backward else {Phase.RECOMPUTE.value}
    predicted: dict[str, int] = {}
    for point in timeline:
        phase = Phase.BACKWARD.value if point.phase in inside else point.phase
        alive = point.alive
        total = sum(getattr(alive, name) for name in alive.__slots__)
        predicted[phase] = max(predicted.get(phase, 0), total)
    real = measured.steps[-1].phases
    order = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    return [
        Comparison(phase.value, predicted[phase.value], real[phase.value])
        for phase in order
        if phase.value in predicted and phase.value in real
    ]


# -- FLOPs ----------------------------------------------------------------------------------------


def _priced_flops(account: Account) -> int:
    """What FlopCounterMode means to count: matmul-like work of the whole step, recomputed work too."""
    kinds = account.flops.by_kind
    return sum(kinds.get(kind, 0) for kind in ("matmul", "attention", "convolution"))


def _compare_flops(account: Account, subject: Subject) -> FlopsComparison:
    """Predicted and counted; a step that ran by itself and does not run under the counter has no count."""
    wrong = oracle_wrong(account.tape)
    try:
        counted = counted_flops(subject)
    except BadSubject as error:
        first_line = str(error).splitlines()[0]
        return FlopsComparison(_priced_flops(account), None, (f"the step under it: {first_line}", *wrong))
    return FlopsComparison(_priced_flops(account), counted, tuple(wrong))


def counted_flops(subject: Subject) -> int:
    """FLOPs by torch's FlopCounterMode over one real step, attention written out as matmuls.

    The counter knows nothing of the CPU's fused attention; the math path does the same two products.

    Raises:
        BadSubject: the step does not run under the counter.
    """
    return sum(counted_by_operator(subject).values())


def counted_by_operator(subject: Subject) -> dict[str, int]:
    """As `counted_flops`, by operator: "aten.mm" -> FLOPs."""
    with torch.random.fork_rng(devices=[]):
        real = build(subject)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()
        with sdpa_kernel(SDPBackend.MATH), counter:
            real.step()
    return {str(op): int(count) for op, count in counter.get_flop_counts().get("Global", {}).items()}


class _NoModules:
    """In place of FlopCounterMode's ModuleTracker, of which only the total's name is needed.

    The tracker's hooks refuse `autograd.grad` inside of forward ("A leaf node was passed to
    _will_engine_execute_node"), and keep recomputed graphs alive (torch/utils/module_tracker.py).
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was hooked."""


def oracle_wrong(tape: Tape) -> list[str]:
    """Operators of the steady step that FlopCounterMode counts wrongly, in words."""
    found: Counter[str] = Counter()
    frozen = any(not info.trainable for info in tape.parameters)
    for call in tape.steady():
        signature = tape.signatures[call.signature]
        reason = _why_wrong(signature)
        if frozen and signature.op in _ALL_THREE_GRADIENTS:
            reason = (
                f"{signature.op}: makes the gradients of query, key and value alike; the written-out form "
                "that is counted skips those that only frozen weights lead to"
            )
        if reason is not None:
            found[reason] += 1
    return [f"{reason} ({calls} calls)" for reason, calls in found.most_common()]


_ALL_THREE_GRADIENTS = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
}


def _why_wrong(signature: Signature) -> str | None:
    if signature.op in _COUNTED_AS_NOTHING:
        return f"{signature.op}: {_COUNTED_AS_NOTHING[signature.op]}, counted as nothing"
    if signature.op == "aten.convolution_backward" and signature.args[9] != 1:
        return "aten.convolution_backward: grouped, counted as if it were not"
    if any(meta.dtype.startswith("complex") for meta in signature.inputs):
        return f"{signature.op}: complex, counted as real"
    if not signature.op.startswith(("aten.", "prims.", "prim.")):
        return f"{signature.op}: custom operator, counted as nothing"
    return None


def _has_convolution(tape: Tape) -> bool:
    return any(signature.op.startswith("aten.convolution") for signature in tape.signatures)
