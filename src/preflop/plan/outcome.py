"""What one choice costs: the figures that choices are compared by."""

from __future__ import annotations

from dataclasses import dataclass

from preflop.account import Priced
from preflop.ledgers.host import host_memory
from preflop.precision import PRECISIONS
from preflop.timing.roofline import MATMUL_LIKE, peak_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One training step in a few numbers."""

    peak_bytes: int
    """Peak of the steady step's tensors."""
    peak_phase: str
    flops_model: int
    flops_hardware: int
    flops_total: int
    """All phases, element-wise work included."""
    read_bytes: int
    write_bytes: int
    lower_s: float | None
    """None without a device."""
    expected_s: float | None
    upper_s: float | None
    tokens: int | None
    """Tokens that one optimizer step sees; None where there are none."""
    samples: int | None
    """Samples that one optimizer step sees."""
    reserved_bytes: int | None = None
    """What the device's allocator reserves; None where it was not replayed."""
    fits: bool | None = None
    """None where it is not known. Where the allocator was not replayed: False if the tensors alone are more than
    the device has, else None."""
    needs_bytes: int | None = None
    """What `fits` is judged by: reserved by the allocator, and the context; None where it is not judged."""
    spare_bytes: int | None = None
    no_peak: tuple[str, ...] = ()
    """Dtypes of matmuls for which the device has no dense peak: `lower_s` counts only their bytes then,
    which is a bound and no time to compare."""
    host_bytes: int = 0
    """Most that waits in the host's memory (offload)."""
    link_bytes: int = 0
    """What goes over the link to the host and back in a step."""

    @property
    def time_s(self) -> float | None:
        """Expected seconds of a step; its lower bound where nothing is expected; None where matmuls have
        no peak to run at."""
        if self.no_peak:
            return None
        return self.lower_s if self.expected_s is None else self.expected_s

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def units(self) -> int | None:
        """What a step's time is divided by: tokens, else samples."""
        return self.tokens or self.samples

    @property
    def per_unit_s(self) -> float | None:
        """Seconds per token, or per sample where there are no tokens."""
        return self.time_s / self.units if self.time_s is not None and self.units else None


def outcome_of(priced: Priced) -> Outcome:
    """The outcome of a priced step, its allocator replayed where it has one."""
    subject, memory, time = priced.tape.subject, priced.memory, priced.time
    microbatches = 1 if subject is None else subject.microbatches
    host = host_memory(priced.tape)

    def of_step(count: int | None) -> int | None:
        return None if count is None else count * microbatches

    return Outcome(
        peak_bytes=memory.peak_bytes,
        peak_phase=memory.peak_phase,
        flops_model=priced.flops.model,
        flops_hardware=priced.flops.hardware,
        flops_total=priced.flops.total,
        read_bytes=priced.traffic.read_bytes,
        write_bytes=priced.traffic.write_bytes,
        lower_s=time.lower_s,
        expected_s=time.expected_s,
        upper_s=time.upper_s,
        tokens=of_step(None if subject is None else subject.tokens),
        samples=of_step(None if subject is None else subject.samples),
        reserved_bytes=memory.reserved_bytes,
        fits=memory.fits,
        needs_bytes=None if memory.fits is None else memory.needs_bytes,
        spare_bytes=memory.spare_bytes,
        no_peak=() if time.lower_s is None else _no_peak(priced),
        host_bytes=host.peak_bytes,
        link_bytes=host.link_bytes,
    )


def _no_peak(priced: Priced) -> tuple[str, ...]:
    subject = priced.tape.subject
    precision = None if subject is None else PRECISIONS.get(subject.precision)
    tf32 = precision is not None and precision.tf32
    unpriced = {
        peak_dtype(row.dtype, tf32)
        for row in priced.operators
        if row.kind in MATMUL_LIKE and row.flops and row.bound is None
    }
    return tuple(sorted(unpriced))
