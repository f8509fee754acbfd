"""Named models as modules: published counts, dtypes, batches, forward and backward, fake tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from preflop.errors import BadNumber, BadSubject, UnknownModel
from preflop.models.build import block_path, build, example_batch
from preflop.models.catalog import ModelFacts, find, models
from preflop.models.initialise import initialise
from tests.models.small import SMALL, sequence_length


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
def test_parameters_are_as_many_as_published(facts: ModelFacts) -> None:
    """Distinct parameters of the module on the meta device == the published count, exactly."""
    model = build(facts, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == facts.parameters


@pytest.mark.parametrize(("name", "with_pooler"), [("bert-base", 109_482_240), ("bert-large", 335_141_888)])
def test_bert_encoder_with_its_pooler_is_as_published(name: str, with_pooler: int) -> None:
    """Without the head, and with the pooler that we do not build, BertModel's count."""
    facts = find(name)
    model = build(facts, device="meta")
    encoder = sum(
        parameter.numel() for part in (model.embeddings, model.blocks) for parameter in part.parameters()
    )
    assert encoder + facts.hidden * (facts.hidden + 1) == with_pooler


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
def test_blocks_are_a_list_of_as_many_as_the_facts_say(facts: ModelFacts) -> None:
    """`block_path` names a ModuleList of `layers` blocks."""
    blocks = build(facts, device="meta").get_submodule(block_path(facts))
    assert isinstance(blocks, torch.nn.ModuleList)
    assert len(blocks) == facts.layers


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
def test_transformer_blocks_are_equal(facts: ModelFacts) -> None:
    """All blocks but a ResNet's print alike and hold parameters of the same names and shapes."""
    if facts.family == "resnet":
        pytest.skip("bottlenecks widen from stage to stage")
    blocks = build(facts, device="meta").blocks
    looks = {
        (repr(block), tuple((n, tuple(p.shape)) for n, p in block.named_parameters())) for block in blocks
    }
    assert len(looks) == 1


@pytest.mark.parametrize("name", sorted(SMALL))
def test_forward_and_backward_reach_every_parameter(name: str) -> None:
    """In training mode, the loss is a finite fp32 scalar and every parameter has a finite gradient."""
    facts = SMALL[name]
    model = build(facts)
    initialise(model, seed=0)
    assert model.training
    output = model(**example_batch(facts, 2, sequence_length(facts)))
    assert output.loss.shape == ()
    assert output.loss.dtype is torch.float32
    output.loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_bfloat16_models_have_an_fp32_loss(name: str) -> None:
    """dtype is that of every parameter; the loss is fp32; torch's default dtype is as before."""
    facts = SMALL[name]
    before = torch.get_default_dtype()
    model = build(facts, dtype=torch.bfloat16)
    assert torch.get_default_dtype() is before
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    initialise(model, seed=0)
    output = model(**example_batch(facts, 2, sequence_length(facts)))
    assert output.logits.dtype is torch.bfloat16
    assert output.loss.dtype is torch.float32


@pytest.mark.parametrize("name", sorted(SMALL))
def test_autocast_gives_bfloat16_logits_and_an_fp32_loss(name: str) -> None:
    """Under CPU autocast, weights stay fp32, matmuls are bf16 and the loss fp32."""
    facts = SMALL[name]
    model = build(facts)
    initialise(model, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**example_batch(facts, 2, sequence_length(facts)))
    assert output.logits.dtype is torch.bfloat16
    assert output.loss.dtype is torch.float32
    output.loss.backward()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_fake_model_runs_a_step_without_reading_a_value(name: str) -> None:
    """Built and run under FakeTensorMode, forward and backward give fake tensors and no error."""
    facts = SMALL[name]
    with FakeTensorMode():
        model = build(facts)
        output = model(**example_batch(facts, 2, sequence_length(facts)))
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_largest_model_is_built_on_fake_tensors() -> None:
    """405,853,388,800 parameters, none of them in memory."""
    with FakeTensorMode():
        model = build("llama-3-405b", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 405_853_388_800


def test_building_and_initialising_leave_the_random_state_alone() -> None:
    """The global generator's state after == before."""
    before = torch.get_rng_state()
    model = build(SMALL["gpt2"])
    initialise(model, seed=0)
    example_batch(SMALL["gpt2"], 2, 8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_initialise_is_reproducible(name: str) -> None:
    """Equal seeds give equal weights; another seed gives others."""
    first, second, third = (build(SMALL[name]) for _ in range(3))
    initialise(first, seed=3)
    initialise(second, seed=3)
    initialise(third, seed=4)
    states = [list(model.parameters()) for model in (first, second, third)]
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))


