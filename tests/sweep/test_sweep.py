"""A sample of the sweep: forty pairs answered and measured. `python -m tests.sweep.run` runs them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from .coverage import within
from .run import Row, all_pairs, in_a_fork, read_rows, try_pair
from .shrink import _spread, small_config

SAMPLE = (
    "llama/LlamaForCausalLM", "qwen2/Qwen2ForCausalLM", "bart/BartForCausalLM", "biogpt/BioGptForCausalLM",
    "bitnet/BitNetForCausalLM", "apertus/ApertusForCausalLM", "aria_text/AriaTextForCausalLM",
    "bamba/BambaForCausalLM", "moshi/MoshiForCausalLM", "gemma4_text/Gemma4ForCausalLM",
    "stablelm/StableLmForCausalLM", "lfm2/Lfm2ForCausalLM", "mamba2/Mamba2ForCausalLM",
    "axk1/AXK1ForCausalLM", "llama4/Llama4ForCausalLM", "gpt_oss/GptOssForCausalLM",
    "mt5/MT5ForConditionalGeneration", "m2m_100/M2M100ForConditionalGeneration",
    "umt5/UMT5ForConditionalGeneration", "bert/BertForMaskedLM", "distilbert/DistilBertForMaskedLM",
    "big_bird/BigBirdForMaskedLM", "gte/GteForMaskedLM", "esm/EsmForSequenceClassification",
    "nemotron/NemotronForSequenceClassification", "vit/ViTForImageClassification",
    "clip/CLIPForImageClassification", "siglip2/Siglip2ForImageClassification",
    "convnext/ConvNextForImageClassification", "segformer/SegformerForImageClassification",
    "resnet/ResNetForImageClassification", "timesformer/TimesformerForVideoClassification",
    "audio-spectrogram-transformer/ASTForAudioClassification", "qwen3_5/Qwen3_5ForConditionalGeneration",
    "blip/BlipForConditionalGeneration", "chinese_clip/ChineseCLIPModel", "patchtst/PatchTSTForRegression",
    "peft-DoRA/llama/LlamaForCausalLM", "peft-prefix/gpt2/GPT2LMHeadModel", "torch/nn.Transformer",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, which oneDNN's scratch depends on."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _pairs() -> dict[str, object]:
    return {pair.name: pair for pair in all_pairs()}


def _row(name: str) -> Row:
    pair = _pairs().get(name)
    if pair is None:
        pytest.skip(f"this transformers has no {name}")
    row = Row(pair.family, name)
    try_pair(pair, row, lambda found: None, measure=True)
    return row


@pytest.mark.parametrize("name", SAMPLE)
def test_pair_is_answered_and_measures_as_predicted(name: str) -> None:
    """Both peaks within 0.1 % (0.5 % with convolutions); FLOPs as counted where the counter is right."""
    row = _row(name)
    assert row.status == "answered", row.reason
    assert not row.measured_error
    assert within(row), (row.error, row.peak_op, row.assumptions)
    assert row.oracle_wrong or row.flops == row.counted_flops


def test_the_sample_is_forty_pairs() -> None:
    """Forty, each once."""
    assert len(SAMPLE) == len(set(SAMPLE)) == 40


def test_small_configurations_are_small() -> None:
    """Rules cut depth, width and vocabulary, and move special tokens into the vocabulary."""
    config = small_config("llama")
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 64, 512)
    assert config.bos_token_id < 512


def test_lists_keep_different_kinds_of_layers() -> None:
    """A list with one entry per layer keeps as many kinds as it has room for."""
    assert _spread(["a", "a", "b", "a"], 2) == ["a", "b"]


def test_a_hang_and_a_crash_do_not_reach_the_sweep() -> None:
    """A fork that hangs is stopped, one that dies is reported, and its last row stays."""
    import os
    import time

    def hang(report: object) -> None:
        time.sleep(60)

    def die(report: object) -> None:
        os._exit(3)

    assert in_a_fork(hang, Row("f", "p"), 1).status == "too slow"
    assert in_a_fork(die, Row("f", "p"), 20).status == "crashed"


def test_rows_of_an_interrupted_run_are_read(tmp_path: object) -> None:
    """No file yet: no rows."""
    assert read_rows(tmp_path / "none.jsonl") == {}
