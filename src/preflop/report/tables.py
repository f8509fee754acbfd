"""Numbers to rows: every table of the report, as text in cells. It adds nothing up.

The terminal and the HTML page show the same `Table`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preflop.ledgers.communication import communication
from preflop.units import bytes_text, time_text

if TYPE_CHECKING:
    from preflop.account import Account, AtPeak, Column, Columns, Flops, OperatorRow

LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "temporaries": "temporaries",
    "buffers": "buffers",
    "inputs": "inputs",
    "workspace": "kernel workspace",
}


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's name and whether its cells are numbers (which stand to the right)."""

    text: str
    number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text cells. `total` is a last row that stands apart."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] | None = None


def columns_table(columns: Columns) -> Table:
    """The four columns (then buffers and inputs): one row per dtype that each holds."""
    rows = []
    for field in dataclasses.fields(columns):
        rows.extend(_column_rows(LABELS[field.name], getattr(columns, field.name)))
    return Table(
        "What the step keeps",
        (Heading("", False), Heading("dtype", False), Heading("elements"), Heading("bytes"), Heading("")),
        tuple(rows),
    )


def _column_rows(label: str, column: Column) -> list[tuple[str, ...]]:
    if not column.dtypes:
        return [(label, "-", "0", "0", "0 B")]
    return [
        ("" if index else label, dtype, f"{elements:,}", f"{size:,}", bytes_text(size))
        for index, (dtype, (size, elements)) in enumerate(column.dtypes.items())
    ]


def peak_table(at_peak: AtPeak, peak_bytes: int) -> Table:
    """What is alive at the peak; the rows sum to it."""
    rows = []
    for name, size in sorted(dataclasses.asdict(at_peak).items(), key=lambda item: -item[1]):
        if size:
            rows.append((LABELS[name], f"{size:,}", bytes_text(size), percent(size, peak_bytes)))
    return Table(
        "Alive at the peak",
        (Heading("", False), Heading("bytes"), Heading(""), Heading("share")),
        tuple(rows),
        ("peak", f"{peak_bytes:,}", bytes_text(peak_bytes), "100 %" if peak_bytes else "-"),
    )


def flops_table(flops: Flops) -> Table:
    """FLOPs of the step by phase; the phases sum to the total."""
    phases = [("forward", flops.forward), ("backward", flops.backward)]
    if flops.recompute:
        phases.append(("recompute", flops.recompute))
    phases.append(("optimizer", flops.optimizer))
    return Table(
        "FLOPs",
        (Heading("", False), Heading("FLOPs"), Heading(""), Heading("share")),
        tuple(
            (name, f"{count:,}", flops_text(count), percent(count, flops.total)) for name, count in phases
        ),
        ("step", f"{flops.total:,}", flops_text(flops.total), "100 %" if flops.total else "-"),
    )


def kinds_table(flops: Flops) -> Table:
    """FLOPs of the step by kind of arithmetic; the kinds sum to the total."""
    return Table(
        "By kind",
        (Heading("", False), Heading("FLOPs"), Heading(""), Heading("share")),
        tuple(
            ("element-wise, other" if kind == "other" else kind, f"{count:,}", flops_text(count),
             percent(count, flops.total))
            for kind, count in sorted(flops.by_kind.items(), key=lambda item: -item[1])
            if count
        ),
        ("step", f"{flops.total:,}", flops_text(flops.total), "100 %" if flops.total else "-"),
    )  # fmt: skip


def six_nd_table(account: Account) -> Table | None:
    """The way from 6ND to the counted model FLOPs; None where there are no tokens."""
    flops = account.flops
    if flops.six_nd is None:
        return None
    rows = [("6 x parameters x tokens", f"{flops.six_nd:,}", flops_text(flops.six_nd))]
    for item in flops.differences:
        sign = "+" if item.flops > 0 else "-"
        rows.append((item.why, f"{item.flops:+,}", f"{sign}{flops_text(abs(item.flops))}"))
    return Table(
        "Why it is not 6ND",
        (Heading("", False), Heading("FLOPs"), Heading("")),
        tuple(rows),
        ("model FLOPs of the step", f"{flops.model:,}", flops_text(flops.model)),
    )


def operators_table(rows: Sequence[OperatorRow], top: int, *, shapes: bool = False) -> Table:
    """The operators that take most time (or FLOPs), largest first.

    Args:
        shapes: also say the shapes of what each takes and gives.
    """
    timed = any(row.time_s is not None for row in rows)
    headings = [
        Heading("operator", False), Heading("calls"), Heading("FLOPs"), Heading("read"),
        Heading("written"), Heading("FLOP/B"),
    ]  # fmt: skip
    if timed:
        headings += [Heading("bound", False), Heading("time")]
    return Table(
        f"Top {min(top, len(rows))} of {len(rows)} operators",
        tuple(headings),
        tuple(_operator_cells(row, timed, shapes) for row in rows[:top]),
    )


