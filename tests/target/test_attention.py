"""Which attention kernel a GPU takes, what it saves, and how the call is found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention_by_name

from preflop.record.subject_tape import record_subject
from preflop.record.target_attention import Backend, Enabled, Question, choose
from preflop.subject import resolve
from preflop.tape.events import Signature, Tape

V100, T4, A100, A10, L4 = (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)
H100, B200, RTX5090 = (9, 0), (10, 0), (12, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLASH, EFFICIENT, CUDNN, MATH = Backend.FLASH, Backend.EFFICIENT, Backend.CUDNN, Backend.MATH


def ask(capability: tuple[int, int], dtype: torch.dtype, width: int = 64, **more: Any) -> Question:
    shape = (2, 8, 256, width)
    given: dict[str, Any] = {"query": shape, "key": shape, "value": shape, **more}
    return Question(**given, dtype=dtype, capability=capability)


WIDE = {"value": (2, 8, 256, 32)}
GROUPED = {"key": (2, 2, 256, 64), "value": (2, 2, 256, 64), "grouped": True}
SHORT_KEYS = {"key": (2, 8, 128, 64), "value": (2, 8, 128, 64)}
MASK = {"mask": (256, 256)}

CHOICES = [
    (ask(A100, BF16), FLASH, "16-bit on Ampere"),
    (ask(A100, FP32), EFFICIENT, "flash is 16-bit only"),
    (ask(A100, torch.float64), MATH, "no fused kernel has fp64"),
    (ask(A100, BF16, **MASK), EFFICIENT, "flash takes no mask"),
    (ask(A100, BF16, **WIDE), EFFICIENT, "flash wants one width for all"),
    (ask(A100, BF16, 512), EFFICIENT, "flash stops at 256"),
    (ask(A100, BF16, 60), FLASH, "padded to 64 before the call"),
    (ask(A100, BF16, 60, **MASK), MATH, "memory-efficient wants whole 16 bytes"),
    (ask(A100, FP32, 60), EFFICIENT, "60 fp32 numbers are whole 16 bytes"),
    (ask(A100, FP32, 66), MATH, "66 are not"),
    (ask(A100, BF16, causal=True), FLASH, "square causal"),
    (ask(A100, BF16, causal=True, **SHORT_KEYS), EFFICIENT, "flash aligns causal masks to the lower right"),
    (ask(A100, BF16, dropout=0.1), FLASH, "flash has dropout"),
    (ask(A100, BF16, **GROUPED), FLASH, "flash has grouped heads"),
    (ask(A100, BF16, key=(2, 2, 256, 64), value=(2, 2, 256, 64)), MATH, "fewer heads without enable_gqa"),
    (ask(A100, BF16, query=(8, 256, 64), key=(8, 256, 64), value=(8, 256, 64)), MATH, "three dimensions"),
    (ask(A100, BF16, strides_last=(1, 2, 1)), MATH, "rows must be dense"),
    (ask(A10, BF16, 256), FLASH, "wider than 224 without dropout"),
    (ask(A10, BF16, 256, dropout=0.1), EFFICIENT, "wider than 192 with dropout: no backward on sm86"),
    (ask(A10, BF16, 200), EFFICIENT, "between 192 and 224: no backward on sm86"),
    (ask(A10, BF16, 200, gradient=False), FLASH, "forward alone is there"),
    (ask(L4, BF16, 200), EFFICIENT, "the same on sm89"),
    (ask(RTX5090, BF16, 200), EFFICIENT, "and on sm120"),
    (ask(A100, BF16, 200), FLASH, "but not on sm80"),
    (ask(V100, FP16), EFFICIENT, "flash begins with Ampere"),
    (ask(V100, BF16), MATH, "memory-efficient has no bf16 before Ampere"),
    (ask(T4, FP32), EFFICIENT, "fp32 before Ampere"),
    (ask(H100, BF16), CUDNN, "cuDNN comes first on Hopper"),
    (ask(B200, BF16), CUDNN, "and on Blackwell for data centres"),
    (ask(RTX5090, BF16), FLASH, "not on consumer Blackwell"),
    (ask(H100, BF16, **MASK), CUDNN, "cuDNN takes masks"),
    (ask(H100, BF16, mask_gradient=True, **MASK), EFFICIENT, "but gives them no gradient"),
    (ask(H100, BF16, **GROUPED), CUDNN, "cuDNN has grouped heads"),
    (ask(H100, BF16, 256), FLASH, "wider than 128"),
    (ask(H100, BF16, dropout=0.1), FLASH, "cuDNN's dropout goes in sixteenths"),
    (ask(H100, BF16, dropout=0.125), CUDNN, "two sixteenths"),
    (ask(H100, FP32), EFFICIENT, "cuDNN is 16-bit only"),
]  # fmt: skip


@pytest.mark.skipif(torch.__version__ < "2.9", reason="the order on Hopper is that of torch 2.9 and later")
@pytest.mark.parametrize(("question", "expected", "why"), CHOICES, ids=[why for *_, why in CHOICES])
def test_the_kernel_is_the_one_torch_chooses(question: Question, expected: Backend, why: str) -> None:
    """choose(question) == what sdp_utils.cpp's conditions give."""
    assert choose(question) is expected, why


