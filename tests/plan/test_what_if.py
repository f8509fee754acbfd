"""What if: which changes are tried, what each keeps, how it is priced, and what is said first."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from preflop.account import Account
from preflop.accounting import account_tape
from preflop.api import tape_of_subject
from preflop.choosing import Accounts, what_if
from preflop.errors import BadNumber, BadSubject, UnknownDevice
from preflop.hardware.catalog import find
from preflop.plan.choice import Choice, Route, route_of
from preflop.plan.what_if import Keeps, WhatIf, change, changes, check_split
from preflop.plan.what_if import what_if as plan_what_if
from preflop.report.tables import short_bytes
from preflop.report.what_if import what_if_json, what_if_table
from preflop.subject import resolve
from preflop.tape.replay import story

H100 = "h100-sxm5-80gb"
GIVEN = Choice(batch=8, seq=128, precision="bf16-mixed", device=H100)


def prices() -> Accounts:
    """gpt2-nano from the tapes that ship."""
    size = {"batch_size": 8, "sequence_length": 128}
    return Accounts("gpt2-nano", size, precision="bf16-mixed", device="h100-sxm")


@pytest.fixture(scope="module")
def shipped() -> WhatIf:
    """The changes that need no recording: the split and the devices of shipped tapes."""
    accounts = prices()

    def account(choice: Choice) -> Account:
        plain = (choice.recompute, choice.optimizer, choice.loss_chunks) == ("none", "adamw", 1)
        if not plain or choice.offload or choice.precision not in SHIPPED:
            raise BadSubject(f"not tried here: {choice.precision}.\n  More.")
        return accounts.account(choice)

    return plan_what_if(GIVEN, account, devices=("a100-80gb", "h200-sxm", "h100-sxm"))


SHIPPED = ("fp32", "tf32", "bf16-mixed", "bf16")


NAMES = {"batch": {"batch", "microbatches"}, "loss": {"loss_chunks"}, "allocator": {"alloc_conf"}}
"""Fields of a choice by knob, where they are called otherwise."""


def test_one_knob_at_a_time() -> None:
    """Each choice differs from the given one in its knob alone; a split keeps the samples of a step."""
    for knob, _, choice, _ in changes(GIVEN):
        before, after = vars(GIVEN), vars(choice)
        differing = {name for name in before if before[name] != after[name]}
        assert differing == NAMES.get(knob, {knob})
        assert (choice.batch or 0) * choice.microbatches == 8


def test_every_knob_is_turned() -> None:
    """Accumulation, every other recomputation, every other precision, optimizers, devices but its own."""
    from preflop.precision import PRECISIONS

    tried: dict[str, list[str]] = {}
    for knob, words, _, _ in changes(GIVEN):
        tried.setdefault(knob, []).append(words)
    assert tried["batch"] == ["batch 4, 2 microbatches"]
    assert tried["recompute"] == ["recompute selective", "recompute block"]
    assert set(tried["precision"]) == set(PRECISIONS) - {"bf16-mixed"}
    assert {"adamw-fused", "adafactor", "momentum", "sgd"} <= set(tried["optimizer"])
    assert "h100-sxm5-80gb" not in tried["device"]
    assert tried["allocator"] == ["expandable_segments:True"]


def test_several_microbatches_are_also_joined() -> None:
    """4 microbatches of 2: also 2 of 4, and 8 of 1."""
    given = Choice(batch=2, microbatches=4)
    words = [words for knob, words, _, _ in changes(given) if knob == "batch"]
    assert words == ["batch 1, 8 microbatches", "batch 4, 2 microbatches"]


def test_an_odd_batch_is_not_cut() -> None:
    """A batch of 7 has no half: no such row; a batch of one's own is not resized either."""
    assert not [1 for knob, _, _, _ in changes(Choice(batch=7)) if knob == "batch"]
    assert not [1 for knob, _, _, _ in changes(Choice(batch=None)) if knob == "batch"]


