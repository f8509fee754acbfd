"""Subjects beside transformers' auto mappings: peft's adapters and torch's own layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Other:
    """A model and batch that need no search."""

    family: str
    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[], Any]

    def candidates(self) -> Iterator[Any]:
        """The one way to build it."""
        from .run import Candidate

        yield Candidate(self.build, self.make_batch())


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "IA3": ("IA3Config", {}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
}
"""peft's kinds of tuning: its configuration class, and what that is given."""

BASES = ("llama/LlamaForCausalLM", "gpt2/GPT2LMHeadModel")


def _adapted(base: str, kind: str) -> nn.Module:
    import peft
    import transformers

    from .shrink import small_config

    model_type, head = base.split("/")
    name, fields = ADAPTERS[kind]
    model = getattr(transformers, head)._from_config(small_config(model_type))
    return peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **fields)).train()


def _labelled() -> dict[str, torch.Tensor]:
    tokens = torch.arange(64).reshape(2, 32)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


class First(nn.Module):
    """A layer of torch, its first output."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(*[x] * self.times)
        return found[0] if isinstance(found, tuple) else found


def _series() -> torch.Tensor:
    return torch.rand(4, 32, 64)


TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "nn.LSTM": (lambda: First(nn.LSTM(64, 64, 2, batch_first=True)), _series),
    "nn.GRU": (lambda: First(nn.GRU(64, 64, 2, batch_first=True)), _series),
    "nn.RNN": (lambda: First(nn.RNN(64, 64, 2, batch_first=True)), _series),
    "nn.MultiheadAttention": (lambda: First(nn.MultiheadAttention(64, 4, batch_first=True), 3), _series),
    "nn.Transformer": (lambda: First(nn.Transformer(64, 4, 2, 2, 128, batch_first=True), 2), _series),
    "nn.EmbeddingBag": (lambda: First(nn.EmbeddingBag(500, 64)), lambda: torch.arange(256).reshape(8, 32)),
}


def other_pairs() -> list[Any]:
    """peft's adapters on two bases, and torch's own layers."""
    adapted = [
        Other("peft", f"peft-{kind}/{base}", partial(_adapted, base, kind), _labelled)
        for kind in ADAPTERS
        for base in BASES
    ]
    return [*adapted, *(Other("torch", f"torch/{name}", *made) for name, made in TORCH.items())]



