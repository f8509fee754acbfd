"""The law of reentrant recomputation: recompute(record(s), "block-reentrant") == record(s so), by event."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from preflop.axes import SEQ, Axis
from preflop.folding import tape_of
from preflop.parametric import parametric_tapes
from preflop.record.subject_tape import record_cut, record_subject
from preflop.subject import Subject, resolve
from preflop.tape.events import Role, Tape
from preflop.tape.stack import CutTape, Refused
from preflop.transforms.accumulation import accumulate
from preflop.transforms.depth import unfold
from preflop.transforms.recompute import recompute, recompute_at_any_size
from tests.transforms.test_recompute import H100, annotated_member, hold_named, named, net, same

HOW = "block-reentrant"
NAMED = [
    ("gpt2", {"precision": "bf16-mixed", **H100}, [HOW, "block-reentrant:2"]),
    ("llama-3.2-1b", {"precision": "bf16", **H100}, [HOW]),
    ("vit-b-16", {"optimizer": "sgd", "device": "a100"}, [HOW]),
    ("bert-base", {}, [HOW]),
    ("pythia-160m", {"precision": "bf16-mixed", "microbatches": 2}, [HOW]),
]
NAMED_WHOLE = [
    ("gpt2", {"microbatches": 3, "keep_output": True}, [HOW, "block-reentrant:blocks.*.feed_forward"]),
    ("gpt2", {"precision": "bf16-mixed"}, [HOW]),
    ("gemma-2-2b", {"precision": "bf16-mixed"}, [HOW]),
    ("gemma-2-2b", {"precision": "fp16-mixed", **H100}, [HOW]),
    ("qwen-2.5-0.5b", {"precision": "bf16-fp32-states", "device": "a100"}, [HOW]),
    ("resnet-50", {"precision": "bf16-mixed"}, [HOW]),
    ("resnet-50", {"device": "v100"}, [HOW]),
    ("vit-b-16", {"precision": "bf16-mixed", "device": "a100"}, [HOW]),
]
ZOO = ["gpt2-plain", "resnext-grouped"]
ZOO_WHOLE = [
    "gpt2-hf", "gpt2-manual-attention", "llama-hf", "neox-hf", "mistral-sliding-window-hf", "mixtral-hf",
    "bert-hf", "vit-hf", "vit-plain", "mobilenet-depthwise", "convnext", "dropout-manual-attention",
    "autocast-bf16-resnext", "autocast-bf16-llama-hf", "accumulate-4-kept-output",
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "hows"), NAMED)
def test_transformed_equals_recorded(name: str, options: dict[str, Any], hows: list[str]) -> None:
    """For the whole model, folded where it folds."""
    hold_named(name, options, hows)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "hows"), NAMED_WHOLE)
def test_transformed_equals_recorded_whole(name: str, options: dict[str, Any], hows: list[str]) -> None:
    """The same for more architectures, precisions, devices and microbatches."""
    hold_named(name, options, hows)


@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(name, marks=pytest.mark.long) for name in ZOO_WHOLE)])
def test_members_of_the_zoo(name: str) -> None:
    """The same for what people write, without a fold."""
    subject, tape = annotated_member(name)
    same(recompute(tape, how=HOW), record_subject(subject(recompute=HOW)))


def test_accumulation_and_recomputation_commute() -> None:
    """accumulate . recompute == recompute . accumulate == record both."""
    tape = unfold(record_cut(named("gpt2"), lives=True))
    recorded = tape_of(named("gpt2", recompute=HOW, microbatches=3))
    same(recompute(accumulate(tape, microbatches=3), how=HOW), recorded)
    same(accumulate(recompute(tape, how=HOW), microbatches=3), recorded)


@pytest.mark.parametrize("how", [HOW, "block-reentrant:3"])
def test_sizes_stay_symbols(how: str) -> None:
    """recompute(parametric).at(B, S) == record at B, S, at a size that was not fitted: with the kernel that
    makes no log-sum-exp in forward."""
    tape = next(t for t in parametric_tapes(gpt2_at, axes=(Axis(SEQ, 1024),), lives=True) if t.holds(3, 256))
    made = recompute_at_any_size(tape, how=how)
    whole = unfold(CutTape(made.at(3, 256), made.stacks, ()))
    same(whole, tape_of(gpt2_at(3, 256, how)))
    kernel = "aten._scaled_dot_product_efficient_attention"
    made_by = [(call.phase.value, whole.signatures[call.signature]) for call in whole.steady()]
    asked = {(phase, s.args[4], s.outputs[1].shape) for phase, s in made_by if s.op == kernel}
    assert ("recompute", True, (3, 12, 256)) in asked
    assert ("forward", False, (3, 12, 0)) in asked


def gpt2_at(batch: int, seq: int | None, recompute: str = "none") -> Subject:
    """GPT-2 in fp32 on a Hopper."""
    return resolve("gpt2", {"batch_size": batch, "sequence_length": seq}, recompute=recompute, **H100)


# -- small models -----------------------------------------------------------------------------------


class Part(nn.Module):
    """A block in which something is otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        """x + a feed-forward, and what is otherwise."""
        done = self.down(self.up(self.norm(x)).tanh())
        if self.kind in ("no residual", "outer residual"):
            return done
        if other is not None:
            done = done + other
        if self.kind == "several":
            return x + done, done.mean()
        return x + done


