"""Ten models at their published size, from transformers' classes: time and memory that pricing a step takes.

    python bench/full_size.py [NAME ...]

Needs no weights and no network: only the configurations below, one new process each. A step is forward,
backward and AdamW in bf16 on an H200. Parameters are held against the published count.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Made = tuple[Callable[[], torch.nn.Module], dict[str, torch.Tensor]]


def causal(config: Any, *, batch: int = 1, seq: int = 2048) -> Made:
    """A causal language model, and random ids."""
    import transformers

    ids = torch.randint(0, config.vocab_size, (batch, seq))
    return lambda: transformers.AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


def mixtral() -> Made:
    """Mixtral 8x22B. Source of each configuration: the model's config.json on the Hugging Face hub."""
    from transformers import MixtralConfig

    return causal(
        MixtralConfig(
            vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
            num_attention_heads=48, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        )
    )  # fmt: skip


def deepseek_v3() -> Made:
    """DeepSeek-V3, which is the class's default configuration."""
    from transformers import DeepseekV3Config

    return causal(DeepseekV3Config())


def qwen3_moe() -> Made:
    """Qwen3-235B-A22B."""
    from transformers import Qwen3MoeConfig

    return causal(
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
            num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
        )
    )  # fmt: skip


def llama4() -> Made:
    """Llama 4 Scout, its language model. transformers' own experts all run on every token."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
        num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        num_local_experts=16, num_experts_per_tok=1,
    )  # fmt: skip
    return lambda: Llama4ForCausalLM(config), causal(config)[1]


def gemma3() -> Made:
    """Gemma 3 27B, its language model."""
    from transformers import Gemma3TextConfig

    return causal(
        Gemma3TextConfig(
            vocab_size=262208, hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
            num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168,
            sliding_window=1024,
        )
    )  # fmt: skip


def whisper() -> Made:
    """Whisper large-v3: 30 s of sound, 128 tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51866, num_mel_bins=128, encoder_layers=32, encoder_attention_heads=20, decoder_layers=32,
        decoder_attention_heads=20, decoder_ffn_dim=5120, encoder_ffn_dim=5120, d_model=1280,
    )  # fmt: skip
    sound, labels = torch.randn(4, 128, 3000), torch.randint(0, 51866, (4, 128))
    return lambda: WhisperForConditionalGeneration(config), {"input_features": sound, "labels": labels}


def pixtral() -> Made:
    """Pixtral 12B: one image of 512 x 512 (1024 patches), 256 tokens."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, MistralConfig, PixtralVisionConfig

    vision = PixtralVisionConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        image_size=1024, patch_size=16,
    )  # fmt: skip
    text = MistralConfig(
        vocab_size=131072, hidden_size=5120, intermediate_size=14336, num_hidden_layers=40,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=None,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=10, vision_feature_layer=-1,
        vision_feature_select_strategy="full", projector_hidden_act="gelu",
    )  # fmt: skip
    patches = (512 // 16) ** 2
    ids = torch.randint(11, 1000, (1, patches + 256))
    ids[0, :patches] = 10
    batch = {
        "input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(1, 3, 512, 512),
        "image_sizes": torch.tensor([[512, 512]]),
    }  # fmt: skip
    return lambda: LlavaForConditionalGeneration(config), batch


def mamba2() -> Made:
    """Mamba-2 2.7B, embeddings and head apart (as the class has it by default)."""
    from transformers import Mamba2Config

    return causal(
        Mamba2Config(
            vocab_size=50288, hidden_size=2560, state_size=128, num_hidden_layers=64, num_heads=80,
            head_dim=64, n_groups=1, expand=2, chunk_size=256,
        )
    )  # fmt: skip


def t5() -> Made:
    """T5-11B: 512 tokens in, 128 out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 32000, (1, 512))
    return lambda: T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :128].clone()}


def vit_g() -> Made:
    """ViT-G/14."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1664, intermediate_size=8192, num_hidden_layers=48, num_attention_heads=16,
        image_size=224, patch_size=14, num_labels=1000,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 1000, (8,))}
    return lambda: ViTForImageClassification(config), batch


MODELS = {
    "mixtral-8x22b": mixtral, "deepseek-v3": deepseek_v3, "qwen3-235b-a22b": qwen3_moe,
    "llama-4-scout": llama4, "gemma-3-27b": gemma3, "whisper-large-v3": whisper, "pixtral-12b": pixtral,
    "mamba2-2.7b": mamba2, "t5-11b": t5, "vit-g-14": vit_g,
}  # fmt: skip


def price(name: str) -> dict[str, Any]:
    """Account for one model in this process."""
    import preflop

    make, batch = MODELS[name]()
    begun = time.process_time()
    account = preflop.account(make, batch, precision="bf16", device="h200-sxm")
    return {
        "model": name,
        "parameters": sum(math.prod(info.shape) for info in account.tape.parameters),
        "cpu_s": time.process_time() - begun,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": account.memory.peak_bytes,
        "model_flops": account.flops.model,
    }


def main() -> None:
    """Each model in a process of its own, a line each."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(price(sys.argv[2])))
        return
    print(f"{'model':18}{'parameters':>14}{'processor':>11}{'process':>10}{'peak':>12}{'model FLOPs':>15}")
    for name in sys.argv[1:] or MODELS:
        command = [sys.executable, __file__, "--one", name]
        found = json.loads(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
        print(
            f"{name:18}{found['parameters'] / 1e9:12.2f} B{found['cpu_s']:9.1f} s"
            f"{found['resident_bytes'] / 2**30:6.2f} GiB{found['peak_bytes'] / 2**30:8.1f} GiB"
            f"{found['model_flops'] / 1e12:9.1f} TFLOP",
            flush=True,
        )


if __name__ == "__main__":
    main()
