"""Kinds that a CPU recording shows seldom, and what a GPU's kernels do without."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import preflop
from preflop.ledgers.copies import copies_ledger, copy_rows
from preflop.tape.events import Phase, SubjectInfo
from tests.ops.signatures import meta, signature, tape_of


def test_copies_between_devices_are_named():
    """A tensor made on the host and used on the device is moved: kind, bytes, and the remedy."""
    there = dataclasses.replace(meta(4, 8), device="cuda")
    (row,) = copy_rows(tape_of(signature("aten._to_copy", meta(4, 8), out=there)))
    assert (row.kind, row.bytes, row.reason) == ("move", 128, "(4, 8): cpu to cuda")
    assert "non_blocking" in row.instead
    (row,) = copy_rows(tape_of(signature("aten.copy_", there, meta(4, 8))))
    assert row.kind == "move"


def test_a_change_of_memory_format_is_named():
    """to(memory_format=channels_last) says both strides."""
    last = meta(2, 3, 4, 4, stride=(48, 1, 12, 3))
    (row,) = copy_rows(tape_of(signature("aten._to_copy", meta(2, 3, 4, 4), out=last)))
    assert (row.kind, row.reason) == ("layout", "(2, 3, 4, 4): strides (48, 16, 4, 1) become (48, 1, 12, 3)")


def test_the_optimizers_own_copies_are_its():
    """With an fp32 master copy the update is written back into the bf16 weight: kind optimizer."""
    account = preflop.account(nn.Linear(16, 16, bias=False), torch.randn(2, 16), precision="bf16-master")
    rows = [row for row in account.copies if row.phase == "optimizer" and row.kind != "scalar"]
    assert rows
    assert {row.kind for row in rows} <= {"optimizer", "cast"}


def test_a_gpu_does_without_what_only_cpu_kernels_copy():
    """Numbers turned into tensors, biases and mixed dtypes are copied by a CPU's kernels only."""
    half = signature("aten.mul", meta(4, 8), meta(4, 8, dtype="bfloat16"), out=meta(4, 8))
    biased = signature("aten.addmm", meta(4), meta(2, 3), meta(3, 4), out=meta(2, 4))
    padded = signature("aten.constant_pad_nd", meta(4, 8), (1, 1), 0.0, out=meta(4, 10))
    here, there = tape_of(half, biased, padded), tape_of(half, biased, padded)
    there.subject = SubjectInfo("x", "fp32", None, 1, "none", "", None, None, "h100-sxm5-80gb")
    assert {row.kind for row in copy_rows(here)} == {"cast", "bias", "pad"}
    assert {row.kind for row in copy_rows(there)} == {"pad"}


def test_kernels_only_leaves_out_what_no_profiler_calls_a_copy():
    """cat and stack write new tensors without aten::copy_; clone is one."""
    tape = tape_of(
        signature("aten.cat", [meta(3, 4), meta(3, 4)], out=meta(6, 4)),
        signature("aten.clone", meta(3, 4), out=meta(3, 4)),
        phases=(Phase.FORWARD, Phase.FORWARD),
    )
    assert copies_ledger(tape).by("op") == {"aten.cat": 96, "aten.clone": 48}
    assert copies_ledger(tape, kernels_only=True).total() == 48