class Odd(nn.Module):
    """Two blocks, and what is done with them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(100, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Part(kind) for _ in range(2))
        if kind == "shared":
            self.blocks[1].up.weight = self.blocks[0].up.weight
        if kind == "frozen":
            self.embed.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = first = self.embed(ids)
        for block in self.blocks:
            if self.kind == "keyword":
                x = block(x, other=first * self.scale)
            elif self.kind == "constant":
                x = block(x, other=first.detach() * 2)
            elif self.kind == "elsewhere":
                x = x * 2 + block(x)
            elif self.kind == "outer residual":
                x = x + block(x)
            elif self.kind == "several":
                x, extra = block(x)
                x = x + extra
            elif self.kind == "twice":
                x = block(block(x))
            else:
                x = block(x)
        return x.square().mean()


def odd(kind: str, recompute: str = "none", **options: Any) -> Subject:
    """A step of the small model."""
    return resolve(lambda: Odd(kind), torch.randint(100, (4, 8)), recompute=recompute, **options)


@pytest.mark.parametrize("kind", ["plain", "no residual", "constant", "elsewhere"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "device": "a100", "microbatches": 2}])
def test_small_models(kind: str, options: dict[str, Any]) -> None:
    """With and without a residual; and with a tensor by keyword, which the node keeps until the loss goes."""
    tape = record_subject(odd(kind, **options), lives=True)
    same(recompute(tape, how=HOW), record_subject(odd(kind, HOW, **options)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("shared", "used elsewhere too|of nothing it was given"),
        ("keyword", "by keyword or in a container, a tensor that wants a gradient"),
        ("outer residual", "used elsewhere too"),
        ("several", "returns several tensors"),
        ("twice", "runs several times"),
        ("frozen", "torch would not train it"),
    ],
)
def test_refused_by_name(kind: str, reason: str) -> None:
    """What does not follow from the tape is refused, and says so."""
    with pytest.raises(Refused, match=reason):
        recompute(record_subject(odd(kind), lives=True), how=HOW)


def test_repeated_casts_are_refused() -> None:
    """BERT's input is cast for query, key and value each; autocast casts the detached one once."""
    tape = record_cut(named("bert-base", precision="bf16-mixed"), lives=True).tape
    with pytest.raises(Refused, match="casts several times"):
        recompute(tape, how=HOW)


def test_the_gradient_that_comes_in_is_held() -> None:
    """The engine adds in place to the first block's gradient in the plain step, and not in the other: its frame
    holds it. So one tensor of 4 x 8 x 16 more per such block."""
    plain, made = record_subject(net()), recompute(record_subject(net(), lives=True), how=HOW)

    def sums(tape: Tape, op: str) -> int:
        calls = (call for call in tape.steady() if call.phase.value == "backward")
        return sum(
            tape.signatures[call.signature].op == op and tape.storages[call.storages[0]].role is not Role.GRADIENT
            for call in calls
        )

    assert (sums(plain, "aten.add_"), sums(made, "aten.add_")) == (2, 0)


def test_forgotten_rule_is_seen() -> None:
    """The comparison can fail: a forward that keeps nothing is not that of the other kind."""
    block, reentrant = (recompute(record_subject(net(), lives=True), how=how) for how in ("block", HOW))
    with pytest.raises(AssertionError):
        same(dataclasses.replace(block, subject=reentrant.subject), reentrant)
