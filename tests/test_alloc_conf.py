"""PYTORCH_CUDA_ALLOC_CONF for the device that a step is priced on: in Python, the command, what-if, fit and a tape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import preflop
from preflop.accounting import account_tape, find_device
from preflop.choosing import what_if
from preflop.cli.main import run
from preflop.device_memory import device_memory
from preflop.hardware.allocator_settings import EXPANDABLE, AllocatorSettings, BadAllocatorSetting
from preflop.hardware.device import Figure

SIZE = {"batch_size": 4, "sequence_length": 1000}


def test_the_account_replays_the_allocator_as_set() -> None:
    """Reserved bytes == the replay with those settings; the tensors are the same."""
    plain = preflop.account("gpt2", SIZE, device="l4")
    grown = preflop.account("gpt2", SIZE, device="l4", alloc_conf=EXPANDABLE)
    settings = AllocatorSettings.parse(EXPANDABLE)
    assert grown.memory.reserved_bytes == device_memory(grown.tape, (8, 9), settings=settings).reserved_bytes
    assert plain.memory.reserved_bytes > grown.memory.reserved_bytes >= grown.memory.allocated_bytes
    assert grown.memory.peak_bytes == plain.memory.peak_bytes
    assert grown.to_dict()["device"]["alloc_conf"] == EXPANDABLE


def test_where_only_gaps_are_in_the_way_the_setting_is_found() -> None:
    """A device with room for the blocks and not for the gaps: what expandable segments leave is what a replay says."""
    tape = preflop.account("gpt2", SIZE, device="l4").tape
    device = find_device("l4")
    settings = AllocatorSettings.parse(EXPANDABLE)
    grown = device_memory(tape, (8, 9), settings=settings).reserved_bytes
    memory = account_tape(tape, device).memory
    room = grown + (memory.context_bytes or 0) + 1000
    assert room < memory.needs_bytes
    small = dataclasses.replace(
        device, figures={**device.figures, "torch_total_memory_bytes": Figure(room, "made up", "C")}
    )
    found = account_tape(tape, small)
    assert (found.memory.fits, found.memory.expandable_spare_bytes) == (False, 1000)
    assert EXPANDABLE in found.verdict


def test_what_if_has_a_row_for_it_where_it_is_not_set() -> None:
    """One row, whose reserved bytes are the account's with the setting; none where it is set or there is no CUDA."""
    found = what_if("gpt2", SIZE, device="l4", devices=())
    (row,) = [row for row in found.rows if row.knob == "allocator"]
    grown = preflop.account("gpt2", SIZE, device="l4", alloc_conf=EXPANDABLE)
    assert row.outcome.reserved_bytes == grown.memory.reserved_bytes
    for options in ({"device": "l4", "alloc_conf": EXPANDABLE}, {"device": "cpu"}):
        assert not [row for row in what_if("gpt2", SIZE, devices=(), **options).rows if row.knob == "allocator"]


def test_the_command_and_a_tape_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--alloc-conf` with a model and with a recorded tape gives the same reserved bytes."""
    tape = str(tmp_path / "a.tape")
    asked = ["--device", "l4", "--alloc-conf", EXPANDABLE, "--json"]
    found = []
    for words in (["gpt2", "--batch", "4", "--seq", "1000", "--tape", tape], [tape]):
        assert run(["account", *words, *asked]) == 0
        found.append(json.loads(capsys.readouterr().out)["memory"]["reserved_bytes"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("device", "text", "says"),
    [
        ("cpu", EXPANDABLE, "the device is the CPU"),
        ("mi300x", EXPANDABLE, "is no CUDA device"),
        ("l4", "expandable_segment:True", "Nearest: expandable_segments"),
        ("l4", "expandable_segments", "is no key:value"),
    ],
)
def test_bad_settings_are_told_before_anything_is_recorded(device: str, text: str, says: str) -> None:
    """What torch would not take, and devices without that allocator."""
    with pytest.raises(BadAllocatorSetting, match=says):
        preflop.account("no-such-model", None, device=device, alloc_conf=text)


def test_fit_takes_it_with_a_model_only(capsys: pytest.CaptureFixture[str]) -> None:
    """The napkin has no allocator: one message, exit status 2."""
    assert run(["fit", "--device", "l4", "--alloc-conf", EXPANDABLE]) == 2
    assert "--alloc-conf expandable_segments:True needs a model" in capsys.readouterr().err