def test_disabled_kernels_are_not_chosen() -> None:
    """With flash off bf16 goes memory-efficient, with both off to math; with all off torch's error."""
    question = ask(A100, BF16)
    assert choose(question, Enabled(flash=False)) is EFFICIENT
    assert choose(question, Enabled(flash=False, efficient=False)) is MATH
    with pytest.raises(RuntimeError, match="No available kernel"):
        choose(question, Enabled(False, False, False, False))


# ------------------------------------------------------------------------------------- recorded


class Attend(nn.Module):
    """One attention layer, with the function given."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int | None = None, *, mask: bool = False,
                 dropout: float = 0.0, function: Any = F.scaled_dot_product_attention) -> None:  # fmt: skip
        super().__init__()
        self.width, self.heads, self.groups = width, heads, groups or heads
        self.project = nn.Linear(width * heads, width * (heads + 2 * self.groups))
        self.masked, self.dropout, self.function = mask, dropout, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        sizes = [self.width * self.heads] + [self.width * self.groups] * 2
        q, k, v = (
            part.view(batch, length, -1, self.width).transpose(1, 2)
            for part in self.project(x).split(sizes, dim=-1)
        )
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.masked else None
        out = self.function(
            q, k, v, attn_mask=mask, is_causal=not self.masked, dropout_p=self.dropout,
            enable_gqa=self.groups != self.heads,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(batch, length, -1)


def recorded(model: nn.Module, device: str = "a100-80gb", precision: str = "bf16", length: int = 100) -> Tape:
    size = model.width * model.heads if isinstance(model, Attend) else 64
    return record_subject(resolve(model, torch.zeros(2, length, size), precision=precision, device=device))


def signature(tape: Tape, name: str) -> Signature:
    found = [s for s in tape.signatures if s.op == f"aten._scaled_dot_product_{name}"]
    assert found, sorted({s.op for s in tape.signatures})
    return found[0]


def test_flash_saves_the_log_sum_exp_and_no_scores() -> None:
    """Flash keeps fp32 (batch, heads, sequence) and two seeds; no tensor has sequence x sequence."""
    tape = recorded(Attend())
    outputs = signature(tape, "flash_attention").outputs
    assert (outputs[1].shape, outputs[1].dtype) == ((2, 4, 100), "float32")
    assert signature(tape, "flash_attention_backward")
    assert not any(out.shape[-2:] == (100, 100) for s in tape.signatures for out in s.outputs)


def test_flash_saves_heads_padded_to_eight() -> None:
    """Heads of 60 run, and are saved, as heads of 64."""
    sig = signature(recorded(Attend(width=60)), "flash_attention")
    assert [meta.shape for meta in sig.inputs] == [(2, 4, 100, 64)] * 3
    assert dict(sig.kwargs)["scale"] == pytest.approx(60**-0.5)


def test_flash_keeps_grouped_heads() -> None:
    """Two key heads for four query heads are not repeated, and their gradients have two heads."""
    tape = recorded(Attend(groups=2))
    assert signature(tape, "flash_attention").inputs[1].shape == (2, 2, 100, 64)
    assert signature(tape, "flash_attention_backward").outputs[1].shape == (2, 2, 100, 64)


def test_efficient_pads_log_sum_exp_to_32_and_masks_to_16() -> None:
    """100 queries keep 128 log-sums; a mask with rows of 100 lies in rows of 112."""
    outputs = signature(tape := recorded(Attend(mask=True)), "efficient_attention").outputs
    assert outputs[1].shape == (2, 4, 128)
    mask = signature(tape, "efficient_attention").inputs[3]
    assert (mask.shape, mask.stride, mask.dtype) == ((2, 4, 100, 100), (0, 0, 112, 1), "bfloat16")


def test_fp32_goes_memory_efficient() -> None:
    """An fp32 step on an A100 keeps no scores either."""
    tape = recorded(Attend(), precision="fp32")
    assert signature(tape, "efficient_attention").inputs[0].dtype == "float32"
    assert signature(tape, "efficient_attention_backward")


@pytest.mark.skipif(torch.__version__ < "2.9", reason="cuDNN comes first on Hopper from torch 2.9 on")
def test_hopper_takes_cudnn_with_a_mask() -> None:
    """On an H100 the mask goes to cuDNN in its own shape, as numbers of the queries' dtype."""
    mask = signature(recorded(Attend(mask=True), "h100-sxm"), "cudnn_attention").inputs[3]
    assert (mask.shape, mask.dtype) == ((100, 100), "bfloat16")


