"""Small configurations of Hugging Face transformers (and peft): built from a config, never downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn


def _causal(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    return AutoModelForCausalLM.from_config(config)


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config

    return _causal(
        GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=3, n_head=4, **changes)
    )


_LLAMA_LIKE = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig

    return _causal(LlamaConfig(**_LLAMA_LIKE))


def mistral() -> nn.Module:
    """A window of 32 positions on sequences longer than that."""
    from transformers import MistralConfig

    return _causal(MistralConfig(**_LLAMA_LIKE, sliding_window=32))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig

    return _causal(MixtralConfig(**_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2))


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig

    return _causal(
        GPTNeoXConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=1000,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=128,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=1000,
            d_model=128,
            d_kv=32,
            d_ff=512,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            image_size=64,
            patch_size=8,
            num_labels=100,
        )
    )


def gpt2_lora() -> nn.Module:
    """peft's LoRA on the attention projections of a frozen GPT-2."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        gpt2(), LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
