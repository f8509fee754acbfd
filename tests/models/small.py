"""Small facts of every kind of model: the real families, shrunk until they run in a moment."""

from __future__ import annotations

from dataclasses import replace

from preflop.models.catalog import ModelFacts, find

_TOKENS = {"layers": 3, "vocab": 61, "max_positions": 32}

SMALL: dict[str, ModelFacts] = {
    "gpt2": replace(find("gpt2"), **_TOKENS, hidden=24, heads=3, kv_heads=3, head_dim=8, ffn=96),
    "llama-2": replace(find("llama-2-7b"), **_TOKENS, hidden=24, heads=3, kv_heads=3, head_dim=8, ffn=40),
    "llama-3.1": replace(find("llama-3.1-8b"), **_TOKENS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=40),
    "llama-3.2": replace(find("llama-3.2-1b"), **_TOKENS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=40),
    "mistral": replace(
        find("mistral-7b"), **_TOKENS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=40, window=5
    ),
    "qwen": replace(find("qwen-2.5-0.5b"), **_TOKENS, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=40),
    "gemma-2": replace(
        find("gemma-2-2b"),
        **_TOKENS,
        hidden=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=40,
        window=5,
        attention_scale=8**-0.5,
        attention_softcap=2.0,
        logit_softcap=1.0,
    ),
    "pythia": replace(find("pythia-160m"), **_TOKENS, hidden=48, heads=3, kv_heads=3, head_dim=16, ffn=96),
    "bert": replace(find("bert-base"), **_TOKENS, hidden=24, heads=3, kv_heads=3, head_dim=8, ffn=96),
    "vit": replace(
        find("vit-b-16"),
        layers=3,
        hidden=24,
        heads=3,
        kv_heads=3,
        head_dim=8,
        ffn=96,
        image_size=16,
        patch_size=4,
        classes=7,
    ),
    "resnet": replace(
        find("resnet-50"), layers=5, depths=(2, 1, 2), stem=8, hidden=64, image_size=32, classes=7
    ),
}
"""Nothing here is a published model; counts and sources of the originals do not apply."""


def sequence_length(facts: ModelFacts) -> int | None:
    """Long enough to outgrow the small windows; None for images."""
    return None if facts.is_image else 12
