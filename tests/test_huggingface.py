"""Hugging Face configurations: a config.json alone is a subject, and costs what its model costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import preflop
from preflop.errors import BadSubject
from tests.cases.new_bytes import parameters

transformers = pytest.importorskip("transformers")

TEXT = {"batch_size": 2, "sequence_length": 12}
IMAGES = {"batch_size": 2}

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}
BERT = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2": ({**GPT2, "architectures": ["GPT2LMHeadModel"]}, TEXT),
    "gpt2 without a class": (GPT2, TEXT),
    "llama": ({**LLAMA, "architectures": ["LlamaForCausalLM"]}, TEXT),
    "llama tied": ({**LLAMA, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}, TEXT),
    "mixtral": (
        {
            **LLAMA,
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "architectures": ["MixtralForCausalLM"],
        },
        TEXT,
    ),
    "bert": ({**BERT, "architectures": ["BertModel"]}, TEXT),
    "bert masked": ({**BERT, "architectures": ["BertForMaskedLM"]}, TEXT),
    "bert classifier": (
        {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 3},
        TEXT,
    ),
    "bert tokens": ({**BERT, "architectures": ["BertForTokenClassification"]}, TEXT),
    "bert answers": ({**BERT, "architectures": ["BertForQuestionAnswering"]}, TEXT),
    "bert pretraining": ({**BERT, "architectures": ["BertForPreTraining"]}, TEXT),
    "t5": (
        {
            "model_type": "t5",
            "d_model": 32,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 8,
            "vocab_size": 100,
            "decoder_start_token_id": 0,
            "architectures": ["T5ForConditionalGeneration"],
        },
        TEXT,
    ),
    "vit": (
        {
            "model_type": "vit",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "architectures": ["ViTForImageClassification"],
        },
        IMAGES,
    ),
    "resnet": (
        {
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "architectures": ["ResNetForImageClassification"],
        },
        lambda: {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)},
    ),
    "whisper": (
        {
            "model_type": "whisper",
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 100,
            "num_mel_bins": 8,
            "max_source_positions": 50,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "architectures": ["WhisperForConditionalGeneration"],
        },
        lambda: {"input_features": torch.zeros(2, 8, 100), "labels": torch.zeros(2, 6, dtype=torch.int64)},
    ),
}


def written(folder, fields):
    """A folder with this config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def model_of(fields):
    """The model that transformers builds from the same fields, on no device."""
    config = transformers.AutoConfig.for_model(**fields)
    names = fields.get("architectures") or ["GPT2LMHeadModel"]
    return getattr(transformers, names[0]), config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_costs_what_its_model_costs(name, tmp_path):
    """Parameter counts equal transformers', and the peak equals that of the factory on the same batch."""
    fields, batch = CONFIGS[name]
    by_config = preflop.account(written(tmp_path, fields), batch)
    model_class, config = model_of(fields)
    real = model_class(config)
    count = sum(parameter.numel() for parameter in real.parameters())
    assert parameters(by_config.tape)[0] == count
    made = captured_batch(by_config, fields, batch)
    by_factory = preflop.account(lambda: model_class(config), made)
    by_module = preflop.account(real.train(), made)
    assert by_factory.memory.peak_bytes == by_config.memory.peak_bytes
    assert by_module.memory.peak_bytes == by_config.memory.peak_bytes
    assert by_factory.flops.model == by_config.flops.model > 0
    assert by_config.flops.unknown == {}


def captured_batch(account, fields, batch):
    """The batch that `--batch` and `--seq` stand for."""
    if callable(batch):
        return batch()
    size, length = batch["batch_size"], batch.get("sequence_length")
    name = (fields.get("architectures") or ["GPT2LMHeadModel"])[0]
    if length is None:
        side = fields["image_size"]
        return {
            "pixel_values": torch.zeros(size, 3, side, side),
            "labels": torch.zeros(size, dtype=torch.int64),
        }
    ids = torch.arange(size * length).remainder(fields["vocab_size"]).reshape(size, length)
    if name == "BertModel":
        return {"input_ids": ids}
    each = torch.zeros(size, dtype=torch.int64)
    if "Question" in name:
        return {"input_ids": ids, "start_positions": each, "end_positions": each.clone()}
    labels = {"Sequence": each, "TokenClass": ids % 2}
    chosen = next((value for part, value in labels.items() if part in name), ids.clone())
    batch = {"input_ids": ids, "labels": chosen}
    return {**batch, "next_sentence_label": each} if name == "BertForPreTraining" else batch


def test_tied_weights_count_once(tmp_path):
    """A tied head adds no parameters."""
    tied = preflop.account(written(tmp_path, CONFIGS["llama tied"][0]), TEXT)
    free = preflop.account(written(tmp_path, CONFIGS["llama"][0]), TEXT)
    assert parameters(free.tape)[0] - parameters(tied.tape)[0] == 100 * 32


@pytest.mark.parametrize(("length", "said"), [(32, False), (48, True)])
def test_rotary_positions_beyond_the_configuration_are_told(tmp_path, length, said):
    """They run at any length: a sequence that is longer than the model was trained for is an assumption."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 32}))
    sizes = {"batch_size": 1, "sequence_length": length}
    for step in (preflop.account(str(tmp_path), sizes), preflop.account_real(str(tmp_path), sizes)):
        assert any(f"{length} tokens are more than" in words for words in step.assumptions) is said


def test_what_sizes_do_not_describe(tmp_path):
    """A batch of several choices a sample must be given."""
    with pytest.raises(BadSubject, match="--batch-from"):
        preflop.account(written(tmp_path, {**BERT, "architectures": ["BertForMultipleChoice"]}), TEXT)


def test_token_labels_are_classes(tmp_path):
    """Labels of a token classifier are among its classes, whatever the vocabulary."""
    fields = {**BERT, "architectures": ["BertForTokenClassification"], "num_labels": 3}
    account = preflop.account(written(tmp_path, fields), TEXT)
    assert account.memory.columns.inputs.bytes == 2 * 2 * 12 * 8


def test_a_large_config_is_quick_and_small(tmp_path):
    """A 70B configuration is built without its weights, and nothing is drawn at random."""
    fields = {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "architectures": ["LlamaForCausalLM"],
    }
    before = torch.get_rng_state()
    account = preflop.account(written(tmp_path, fields), {"batch_size": 1, "sequence_length": 128})
    assert torch.equal(before, torch.get_rng_state())
    layer = 8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert parameters(account.tape)[0] == 2 * layer + 2 * 128256 * 8192 + 8192


def test_a_known_name_is_not_hidden_by_a_folder(tmp_path, monkeypatch):
    """`gpt2` is the named model also where a folder gpt2 lies, and says so; the folder is `./gpt2`, by that title."""
    (tmp_path / "gpt2-nano").mkdir()
    written(tmp_path / "gpt2-nano", {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100})
    monkeypatch.chdir(tmp_path)
    size = {"batch_size": 1, "sequence_length": 8}
    named, folder = preflop.account("gpt2-nano", size), preflop.account("./gpt2-nano", size)
    assert (named.tape.subject.model, folder.tape.subject.model) == ("gpt2-nano", "./gpt2-nano")
    assert named.memory.columns.parameters.elements > folder.memory.columns.parameters.elements
    assert any("the folder of that name here is ./gpt2-nano" in text for text in named.assumptions)
    assert preflop.account(Path("gpt2-nano"), size).tape.subject.model == "./gpt2-nano"
