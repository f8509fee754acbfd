"""One layer of Megatron-LM on one of `degree` tensor-parallel ranks, as Korthikanti et al. timed it.

Source: arXiv 2205.05198, sections 4 and 5 and table 4; NVIDIA/Megatron-LM of 2022 (fused scale-mask-softmax, joined
bias and GELU). What collectives write is made without a kernel: their time is added apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of the whole layer and how it is divided."""

    hidden: int
    heads: int
    ffn: int
    length: int
    batch: int
    degree: int
    sequence_parallel: bool
    """Norms, dropouts and residuals work on their share of the positions."""
    selective: bool
    """Scores, softmax, dropout and the weighted sum are computed again in backward."""

    @property
    def positions(self) -> int:
        """Positions outside of the tensor-parallel parts, on one rank."""
        return self.length // self.degree if self.sequence_parallel else self.length


class _Communicated(torch.autograd.Function):
    """A tensor of other positions, as a collective leaves it, and the other way in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: int) -> Tensor:
        ctx.positions = x.shape[0]
        return x if positions == x.shape[0] else x.new_empty((positions, *x.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if ctx.positions == gradient.shape[0]:
            return gradient, None
        return gradient.new_empty((ctx.positions, *gradient.shape[1:])), None


class Layer(nn.Module):
    """Attention and feed-forward with dropout 0.1 everywhere, positions first, in fp16."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, ffn = shape.hidden // shape.degree, shape.ffn // shape.degree
        half = {"dtype": torch.float16}
        self.input = nn.Parameter(torch.empty(shape.positions, shape.batch, shape.hidden, **half))
        self.norm_1, self.norm_2 = (nn.LayerNorm(shape.hidden, **half) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, 3 * inner, bias=False, **half)
        self.proj = nn.Linear(inner, shape.hidden, bias=False, **half)
        self.up = nn.Linear(shape.hidden, ffn, bias=False, **half)
        self.down = nn.Linear(ffn, shape.hidden, bias=False, **half)

    def forward(self, _: Tensor) -> Tensor:
        x = self.input
        x = x + functional.dropout(self._reduced(self._attention(self._gathered(self.norm_1(x)))), 0.1)
        wide = functional.gelu(self.up(self._gathered(self.norm_2(x))))
        return x + functional.dropout(self._reduced(self.down(wide)), 0.1)

    def _gathered(self, x: Tensor) -> Tensor:
        return _Communicated.apply(x, self.shape.length)  # type: ignore[no-any-return]

    def _reduced(self, x: Tensor) -> Tensor:
        return _Communicated.apply(x, self.shape.positions)  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        shape = self.shape
        heads = shape.heads // shape.degree
        qkv = self.qkv(x).view(shape.length, shape.batch * heads, 3 * (shape.hidden // shape.heads))
        query, key, value = qkv.chunk(3, dim=-1)
        if shape.selective:
            out = checkpoint(self._core, query, key, value, use_reentrant=False)
        else:
            out = self._core(query, key, value)
        return self.proj(out.transpose(0, 1).reshape(shape.length, shape.batch, -1))  # type: ignore[no-any-return]

    def _core(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query.transpose(0, 1)
        empty = query.new_empty(query.shape[0], query.shape[1], key.shape[0])
        scale = 1 / math.sqrt(query.shape[-1])
        scores = torch.baddbmm(empty, query, key.permute(1, 2, 0), beta=0.0, alpha=scale)
        weights = functional.dropout(torch.softmax(scores, dim=-1), 0.1)
        return torch.bmm(weights, value.transpose(0, 1))