def _operator_cells(row: OperatorRow, timed: bool, shapes: bool) -> tuple[str, ...]:
    name = f"{short_op(row.op)} ({row.phase})\n{place(row)}"
    cells = (
        f"{name}\n{row.shapes} {row.dtype}" if shapes else name,
        f"{row.calls:,}",
        flops_text(row.flops) if row.flops else "0",
        short_bytes(row.read_bytes),
        short_bytes(row.write_bytes),
        intensity_text(row.arithmetic_intensity),
    )
    if not timed:
        return cells
    return (*cells, row.bound or "-", "-" if row.time_s is None else time_text(row.time_s))


def flops_text(count: float, unit: str = "") -> str:
    """FLOPs, or a rate of them, to three digits.

    >>> flops_text(7e12), flops_text(989.4e12, "FLOP/s"), flops_text(12), flops_text(0)
    ('7.00 T', '989 TFLOP/s', '12', '0')
    """
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * factor:
            return f"{count / factor:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()


def short_op(op: str) -> str:
    """The operator without its usual namespace.

    >>> short_op("aten.mm"), short_op("mylib.scan")
    ('mm', 'mylib.scan')
    """
    return op.removeprefix("aten.")


def place(row: OperatorRow) -> str:
    """Where the operator stands: module and line, the file without its folders."""
    line = (row.source or "").rpartition("/")[2]
    return "  ".join(part for part in (row.module, line) if part) or "-"


def short_bytes(count: int) -> str:
    """Bytes to three digits, for narrow columns.

    >>> short_bytes(171 * 2**20), short_bytes(1_640_000_000), short_bytes(12)
    ('171 MiB', '1.53 GiB', '12 B')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            return f"{size:.3g} {unit}" if unit == "B" else f"{size:#.3g}".rstrip(".") + f" {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def intensity_text(intensity: float | None) -> str:
    """FLOPs per byte.

    >>> intensity_text(341.33), intensity_text(0.25), intensity_text(None)
    ('341', '0.25', '-')
    """
    if intensity is None:
        return "-"
    return f"{intensity:.0f}" if intensity >= 10 else f"{intensity:.2g}"


def percent(part: float, whole: float) -> str:
    """A share in percent.

    >>> percent(1, 3), percent(1, 10_000), percent(0, 0)
    ('33.3 %', '<0.1 %', '-')
    """
    if not whole:
        return "-"
    share = part / whole
    return "<0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def without_empty_columns(content: Table) -> Table:
    """The table without columns that say nothing in any row, but for the first: the others have its room."""
    kept = [i for i in range(len(content.headings)) if i == 0 or any(row[i] for row in content.rows)]

    def of(row: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(row[i] for i in kept)

    return dataclasses.replace(
        content,
        headings=tuple(content.headings[i] for i in kept),
        rows=tuple(map(of, content.rows)),
        total=None if content.total is None else of(content.total),
    )


def headline(account: Account) -> str:
    """What was priced, in one line."""
    subject = account.tape.subject
    if subject is None:
        return "A recorded call"
    parts = [subject.model, subject.batch, subject.precision]
    parts.append(subject.optimizer or "no optimizer")
    if subject.microbatches != 1:
        parts.append(f"{subject.microbatches} microbatches")
    if subject.recompute != "none":
        parts.append(f"recompute {subject.recompute}")
    parts.append(_where(account, subject.device))
    return ", ".join(parts)


def _where(account: Account, recorded_for: str) -> str:
    """On what the step was priced; a recording for another device stays what that device runs."""
    ranks = communication(account.tape).ranks
    if account.device is not None:
        return f"on {account.device.name}" if ranks is None else f"on each of {ranks} x {account.device.name}"
    if ranks is not None:
        return f"on each of {ranks} ranks, as {'a CPU' if recorded_for == 'cpu' else recorded_for} runs it"
    return "as a CPU runs it" if recorded_for == "cpu" else f"as recorded for {recorded_for}, on no device"


def peak_sentence(account: Account) -> str:
    """How much memory at most, and when."""
    memory = account.memory
    where = f" of {memory.peak_module}" if memory.peak_module else ""
    line = f" ({memory.peak_source})" if memory.peak_source else ""
    when = f", in {memory.peak_phase}: {short_op(memory.peak_op)}{where}{line}" if memory.peak_op else ""
    text = f"Peak {bytes_text(memory.peak_bytes)}{when}."
    if memory.first_step_peak_bytes != memory.peak_bytes:
        text += f" The first step's: {bytes_text(memory.first_step_peak_bytes)}."
    return text


def fits_sentence(account: Account) -> str | None:
    """Whether the step fits on the device and by how much; None without a device."""
    memory, device = account.memory, account.device
    if device is None:
        return None
    if memory.fits is None or memory.spare_bytes is None or device.memory_bytes is None:
        return f"Whether it fits is not known: the catalog has no memory for {device.name}."
    setting = f" ({device.alloc_conf})" if device.alloc_conf else ""
    needs = (
        f"{bytes_text(memory.reserved_bytes)} reserved by the allocator{setting}"
        if memory.reserved_bytes is not None
        else f"{bytes_text(memory.peak_bytes)} at the peak"
    )
    if memory.context_bytes is not None:
        needs += f" + {bytes_text(memory.context_bytes)} for the context"
    if memory.communicator_bytes is not None:
        needs += f" + {bytes_text(memory.communicator_bytes)} for NCCL"
    has = f"{bytes_text(device.memory_bytes)} ({device.memory_basis})"
    if memory.fits:
        return f"Fits: {needs}, of {has}; {bytes_text(memory.spare_bytes)} to spare."
    return f"Does not fit: {needs}, of {has}; {bytes_text(-memory.spare_bytes)} too much."


def allocated_sentence(account: Account) -> str | None:
    """From the peak of the tensors to what torch would report; None where no allocator was replayed."""
    allocated = account.memory.allocated_bytes
    if allocated is None:
        return None
    return (
        f"Allocated peak {bytes_text(allocated)}: what torch.cuda.max_memory_allocated() shows, the peak with the "
        "allocator's rounding, remainders that it does not split and cuBLAS's workspaces."
    )


def six_nd_sentence(account: Account) -> str:
    """Model FLOPs beside 6ND."""
    flops = account.flops
    counted = flops_text(flops.model, "FLOP")
    text = f"Model FLOPs (forward + backward of matmul, attention, convolution): {counted}."
    if flops.six_nd:
        ratio = flops.model / flops.six_nd
        text += f" 6ND gives {flops_text(flops.six_nd, 'FLOP')}: counted is {ratio:.3f} times that."
    if flops.attended != flops.model:
        text += f" Counting only attended pairs: {flops_text(flops.attended, 'FLOP')}."
    if flops.hardware != flops.model:
        text += f" The hardware does {flops_text(flops.hardware, 'FLOP')}: {_hardware_more(account)}."
    return text


_INSIDE_BACKWARD = {
    "attention": "the backward kernel of fused attention computes its scores again",
    "mkldnn_rnn": "the backward kernel of recurrent layers computes gradients that nothing uses",
}
"""Part of an operator's name -> what its kernel does besides."""


