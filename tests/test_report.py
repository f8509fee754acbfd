"""What people see: the terminal's text, the page, the pictures. All from the same rows."""

from __future__ import annotations

import io
import re

import pytest

from preflop.accounting import account_tape, find_device
from preflop.errors import BadFile, PreflopError
from preflop.report import roofline, tables
from preflop.report.html import account_html
from preflop.report.plots import check_suffix, draw_roofline, draw_timeline, picture, thinned
from preflop.report.terminal import show
from preflop.tape.events import Phase, Role, Tape
from preflop.units import bytes_text
from tests.tapes import Builder, linear_step

PRICED = account_tape(linear_step(device="h100-sxm5-80gb"), find_device("h100-sxm"))
BARE = account_tape(linear_step())


def text_of(account, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    show(account, file=stream)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("account", [PRICED, BARE], ids=["device", "cpu"])
def test_terminal_stays_within_its_width_and_has_no_escapes_in_a_pipe(account, width, monkeypatch):
    """No line is wider than the terminal, none ends in blanks, no colour code reaches a pipe."""
    text = text_of(account, width, monkeypatch)
    assert "\x1b" not in text
    for line in text.splitlines():
        assert len(line) <= width and line == line.rstrip()


def test_the_order_of_the_answer(monkeypatch):
    """Memory table, alive at the peak, fits, FLOPs with 6ND, operators, verdict, assumptions."""
    text = text_of(PRICED, 100, monkeypatch)
    order = ["MEMORY", "What the step keeps", "Alive at the peak", "Fits:", "COMPUTE", "6ND",
             "Why it is not 6ND", "OPERATORS", "Top ", "VERDICT", "Change first", "ASSUMED"]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_bytes_are_shown_in_full(monkeypatch):
    """The rows at the peak are exact bytes that sum to the printed peak."""
    text = text_of(BARE, 100, monkeypatch)
    block = text[text.index("Alive at the peak") :].split("COMPUTE")[0]
    numbers = [int(m.replace(",", "")) for m in re.findall(r" ([\d,]{5,}) ", block)]
    assert sum(numbers[:-1]) == numbers[-1] == BARE.memory.peak_bytes


def test_unknown_operators_are_in_every_output(monkeypatch):
    """What could not be priced is named in the terminal and on the page."""
    b = Builder(phase=Phase.FORWARD)
    b.call("mylib.scan", [b.tensor((4, 4), Role.INPUT)], [(4, 4)])
    account = account_tape(b.tape)
    assert "mylib.scan (1)" in text_of(account, 100, monkeypatch)
    assert "mylib.scan (1)" in account_html(account)


def test_empty_account_prints(monkeypatch):
    """A tape with nothing on it still gives a text, a page and a picture."""
    account = account_tape(Tape(subject=None))
    assert "Peak 0 B" in text_of(account, 100, monkeypatch)
    assert "<html" in account_html(account)
    assert picture(account, ".png").startswith(b"\x89PNG")


def test_page_needs_nothing_else():
    """The page fetches nothing: no script, no link, no image from elsewhere; both pictures are inside."""
    page = account_html(PRICED)
    assert page.count("<svg") == 2
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"""(src|href)=["']https?:""", page.replace("xlink:href", ""))


def test_page_escapes_names():
    """A module named like markup is shown, not run."""
    b = Builder(phase=Phase.FORWARD)
    b.call("aten.relu", [b.tensor((4,), Role.INPUT)], [(4,)], module="<script>alert(1)</script>")
    assert "<script>" not in account_html(account_tape(b.tape))


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures_are_of_the_kind_asked_for(suffix, begins):
    """A .png is a PNG and a .svg an SVG, with and without a device."""
    assert picture(PRICED, suffix).startswith(begins)
    assert picture(BARE, suffix).startswith(begins)


SIZES = {
    "gpt2-nano on l4": ("gpt2-nano", 8, 256, "l4", "MiB"),
    "gpt2 on h100-sxm": ("gpt2", 8, 1024, "h100-sxm", "GiB"),
}


def drawn(name, draw, width, height):
    """A drawn figure's axes, and the account."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    import preflop

    model, batch, seq, device, _ = SIZES[name]
    account = preflop.account(model, {"batch_size": batch, "sequence_length": seq}, device=device)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    draw(axes, account)
    FigureCanvasAgg(figure).draw()
    return axes, account


@pytest.mark.parametrize("size", [(10.5, 5.2), (11, 5.35)], ids=["page", "picture"])
@pytest.mark.parametrize("name", SIZES)
def test_operators_numbers_stay_inside_the_roofline(name, size):
    """All ten numbers lie inside of the axes, none on another or on a tick's label."""
    axes, _ = drawn(name, draw_roofline, *size)
    numbers = [text for text in axes.texts if text.get_text().isdecimal()]
    assert len(numbers) == 10
    boxes = [text.get_window_extent() for text in numbers]
    whole = axes.get_window_extent()
    ticks = [label.get_window_extent() for label in axes.get_xticklabels() + axes.get_yticklabels()]
    for index, box in enumerate(boxes):
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
        assert not any(box.overlaps(other) for other in ticks + boxes[:index])


def test_half_of_the_roofline_has_room_for_every_number():
    """A column of ten numbers at the middle of the axes, the worst place, ends inside of them."""
    axes, _ = drawn("gpt2-nano on l4", draw_roofline, 10.5, 5.2)
    points = axes.get_window_extent().height * 72 / axes.figure.dpi
    assert points / 2 >= 9 + 11 * 10


