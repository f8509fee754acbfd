"""Recurrent layers as CUDA runs them: one cuDNN call, its reserve, its casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from preflop.ledgers.flops import flops_ledger
from preflop.record.subject_tape import record_subject
from preflop.subject import resolve
from preflop.tape.events import Call, Tape

BATCH, LENGTH, SIZE, HIDDEN, LAYERS = 4, 10, 32, 64, 2


class Recurrent(nn.Module):
    """A recurrent layer of torch's, over padded or packed input."""

    def __init__(self, kind: str, *, packed: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(SIZE, HIDDEN, LAYERS, batch_first=True, **kwargs)
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return self.layer(x)[0]
        lengths = torch.tensor([10, 7, 5, 3])
        return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data


def recorded(kind: str, device: str = "a100-80gb", precision: str = "fp32", **more: Any) -> Tape:
    x = torch.zeros(BATCH, LENGTH, SIZE)
    return record_subject(resolve(Recurrent(kind, **more), x, precision=precision, device=device))


def calls(tape: Tape, op: str) -> list[Call]:
    return [call for call in tape.steady() if tape.signatures[call.signature].op == op]


@pytest.mark.parametrize(("kind", "kept"), [("LSTM", 6), ("GRU", 5), ("RNN", 2)])
def test_the_stack_is_one_call_each_way(kind: str, kept: int) -> None:
    """All layers run in one call, which keeps the assumed numbers per row and hidden unit."""
    tape = recorded(kind)
    (forward,), (_,) = calls(tape, "aten._cudnn_rnn"), calls(tape, "aten._cudnn_rnn_backward")
    reserve = tape.signatures[forward.signature].outputs[3]
    assert reserve.bytes == kept * BATCH * LENGTH * HIDDEN * LAYERS * 4
    assert any("does not say what it keeps" in text for text in tape.assumptions)


def test_packed_and_bidirectional_sequences_are_recorded() -> None:
    """25 packed rows; two directions keep twice the reserve."""
    tape = recorded("LSTM", packed=True, bidirectional=True)
    (forward,) = calls(tape, "aten._cudnn_rnn")
    outputs = tape.signatures[forward.signature].outputs
    assert outputs[0].shape == (25, 2 * HIDDEN)
    assert outputs[3].bytes == 6 * 25 * HIDDEN * LAYERS * 2 * 4


def test_autocast_casts_inputs_and_weights() -> None:
    """Under bf16 autocast every floating input of the call is bf16, weights by a fresh copy each."""
    tape = recorded("LSTM", precision="bf16-mixed")
    (forward,) = calls(tape, "aten._cudnn_rnn")
    assert {meta.dtype for meta in tape.signatures[forward.signature].inputs} == {"bfloat16"}


def test_its_work_is_priced() -> None:
    """The recorded LSTM has no operator without a price, and forward is 2 x rows x matrix elements."""
    tape = recorded("LSTM")
    ledger = flops_ledger(tape)
    matrices = 4 * HIDDEN * (SIZE + HIDDEN) + 4 * HIDDEN * 2 * HIDDEN
    assert not ledger.unknown
    assert ledger.by("op")["aten._cudnn_rnn"] == 2 * BATCH * LENGTH * matrices


def test_the_cpu_keeps_its_own_kernels() -> None:
    """Recorded for the CPU there is no cuDNN call."""
    assert not calls(recorded("LSTM", "cpu"), "aten._cudnn_rnn")
