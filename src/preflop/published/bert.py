"""BERT-large as transformers of January 2022 trained it on torch 1.10, written anew operator by operator.

What that torch kept and today's does not: softmax's backward holds its input beside its output (pytorch/pytorch#49600
and #64000, changed by #65242 in torch 1.11; transformers/pytorch_utils.py tells the two signatures apart), and
`zero_grad` writes zeros instead of freeing (`set_to_none` became the default with torch 2.0), so gradients live through
forward too. cuBLAS took its workspaces itself. Sources: huggingface/transformers v4.16, models/bert/modeling_bert.py,
trainer.py (`training_step`, `model.zero_grad()`) and optimization.py; bitsandbytes 0.26, optim/optimizer.py
(`Optimizer2State.init_state`, block-wise, 4,096 numbers at least). The run is of 2022-01-11 on a V100-SXM2-16GB: its
nvidia-smi stands in huggingface/transformers, docs/source/performance.mdx.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, LAYERS, HEADS, INNER, VOCABULARY, POSITIONS = 1024, 24, 16, 4096, 30522, 512
"""bert-large-uncased."""
QUANTIZED_FROM, QUANTIZED_BLOCK = 4096, 2048
"""bitsandbytes: numbers from which a parameter's states have 8 bits, and numbers that share a scale."""


class SoftmaxOfTorch110(torch.autograd.Function):
    """Softmax over the last dimension that keeps its input for backward, though nothing reads it there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.softmax(x, dim=-1)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, result = ctx.saved_tensors
        return torch._softmax_backward_data(gradients[0], result, -1, x.dtype)


class Attention(nn.Module):
    """Self-attention with its output projection and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout, self.dropout_out = nn.Dropout(0.1), nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        key, value, query = (_heads(part(x)) for part in (self.key, self.value, self.query))
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(WIDTH // HEADS)
        scores = scores + mask
        scores = scores.float() if torch.is_autocast_enabled("cpu") else scores
        weights = self.dropout(SoftmaxOfTorch110.apply(scores))
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()
        return self.norm(self.dropout_out(self.dense(context.view(x.shape))) + x)  # type: ignore[no-any-return]


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention(x, mask)
        wide = functional.gelu(self.up(attended))
        return self.norm(self.dropout(self.down(wide)) + attended)  # type: ignore[no-any-return]


class SequenceClassifier(nn.Module):
    """Gives the loss; `recompute` checkpoints each layer."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH, 0), nn.Embedding(POSITIONS, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.dropout_out = nn.Dropout(0.1)
        self.register_buffer("numbers", torch.arange(POSITIONS).expand(1, -1).contiguous())
        self.register_buffer("type_ids", torch.zeros(1, POSITIONS, dtype=torch.int64))
        self.recompute = recompute

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        batch, length = ids.shape
        mask = (1.0 - torch.ones(batch, length)[:, None, None, :]) * -10000.0
        x = self.words(ids) + self.types(self.type_ids[:, :length].expand(batch, length))
        x += self.positions(self.numbers[:, :length])
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=True) if self.recompute else layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return functional.cross_entropy(self.classifier(self.dropout_out(pooled)).view(-1, 2), labels)


class _KeepsGradients(torch.optim.Optimizer):
    """`zero_grad` of torch 1.10: zeros are written, nothing is freed."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    def zero_grad(self, set_to_none: bool = True) -> None:
        del set_to_none
        super().zero_grad(set_to_none=False)

    def _with_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]


class AdamW(_KeepsGradients):
    """transformers' own AdamW, without weight decay, the trainer's default."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for p, gradient in self._with_gradients():
            state = self.state[p]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
            state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            root = state["exp_avg_sq"].sqrt().add_(1e-8)
            p.data.addcdiv_(state["exp_avg"], root, value=-5e-5)


class Adafactor(_KeepsGradients):
    """transformers' Adafactor without a first moment: rows and columns of each matrix."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for p, gradient in self._with_gradients():
            state = self.state[p]
            factored = p.dim() >= 2
            if not state:
                shapes = {"row": p.shape[:-1], "column": p.shape[:-2] + p.shape[-1:]} if factored else {"all": p.shape}
                state.update({name: torch.zeros(shape) for name, shape in shapes.items()})
            update = gradient**2 + 1e-30
            if factored:
                state["row"].mul_(0.9).add_(update.mean(dim=-1), alpha=0.1)
                state["column"].mul_(0.9).add_(update.mean(dim=-2), alpha=0.1)
                row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                update = torch.mul(row, state["column"].unsqueeze(-2).rsqrt())
                update.mul_(gradient)
            else:
                state["all"].mul_(0.9).add_(update, alpha=0.1)
                update = state["all"].rsqrt().mul_(gradient)
            update.div_((update.norm(2) / p.numel() ** 0.5).clamp_(min=1.0))
            update.mul_(5e-5)
            p.data.add_(-update)


class Adam8bit(_KeepsGradients):
    """bitsandbytes' block-wise 8-bit Adam of every parameter, as the page calls it. One kernel updates a parameter in
    place."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for p, gradient in self._with_gradients():
            state = self.state[p]
            if not state:
                quantized = p.numel() >= QUANTIZED_FROM
                dtype = torch.uint8 if quantized else torch.float32
                state["state1"], state["state2"] = (torch.zeros_like(p.data, dtype=dtype) for _ in range(2))
                if quantized:
                    blocks = -(-p.numel() // QUANTIZED_BLOCK)
                    state["absmax1"], state["absmax2"] = torch.zeros(blocks), torch.zeros(blocks)
            p.data.add_(gradient, alpha=-5e-5)
