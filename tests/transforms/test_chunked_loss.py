"""The law of the chunked loss: with_chunked_loss(record(s)) == record(s with such a loss)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import preflop
from preflop.choosing import Accounts, in_chunks
from preflop.errors import BadSubject
from preflop.folding import tape_of
from preflop.ledgers.flops import flops_totals
from preflop.ledgers.memory import memory
from preflop.models.build import build, example_batch
from preflop.models.catalog import find
from preflop.models.chunked_loss import chunked_cross_entropy
from preflop.models.initialise import initialise
from preflop.record.loss_tape import record_loss
from preflop.subject import resolve
from preflop.tape.head import Head
from preflop.tape.replay import story
from preflop.transforms.chunked_loss import ASSUMPTION, head_of, with_chunked_loss

LOSSES = ("next_token_loss", "token_loss", "class_loss")
# Model, head, precision and more, chunks. 64 rows, of which 5 chunks make unequal ones.
CASES = [
    ("gpt2", "lm_head", {}, 2),
    ("gpt2", "lm_head", {"precision": "bf16-mixed", "device": "h100-sxm"}, 5),
    ("llama-3.2-1b", "lm_head", {"precision": "bf16", "device": "h100-sxm", "microbatches": 2}, 4),
    ("pythia-160m", "lm_head", {"precision": "bf16-mixed", "optimizer": "lion"}, 8),
    ("bert-base", "head.decoder", {"precision": "fp16-mixed", "microbatches": 2}, 4),
    ("vit-b-16", "classifier", {}, 2),
    ("resnet-50", "classifier", {}, 2),
]
WHOLE = [
    ("llama-3.2-1b", "lm_head", {"precision": "fp16-mixed", "microbatches": 2, "recompute": "block"}, 2),
    ("qwen-2.5-0.5b", "lm_head", {"precision": "bf16-master"}, 3),
    ("bert-base", "head.decoder", {"precision": "bf16-mixed", "device": "a100"}, 1),
]


def with_such_a_loss(
    monkeypatch: pytest.MonkeyPatch, name: str, head: str, chunks: int, *, next_token: bool
) -> Callable[[], nn.Module]:
    """What builds the model with its own loss replaced: the head passes its input on, the loss does the rest."""

    def make() -> nn.Module:
        model = build(name)
        linear: Any = model.get_submodule(head)
        linear.forward = lambda hidden: hidden

        def loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return chunked_cross_entropy(
                hidden, linear.weight, labels, bias=linear.bias, chunks=chunks, next_token=next_token
            )

        module = importlib.import_module(type(model).__module__)
        for function in LOSSES:
            if hasattr(module, function):
                monkeypatch.setattr(module, function, loss)
        return model

    return make


def hold(monkeypatch: pytest.MonkeyPatch, name: str, head: str, options: dict, chunks: int) -> None:
    """Transformed == recorded."""
    facts = find(name)
    size = {"batch_size": 2} if facts.is_image else {"batch_size": 2, "sequence_length": 32}
    plain = resolve(name, size, **options)
    base = tape_of(plain)
    found = head_of(base)
    made = with_chunked_loss(base, record_loss(plain, found, chunks=chunks))
    make = with_such_a_loss(monkeypatch, name, head, chunks, next_token=found.next_token)
    recorded = tape_of(resolve(make, example_batch(facts, 2, None if facts.is_image else 32), **options))
    assert story(made) == story(recorded)
    assert all(made.storages[info.storage].name == info.name for info in made.parameters)
    assert memory(made).at_peak == memory(recorded).at_peak
    assert memory(made).columns == memory(recorded).columns
    assert flops_totals(made) == flops_totals(recorded)
    assert flops_totals(made).model == flops_totals(base).model
    assert ASSUMPTION in made.assumptions


@pytest.mark.parametrize(("name", "head", "options", "chunks"), CASES)
def test_chunked_equals_recorded(
    monkeypatch: pytest.MonkeyPatch, name: str, head: str, options: dict, chunks: int
) -> None:
    """Head and loss replaced == the step recorded with a chunked loss, event by event; FLOPs as before."""
    hold(monkeypatch, name, head, options, chunks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "head", "options", "chunks"), WHOLE)
def test_chunked_equals_recorded_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, head: str, options: dict, chunks: int
) -> None:
    """The same for more architectures and precisions."""
    hold(monkeypatch, name, head, options, chunks)


@pytest.mark.parametrize(
    ("name", "head", "optimizer", "options", "chunks"),
    [
        ("gpt2", "lm_head", "sgd", {"precision": "bf16-mixed", "device": "h100-sxm"}, 5),
        ("bert-base", "head.decoder", "adamw", {}, 2),
    ],
)
def test_updates_are_moved_into_backward_afterwards(
    monkeypatch: pytest.MonkeyPatch, name: str, head: str, optimizer: str, options: dict, chunks: int
) -> None:
    """Chunked, then updated in backward == recorded with both; the head's gradient is there before backward is."""
    size = {"batch_size": 2, "sequence_length": 32}
    in_backward = f"{optimizer}-in-backward"
    prices = Accounts(name, size, optimizer=in_backward, **options)
    made = prices.account(prices.choice.but(loss_chunks=chunks)).tape
    make = with_such_a_loss(monkeypatch, name, head, chunks, next_token=name == "gpt2")
    recorded = tape_of(resolve(make, example_batch(find(name), 2, 32), optimizer=in_backward, **options))
    assert story(made, without={"aten.detach"}) == story(recorded, without={"aten.detach"})
    assert all(made.storages[info.storage].name == info.name for info in made.parameters)
    assert memory(made).at_peak == memory(recorded).at_peak


