"""`preflop hardware`: the list, one device, JSON, and a name that is not there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from preflop.cli.main import run
from preflop.hardware.catalog import devices


def test_the_list_shows_every_device_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Each id once at the start of a line, with its legend, and no line longer than 100."""
    assert run(["hardware"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    starts = [line.split()[0] for line in lines if line.split()]
    for device in devices():
        assert starts.count(device.id) == 1
    assert max(map(len, lines)) <= 100
    assert "as sold" in out and "dense" in out


def test_one_device_shows_every_figure_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    """The page of the L4: peaks, figures, both checks, its sources and what the letters mean."""
    assert run(["hardware", "NVIDIA L4"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())  # long lines are wrapped
    (l4,) = (device for device in devices() if device.id == "l4")
    for name in (*l4.peaks, *l4.figures):
        assert name in out
    for figure in (*l4.peaks.values(), *l4.figures.values()):
        assert figure.source in words
    assert "121 TFLOP/s" in out and "with sparsity 242e12" in out
    assert "Check of bandwidth: stated 300, computed 300 GB/s" in out
    assert "Trust: V vendor text read" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object per device: memory and bandwidth in bytes, dense peaks in FLOP/s."""
    assert run(["hardware", "--json"]) == 0
    found = {device["id"]: device for device in json.loads(capsys.readouterr().out)["devices"]}
    assert len(found) == len(devices())
    h100 = found["h100-sxm5-80gb"]
    assert h100["memory_bytes"] == 85_029_027_840
    assert h100["memory_sold_bytes"] == 80_000_000_000
    assert h100["bandwidth_bytes_per_s"] == 3352e9
    assert h100["peak_flops_per_s"]["bfloat16"] == 989.4e12
    assert "h100" in h100["aliases"]


def test_one_device_as_json_has_a_source_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure and peak carries value, source, confidence and note."""
    assert run(["hardware", "h100", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    for figure in (*device["figures"].values(), *device["peaks"].values()):
        assert set(figure) == {"value", "source", "confidence", "note"}
        assert figure["source"]
    assert [check["what"] for check in device["checks"]] == ["bandwidth", "dense 16-bit peak"]


def test_an_unknown_device_exits_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """One message on standard error, nothing on standard output."""
    assert run(["hardware", "h100-smx"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no device named 'h100-smx'" in captured.err and "Nearest: h100-sxm" in captured.err


def test_the_command_imports_neither_torch_nor_numpy() -> None:
    """`preflop hardware` answers without the heavy imports."""
    code = (
        "import sys; from preflop.cli.main import run; status = run(['hardware', 'h100', '--json']); "
        "print(status, sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 []"
