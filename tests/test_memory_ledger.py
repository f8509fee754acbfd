"""Memory: alive bytes replayed from births and deaths."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflop.ledgers.memory import CATEGORIES, memory, memory_ledger
from preflop.ops import registry
from preflop.tape.events import Phase, Role, Storage, Tape
from tests.tapes import Builder, linear_step

W = 4 * 256 * 256
X = 4 * 512 * 256


def test_peak_of_a_linear_step_by_hand():
    """The steady peak is weight + momentum + input + output + gradient, in backward's matmul."""
    result = memory(linear_step())
    assert result.peak_bytes == W + W + X + X + W
    assert (result.peak_phase, result.peak_op, result.peak_module) == ("backward", "aten.mm", "fc")
    assert result.peak_source == "model.py:7"


def test_first_step_has_no_states_before_its_optimizer():
    """The first step's peak lacks the momentum while backward runs."""
    result = memory(linear_step())
    assert result.first_step_peak_bytes == W + X + X + W


def test_at_peak_sums_to_the_peak():
    """The categories at the peak add up to it exactly, each as counted by hand."""
    result = memory(linear_step())
    at = dataclasses.asdict(result.at_peak)
    assert sum(at.values()) == result.peak_bytes
    assert tuple(at) == CATEGORIES
    assert at["activations"] == X and at["optimizer_states"] == W and at["workspace"] == 0


def test_columns_by_hand():
    """Each column holds what its role has at its moment: 65,536 elements per weight-like tensor."""
    columns = memory(linear_step()).columns
    for name in ("parameters", "gradients", "optimizer_states"):
        column = getattr(columns, name)
        assert (column.bytes, column.elements) == (W, 256 * 256), name
        assert column.dtypes == {"float32": (W, 256 * 256)}
    assert columns.activations.bytes == X
    assert columns.inputs.bytes == X
    assert columns.buffers.bytes == 0


def test_ledger_total_is_the_peak_and_rows_say_where_storages_were_born():
    """The ledger sums to the peak; the output stands at the forward matmul's line."""
    tape = linear_step()
    ledger = memory_ledger(tape)
    assert ledger.total() == memory(tape).peak_bytes
    assert ledger.by("op") == {"aten.mm": X + W, "input": X, "aten.clone": W, "parameter": W}
    assert ledger.by("source") == {"model.py:7": X + W, "": X + 2 * W}
    assert ledger.by("phase")["forward"] == X


def test_workspace_counts_as_a_candidate_for_the_peak(monkeypatch):
    """What a CPU kernel takes inside itself can make the peak, and shows as workspace."""
    monkeypatch.setitem(registry.WORKSPACE, "aten.mul", lambda sig: 10 * X)
    result = memory(linear_step())
    assert result.at_peak.workspace == 10 * X
    assert result.peak_op == "aten.mul"
    assert result.peak_bytes == W + W + W + W + X + 10 * X
    assert memory_ledger(linear_step()).total() == result.peak_bytes


def test_cpu_workspace_rules_do_not_apply_to_another_device(monkeypatch):
    """Rules measured on CPU kernels say nothing about a recording that followed a GPU's rules."""
    monkeypatch.setitem(registry.WORKSPACE, "aten.mul", lambda sig: 10 * X)
    assert memory(linear_step(device="h100-sxm5-80gb")).at_peak.workspace == 0


def test_small_workspace_does_not_move_the_peak(monkeypatch):
    """A workspace at a moment that stays below the peak changes nothing."""
    monkeypatch.setitem(registry.WORKSPACE, "aten.add_", lambda sig: 8)
    assert memory(linear_step()).peak_bytes == 3 * W + 2 * X


def test_tape_without_marks_is_one_steady_step():
    """A recorded function has no marks: its whole tape counts, columns are taken at their fullest."""
    b = Builder(phase=Phase.FORWARD)
    a = b.tensor((8,), Role.INPUT)
    (c,) = b.call("aten.relu", [a], [(8,)], role=Role.ACTIVATION)
    b.call("aten.sum", [c], [()])
    b.free(c)
    result = memory(b.tape)
    assert result.peak_bytes == 32 + 32 + 4
    assert result.first_step_peak_bytes == result.peak_bytes
    assert result.columns.activations.bytes == 32
    assert result.columns.parameters.elements == 0


def test_empty_tape_has_nothing():
    """An empty tape has a peak of 0 and an empty ledger."""
    empty = Tape(subject=None)
    assert memory(empty).peak_bytes == 0
    assert memory_ledger(empty).total() == 0


def test_timeline_follows_the_step_and_touches_the_peak():
    """Each point's categories are bytes alive; the largest point is the peak; ticks rise."""
    result = memory(linear_step())
    totals = [sum(dataclasses.astuple(point.alive)) for point in result.timeline]
    assert max(totals) == result.peak_bytes
    ticks = [point.tick for point in result.timeline]
    assert ticks == sorted(set(ticks)) and len(ticks) == len(result.timeline)
    assert result.timeline[-1].phase == "optimizer"
    assert result.timeline[0:2] == (result.timeline[0], result.timeline[1])


def test_tied_parameter_part_of_its_storage():
    """Elements are the parameter's own where it is a part of a larger storage; bytes the storage's."""
    tape = linear_step()
    tape.parameters[0] = dataclasses.replace(tape.parameters[0], shape=(100, 256))
    assert memory(tape).columns.parameters.elements == 25_600
    assert memory(tape).columns.parameters.bytes == W


spans = st.lists(
    st.tuples(st.integers(0, 40), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 50),
              st.sampled_from(list(Role))),
    max_size=30,
)  # fmt: skip


@given(spans)
def test_replay_equals_brute_force(lives):
    """The peak from prefix sums == the largest sum over all ticks of what is alive then."""
    tape = Tape(subject=None)
    for born, life, words, role in lives:
        died = None if life is None else born + life
        tape.storages.append(Storage(4 * words, "float32", (words,), born, died, role))
    want = max(
        (
            sum(s.bytes for s in tape.storages if s.born <= t and (s.died is None or t < s.died))
            for t in range(75)
        ),
        default=0,
    )
    result = memory(tape)
    assert result.peak_bytes == want
    assert sum(dataclasses.astuple(result.at_peak)) == want
    assert memory_ledger(tape).total() == want


def test_calls_out_of_order_are_a_bug_not_a_wrong_number():
    """A tape whose calls do not follow their ticks is refused."""
    tape = linear_step()
    tape.calls.reverse()
    with pytest.raises(ValueError, match="order"):
        memory(tape)