def test_its_gradients_are_those_of_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt2-nano: the loss in 4 chunks and its gradients are those of the whole loss, to rounding."""
    model, batch = build("gpt2-nano"), example_batch(find("gpt2-nano"), 2, 32)
    initialise(model, 0)
    model.eval()
    whole = model(**batch).loss
    whole.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    make = with_such_a_loss(monkeypatch, "gpt2-nano", "lm_head", 4, next_token=True)
    chunked = make().eval()
    chunked.load_state_dict(model.state_dict())
    loss = chunked(**batch).loss
    loss.backward()
    assert torch.allclose(loss, whole, rtol=1e-6)
    for name, parameter in chunked.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_a_real_step_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded step of a chunked loss is the measured one, within the bytes that any step is off."""
    make = with_such_a_loss(monkeypatch, "gpt2-nano", "lm_head", 4, next_token=True)
    found = preflop.verify(make, example_batch(find("gpt2-nano"), 2, 32))
    assert found.verifies
    assert abs(found.steady.predicted_bytes - found.steady.measured_bytes) <= 128


def test_logits_do_not_exist_at_once() -> None:
    """GPT-2 at 2048 positions, 50257 words: with 8 chunks at least 2 of 3 tensors of all logits are gone."""
    subject = resolve("gpt2", {"batch_size": 2, "sequence_length": 1024}, optimizer=None)
    tape = tape_of(subject)
    saved = memory(tape).peak_bytes - memory(in_chunks(tape, subject, 8)).peak_bytes
    assert saved > 2 * (2 * 1024) * 50257 * 4


class Scaled(nn.Module):
    """A head whose logits are changed, or whose loss is no cross entropy."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(8, 10), kind

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, in one of several ways."""
        logits = self.head(x)
        if self.kind == "tanh":
            return functional.cross_entropy(torch.tanh(logits), labels)
        if self.kind == "more":
            return functional.cross_entropy(logits, labels) + 1
        if self.kind == "part":
            return functional.cross_entropy(logits[:-1], labels[:-1])
        return functional.mse_loss(logits, functional.one_hot(labels, 10).float())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("tanh", "aten.tanh"), ("more", "aten.add"), ("part", "part of the logits"), ("mse", "no cross entropy")],
)
def test_other_losses_are_refused_by_name(kind: str, reason: str) -> None:
    """Where something stands between head, cross entropy and loss: refused, and said what it is."""
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    subject = resolve(Scaled(kind), batch)
    with pytest.raises(BadSubject, match=f"Scaled's loss cannot be made in chunks: .*{reason}"):
        in_chunks(tape_of(subject), subject, 2)


def test_named_models_that_cannot_are_refused() -> None:
    """Gemma caps its logits by tanh; updates in backward stand between: refused."""
    size = {"batch_size": 2, "sequence_length": 32}
    subject = resolve("gpt2-nano", size, optimizer="sgd-in-backward")
    with pytest.raises(BadSubject, match="chunk the loss first"):
        in_chunks(tape_of(subject), subject, 2)
    subject = resolve("gemma-2-2b", size)
    with pytest.raises(BadSubject, match="gemma-2-2b's loss .*the logits reach the cross entropy by aten.mul"):
        in_chunks(tape_of(subject), subject, 2)


def test_a_head_is_found_with_its_facts() -> None:
    """gpt2-nano: hidden states of every position, the tied embedding, shifted labels."""
    head = head_of(tape_of(resolve("gpt2-nano", {"batch_size": 2, "sequence_length": 32})))
    assert isinstance(head, Head)
    assert (head.hidden.shape[:2], head.labels.shape, head.bias, head.next_token) == (
        (2, 32), (2, 32), None, True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "precision"), [("gpt2", "fp32"), ("llama-3.2-1b", "bf16-mixed"), ("bert-base", "bf16")]
)
def test_a_shipped_tape_is_chunked_as_a_recorded_one(name: str, precision: str) -> None:
    """Shipped tapes are recorded under hooks, which detach what they hand to backward: it does not matter."""
    from preflop.api import shipped_of

    sizes = {"batch_size": 2, "sequence_length": 128}
    subject = resolve(name, sizes, precision=precision, device="h100-sxm5-80gb")
    shipped = shipped_of(subject)
    assert shipped is not None
    made = in_chunks(shipped, subject, 4)
    wanted = in_chunks(tape_of(subject), subject, 4)
    assert story(made, without=("aten.detach",)) == story(wanted, without=("aten.detach",))
    assert memory(made).at_peak == memory(wanted).at_peak