def test_first_weights_are_spread_as_published() -> None:
    """GPT-2: standard deviation 0.02, and 0.02 / sqrt(2 x layers) into the residual stream."""
    model = build("gpt2-nano")
    initialise(model, seed=0)
    block = model.blocks[0]
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.feed_forward.down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert block.attention.output.bias.abs().max() == 0


def test_a_copy_keeps_the_tie_between_embedding_and_output() -> None:
    """Tied weights are one parameter in the model and in its deep copy."""
    model = copy.deepcopy(build("gpt2-nano"))
    assert model.lm_head.weight is model.token_embedding.weight


def test_token_batches_are_integers_and_labels_their_own_tensor() -> None:
    """int64 ids below the vocabulary, twice the same values, labels in another storage."""
    facts = find("gpt2")
    batch, again = (example_batch(facts, 3, 5) for _ in range(2))
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((3, 5), torch.int64),
        "labels": ((3, 5), torch.int64),
    }
    assert torch.equal(batch["input_ids"], again["input_ids"])
    assert int(batch["input_ids"].max()) < facts.vocab
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_image_batches_are_floats_and_classes() -> None:
    """fp32 images of the model's size and one int64 label each, on the device asked for."""
    batch = example_batch(find("vit-b-16"), 2, None, device="meta")
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in batch.items()} == {
        "images": ((2, 3, 224, 224), torch.float32, "meta"),
        "labels": ((2,), torch.int64, "meta"),
    }


@pytest.mark.parametrize(
    ("name", "sequence", "words"),
    [
        ("gpt2", 1025, ["gpt2", "1024 positions", "1025"]),
        ("gpt2", None, ["gpt2", "no sequence length", "--seq"]),
        ("resnet-50", 128, ["resnet-50", "128", "224 x 224", "--seq"]),
    ],
)
def test_a_length_that_does_not_fit_is_an_error_in_words(
    name: str, sequence: int | None, words: list[str]
) -> None:
    """The message says what we got, what the model needs and what to do."""
    with pytest.raises(BadSubject) as error:
        example_batch(find(name), 1, sequence)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_sizes_are_positive_integers(size: object) -> None:
    """Anything else is a BadNumber that shows the value, for batch and for sequence."""
    with pytest.raises(BadNumber, match="batch size"):
        example_batch(find("gpt2"), size, 8)  # type: ignore[arg-type]
    with pytest.raises(BadNumber, match="sequence length"):
        example_batch(find("gpt2"), 1, size)  # type: ignore[arg-type]


def test_building_an_unknown_name_is_an_unknown_model() -> None:
    """build raises what find raises."""
    with pytest.raises(UnknownModel):
        build("gpt5")


def test_a_window_that_is_not_outgrown_changes_nothing() -> None:
    """Mistral at a sequence of the window's length computes what it does without a window."""
    facts = SMALL["mistral"]
    model = build(facts)
    initialise(model, seed=0)
    ids = example_batch(facts, 1, facts.window)["input_ids"]
    windowed = model(ids).logits
    masks = model._masks(facts.window, dtype=torch.float32, device=torch.device("cpu"))
    assert masks == (None, None)
    mask, _ = model._masks(facts.window + 1, dtype=torch.float32, device=torch.device("cpu"))
    assert mask.sum(dim=-1).tolist() == [1, 2, 3, 4, 5, 5]
    assert windowed.isfinite().all()