def test_the_math_path_keeps_scores() -> None:
    """Where no fused kernel fits (60 wide, with a mask), softmax's result is kept: (2, 4, 100, 100)."""
    tape = recorded(Attend(width=60, mask=True))
    assert any(out.shape == (2, 4, 100, 100) for s in tape.signatures for out in s.outputs)


def test_dropout_is_inside_the_kernel() -> None:
    """Flash with dropout keeps no mask of sequence x sequence."""
    tape = recorded(Attend(dropout=0.1))
    assert signature(tape, "flash_attention").args[3] == pytest.approx(0.1)
    assert not any(out.shape[-2:] == (100, 100) for s in tape.signatures for out in s.outputs)


def test_autocast_casts_before_the_choice() -> None:
    """Under bf16 autocast fp32 inputs are cast, so flash takes them."""
    tape = recorded(Attend(), precision="bf16-mixed")
    assert signature(tape, "flash_attention").inputs[0].dtype == "bfloat16"


def test_a_function_imported_by_name_is_found() -> None:
    """`from torch.nn.functional import scaled_dot_product_attention` makes no difference."""
    assert signature(recorded(Attend(function=attention_by_name)), "flash_attention")


def test_multihead_attention_is_found() -> None:
    """nn.TransformerEncoderLayer calls it from inside torch, and takes flash too."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    assert signature(recorded(layer), "flash_attention").inputs[0].shape == (2, 4, 100, 16)


def test_the_users_choice_of_kernel_is_kept() -> None:
    """Inside sdpa_kernel(MATH) the call is recorded as math."""

    def math_only(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*args, **kwargs)

    tape = recorded(Attend(function=math_only))
    assert any(out.shape == (2, 4, 100, 100) for s in tape.signatures for out in s.outputs)


def test_the_report_says_which_kernel() -> None:
    """The tape's assumptions name the kernel."""
    assert any("flash kernel" in text for text in recorded(Attend()).assumptions)
    assert math.isfinite(len(recorded(Attend(), device="cpu").assumptions))
    assert not any("CUDA" in text for text in recorded(Attend(), device="cpu").assumptions)


def test_other_vendors_follow_a_stated_assumption() -> None:
    """An MI300X is recorded by CUDA's rules, and the tape says so."""
    assert any("no CUDA device" in text for text in recorded(Attend(), "mi300x").assumptions)