def test_each_field_states_its_route() -> None:
    """Every field of a choice says how a change of it is priced."""
    assert {f.name: f.metadata["route"].value for f in dataclasses.fields(Choice)} == {
        "batch": "resize", "seq": "resize", "microbatches": "resize", "recompute": "transform",
        "precision": "record", "optimizer": "transform", "device": "record", "loss_chunks": "transform",
        "offload": "transform", "alloc_conf": "price",
    }  # fmt: skip
    other = GIVEN.but(device="h200-sxm-141gb")
    assert route_of(GIVEN, other, same_kernels=True) is Route.PRICE
    assert route_of(GIVEN, other.but(precision="fp32"), same_kernels=True) is Route.RECORD


def test_what_a_change_keeps() -> None:
    """A fused AdamW is AdamW; SGD is not; bf16 weights without a master copy are rounded."""
    kept = {words: keeps for _, words, _, keeps in changes(GIVEN)}
    assert kept["adamw-fused"] is Keeps.MATHEMATICS
    assert kept["sgd"] is Keeps.NOTHING
    assert kept["fp32"] is kept["bf16-master"] is Keeps.WEIGHTS
    assert kept["bf16"] is Keeps.ALGORITHM


def test_rows_are_accounts(shipped: WhatIf) -> None:
    """Each row's figures == those of `preflop.account` with that one argument changed."""
    import preflop

    size = {"batch_size": 8, "sequence_length": 128}
    for words, changed in (("bf16", {"precision": "bf16"}), ("a100-sxm4-80gb", {"device": "a100-80gb"})):
        row = next(row for row in shipped.rows if row.words == words)
        options = {"precision": "bf16-mixed", "device": "h100-sxm", **changed}
        account = preflop.account("gpt2-nano", size, **options)
        assert row.outcome is not None
        assert row.outcome.peak_bytes == account.memory.peak_bytes
        assert row.outcome.reserved_bytes == account.memory.reserved_bytes
        assert row.outcome.fits == account.memory.fits
        assert row.outcome.moved_bytes == account.traffic.read_bytes + account.traffic.write_bytes
        assert row.outcome.expected_s == account.time.expected_s


