"""Pictures of an account: the memory timeline and the roofline, drawn with matplotlib.

`picture` gives the file's bytes for .svg and .png; `svg` the markup for a page.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preflop.errors import BadFile
from preflop.ledgers.memory import CATEGORIES, Timeline
from preflop.report.tables import LABELS, headline, peak_sentence, short_op
from preflop.units import bytes_text, bytes_unit, si_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from preflop.account import Account, OperatorRow

# One colour per category, told apart also without colour vision (after Okabe and Ito 2008).
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_states": "#009E73",
    "activations": "#D55E00",
    "temporaries": "#CC79A7",
    "buffers": "#999999",
    "inputs": "#56B4E9",
    "workspace": "#444444",
}
KIND_COLOURS = {
    "matmul": "#0072B2",
    "attention": "#D55E00",
    "convolution": "#009E73",
    "other": "#E69F00",
}
PHASE_SHADES = {
    "forward": "#eef4fb",
    "backward": "#fdf1ea",
    "recompute": "#f3eefa",
    "optimizer": "#eaf6f1",
    "other": "#ffffff",
}
SUFFIXES = (".svg", ".png", ".html")
# What a figure 1,000 pixels wide can show: more points would lie on one another.
_MOST_POINTS = 1000
_MOST_LABELS = 10
# Operators below this share of the least time are dots too small to see; they only stretch the axes.
_LEAST_SHARE = 0.0005
# FLOPs per byte below which an operator copies rather than computes.
_LEAST_INTENSITY = 0.01


def picture(account: Account, suffix: str) -> bytes:
    """Roofline (where there is a device) and memory timeline in one figure.

    Args:
        suffix: ".svg" or ".png".
    """
    figure = _figure(11, 10 if account.device is not None else 5.2)
    if account.device is not None:
        upper, lower = figure.subplots(2, 1, height_ratios=(1.15, 1))
        draw_roofline(upper, account)
        draw_timeline(lower, account)
    else:
        draw_timeline(figure.subplots(), account)
    figure.suptitle(headline(account), fontsize=11, x=0.01, ha="left", weight="bold")
    return _bytes(figure, suffix)


def check_suffix(path: str) -> str:
    """The kind of picture that a file's name asks for.

    Raises:
        BadFile: none that can be drawn.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise BadFile(
            f"{path!r} does not say which kind of picture: got {suffix or 'no suffix'!r}.\n"
            f"  Needed: a name that ends in {', '.join(SUFFIXES)}."
        )
    return suffix


def timeline_svg(account: Account) -> str:
    """The memory timeline as SVG markup for a page."""
    figure = _figure(10.5, 4.4)
    draw_timeline(figure.subplots(), account, titled=False)
    return _markup(figure)


def roofline_svg(account: Account) -> str:
    """The roofline as SVG markup for a page; empty without a device."""
    if account.device is None or account.device.bandwidth_bytes_per_s is None:
        return ""
    figure = _figure(10.5, 5.2)
    draw_roofline(figure.subplots(), account)
    return _markup(figure)


# --- the memory timeline


def draw_timeline(axes: Axes, account: Account, *, titled: bool = True) -> None:
    """Bytes alive through the steady step, stacked by category, phases shaded, the peak marked."""
    import numpy as np

    timeline = account.memory.timeline
    if not isinstance(timeline, Timeline) or not account.memory.peak_bytes:
        axes.text(0.5, 0.5, "nothing was alive", ha="center", va="center", transform=axes.transAxes)
        return
    chosen = thinned(timeline.alive.sum(axis=0), _MOST_POINTS)
    unit, unit_bytes = bytes_unit(account.memory.peak_bytes)
    alive = timeline.alive[:, chosen] / unit_bytes
    present = [i for i in _stacking(alive) if alive[i].any()]
    axes.stackplot(
        chosen, alive[present], step="post", linewidth=0,
        labels=[LABELS[CATEGORIES[i]] for i in present],
        colors=[COLOURS[CATEGORIES[i]] for i in present],
    )  # fmt: skip
    _shade_phases(axes, timeline.phases)
    _mark_peak(axes, int(np.argmax(timeline.alive.sum(axis=0))), account, len(timeline))
    if account.device is not None and account.device.memory_bytes:
        _capacity_line(axes, account.device.memory_bytes, unit_bytes)
    axes.set_xlim(0, len(timeline) - 1 or 1)
    axes.set_xlabel("events of the steady step (allocations and frees, in order)")
    axes.set_ylabel(f"{unit} alive")
    if titled:
        axes.set_title(peak_sentence(account), loc="left", fontsize=9.5)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    _tidy(axes)