def _hardware_more(account: Account) -> str:
    """Why the hardware does more than model FLOPs: what a checkpoint recomputes, or a kernel inside itself."""
    if account.flops.recompute:
        return "backward computes activations again"
    backward = [row.op for row in account.operators if row.phase == "backward"]
    found = [why for word, why in _INSIDE_BACKWARD.items() if any(word in op for op in backward)]
    return " and ".join(found) or "kernels compute what the model does not need"


def traffic_sentence(account: Account) -> str:
    """Bytes moved by the step."""
    moved = account.traffic
    intensity = moved.arithmetic_intensity
    text = f"Bytes moved: {bytes_text(moved.read_bytes)} read, {bytes_text(moved.write_bytes)} written"
    return text + (f"; {intensity_text(intensity)} FLOPs per byte." if intensity is not None else ".")


def time_sentence(account: Account) -> str | None:
    """The step's time between its bounds; None where nothing was timed."""
    time = account.time
    if time.lower_s is None:
        return None
    text = f"At least {time_text(time.lower_s)}"
    if time.expected_s is not None and time.upper_s is not None:
        text = (
            f"Expected {time_text(time.expected_s)} (at least {time_text(time.lower_s)}, "
            f"{time_text(time.upper_s)} without overlap)"
        )
    if time.tokens_per_s is not None:
        text += f", {time.tokens_per_s:,.0f} tokens/s"
    if time.mfu is not None and time.peak_flops_per_s is not None:
        most = "" if time.mfu_basis == "expected_s" else "at most "
        peak = flops_text(time.peak_flops_per_s, "FLOP/s") + f" {time.peak_dtype}"
        text += f", MFU {most}{time.mfu:.1%} of {peak}".replace("%", " %", 1)
    return text + "."


def unknown_sentence(account: Account) -> str | None:
    """The operators that could not be priced; None where all could."""
    unknown = account.flops.unknown
    if not unknown:
        return None
    names = ", ".join(f"{short_op(op)} ({calls:,})" for op, calls in unknown.items())
    return f"Not priced, by name and calls: {names}. Their FLOPs are missing above."
