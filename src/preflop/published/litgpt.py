"""Fine-tuning in litgpt as its published memory tables ran it, written anew operator by operator.

One GPU, bf16 weights, LoRA or LLaMA-Adapter, with or without bitsandbytes' 4-bit weights. What costs memory there:
the head runs in chunks of 128 positions, Lightning's plugin casts the model's output to fp32, and the loop holds
those logits through backward. Sources: Lightning-AI/litgpt@8641822 (resource-tables.md names that commit) and
@5895df10 (config_hub), lit_gpt/{model,lora,adapter,adapter_v2}.py and finetune/lora.py; Lightning 2.1
fabric/plugins/precision/half.py; bitsandbytes 0.41.1 autograd/_functions.py (MatMul4Bit), nn/modules.py (Params4bit).
The tables' Llama rows have the fp32 RMS norm of @6178c7cc, four days after their date.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_CHUNK = 128
"""Positions that the head and the loss take at once (finetune/lora.py)."""
FIRST_ADAPTED_BLOCK, PROMPT = 2, 10
"""Blocks before the second have no adapter; tokens of its prompt (adapter.py)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the operators of one run."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    length: int
    gated: bool
    parallel: bool
    """Attention and feed-forward read the same residual stream."""
    shared_norm: bool
    bias: bool
    head_bias: bool
    rotary: float
    """Share of each head that is rotated."""
    method: str
    """"lora", "adapter" or "adapter_v2"."""
    rank: int
    quantized: str = ""
    """"" (bf16 weights), "nf4" or "nf4-dq" (block scales quantised again)."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Outputs of the joint projection."""
        return (self.heads + 2 * self.groups) * self.head_dim


