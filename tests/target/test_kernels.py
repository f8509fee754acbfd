"""What CUDA saves for backward where a CPU saves something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from preflop.record.subject_tape import record_subject
from preflop.subject import resolve
from preflop.tape.events import Tape

GPU = "a100-80gb"


def recorded(model: nn.Module, device: str = GPU, precision: str = "fp32", **more: Any) -> Tape:
    return record_subject(resolve(model, torch.zeros(8, 64), precision=precision, device=device, **more))


def kept_dtypes(tape: Tape, elements: int) -> list[str]:
    """Dtypes of the storages of that many elements that forward of the last step leaves alive."""
    end = max(mark.tick for mark in tape.marks if mark.name == "forward_end")
    start = max(mark.tick for mark in tape.marks if mark.name == "step")
    return sorted(
        storage.dtype
        for storage in tape.storages
        if start < storage.born < end and (storage.died or end + 1) > end and storage.elements == elements
    )


@pytest.mark.parametrize(("device", "kept"), [("cpu", ["float32", "float32"]), (GPU, ["bool", "float32"])])
def test_dropout_keeps_one_byte_per_element(device: str, kept: list[str]) -> None:
    """CUDA keeps a boolean mask, the CPU one of the input's dtype (beside the layer's input)."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 1, bias=False))
    assert kept_dtypes(recorded(model, device), 8 * 64) == kept


def test_dropout_in_evaluation_and_at_the_ends_is_not_fused() -> None:
    """p = 0, p = 1 and eval() make no native_dropout."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return F.dropout(x, 0.0) + F.dropout(x, 1.0) + F.dropout(x, 0.5, training=False)

    assert not any("native_dropout" in s.op for s in recorded(Ends()).signatures)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="came with torch 2.9")
def test_rms_norm_is_one_kernel() -> None:
    """nn.RMSNorm keeps its input and one fp32 number per row; its backward is one call."""
    tape = recorded(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)), precision="bf16")
    forward = next(s for s in tape.signatures if s.op == "aten._fused_rms_norm")
    assert [(out.shape, out.dtype) for out in forward.outputs] == [((8, 64), "bfloat16"), ((8, 1), "float32")]
    assert any(s.op == "aten._fused_rms_norm_backward" for s in tape.signatures)
    assert not any(s.op == "aten.rsqrt" for s in tape.signatures)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), (GPU, "float32")])
def test_layer_norm_keeps_fp32_statistics(device: str, dtype: str) -> None:
    """For bf16 input CUDA's mean and 1/sigma are fp32; the CPU's are bf16."""
    tape = recorded(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), device, "bf16")
    outputs = next(s for s in tape.signatures if s.op == "aten.native_layer_norm").outputs
    assert [out.dtype for out in outputs] == ["bfloat16", dtype, dtype]


class LogSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.layer(x), -1)


@pytest.mark.parametrize(("precision", "read"), [("fp16-mixed", "float16"), ("bf16-mixed", "float32")])
def test_log_softmax_in_mixed_precision(precision: str, read: str) -> None:
    """fp16 goes into an fp32 log-softmax without an fp32 copy; bf16 is copied first."""
    tape = recorded(LogSoftmax(), precision=precision)
    softmax = next(s for s in tape.signatures if s.op == "aten._log_softmax")
    assert (softmax.inputs[0].dtype, softmax.outputs[0].dtype) == (read, "float32")


class Classify(LogSoftmax):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), torch.zeros(x.shape[0], dtype=torch.int64))


def test_cross_entropy_in_mixed_precision() -> None:
    """cross_entropy asks log_softmax for the logits' own dtype (LossNLL.cpp), so autocast leaves it in
    bf16; nll_loss, which is listed, reads an fp32 copy."""
    tape = recorded(Classify(), precision="bf16-mixed")
    softmax = next(s for s in tape.signatures if s.op == "aten._log_softmax")
    loss = next(s for s in tape.signatures if s.op == "aten.nll_loss_forward")
    assert (softmax.outputs[0].dtype, loss.inputs[0].dtype) == ("bfloat16", "float32")


def test_adamw_is_foreach_on_a_gpu() -> None:
    """Without a suffix AdamW updates by lists on CUDA and one by one on the CPU."""
    layer = nn.Linear(64, 64)
    assert any(s.op == "aten._foreach_addcdiv_" for s in recorded(layer).signatures)
    assert not any("_foreach" in s.op for s in recorded(layer, "cpu").signatures)


def test_fused_adamw_makes_no_temporaries() -> None:
    """The fused AdamW allocates nothing in the steady step; foreach allocates a list of denominators."""

    def made(optimizer: str) -> int:
        tape = recorded(nn.Linear(64, 64), optimizer=optimizer)
        calls = [call.phase.value for call in tape.calls]
        start = max(mark.tick for mark in tape.marks if mark.name == "backward_end")
        return sum(
            storage.bytes
            for storage in tape.storages
            if storage.born > start
            and storage.call >= 0
            and calls[storage.call] == "optimizer"
            and storage.bytes > 64
        )

    assert made("adamw-fused") == 0
    assert made("adamw") >= 64 * 64 * 4
