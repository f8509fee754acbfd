"""Each family computes what transformers computes: same weights in, same logits and loss out."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5", reason="the names below are of 5")

from preflop.models.build import build, example_batch
from preflop.models.catalog import ModelFacts
from preflop.models.initialise import initialise
from tests.models.small import SMALL, sequence_length

# Absolute and relative difference allowed between two fp32 computations of the same values.
TOLERANCE = 1e-5

GPT2_NAMES = [
    (r"^token_embedding", "transformer.wte"),
    (r"^position_embedding", "transformer.wpe"),
    (r"^final_norm", "transformer.ln_f"),
    (r"^blocks", "transformer.h"),
    (r"attention_norm", "ln_1"),
    (r"feed_forward_norm", "ln_2"),
    (r"attention\.query_key_value", "attn.c_attn"),
    (r"attention\.output", "attn.c_proj"),
    (r"feed_forward\.up", "mlp.c_fc"),
    (r"feed_forward\.down", "mlp.c_proj"),
]
LLAMA_NAMES = [
    (r"^token_embedding", "model.embed_tokens"),
    (r"^final_norm", "model.norm"),
    (r"^blocks", "model.layers"),
    (r"\.attention\.(query|key|value|output)", lambda found: f".self_attn.{found[1][0]}_proj"),
    (r"feed_forward\.(gate|up|down)", r"mlp.\1_proj"),
    (r"attention_norm", "input_layernorm"),
]
LLAMA_NORMS = [(r"feed_forward_norm", "post_attention_layernorm")]
GEMMA_NORMS = [
    (r"attention_post_norm", "post_attention_layernorm"),
    (r"feed_forward_norm", "pre_feedforward_layernorm"),
    (r"feed_forward_post_norm", "post_feedforward_layernorm"),
]
NEOX_NAMES = [
    (r"^token_embedding", "gpt_neox.embed_in"),
    (r"^final_norm", "gpt_neox.final_layer_norm"),
    (r"^blocks", "gpt_neox.layers"),
    (r"attention\.output", "attention.dense"),
    (r"feed_forward\.up", "mlp.dense_h_to_4h"),
    (r"feed_forward\.down", "mlp.dense_4h_to_h"),
    (r"attention_norm", "input_layernorm"),
    (r"feed_forward_norm", "post_attention_layernorm"),
]
BERT_NAMES = [
    (r"^embeddings\.(word|token_type|position)\.", r"bert.embeddings.\1_embeddings."),
    (r"^embeddings\.norm", "bert.embeddings.LayerNorm"),
    (r"^blocks", "bert.encoder.layer"),
    (r"\.attention\.(query|key|value)", r".attention.self.\1"),
    (r"\.attention\.output", ".attention.output.dense"),
    (r"\.attention_norm", ".attention.output.LayerNorm"),
    (r"feed_forward\.up", "intermediate.dense"),
    (r"feed_forward\.down", "output.dense"),
    (r"feed_forward_norm", "output.LayerNorm"),
    (r"^head\.transform", "cls.predictions.transform.dense"),
    (r"^head\.norm", "cls.predictions.transform.LayerNorm"),
    (r"^head\.decoder", "cls.predictions.decoder"),
]
VIT_NAMES = [
    (r"^embedding\.projection", "vit.embeddings.patch_embeddings.projection"),
    (r"^embedding\.class_token", "vit.embeddings.cls_token"),
    (r"^embedding\.position", "vit.embeddings.position_embeddings"),
    (r"^blocks", "vit.layers"),
    (r"^final_norm", "vit.layernorm"),
    (r"\.attention\.(query|key|value|output)", lambda found: f".attention.{found[1][0]}_proj"),
    (r"feed_forward\.up", "mlp.fc1"),
    (r"feed_forward\.down", "mlp.fc2"),
    (r"attention_norm", "layernorm_before"),
    (r"feed_forward_norm", "layernorm_after"),
]


def _resnet_name(name: str, facts: ModelFacts) -> str:
    """transformers nests bottlenecks in stages; ours lie in one list."""
    name = name.replace("stem.convolve.", "resnet.embedder.embedder.convolution.")
    name = name.replace("stem.norm.", "resnet.embedder.embedder.normalization.")
    name = name.replace("classifier.", "classifier.1.")
    place = re.match(r"blocks\.(\d+)\.", name)
    if place is None:
        return name
    stage, index = 0, int(place[1])
    while index >= facts.depths[stage]:
        index -= facts.depths[stage]
        stage += 1
    name = name[place.end() :].replace("shortcut.0", "shortcut.convolution")
    name = name.replace("shortcut.1", "shortcut.normalization")
    for layer, part in enumerate(("narrow", "convolve", "widen")):
        name = name.replace(f"{part}_norm.", f"layer.{layer}.normalization.")
        name = re.sub(rf"^{part}\.", f"layer.{layer}.convolution.", name)
    return f"resnet.encoder.stages.{stage}.layers.{index}.{name}"


NAMES = {
    "gpt2": GPT2_NAMES,
    "llama": LLAMA_NAMES + LLAMA_NORMS,
    "mistral": LLAMA_NAMES + LLAMA_NORMS,
    "qwen2": LLAMA_NAMES + LLAMA_NORMS,
    "gemma2": GEMMA_NORMS[:1] + GEMMA_NORMS[2:] + LLAMA_NAMES + GEMMA_NORMS[1:2],
    "pythia": NEOX_NAMES,
    "bert": BERT_NAMES,
    "vit": VIT_NAMES,
}


def _their_name(name: str, facts: ModelFacts) -> str:
    if facts.family == "resnet":
        return _resnet_name(name, facts)
    for pattern, replacement in NAMES[facts.family]:
        name = re.sub(pattern, replacement, name)
    return name


def _shape(facts: ModelFacts) -> dict[str, object]:
    """Configuration keys that most transformers families share."""
    return {
        "num_hidden_layers": facts.layers,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "intermediate_size": facts.ffn,
        "vocab_size": facts.vocab,
        "max_position_embeddings": facts.max_positions,
        "tie_word_embeddings": facts.tied_embeddings,
    }


def _rotary(facts: ModelFacts) -> dict[str, object]:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": facts.rope_theta}
    if facts.rotary_fraction != 1.0:
        rope["partial_rotary_factor"] = facts.rotary_fraction
    if facts.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": facts.rope_scaling.factor,
            "low_freq_factor": facts.rope_scaling.low_freq_factor,
            "high_freq_factor": facts.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": facts.rope_scaling.original_max_positions,
        }
    return {"rope_parameters": rope}


def _grouped(facts: ModelFacts) -> dict[str, object]:
    return {
        **_shape(facts),
        **_rotary(facts),
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "rms_norm_eps": facts.norm_eps,
    }


def _theirs(facts: ModelFacts) -> torch.nn.Module:
    """The transformers model of the same facts, with the defaults of its family for the rest."""
    t = transformers
    if facts.family == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                n_layer=facts.layers,
                n_embd=facts.hidden,
                n_head=facts.heads,
                vocab_size=facts.vocab,
                n_positions=facts.max_positions,
            )
        )
    if facts.family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**_grouped(facts)))
    if facts.family == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**_grouped(facts), sliding_window=facts.window))
    if facts.family == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**_grouped(facts)))
    if facts.family == "gemma2":
        return t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **_grouped(facts),
                sliding_window=facts.window,
                query_pre_attn_scalar=round(facts.attention_scale**-2),
                attn_logit_softcapping=facts.attention_softcap,
                final_logit_softcapping=facts.logit_softcap,
                attn_implementation="eager",
            )
        )
    if facts.family == "pythia":
        return t.GPTNeoXForCausalLM(
            t.GPTNeoXConfig(**_shape(facts), **_rotary(facts), layer_norm_eps=facts.norm_eps)
        )
    if facts.family == "bert":
        return t.BertForMaskedLM(t.BertConfig(**_shape(facts), layer_norm_eps=facts.norm_eps))
    if facts.family == "vit":
        return t.ViTForImageClassification(
            t.ViTConfig(
                num_hidden_layers=facts.layers,
                hidden_size=facts.hidden,
                num_attention_heads=facts.heads,
                intermediate_size=facts.ffn,
                image_size=facts.image_size,
                patch_size=facts.patch_size,
                num_labels=facts.classes,
                layer_norm_eps=facts.norm_eps,
            )
        )
    return t.ResNetForImageClassification(
        t.ResNetConfig(
            embedding_size=facts.stem,
            hidden_sizes=[facts.hidden // 2**left for left in (2, 1, 0)],
            depths=list(facts.depths),
            num_labels=facts.classes,
        )
    )


def _copied(ours: torch.nn.Module, theirs: torch.nn.Module, facts: ModelFacts) -> None:
    """Copies our values into theirs, under their names; every one of theirs must be reached."""
    state = {}
    for name, tensor in ours.state_dict().items():
        flip = facts.family == "gpt2" and name.startswith("blocks") and tensor.dim() == 2
        state[_their_name(name, facts)] = tensor.T if flip else tensor
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert [name for name in missing if name != "cls.predictions.bias"] == []
    theirs.tie_weights()


def _pair(facts: ModelFacts) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our model and theirs, in evaluation mode, with equal random weights (norms and biases too)."""
    ours = build(facts)
    initialise(ours, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    theirs = _theirs(facts)
    _copied(ours, theirs, facts)
    return ours.eval(), theirs.eval()


@pytest.mark.parametrize("name", sorted(SMALL))
def test_logits_loss_and_gradients_equal_those_of_transformers_to_1e_5(name: str) -> None:
    """With equal weights, logits, loss and every gradient == transformers', within 1e-5."""
    facts = SMALL[name]
    ours, theirs = _pair(facts)
    batch = example_batch(facts, 2, sequence_length(facts))
    their_batch = dict(batch)
    if facts.is_image:
        their_batch["pixel_values"] = their_batch.pop("images")
    our_output, their_output = ours(**batch), theirs(**their_batch)
    torch.testing.assert_close(our_output.logits, their_output.logits, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(our_output.loss, their_output.loss, atol=TOLERANCE, rtol=TOLERANCE)
    our_output.loss.backward()
    their_output.loss.backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters(remove_duplicate=False)}
    for our_name, parameter in ours.named_parameters():
        gradient = their_gradients[_their_name(our_name, facts)]
        flip = facts.family == "gpt2" and our_name.startswith("blocks") and gradient.dim() == 2
        torch.testing.assert_close(
            parameter.grad, gradient.T if flip else gradient, atol=TOLERANCE, rtol=1e-4
        )


# Calls that may differ in number: views, and what makes positions, tables, masks and defaults once a step.
ONCE_A_STEP = {
    "add", "mul", "div", "sub", "rsub", "pow.Scalar", "reciprocal", "arange", "cat", "zeros", "zeros_like",
    "new_ones", "scalar_tensor", "where", "masked_fill", "bitwise_and", "bitwise_not", "eq", "ne", "all",
    "clamp", "cumsum", "gather", "_to_copy", "_local_scalar_dense", "lift_fresh",
}  # fmt: skip
VIEWS = {
    "view", "_unsafe_view", "permute", "transpose", "t", "detach", "unsqueeze", "squeeze", "alias", "expand",
    "slice", "split", "select", "_reshape_alias",
}  # fmt: skip


class _Calls(TorchDispatchMode):
    """Counts operator calls, in-place ones with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _, name, overload = str(func).split(".")
        if f"{name}.{overload}" not in ONCE_A_STEP and name not in ONCE_A_STEP | VIEWS:
            self.counts[name.removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_training_step_calls_the_operators_that_transformers_calls(name: str) -> None:
    """Forward and backward in training mode: calls of every operator that does work == transformers'.

    Without its cache of keys and values, which serves generation and copies both in every block.
    """
    facts = SMALL[name]
    ours, theirs = _pair(facts)
    batch = example_batch(facts, 2, sequence_length(facts))
    their_batch = dict(batch)
    if facts.is_image:
        their_batch["pixel_values"] = their_batch.pop("images")
    elif facts.family != "bert":
        their_batch["use_cache"] = False
    with _Calls() as our_calls:
        ours.train()(**batch).loss.backward()
    with _Calls() as their_calls:
        theirs.train()(**their_batch).loss.backward()
    assert our_calls.counts == their_calls.counts
    assert sum(our_calls.counts.values()) > 50


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"vit", "resnet", "bert"}))
def test_a_position_sees_no_later_token(name: str) -> None:
    """Changing the last token changes the logits of the last position and of no other."""
    facts = SMALL[name]
    model = build(facts)
    initialise(model, seed=1)
    model.eval()
    ids = example_batch(facts, 1, sequence_length(facts))["input_ids"]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % facts.vocab
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