def thinned(totals: np.ndarray, most: int) -> np.ndarray:
    """Indices of at most about `most` points that keep the outline: each bucket's highest and last.

    >>> import numpy as np
    >>> thinned(np.array([1, 9, 2, 3, 8, 1]), 4).tolist()
    [0, 1, 2, 4, 5]
    """
    import numpy as np

    count = len(totals)
    if count <= most:
        return np.arange(count)
    size = -(-count * 2 // most)
    kept = {0, count - 1}
    for start in range(0, count, size):
        bucket = totals[start : start + size]
        kept.add(start + int(bucket.argmax()))
        kept.add(start + len(bucket) - 1)
    return np.array(sorted(kept))


def _stacking(alive: np.ndarray) -> list[int]:
    """What changes least lies at the bottom: parameters, states, buffers, inputs, then the rest."""
    order = ("parameters", "optimizer_states", "buffers", "inputs", "gradients", "activations",
             "temporaries", "workspace")  # fmt: skip
    return [CATEGORIES.index(name) for name in order]


def _shade_phases(axes: Axes, phases: Sequence[str]) -> None:
    spans = phase_spans(phases)
    for phase, start, end in spans:
        axes.axvspan(start, end, color=PHASE_SHADES[phase], zorder=-1, linewidth=0)
        if end - start > 0.06 * len(phases):
            axes.text(
                (start + end) / 2, 1.0, phase, transform=axes.get_xaxis_transform(), ha="center",
                va="top", fontsize=8, color="#555555",
            )  # fmt: skip


def phase_spans(phases: Sequence[str]) -> list[tuple[str, int, int]]:
    """Runs of one phase as (phase, first index, index after the last).

    >>> phase_spans(["forward", "forward", "backward"])
    [('forward', 0, 2), ('backward', 2, 3)]
    """
    spans: list[tuple[str, int, int]] = []
    for index, phase in enumerate(phases):
        if spans and spans[-1][0] == phase:
            spans[-1] = (phase, spans[-1][1], index + 1)
        else:
            spans.append((phase, index, index + 1))
    return spans


def _mark_peak(axes: Axes, index: int, account: Account, count: int) -> None:
    height = account.memory.peak_bytes / bytes_unit(account.memory.peak_bytes)[1]
    axes.plot([index], [height], marker="v", color="black", markersize=7, zorder=5)
    right = index < count * 0.7
    axes.annotate(
        f"peak {bytes_text(account.memory.peak_bytes)}", (index, height),
        xytext=(8 if right else -8, 4), textcoords="offset points", ha="left" if right else "right",
        fontsize=9, weight="bold",
    )  # fmt: skip
    axes.set_ylim(0, height * 1.18 if height else 1)


def _capacity_line(axes: Axes, capacity_bytes: int, unit_bytes: int) -> None:
    top, height = axes.get_ylim()[1], capacity_bytes / unit_bytes
    if height > 2 * top:
        return
    axes.axhline(height, color="#b00020", linestyle="--", linewidth=1.2)
    axes.text(0.005, height, f"device memory {bytes_text(capacity_bytes)}", color="#b00020", fontsize=8,
              va="bottom", transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylim(0, max(top, height * 1.1))


# --- the roofline


def draw_roofline(axes: Axes, account: Account) -> None:
    """FLOP/s against FLOPs per byte: the device's roofs and the step's operators, as large as their
    share of the step's least time."""
    from matplotlib.collections import PathCollection

    device = account.device
    if device is None or device.bandwidth_bytes_per_s is None:
        axes.text(0.5, 0.5, "no device, no roofline", ha="center", va="center", transform=axes.transAxes)
        return
    whole_s = sum(row.time_s or 0.0 for row in account.operators)
    rows = [row for row in account.operators if _drawn(row, whole_s)]
    axes.set_xscale("log")
    axes.set_yscale("log")
    limits = _intensity_limits(rows, device.bandwidth_bytes_per_s, account.time.peak_flops_per_s)
    _draw_roofs(axes, account, limits)
    for kind, colour in KIND_COLOURS.items():
        points = [row for row in rows if row.kind == kind]
        if points:
            axes.scatter(
                [_place(row)[0] for row in points],
                [_place(row)[1] for row in points],
                s=[18 + 900 * (row.time_s or 0.0) / whole_s for row in points],
                color=colour, alpha=0.65, edgecolor="white", linewidth=0.6,
                label="element-wise, other" if kind == "other" else kind, zorder=3,
            )  # fmt: skip
    silent_s = sum(row.time_s or 0.0 for row in account.operators if not _computes(row))
    axes.set_title(_roofline_title(account, silent_s, whole_s), loc="left", fontsize=9.5)
    axes.set_xlim(*limits)
    axes.set_ylim(top=axes.get_ylim()[1] * 2)
    _number_operators(axes, rows, whole_s)
    axes.set_xlabel("arithmetic intensity, FLOPs per byte moved")
    axes.set_ylabel("attainable FLOP/s")
    axes.yaxis.set_major_formatter(lambda value, _: si_text(value))
    legend = axes.legend(loc="lower right", frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([50])
    _tidy(axes)


def _place(row: OperatorRow) -> tuple[float, float]:
    """FLOPs per byte and FLOP/s of an operator, both by the pairs that its attention attends: so that
    it lies under the roof that its time was taken from."""
    flops = row.flops if row.attended_flops is None else min(row.flops, row.attended_flops)
    return flops / ((row.read_bytes + row.write_bytes) or 1), flops / (row.time_s or 1.0)


def _computes(row: OperatorRow) -> bool:
    return _place(row)[0] >= _LEAST_INTENSITY


def _drawn(row: OperatorRow, whole_s: float) -> bool:
    return _computes(row) and (row.time_s or 0.0) > _LEAST_SHARE * whole_s


def _intensity_limits(
    rows: Sequence[OperatorRow], bandwidth: float, peak: float | None
) -> tuple[float, float]:
    found = [_place(row)[0] for row in rows] or [1.0]
    ridge = (peak or bandwidth) / bandwidth
    return min(*found, 0.1, ridge) / 2, max(*found, ridge) * 3


def _draw_roofs(axes: Axes, account: Account, limits: tuple[float, float]) -> None:
    device, time = account.device, account.time
    if device is None or device.bandwidth_bytes_per_s is None:
        return
    bandwidth = device.bandwidth_bytes_per_s
    roofs = {"float32": device.peak_flops_per_s.get("float32")}
    if time.peak_dtype is not None:
        roofs[time.peak_dtype] = time.peak_flops_per_s
    known = {dtype: peak for dtype, peak in roofs.items() if peak}
    if not known:
        return
    highest = max(known.values())
    slope = [limits[0], highest / bandwidth]
    axes.plot(slope, [value * bandwidth for value in slope], color="black", linewidth=1.6, zorder=2)
    # High on the slope, where numbers hang below it.
    named = slope[0] ** 0.2 * slope[1] ** 0.8
    axes.annotate(si_text(bandwidth, "B/s"), (named, named * bandwidth), xytext=(-8, 8),
                  textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
    for dtype, peak in known.items():
        ridge = peak / bandwidth
        top = peak == highest
        axes.plot([ridge, limits[1]], [peak, peak], color="black", linewidth=1.6 if top else 1.0,
                  linestyle="-" if top else ":", zorder=2)  # fmt: skip
        axes.text(limits[1] / 1.1, peak * 1.3, f"{dtype}: {si_text(peak, 'FLOP/s')}, ridge at {ridge:.0f}",
                  ha="right", fontsize=8.5)  # fmt: skip


def _number_operators(axes: Axes, rows: Sequence[OperatorRow], whole_s: float) -> None:
    """Numbers on the operators that take most time, and beside the axes what they are. The limits of the axes
    are set before."""
    lines = []
    longest = sorted(rows, key=lambda row: -(row.time_s or 0.0))[:_MOST_LABELS]
    for number, row in enumerate(longest, 1):
        place = _place(row)
        # Operators of the same size lie on one another: their numbers stand in a column, into the half of the
        # axes where there is room for all of them.
        before = sum(1 for other in longest[: number - 1] if _near(other, row))
        up = _height(axes, place) < 0.5
        axes.annotate(
            str(number), place, xytext=(0, (1 if up else -1) * (9 + 11 * before)), textcoords="offset points",
            ha="center", va="bottom" if up else "top", fontsize=8.5, weight="bold", color=KIND_COLOURS[row.kind],
            zorder=4,
        )  # fmt: skip
        module = ".".join(row.module.split(".")[-2:])
        share = (row.time_s or 0.0) / whole_s
        lines.append(f"{number}  {short_op(row.op)} ({row.phase}), {share:.1%}")
        if module:
            lines.append(f"    {module}")
    if lines:
        axes.text(1.02, 0.98, "share of the least time\n\n" + "\n".join(lines), transform=axes.transAxes,
                  va="top", fontsize=8, color="#333333", linespacing=1.25)  # fmt: skip


def _height(axes: Axes, place: tuple[float, float]) -> float:
    """Of a place in the axes: 0 at the bottom, 1 at the top."""
    return float(axes.transAxes.inverted().transform(axes.transData.transform(place))[1])


def _near(one: OperatorRow, other: OperatorRow) -> bool:
    """Whether two operators lie on one another in a picture of some six decades."""
    import math

    pairs = zip(_place(one), _place(other), strict=True)
    return all(abs(math.log10(u / v)) < 0.12 for u, v in pairs)


def _roofline_title(account: Account, silent_s: float, whole_s: float) -> str:
    device = account.device
    text = f"Roofline of {device.name if device else ''}: size is the share of the step's least time"
    if whole_s and silent_s / whole_s > 0.005:
        share = f"{silent_s / whole_s:.0%}"
        text += f"; {share} of it does next to no arithmetic (copies, casts) and is not drawn"
    return text


# --- drawing


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)


def _bytes(figure: Figure, suffix: str) -> bytes:
    import matplotlib

    stream = io.BytesIO()
    options: dict[str, Any] = {"format": suffix.lstrip("."), "dpi": 150}
    if suffix == ".svg":
        options["metadata"] = {"Date": None}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "preflop"}):
        figure.savefig(stream, **options)
    return stream.getvalue()


def _markup(figure: Figure) -> str:
    text = _bytes(figure, ".svg").decode()
    return text[text.index("<svg") :]
