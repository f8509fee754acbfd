"""Published memory of Stanford CS336's 3.4B model on an A800, reproduced on a machine without a GPU.

Each figure is `torch.cuda.max_memory_allocated` of one stage of a training step, as a student's report
prints it (GiB to three digits), with AdamW's states resident. Rows M02130-M02145 of the field's reference
table. Reached: 0.07 % at worst, most to the last printed digit, except the backward of the two short rows:
0.18 % under. They miss 97.7 MiB, one tensor of the embedding's size. In the step as priced the
embedding's gradient is made once, in place, as torch's source says; the report does not say what its loop
held besides (a gradient from the step before, for instance, would be that much).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from preflop.device_memory import DeviceMemory, device_memory
from preflop.published import staff as cs336
from preflop.record.subject_tape import record_subject
from preflop.subject import resolve
from preflop.units import GIB

A800 = (8, 0)
BATCH, VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 4, 10000, 2560, 32, 32, 10240
ASKED = 0.003
TOLERANCE = 0.001
"""Of each stage's peak; what was asked for is `ASKED`."""


@dataclass(frozen=True)
class Row:
    """One published run: sequence length, precision, blocks recomputed together, GiB by stage."""

    name: str
    length: int
    precision: str
    segment: int = 0
    loss: float | None = None
    """Peak until the loss is known."""
    backward: float | None = None
    optimizer: float | None = None
    backward_tolerance: float = TOLERANCE


ROWS = [
    Row("M02131", 128, "fp32", loss=43.531, backward=51.023, optimizer=51.416, backward_tolerance=ASKED),
    Row("M02133", 128, "bf16-mixed", loss=47.910, backward=51.014, optimizer=51.406, backward_tolerance=ASKED),
    Row("M02135", 512, "fp32", loss=65.362, backward=65.538, optimizer=51.473),
    Row("M02137", 512, "bf16-mixed", loss=62.427, backward=62.674, optimizer=51.436),
    Row("M02139", 2048, "fp32", 2, backward=69.561),
    Row("M02141", 512, "fp32", 1, backward=51.703),
    Row("M02144", 512, "fp32", 8, backward=54.827),
    Row("M02145", 512, "fp32", 16, backward=58.397),
]


def predicted(row: Row) -> DeviceMemory:
    """What Preflop says of the row's loop."""
    ids = torch.zeros(BATCH, row.length, dtype=torch.int64)
    loop = cs336.Loop(ids)
    subject = resolve(
        lambda: cs336.LanguageModel(VOCABULARY, row.length, WIDTH, LAYERS, HEADS, INNER, segment=row.segment),
        ids,
        loss=loop.loss,
        optimizer=loop.optimizer,
        precision=row.precision,
        device="a800",
    )
    return device_memory(record_subject(subject), A800)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_stage_is_as_published(row: Row) -> None:
    """Peak of loss, backward and optimizer, each within 0.1 % of the report (two backwards: 0.3 %)."""
    phases = predicted(row).allocated_by_phase
    for phase, measured in (("forward", row.loss), ("backward", row.backward), ("optimizer", row.optimizer)):
        if measured is not None:
            allowed = row.backward_tolerance if phase == "backward" else TOLERANCE
            assert phases[phase] / GIB == pytest.approx(measured, rel=allowed), phase


FORWARD = [("M02130", 128, "fp32", 18.053), ("M02132", 128, "bf16-mixed", 22.452),
           ("M02134", 512, "fp32", 39.750), ("M02136", 512, "bf16-mixed", 36.832)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "precision", "measured"), FORWARD, ids=[row[0] for row in FORWARD]
)
def test_forward_alone_within_a_thousandth(name: str, length: int, precision: str, measured: float) -> None:
    """A forward with its graph kept, without an optimizer: within 0.1 % of the report."""
    del name
    ids = torch.zeros(BATCH, length, dtype=torch.int64)
    subject = resolve(
        lambda: cs336.LanguageModel(VOCABULARY, length, WIDTH, LAYERS, HEADS, INNER),
        ids,
        loss=lambda logits: logits.mean(),
        optimizer=None,
        precision=precision,
        device="a800",
    )
    forward = device_memory(record_subject(subject), A800).allocated_by_phase["forward"]
    assert forward / GIB == pytest.approx(measured, rel=TOLERANCE)
