"""Ten models as people write them, small: what each copies is read from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from tests.zoo import hugging_face


class Case(NamedTuple):
    """A model, its batch, its loss, and how it is trained."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None = None
    options: dict[str, Any] = {}


def tokens(batch: int = 2, length: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(1000, (batch, length))
    return {"input_ids": ids, "labels": ids}


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=1000, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=20,
            max_source_positions=50, max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, use_cache=False,
        )
    )  # fmt: skip


def spoken() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 20, 100), "labels": torch.randint(3, 1000, (2, 24))}


class Permuted(nn.Module):
    """Attention as tutorials write it: permutes, expanded key and value heads, a mask, shifted labels."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.embed = nn.Embedding(1000, width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.size)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, 1000)
        self.register_buffer("mask", torch.ones(256, 256, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        b, s, d = x.shape
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, s, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        times = self.heads // self.groups
        k = k[:, :, None].expand(b, self.groups, times, s, self.size).reshape(b, self.heads, s, self.size)
        v = v[:, :, None].expand(b, self.groups, times, s, self.size).reshape(b, self.heads, s, self.size)
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        weights = scores.masked_fill(self.mask[:s, :s], float("-inf")).softmax(-1)
        merged = (weights @ v).transpose(1, 2).contiguous().view(b, s, d)
        return self.head(x + self.out(merged))


def shifted(logits: Tensor) -> Tensor:
    """Next-token loss by cutting the logits."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat.float(), torch.zeros(flat.shape[0], dtype=torch.long))


class Einops(nn.Module):
    """The same in named axes."""

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.embed = nn.Embedding(1000, width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * (width // heads), bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q = rearrange(self.q(x), "b s (h d) -> b h s d", h=self.heads)
        k, v = rearrange(self.kv(x), "b s (two g d) -> two b g s d", two=2, g=self.groups)
        k = repeat(k, "b g s d -> b (g r) s d", r=self.heads // self.groups)
        v = repeat(v, "b g s d -> b (g r) s d", r=self.heads // self.groups)
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        mixed = torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(-1), v)
        x = self.norm(x + self.out(rearrange(mixed, "b h s d -> b s (h d)")))
        return torch.einsum("b s d, v d -> b s v", x, self.embed.weight)


class Tagger(nn.Module):
    """Tags each word by a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(96, 17)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tags(self.lstm(self.embed(ids))[0])


class Attending(nn.Module):
    """torch's own attention layer, with its weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=True)
        return self.norm(x + mixed).mean() + weights.pow(2).mean()


class SmallUNet(nn.Module):
    """Down, up and across, with images channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.pool = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        high = self.down(image)
        low = F.relu(self.pool(high))
        return self.out(torch.cat([high, self.up(low)], dim=1))


def last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)


def pictures() -> Tensor:
    return torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)


def words() -> Tensor:
    return torch.randint(1000, (4, 24))


def squared(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def tagged(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits[..., 0].numel(), dtype=torch.long))


MIXED = {"precision": "bf16-mixed"}

CASES: dict[str, Case] = {
    "gpt2": Case(hugging_face.gpt2, tokens),
    "llama-grouped": Case(hugging_face.llama, tokens),
    "t5": Case(hugging_face.t5, lambda: {**tokens(2, 32), "labels": torch.randint(1000, (2, 24))}),
    "vit": Case(
        hugging_face.vit,
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(100, (2,))},
    ),
    "whisper": Case(whisper, spoken),
    "multihead-attention": Case(Attending, lambda: torch.randn(2, 32, 64)),
    "permuted-attention": Case(Permuted, words, shifted),
    "unet-channels-last": Case(lambda: last(SmallUNet()), pictures, squared),
    "lstm-tagger": Case(Tagger, words, tagged),
    "einops": Case(Einops, words, squared),
    "gpt2-autocast": Case(hugging_face.gpt2, tokens, None, MIXED),
    "llama-autocast-2-microbatches": Case(hugging_face.llama, tokens, None, {**MIXED, "microbatches": 2}),
    "permuted-autocast": Case(Permuted, words, shifted, MIXED),
    "einops-bf16": Case(Einops, words, squared, {"precision": "bf16"}),
    "gpt2-recompute": Case(hugging_face.gpt2, tokens, None, {"recompute": "block"}),
    "einops-foreach": Case(Einops, words, squared, {"optimizer": "adamw-foreach"}),
}
