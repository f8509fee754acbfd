"""The catalog of named models: names, facts, errors; and that reading it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from preflop.errors import BadSubject, UnknownModel
from preflop.models.catalog import Architecture, ModelFacts, find, known, models, names

ASKED_FOR = (
    "gpt2 gpt2-medium gpt2-large gpt2-xl llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b "
    "llama-3-405b mistral-7b qwen-2.5-0.5b qwen-2.5-7b qwen-2.5-72b gemma-2-2b gemma-2-9b pythia-160m "
    "pythia-410m pythia-1b pythia-1.4b pythia-2.8b pythia-6.9b pythia-12b bert-base bert-large "
    "vit-b-16 vit-l-16 resnet-50 gpt2-nano"
).split()


def _formula(facts: ModelFacts) -> int:
    """Parameters of a decoder by hand: embeddings, blocks (projections, biases, norms), final norm."""
    h, d, f = facts.hidden, facts.head_dim, facts.ffn
    q, kv = facts.heads * d, facts.kv_heads * d
    embeddings = facts.vocab * h * (1 if facts.tied_embeddings else 2)
    if facts.architecture is Architecture.GPT2:
        return embeddings + facts.max_positions * h + facts.layers * (12 * h * h + 13 * h) + 2 * h
    if facts.architecture is Architecture.NEOX:
        return embeddings + facts.layers * (12 * h * h + 13 * h) + 2 * h
    block = h * (q + 2 * kv) + q * h + 3 * h * f + (4 if facts.post_norms else 2) * h
    return embeddings + facts.layers * (block + facts.qkv_bias * (q + 2 * kv)) + h


@pytest.mark.parametrize("name", ASKED_FOR)
def test_every_model_that_was_asked_for_is_there(name: str) -> None:
    """find(name).name == name."""
    assert find(name).name == name


@pytest.mark.parametrize(
    "facts",
    [f for f in models() if f.architecture in (Architecture.GPT2, Architecture.LLAMA, Architecture.NEOX)],
    ids=lambda facts: facts.name,
)
def test_published_count_follows_from_the_dimensions(facts: ModelFacts) -> None:
    """Parameters from the facts by the textbook formula == the published count."""
    assert _formula(facts) == facts.parameters


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("gpt2-small", "gpt2"),
        ("GPT2", "gpt2"),
        (" llama2-7B ", "llama-2-7b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Meta-Llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("llama_3_8b", "llama-3-8b"),
        ("llama-3.1-405b", "llama-3-405b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("Qwen/Qwen2.5-7B", "qwen-2.5-7b"),
        ("google/gemma-2-2b", "gemma-2-2b"),
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("bert-base-uncased", "bert-base"),
        ("resnet50", "resnet-50"),
    ],
)
def test_names_that_people_type_are_understood(typed: str, name: str) -> None:
    """Aliases, other case and `_` for `-` find the same facts as the name."""
    assert find(typed) is find(name)
    assert known(typed)


def test_an_unknown_name_is_an_error_that_says_what_is_near_and_where_all_are() -> None:
    """The message holds the name given, the nearest name and `preflop models`."""
    with pytest.raises(UnknownModel) as error:
        find("lama-2-7b")
    assert "'lama-2-7b'" in str(error.value)
    assert "llama-2-7b" in str(error.value)
    assert "`preflop models`" in str(error.value)
    assert not known("lama-2-7b")


def test_no_name_is_given_twice() -> None:
    """Names and aliases, as they are looked up, are distinct."""
    assert len({name.casefold() for name in names()}) == len(names())


@pytest.mark.parametrize("facts", models(), ids=lambda facts: facts.name)
def test_every_model_says_where_its_numbers_are_from(facts: ModelFacts) -> None:
    """Both sources are there, and what its kind needs is not None."""
    assert facts.source
    assert facts.parameters_source
    token_facts = (facts.vocab, facts.max_positions)
    image_facts = (facts.image_size, facts.classes, facts.channels)
    assert None not in (image_facts if facts.is_image else token_facts)
    if facts.heads is not None:
        assert facts.heads % facts.kv_heads == 0
    if facts.architecture is not Architecture.RESNET:
        assert None not in (facts.heads, facts.kv_heads, facts.head_dim, facts.ffn)


def test_a_missing_size_is_an_error_that_names_it() -> None:
    """Facts without heads cannot be asked for them."""
    with pytest.raises(BadSubject, match="no heads, and a gpt2 needs it"):
        replace(find("gpt2"), heads=None).needed("heads")


def test_a_fact_that_does_not_exist_is_refused() -> None:
    """A misspelt key in a catalog file does not pass unseen."""
    with pytest.raises(TypeError):
        replace(find("gpt2"), widht=768)


def _torch_is_imported_by(statement: str) -> bool:
    code = f"{statement}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_the_catalog_is_read_without_torch() -> None:
    """Facts of every model, no torch in sys.modules."""
    assert not _torch_is_imported_by("from preflop.models import catalog; catalog.models()")


def test_the_test_above_can_fail() -> None:
    """A module of the same room that needs torch is seen to import it."""
    assert _torch_is_imported_by("from preflop.models import loss")
