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


# -- torch as people use it -------------------------------------------------------------------------


class Normed(torch.autograd.Function):
    """A custom function with a backward of its own that saves what it made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, scale)
        return x / scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, scale = ctx.saved_tensors
        return grad / scale - x * (x * grad).sum(-1, keepdim=True) / scale**3


@torch.library.custom_op("preflop_sweep::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    """An operator with a fake kernel."""
    return x * torch.sigmoid(x)


@gated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("preflop_sweep::bare", mutates_args=())
def bare(x: torch.Tensor) -> torch.Tensor:
    """An operator without a fake kernel."""
    return x.clamp(min=0.0)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])


gated.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].sigmoid(), setup_context=_save)
bare.register_autograd(lambda ctx, grad: grad * (ctx.saved_tensors[0] > 0), setup_context=_save)


class Apply(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Called(nn.Module):
    """Calls a layer with weights that are computed from its own (`functional_call`)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = {name: 2 * weight for name, weight in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, doubled, (x,))


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))


def _hooked() -> nn.Module:
    model = _block()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[3].register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2,))
    model[3].weight.register_hook(lambda grad: grad * 2)
    return model


USES: dict[str, Callable[[], nn.Module]] = {
    "torch.compile of a part": lambda: nn.Sequential(torch.compile(_block()), nn.Linear(64, 8)),
    "torch.jit.script of a part": lambda: nn.Sequential(torch.jit.script(_block()), nn.Linear(64, 8)),
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))),
    "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))),
    "orthogonal": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(64, 64))),
    "hooks": _hooked,
    "lazy modules": lambda: nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.LazyLinear(16)),
    "functional_call": Called,
    "autograd.Function": lambda: Apply(Normed.apply),
    "custom operator with a fake kernel": lambda: Apply(gated),
    "custom operator without one": lambda: Apply(bare),
}


def other_pairs() -> list[Any]:
    """peft's adapters on two bases, torch's own layers and uses, and diffusers' models if it is there."""
    from . import diffusion

    adapted = [
        Other("peft", f"peft-{kind}/{base}", partial(_adapted, base, kind), _labelled)
        for kind in ADAPTERS
        for base in BASES
    ]
    diffused = [
        Other("diffusers", f"diffusers/{name}", partial(diffusion.build, name), make_batch)
        for name, (_, make_batch) in diffusion.MODELS.items()
        if diffusion.installed()
    ]
    layers = [Other("torch", f"torch/{name}", *made) for name, made in TORCH.items()]
    uses = [Other("torch", f"torch/{name}", build, _series) for name, build in USES.items()]
    return [*adapted, *layers, *uses, *diffused]