class _FourBit(torch.autograd.Function):
    """A product with 4-bit weights: they are written out for it, and again in backward. The input is kept where it
    wants a gradient, though no gradient of the weight will need it, and as an attribute: it lives as long as the
    graph does, not only until its backward has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, linear: Linear) -> Tensor:
        ctx.linear, ctx.kept = linear, x if ctx.needs_input_grad[0] else None
        return functional.linear(x, linear.written_out(x.dtype), linear.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(gradients[0], ctx.linear.written_out(gradients[0].dtype)), None, None


class Linear(nn.Module):
    """A frozen projection, its weight in bf16 or in 4 bits with a scale for every 64 of them."""

    def __init__(self, rows: int, columns: int, bias: bool, quantized: str) -> None:
        super().__init__()
        self.rows, self.columns, self.quantized = rows, columns, quantized
        weights = rows * columns
        if quantized:
            self.packed = nn.Parameter(torch.zeros(weights // 2, 1, dtype=torch.uint8), requires_grad=False)
            self._scales(-(-weights // 64))
        else:
            self.weight = nn.Parameter(torch.empty(columns, rows, dtype=torch.bfloat16), requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(columns, dtype=torch.bfloat16), requires_grad=False)

    def _scales(self, blocks: int) -> None:
        if self.quantized == "nf4-dq":
            self.register_buffer("scales", torch.zeros(blocks, dtype=torch.uint8))
            self.register_buffer("scales_of_scales", torch.zeros(-(-blocks // 256)))
        else:
            self.register_buffer("scales", torch.zeros(blocks))

    def written_out(self, dtype: torch.dtype) -> Tensor:
        """The weight dequantised: to fp16, in which bitsandbytes quantised it (Params4bit.cuda), then cast."""
        scales = self.scales
        if self.quantized == "nf4-dq":
            scales = torch.empty(scales.shape, dtype=torch.float32)  # dequantised by a kernel, then shifted
            scales += 1.0
        weight = torch.empty(self.columns, self.rows, dtype=torch.float16)
        del scales
        return weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized:
            result: Tensor = _FourBit.apply(x, self.packed, self)
            return result
        return functional.linear(x, self.weight, self.bias)


class ScaledLinear(nn.Module):
    """Adapter v2: a trained bias and scale around a frozen projection."""

    def __init__(self, rows: int, columns: int, bias: bool, quantized: str) -> None:
        super().__init__()
        self.linear = Linear(rows, columns, bias, quantized)
        self.adapter_bias = nn.Parameter(torch.empty(columns, dtype=torch.bfloat16))
        self.adapter_scale = nn.Parameter(torch.empty(columns, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


class LoraQKV(nn.Module):
    """The joint projection with low-rank updates of queries and values, put in place by an indexed copy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear = Linear(shape.hidden, shape.qkv, shape.bias, shape.quantized)
        self.widths = (shape.hidden, shape.groups * shape.head_dim)
        self.dropout = nn.Dropout(0.05)
        self.grouped = shape.heads == shape.groups
        self.lora_a = nn.Parameter(torch.empty(2 * shape.rank, shape.hidden, dtype=torch.bfloat16))
        self.lora_b = nn.Parameter(torch.empty(sum(self.widths), shape.rank, dtype=torch.bfloat16))
        self.scaling = 16 / shape.rank

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.linear(x)
        after_a = functional.linear(self.dropout(x), self.lora_a)
        after_b = self._second(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1)).transpose(-2, -1)
        return frozen + self._placed(after_b) * self.scaling

    def _second(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.grouped:
            return functional.conv1d(x, weight, groups=2)
        parts = zip(x.chunk(2, dim=1), weight.split(self.widths))
        return torch.cat([functional.conv1d(part, own) for part, own in parts], dim=1)

    def _placed(self, x: Tensor) -> Tensor:
        """The update with zeros where the keys are."""
        x = x.transpose(0, 1)
        columns = self.linear.columns
        result = x.new_zeros((*x.shape[:-1], columns)).view(-1, columns)
        index = torch.arange(sum(self.widths))
        result = result.index_copy(1, index, x.reshape(-1, sum(self.widths)))
        return result.view((*x.shape[:-1], columns)).transpose(0, 1)


class RMSNorm(nn.Module):
    """Worked in fp32, so fp32 copies are kept."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(mean + 1e-5))).to(dtype)


def _norm(shape: Shape) -> nn.Module:
    return RMSNorm(shape) if shape.gated else nn.LayerNorm(shape.hidden, dtype=torch.bfloat16)


def _linear(shape: Shape, rows: int, columns: int, bias: bool) -> nn.Module:
    kind = ScaledLinear if shape.method == "adapter_v2" else Linear
    return kind(rows, columns, bias, shape.quantized)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions by halves; cos and sin are no bf16, so products are fp32."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class Attention(nn.Module):
    """Joint projection, rotary positions, SDPA; from the third block on with an adapter's prompt."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.shape = shape
        lora = shape.method == "lora"
        self.attn: nn.Module = LoraQKV(shape) if lora else _linear(shape, shape.hidden, shape.qkv, shape.bias)
        self.proj = _linear(shape, shape.hidden, shape.hidden, shape.bias)
        self.adapted = not lora and number >= FIRST_ADAPTED_BLOCK
        if self.adapted:
            self.prompt = nn.Parameter(torch.empty(PROMPT, shape.hidden, dtype=torch.bfloat16))
            self.gate = nn.Parameter(torch.empty(1, 1, shape.heads, 1, dtype=torch.bfloat16))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self._split(self.attn(x), batch, length)
        turned = int(self.shape.rotary * self.shape.head_dim)
        q = torch.cat((rotated(q[..., :turned], cos, sin), q[..., turned:]), dim=-1)
        k = torch.cat((rotated(k[..., :turned], cos, sin), k[..., turned:]), dim=-1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.adapted:
            y = y + self.gate * self._prompted(q)
        return self.proj(y.reshape(batch, length, width))  # type: ignore[no-any-return]

    def _split(self, qkv: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        each = shape.heads // shape.groups
        qkv = qkv.view(batch, length, shape.groups, each + 2, shape.head_dim).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((each, 1, 1), dim=2)
        if each > 1:
            whole = (batch, shape.groups, each, length, shape.head_dim)
            k, v = k.expand(whole), v.expand(whole)
        to = (batch, -1, length, shape.head_dim)
        return q.reshape(to), k.reshape(to), v.reshape(to)

    def _prompted(self, q: Tensor) -> Tensor:
        """Attention to the prompt: its keys and values were made once, in the validation before training, where
        nothing is differentiated."""
        with torch.no_grad():
            qkv = self.attn(self.prompt.reshape(1, PROMPT, -1))
            _, k, v = self._split(qkv, 1, PROMPT)
        mask = torch.ones(q.size(2), PROMPT, dtype=torch.bool)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


class FeedForward(nn.Module):
    """Two or, gated, three projections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated, self.tanh = shape.gated, shape.shared_norm and shape.head_bias
        self.fc_1 = _linear(shape, shape.hidden, shape.ffn, shape.bias)
        if self.gated:
            self.fc_2 = _linear(shape, shape.hidden, shape.ffn, shape.bias)
        self.proj = _linear(shape, shape.ffn, shape.hidden, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            first, second = self.fc_1(x), self.fc_2(x)
            return self.proj(functional.silu(first) * second)  # type: ignore[no-any-return]
        x = self.fc_1(x)
        return self.proj(functional.gelu(x, approximate="tanh" if self.tanh else "none"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.parallel = shape.parallel
        self.norm_1 = _norm(shape)
        self.norm_2 = None if shape.shared_norm else _norm(shape)
        self.attn = Attention(shape, number)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.parallel:
            second = normed if self.norm_2 is None else self.norm_2(x)
            return x + attended + self.mlp(second)  # type: ignore[no-any-return]
        x = x + attended
        assert self.norm_2 is not None
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Gives the logits as a list of chunks in fp32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = _linear(shape, shape.hidden, shape.vocab, shape.head_bias)
        self.wte = nn.Parameter(torch.empty(shape.vocab, shape.hidden, dtype=torch.bfloat16))
        self.blocks = nn.ModuleList(Block(shape, number) for number in range(shape.layers))
        self.last_norm = _norm(shape)
        width = int(shape.rotary * shape.head_dim)
        self.register_buffer("cos", torch.zeros(shape.length, width))
        self.register_buffer("sin", torch.zeros(shape.length, width))
        self._freeze(shape.method)

    def _freeze(self, method: str) -> None:
        trained = {"lora": ("lora_",), "adapter": ("prompt", "gate")}.get(
            method, ("prompt", "gate", "adapter_", "norm")
        )
        for name, parameter in self.named_parameters():
            if parameter.dtype.is_floating_point:
                parameter.requires_grad_(any(part in name for part in trained))

    def forward(self, ids: Tensor) -> list[Tensor]:
        length = ids.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = functional.embedding(ids, self.wte)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.last_norm(x)
        chunks = [self.head(part) for part in x.split(HEAD_CHUNK, dim=1)]
        return [chunk.float() for chunk in chunks]


class Loop:
    """Cross-entropy chunk by chunk, without the last position.

    config_hub's loop holds its variable `logits` until the next forward has returned, and with it the last graph and
    what 4-bit products keep there. The resource tables' peak is the first step's, whose batch has the longest sample.
    """

    def __init__(self, targets: Tensor, *, holds: bool) -> None:
        self.targets = targets
        self.holds = holds
        self.held: list[Tensor] = []

    def loss(self, logits: list[Tensor]) -> Tensor:
        """The loss; takes hold of the logits where the loop does."""
        if self.holds:
            self.held = logits
        logits[-1] = logits[-1][..., :-1, :]
        wanted = self.targets[..., 1:].split(logits[0].size(1), dim=1)
        losses = [
            functional.cross_entropy(chunk.reshape(-1, chunk.size(-1)), own.reshape(-1), reduction="none")
            for chunk, own in zip(logits, wanted)
        ]
        return torch.cat(losses).mean()