@pytest.mark.parametrize("name", SIZES)
def test_the_timelines_axis_has_the_unit_of_its_title(name):
    """A peak of 131 MiB stands at 131 on an axis of MiB; gigabytes on one of GiB."""
    axes, account = drawn(name, draw_timeline, 10.5, 4.4)
    unit = SIZES[name][4]
    peak = bytes_text(account.memory.peak_bytes)
    assert axes.get_ylabel() == f"{unit} alive"
    assert peak.endswith(unit) and axes.get_title("left").startswith(f"Peak {peak}")
    assert axes.get_ylim()[1] == pytest.approx(float(peak.split()[0]) * 1.18, rel=1e-3)


def test_same_account_same_picture():
    """Drawing twice gives the same bytes."""
    assert picture(PRICED, ".svg") == picture(PRICED, ".svg")


def test_unknown_kind_of_picture_is_refused():
    """A name without a suffix that can be drawn: an error that lists those that can."""
    with pytest.raises(BadFile, match=r"\.svg, \.png, \.html"):
        check_suffix("roofline.pdf")
    with pytest.raises(BadFile, match="no suffix"):
        check_suffix("roofline")


def test_thinning_keeps_the_peak():
    """Of 100,000 points the outline that is drawn still has the highest."""
    import numpy as np

    totals = np.random.default_rng(0).integers(0, 1000, 100_000)
    totals[77_777] = 5000
    kept = thinned(totals, 1000)
    assert 77_777 in kept and len(kept) <= 1002 and kept[0] == 0 and kept[-1] == 99_999


def test_a_cpu_has_no_roofline():
    """A roofline without a device is an error that says what to name."""
    with pytest.raises(PreflopError, match="--device h100-sxm"):
        roofline.need_device(BARE.device)


def test_roofline_json_has_ridge_points():
    """989.4e12 / 3.352e12 = 295.2 FLOPs per byte for an H100 in bf16."""
    told = roofline.roofline_json(PRICED)
    assert round(told["ridge_points"]["bfloat16"], 1) == 295.2
    assert told["operators"][0]["bound"] == "compute"


def test_does_not_fit_is_said_with_the_bytes():
    """The sentence has what is needed, what there is, and the difference."""
    account = account_tape(linear_step(tokens=90_000_000, device="l4"), find_device("l4"))
    sentence = tables.fits_sentence(account)
    assert sentence.startswith("Does not fit: ") and sentence.endswith("too much.")


def test_hardware_flops_are_explained_by_what_does_them() -> None:
    """Without recomputation the extra work is a kernel's own, and is not called recomputation."""
    import torch

    import preflop
    from preflop.report.tables import six_nd_sentence

    size = {"batch_size": 2, "sequence_length": 32}
    plain = preflop.account("gpt2-nano", size, device="a100-80gb", precision="bf16")
    assert plain.flops.recompute == 0 < plain.flops.hardware - plain.flops.model
    assert "the backward kernel of fused attention computes its scores again" in six_nd_sentence(plain)
    layer = preflop.account(torch.nn.LSTM(8, 8), torch.zeros(5, 2, 8), loss=lambda output: output[0].mean())
    assert six_nd_sentence(layer).endswith("recurrent layers computes gradients that nothing uses.")
    again = preflop.account("gpt2-nano", size, recompute="block")
    assert "backward computes activations again" in six_nd_sentence(again)


def test_a_recording_for_a_gpu_is_not_called_a_cpus() -> None:
    """Read with `--device cpu`: the headline and the assumptions say whose calls these are."""
    import preflop
    from preflop.accounting import account_tape
    from preflop.report.tables import headline

    size = {"batch_size": 2, "sequence_length": 32}
    tape = preflop.account("gpt2-nano", size, device="a100-80gb").tape
    found = account_tape(tape, None)
    assert headline(found).endswith("as recorded for a100-sxm4-80gb, on no device")
    assert any("on a CPU other kernels would run" in said for said in found.assumptions)
    own = preflop.account("gpt2-nano", size)
    assert headline(own).endswith("as a CPU runs it")
    assert not any("the calls are those" in said for said in own.assumptions)


def test_empty_columns_leave_the_table() -> None:
    """A table without a device has no columns of dashes: the expression gets their room."""
    from preflop.report.einsum import cost_table
    from preflop.timing.einsum import einsum_cost

    sizes = {"b": 8, "s": 2048, "d": 4096, "f": 16384}
    bare = cost_table(einsum_cost("b s d, d f -> b s f", sizes))
    assert [heading.text for heading in bare.headings] == [
        "", "expression", "FLOPs", "read", "written", "FLOPs/B",
    ]
    on = cost_table(einsum_cost("b s d, d f -> b s f", sizes, device="h100-sxm"))
    assert {"bound", "at least", "expected"} <= {heading.text for heading in on.headings}
    assert all(len(row) == len(on.headings) for row in on.rows)


def test_the_allocated_peak_is_bridged():
    """Beside the peak stands the one torch shows, and what it has more; without an allocator nothing is said."""
    import preflop

    size = {"batch_size": 1, "sequence_length": 16}
    account = preflop.account("gpt2-nano", size, device="l4")
    said = tables.allocated_sentence(account)
    assert bytes_text(account.memory.allocated_bytes) in said
    assert "torch.cuda.max_memory_allocated()" in said and "cuBLAS's workspaces" in said
    assert tables.allocated_sentence(preflop.account("gpt2-nano", size)) is None
