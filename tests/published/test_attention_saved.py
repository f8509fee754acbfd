"""What hand-written attention keeps for backward, and holds at its peak, as published for an A100."""

from __future__ import annotations

import math

import pytest
import torch
from einops import einsum
from torch import Tensor, nn

from preflop.device_memory import device_memory
from preflop.ledgers.memory import memory
from preflop.published import staff as cs336
from preflop.record.subject_tape import record_subject
from preflop.subject import resolve
from preflop.units import MIB

BATCH = 8


class Attention(nn.Module):
    """Three inputs that need gradients, and CS336's attention over them without heads or mask."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(BATCH, length, width)) for _ in range(3))

    def forward(self, _: Tensor) -> Tensor:
        scores = einsum(self.q, self.k, "... query d, ... key d -> ... query key") / math.sqrt(
            self.q.shape[-1]
        )
        return einsum(cs336.softmax(scores), self.v, "... query key, ... key d -> ... query d")


# Row, sequence length, width, MiB kept for backward, MiB at the forward's peak less those of the inputs.
ROWS = [
    ("M02173", 256, 16, 4.02344, 24.7739 - 16.7505),
    ("M02177", 4096, 16, 1024.38, 2072.63 - 24.2505),
    ("M02189", 8192, 32, 4096.75, 8241.0 - 48.2505),
    ("M02201", 16384, 64, 16385.5, 32913.8 - 144.25),
    ("M02211", 16384, 128, 16385.5, 33041.8 - 272.25),
]


@pytest.mark.parametrize(("name", "length", "width", "kept", "peak"), ROWS, ids=[row[0] for row in ROWS])
def test_kept_and_peak_within_a_thousandth(
    name: str, length: int, width: int, kept: float, peak: float
) -> None:
    """Two matrices of scores and 12 bytes per query are kept: within 0.1 % of the published bytes."""
    del name
    subject = resolve(
        lambda: Attention(length, width), torch.zeros(1), loss=torch.sum, optimizer=None, device="a100-80gb"
    )
    tape = record_subject(subject)
    parameters = sum(tape.storages[info.storage].bytes for info in tape.parameters)
    # Both cuBLAS workspaces were taken by the report's warm-up, and stand among its inputs.
    workspaces = device_memory(tape, (8, 0)).allocated_by_phase["forward"] - parameters
    assert memory(tape).columns.activations.bytes / MIB == pytest.approx(kept, rel=1e-3)
    assert (workspaces - 2 * 8519680) / MIB == pytest.approx(peak, rel=1e-3)
