"""The language model of Stanford's CS336 (2026), written anew operator by operator, and its loop.

The published memory rows of that course are of this model: RMS norm in fp32, rotary positions by halves,
attention with a materialised mask and a hand-written softmax, SwiGLU, an untied head, a hand-written
cross-entropy and a hand-written AdamW. Source of the operators' order:
https://github.com/stanford-cs336/assignment2-systems, cs336-basics/cs336_basics/ (model, nn_utils and
optimizer).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Module):
    """x W^T by einsum, without bias."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, rows))

    def forward(self, x: Tensor) -> Tensor:
        return einsum(x, self.weight, "... d_in, d_out d_in -> ... d_out")


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids, :]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * rms
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, length, width // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = rearrange(x, "... (half xy) -> xy ... half", xy=2).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        one = cos * first - sin * second
        two = sin * first + cos * second
        return torch.concat((one, two), dim=-1)


def softmax(x: Tensor) -> Tensor:
    moved = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponential = torch.exp(moved)
    return exponential / torch.sum(exponential, dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = einsum(query, key, "... query d, ... key d -> ... query key") / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return einsum(weights, value, "... query key, ... key d -> ... query d")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, width) for _ in range(3))
        self.output_proj = Linear(width, width)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (rearrange(y, "... seq (heads d) -> ... heads seq d", heads=self.heads) for y in (q, k, v))
        q, k = self.rotary(q), self.rotary(k)
        iota = torch.arange(x.size(-2))
        mask = (rearrange(iota, "query -> query 1") >= rearrange(iota, "key -> 1 key"))[None, ...]
        out = attend(q, k, v, mask)
        out = rearrange(out, "batch heads seq d -> batch seq (heads d)").contiguous()
        return self.output_proj(out)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.attn = Attention(width, heads, rotary)
        self.ffn = SwiGLU(width, inner)
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = x + self.attn(self.ln1(x))
        return attended + self.ffn(self.ln2(attended))


class LanguageModel(nn.Module):
    """`segment` blocks are recomputed together in backward; 0 keeps everything."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        inner: int,
        *,
        segment: int = 0,
    ) -> None:
        super().__init__()
        self.token_embeddings = Embedding(vocabulary, width)
        self.rotary = Rotary(length, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, self.rotary) for _ in range(layers))
        self.ln_final = RMSNorm(width)
        self.lm_head = Linear(width, vocabulary)
        self.segment = segment

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embeddings(ids)
        if not self.segment:
            for layer in self.layers:
                x = layer(x)
        else:
            for start in range(0, len(self.layers), self.segment):
                x = checkpoint(self._run, x, start, use_reentrant=False)
        return self.lm_head(self.ln_final(x))

    def _run(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers[start : start + self.segment]:
            x = layer(x)
        return x


def log_softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class Loop:
    """The reports' training loop: its variable `logits` lives until the step's function returns, so through
    backward and the optimizer. `loss` takes hold of them and the optimizer's last call lets go."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.logits: Tensor | None = None

    def loss(self, logits: Tensor) -> Tensor:
        self.logits = logits
        return cross_entropy(logits, self.targets)

    def free_loss(self, logits: Tensor) -> Tensor:
        """The same loss where nothing holds the logits."""
        return cross_entropy(logits, self.targets)

    def optimizer(self, parameters: Any) -> AdamW:
        return AdamW(parameters, loop=self)


class AdamW(torch.optim.Optimizer):
    """The course's AdamW: one parameter at a time, new moments each step."""

    def __init__(self, parameters: Any, lr: float = 1e-3, *, loop: Loop) -> None:
        self.loop = loop
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                alpha, (beta_1, beta_2), eps = group["lr"], group["betas"], group["eps"]
                t = state.get("t", 1)
                alpha_t = alpha * (math.sqrt(1 - beta_2**t) / (1 - beta_1**t))
                p.data -= alpha * group["weight_decay"] * p.data
                prev_m = state.get("m", torch.zeros_like(grad))
                prev_v = state.get("v", torch.zeros_like(grad))
                m = beta_1 * prev_m + ((1 - beta_1) * grad)
                v = beta_2 * prev_v + ((1 - beta_2) * torch.square(grad))
                p.data -= alpha_t * m / (torch.sqrt(v) + eps)
                state["m"], state["v"], state["t"] = m, v, t + 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.loop.logits = None
        super().zero_grad(set_to_none)


class ForwardOnly(nn.Module):
    """A forward under `no_grad`, as an inference run: nothing is kept for backward.

    The loop that is recorded needs a gradient to compute: `anchor`, one number, has one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            self.model(*args, **kwargs)
        return self.anchor.sum()


class PlainAttention(nn.Module):
    """Three inputs that need gradients, and hand-written attention over them without heads or mask."""

    def __init__(self, batch: int, length: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(batch, length, width)) for _ in range(3))

    def forward(self, _: Tensor) -> Tensor:
        scores = einsum(self.q, self.k, "... query d, ... key d -> ... query key") / math.sqrt(
            self.q.shape[-1]
        )
        return einsum(softmax(scores), self.v, "... query key, ... key d -> ... query d")
