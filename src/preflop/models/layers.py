"""Layers that leave their weights as `torch.empty` made them, and the small ones every family shares.

Building a model must neither read a value nor spend time on random numbers: a 405B model is built on
fake tensors. `preflop.models.initialise.initialise` gives the weights their values. The class names
are torch's, because reports show them.
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from preflop.models.catalog import Activation, ModelFacts, Norm


class Linear(nn.Linear):
    """torch's Linear, its weights not yet initialised."""

    def reset_parameters(self) -> None:
        """Does nothing; see `initialise`."""


class Embedding(nn.Embedding):
    """torch's Embedding, its weights not yet initialised."""

    def reset_parameters(self) -> None:
        """Does nothing; see `initialise`."""


class Conv2d(nn.Conv2d):
    """torch's Conv2d, its weights not yet initialised."""

    def reset_parameters(self) -> None:
        """Does nothing; see `initialise`."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, operator by operator as `transformers` runs it.

    Not `torch.nn.functional.rms_norm`, whose operators differ between torch versions. With
    `unit_offset` (Gemma) it multiplies by 1 + weight, before casting back and not after.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; LlamaRMSNorm and Gemma2RMSNorm of transformers.
    """

    def __init__(self, hidden: int, eps: float, *, unit_offset: bool) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The input over its root mean square, times the weight."""
        wide = hidden.to(torch.float32)
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(mean_square + self.eps)
        if self.unit_offset:
            return (normed * (1.0 + self.weight.float())).to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


def make_norm(facts: ModelFacts) -> nn.Module:
    """The norm that the family uses, over the residual stream's width."""
    if facts.norm is Norm.LAYER_NORM:
        return nn.LayerNorm(facts.hidden, eps=facts.norm_eps)
    return RMSNorm(facts.hidden, facts.norm_eps, unit_offset=facts.norm is Norm.RMS_NORM_UNIT_OFFSET)


def activate(hidden: Float[Tensor, "*batch ffn"], activation: Activation) -> Float[Tensor, "*batch ffn"]:
    """The feed-forward's non-linearity.

    Source of the spelled-out form: NewGELUActivation of transformers, which GPT-2 runs in nine calls;
    the fused tanh form (one call) gives the same values and keeps one tensor where this keeps four.
    """
    if activation is Activation.GELU:
        return functional.gelu(hidden)
    if activation is Activation.GELU_TANH:
        return functional.gelu(hidden, approximate="tanh")
    if activation is Activation.SILU:
        return functional.silu(hidden)
    if activation is Activation.RELU:
        return functional.relu(hidden)
    # 0.7978845608028654 = sqrt(2 / pi); 0.044715 from Hendrycks and Gimpel, arXiv:1606.08415.
    inner = 0.7978845608028654 * (hidden + 0.044715 * torch.pow(hidden, 3.0))
    return 0.5 * hidden * (1.0 + torch.tanh(inner))


def split_heads(
    hidden: Float[Tensor, "batch sequence features"], heads: int
) -> Float[Tensor, "batch {heads} sequence head"]:
    """Features cut into heads, heads before positions: what attention reads. A view."""
    return rearrange(hidden, "batch sequence (heads head) -> batch heads sequence head", heads=heads)


def merge_heads(
    attended: Float[Tensor, "batch heads sequence head"],
) -> Float[Tensor, "batch sequence features"]:
    """Heads put back side by side. Copies when the positions do not lie before the heads in memory."""
    return rearrange(attended, "batch heads sequence head -> batch sequence (heads head)")


def tied_linear(embedding: nn.Embedding, *, bias: bool) -> nn.Linear:
    """An output projection that shares the embedding's weight: one parameter, two uses."""
    words, hidden = embedding.weight.shape
    linear = Linear(hidden, words, bias=False, device="meta")
    linear.weight = embedding.weight
    if bias:
        linear.bias = nn.Parameter(torch.empty(words))
    return linear