CHANGED = (
    {"optimizer": "sgd"}, {"optimizer": "adamw-fused"}, {"optimizer": "adamw-loop", "microbatches": 2},
    {"optimizer": "adamw-8bit"}, {"optimizer": "adafactor", "recompute": "block"},
    {"optimizer": "adamw-in-backward"}, {"precision": "bf16-master"}, {"precision": "bf16-fp32-states"},
    {"recompute": "block-reentrant"},
)  # fmt: skip
"""Changes of a run whose tape ships that no tape ships for, and that need no recording of the step."""
VIEWS = {"aten.detach"}
"""Calls that an annotated recording does not make: views, which cost nothing."""


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_what_a_transform_gives_is_what_is_recorded(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another update, put into the tape that ships == the step recorded with it, event by event."""
    from preflop.folding import tape_of_many

    size = {"batch_size": 8, "sequence_length": 128}
    options = {"precision": "bf16-mixed", "device": "h100-sxm", **changed}
    recorded = tape_of_many(resolve("gpt2-nano", size, **options))
    monkeypatch.setattr("preflop.choosing.tape_of_subject", lambda subject: pytest.fail("recorded"))
    prices = Accounts("gpt2-nano", size, precision="bf16-mixed", device="h100-sxm")
    account = prices.account(prices.choice.but(**changed))
    assert story(account.tape, without=VIEWS) == story(recorded, without=VIEWS)
    expected = account_tape(recorded, find(H100))
    assert dataclasses.replace(account.memory, timeline=()) == dataclasses.replace(expected.memory, timeline=())
    assert account.time == expected.time
    assert (account.flops, account.traffic) == (expected.flops, expected.traffic)


@pytest.mark.parametrize("changed", [{"optimizer": "momentum"}, {"optimizer": "adamw-in-backward"}], ids=str)
def test_the_same_where_nothing_ships(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own that recomputes its blocks, on the CPU: the given run's tape, with another update."""
    given = {"microbatches": 1, "recompute": "block", "optimizer": "rmsprop"}
    config = {"batch_size": 2, "sequence_length": 16}
    prices = Accounts("gpt2-nano", config, **given)
    for known in (prices.choice, prices.choice.but(recompute="none")):
        prices.price(known)
    recorded = tape_of_subject(resolve("gpt2-nano", config, **{**given, **changed}))
    monkeypatch.setattr("preflop.choosing.tape_of_subject", lambda subject: pytest.fail("recorded"))
    account = prices.account(prices.choice.but(**changed))
    assert story(account.tape, without=VIEWS) == story(recorded, without=VIEWS)


def test_a_split_keeps_tokens_and_flops(shipped: WhatIf) -> None:
    """Half the batch, twice the microbatches: the same tokens and model FLOPs, a lower peak."""
    given, row = shipped.given.outcome, shipped.rows[0].outcome
    assert given is not None
    assert row is not None
    assert (row.tokens, row.flops_model) == (given.tokens, given.flops_model)
    assert row.peak_bytes < given.peak_bytes


def test_what_cannot_be_run_says_why(shipped: WhatIf) -> None:
    """A choice that is refused is a row without figures, with the first line of the reason."""
    row = next(row for row in shipped.rows if row.words == "recompute block")
    assert row.outcome is None
    assert row.refused == "not tried here: bf16-mixed."
    assert shipped.change(row).peak is None


def test_json_and_table_say_the_same(shipped: WhatIf) -> None:
    """Both have the given run and every row that has figures; the JSON is plain."""
    said = json.loads(json.dumps(what_if_json(shipped)))
    assert said["schema"] == "preflop.what-if/1"
    assert len(said["rows"]) == len(shipped.rows)
    assert said["advice"] == shipped.advice
    shown = what_if_table(shipped).rows
    assert len(shown) == 1 + sum(row.outcome is not None for row in shipped.rows)


def test_what_fits_is_judged_by_is_shown(shipped: WhatIf) -> None:
    """needs == reserved + context, one column of the table; fits where it is no more than the device has."""
    device = find(H100)
    table = what_if_table(shipped)
    column = [heading.text for heading in table.headings].index("needs")
    with_figures = [row for row in (shipped.given, *shipped.rows) if row.outcome is not None]
    assert len(with_figures) == len(table.rows)
    for row, cells in zip(with_figures, table.rows):
        outcome = row.outcome
        assert outcome is not None and outcome.needs_bytes is not None and outcome.reserved_bytes is not None
        assert outcome.needs_bytes > outcome.reserved_bytes > outcome.peak_bytes
        assert cells[column] == short_bytes(outcome.needs_bytes)
    given = shipped.given.outcome
    assert given is not None and given.needs_bytes is not None
    assert given.spare_bytes == device.memory_bytes - given.needs_bytes


# -- what to change first ---------------------------------------------------------------------------


def advised(**spare: int) -> str:
    """The advice where the given run does not fit and named rows have so many bytes to spare."""
    account = prices().account(GIVEN)

    def account_of(choice: Choice) -> Account:
        name = "given" if choice == GIVEN else str(next(w for _, w, c, _ in changes(GIVEN) if c == choice))
        bytes_ = spare.get(name.replace(" ", "_").replace("-", "_"), -1)
        peak = account.memory.peak_bytes - (bytes_ if name != "given" else 0)
        memory = dataclasses.replace(account.memory, fits=bytes_ >= 0, spare_bytes=bytes_, peak_bytes=peak)
        return dataclasses.replace(account, memory=memory)

    return plan_what_if(GIVEN, account_of).advice


def test_what_keeps_the_training_comes_first() -> None:
    """Recomputation before another optimizer, though both make the run fit."""
    said = advised(given=-5, recompute_block=10, sgd=10)
    assert said.startswith("Change first: recompute block. The run does not fit, by 5 B;")


def test_the_smallest_device_that_holds_it() -> None:
    """Where nothing else helps: the least memory of the devices that fit."""
    said = advised(given=-5, h200_sxm_141gb=9, b200_sxm_180gb=9)
    assert said.startswith("Change first: the device.")
    assert "h200-sxm-141gb" in said


def test_where_nothing_fits_it_says_so() -> None:
    """No single change makes it fit: the largest saving is named, and that it is not enough."""
    said = advised(given=-5)
    assert "does not fit, by 5 B" in said or "No single change" in said


def test_faster_is_said_with_its_reason(shipped: WhatIf) -> None:
    """A run that fits: the change that keeps weights and takes most time off, with a reason."""
    assert shipped.advice.startswith(("Change first: ", "Change nothing"))


def test_changes_are_per_token(shipped: WhatIf) -> None:
    """FLOPs and bytes are compared per token: the same run with itself is no change."""
    same = change(shipped.given.outcome, shipped.given.outcome)
    assert (same.peak, same.flops, same.moved, same.time) == (0, 0, 0, 0)


# -- bad input --------------------------------------------------------------------------------------


def test_a_split_that_does_not_divide() -> None:
    """8 into 3: an error with the divisors."""
    with pytest.raises(BadNumber, match="batch of 8 cannot be split into 3 equal microbatches") as error:
        check_split(8, 3)
    assert "1, 2, 4, 8" in str(error.value)
    with pytest.raises(BadNumber, match="needs a batch with a size"):
        check_split(None, 2)


def test_an_unknown_device_is_named_before_anything_is_priced() -> None:
    """A wrong name among the devices is an error at once."""
    with pytest.raises(UnknownDevice, match="h100-smx"):
        what_if("gpt2-nano", {"batch_size": 2, "sequence_length": 16}, devices=("h100-smx",))


def test_a_bound_by_bytes_is_shown_as_no_time() -> None:
    """bf16 on a T4, which has no peak for it: no time, the reason named; an H100's row keeps its own."""
    from preflop.choosing import what_if
    from preflop.report.what_if import what_if_json, what_if_table

    size = {"batch_size": 2, "sequence_length": 32}
    found = what_if("gpt2-nano", size, device="t4", precision="bf16", devices=("h100-sxm",))
    assert found.given.outcome is not None
    assert found.given.outcome.lower_s
    assert found.given.outcome.time_s is None
    table = what_if_table(found)
    assert table.rows[0][-2:] == ("-", "")
    times = {row[0]: row[-2] for row in table.rows}
    assert times["device: h100-sxm5-80gb"].endswith("s")
    assert times["tf32"] == "-"
    reasons = found.untimed()
    assert any("Tesla T4 16GB has no dense peak for bfloat16" in reason for reason in reasons)
    assert any(reason.startswith("no time (tf32): Tesla T4 16GB has no dense peak for tf32") for reason in reasons)
    assert what_if_json(found)["given"]["outcome"]["per_unit_s"] is None
    assert "Name a --device" not in found.advice


def test_a_lower_bound_is_not_compared_with_an_expected_time() -> None:
    """MI300X kernels were measured by nobody: its time is shown as at least, and without a change."""
    from preflop.choosing import what_if
    from preflop.report.what_if import what_if_table

    size = {"batch_size": 2, "sequence_length": 32}
    found = what_if("gpt2-nano", size, device="h100-sxm", precision="bf16-mixed", devices=("mi300x",))
    row = what_if_table(found).rows[-1]
    assert row[-2].startswith("at least ")
    assert row[-1] == "-"


def test_one_device_is_compared_by_its_name_alone(monkeypatch):
    """devices="a100" is that device, not five of one letter."""
    monkeypatch.setattr("preflop.choosing.plan_what_if", lambda *given, devices, **rest: devices)
    size = {"batch_size": 8, "sequence_length": 128}
    assert what_if("gpt2-nano", size, device="h100-sxm", devices="a100") == ("a100",)
    assert what_if("gpt2-nano", size, device="h100-sxm", devices=["a100", "l4"]) == ["a100", "l4"]
