"""FLOPs, traffic, copies and operator rows of small hand-made tapes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.ledgers.copies import copies_ledger, copy_rows
from preflop.ledgers.flops import flops_ledger, flops_totals
from preflop.ledgers.ledger import GROUPS
from preflop.ledgers.operators import operator_rows, starred
from preflop.ledgers.traffic import traffic_ledger
from preflop.tape.events import Phase, Tape
from tests.ops.signatures import meta, signature, tape_of

MM = signature("aten.mm", meta(4, 8), meta(8, 16), out=meta(4, 16))
ADD = signature("aten.add", meta(4, 16), meta(4, 16), out=meta(4, 16))
ATTENTION = signature(
    "aten._scaled_dot_product_flash_attention_for_cpu",
    *(meta(1, 2, 8, 4),) * 3,
    0.0,
    True,
    out=(meta(1, 2, 8, 4), meta(1, 2, 8)),
)
MINE = signature("mine.make", meta(4), out=meta(4))
KNOWN = (MM, ADD, ATTENTION, MINE)


def test_empty_tape():
    """A tape without calls costs nothing."""
    tape = Tape(None)
    assert (flops_ledger(tape).total(), traffic_ledger(tape).total(), copies_ledger(tape).total()) == (
        0,
        0,
        0,
    )
    assert (flops_totals(tape).total, operator_rows(tape), copy_rows(tape)) == (0, [], ())


def test_totals_by_phase_and_kind():
    """Recomputed work is hardware work and not model work; element-wise work is neither."""
    phases = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER, Phase.FORWARD)
    totals = flops_totals(tape_of(MM, MM, MM, ADD, ATTENTION, phases=phases))
    dense, attended = 4 * 2 * 64 * 4, 4 * 2 * 36 * 4
    assert (totals.forward, totals.recompute, totals.backward, totals.optimizer) == (
        1024 + dense,
        1024,
        1024,
        64,
    )
    assert totals.total == sum(totals.by_kind.values()) == 3 * 1024 + dense + 64
    assert (totals.model, totals.hardware) == (2 * 1024 + dense, 3 * 1024 + dense)
    assert totals.attended == 2 * 1024 + attended


def test_optimizer_products_are_not_model_work():
    """Matrix products of an optimizer (Adafactor, Muon) are counted but never enter MFU."""
    totals = flops_totals(tape_of(MM, phases=(Phase.OPTIMIZER,)))
    assert (totals.optimizer, totals.total, totals.model, totals.hardware) == (1024, 1024, 0, 0)


def test_unknown_operators_are_named():
    """What makes tensors and has no formula is named with its calls, in ledger and totals."""
    tape = tape_of(MM, MINE, MINE)
    assert flops_ledger(tape).unknown == flops_totals(tape).unknown == {"mine.make": 2}


def test_last_step_is_the_one_that_counts():
    """Only the last recorded step is priced."""
    tape = tape_of(MM, MM, ADD)
    tape.calls = [dataclasses.replace(c, step=min(i, 1)) for i, c in enumerate(tape.calls)]
    tape.steps = 2
    assert flops_ledger(tape).total() == 1024
    assert len(operator_rows(tape)) == 2


@given(st.lists(st.tuples(st.sampled_from(KNOWN), st.sampled_from(list(Phase))), max_size=12))
def test_groups_and_rows_sum_to_totals(calls):
    """Every grouping sums to the total; operator rows sum to FLOPs and bytes of the step."""
    tape = tape_of(*(sig for sig, _ in calls), phases=tuple(phase for _, phase in calls))
    flops, bytes_moved, totals = (
        flops_ledger(tape, elementwise=True),
        traffic_ledger(tape),
        flops_totals(tape),
    )
    for ledger in (flops, flops_ledger(tape), bytes_moved, copies_ledger(tape)):
        assert all(sum(ledger.by(group).values()) == ledger.total() for group in GROUPS)
    rows = operator_rows(tape)
    assert flops.total() == totals.total == sum(row.flops for row in rows)
    assert bytes_moved.read_bytes() == sum(row.read_bytes for row in rows)
    assert bytes_moved.write_bytes() == sum(row.write_bytes for row in rows)
    assert bytes_moved.total() == bytes_moved.read_bytes() + bytes_moved.write_bytes()
    assert totals.total == totals.forward + totals.backward + totals.recompute + totals.optimizer
    assert totals.attended <= totals.model <= totals.hardware


def test_layers_share_a_row():
    """Numbers in a module's path become *: twelve layers are one row with twelve calls."""
    tape = tape_of(*[MM] * 12)
    tape.modules = ["", *(f"blocks.{i}.fc1" for i in range(12))]
    tape.calls = [dataclasses.replace(c, signature=0, module=i + 1) for i, c in enumerate(tape.calls)]
    (row,) = operator_rows(tape)
    assert (row.module, row.calls, row.flops) == ("blocks.*.fc1", 12, 12 * 1024)
    assert row.shapes == "(4, 8) x (8, 16) -> (4, 16)"
    assert (row.dtype, row.kind, row.source) == ("float32", "matmul", None)


def test_starred_keeps_names_with_digits():
    """Only whole numbers in a path are replaced."""
    assert starred("h.0.conv2d.1") == "h.*.conv2d.*"
    assert starred("0.10.2") == "*.*.*"


@pytest.mark.parametrize(
    ("sig", "kind", "count"),
    [
        (
            signature("aten.clone", meta(3, 4, stride=(1, 3)), out=meta(3, 4), memory_format="x"),
            "contiguous",
            48,
        ),
        (signature("aten.clone", meta(3, 4, stride=(0, 1)), out=meta(3, 4), memory_format="x"), "repeat", 48),
        (signature("aten._to_copy", meta(3, 4), out=meta(3, 4, dtype="bfloat16")), "cast", 24),
        (signature("aten.cat", [meta(3, 4), meta(3, 4)], out=meta(6, 4)), "cat", 96),
        (signature("aten.copy_", meta(3, 4), meta(3, 4)), "assign", 48),
        (signature("aten.repeat", meta(3, 4), (2, 1), out=meta(6, 4)), "repeat", 96),
    ],
)
def test_copies_are_named(sig, kind, count):
    """Each copy says its kind, the bytes it writes, and why by shape and stride."""
    (row,) = copy_rows(tape_of(sig))
    assert (row.kind, row.bytes, row.calls) == (kind, count, 1)
    assert "(3, 4)" in row.reason or "(6, 4)" in row.reason
    assert copies_ledger(tape_of(sig)).total() == count


def test_an_explicit_clone_is_named_as_asked_for():
    """clone() in forward does what its caller wrote: a kind of its own, with nothing to write instead."""
    (row,) = copy_rows(tape_of(signature("aten.clone", meta(3, 4), out=meta(3, 4))))
    assert (row.kind, row.bytes, row.instead) == ("clone", 48, None)


def test_each_signature_is_priced_once(monkeypatch):
    """60,000 calls of three signatures ask for three prices, not for 60,000."""
    from preflop.ledgers import flops as module

    asked = []
    real = module.work
    monkeypatch.setattr(module, "work", lambda sig: asked.append(sig) or real(sig))
    tape = tape_of(MM, ADD, ATTENTION)
    tape.calls = [call for call in tape.calls for _ in range(20_000)]
    assert flops_ledger(tape).total() == 20_000 * (1024 + 4 * 2 * 64 * 4)
    assert len(asked) == 3
