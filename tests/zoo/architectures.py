"""Small but real architectures in plain torch: each function builds one model with fresh weights.

They are written as their papers and common implementations write them, in-place activations, buffers,
tied weights and all, because the zoo is there to meet what people have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------- decoders


class CausalAttention(nn.Module):
    """Multi-head attention with torch's fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class ManualCausalAttention(CausalAttention):
    """The same, written out: keeps the S x S scores."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    """GPT-2's pre-norm block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, manual: bool = False) -> None:
        super().__init__()
        kind = ManualCausalAttention if manual else CausalAttention
        self.norm1, self.attention = nn.LayerNorm(width), kind(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Decoder(nn.Module):
    """GPT-2: learned positions, tied output head, next-token loss computed outside."""

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        length: int = 128,
        dropout: float = 0.0,
        manual: bool = False,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, dropout, manual) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, gated feed-forward."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(y).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 3, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, 4, 2, 344) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // 4
        rates = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        length = ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Mixture of experts with a loop, `nonzero` and `index_add_`: sizes depend on the routing.

    The router is fixed so that token t goes to experts t and t + 1 (mod n): exactly balanced.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.router(flat).softmax(dim=-1)
        turn = torch.arange(flat.shape[0])
        chosen = torch.stack((turn, turn + 1), dim=1) % len(self.experts)
        weights = scores.gather(1, chosen)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.nonzero(chosen == index, as_tuple=True)
            result.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return result.view_as(x)


class ExpertDecoder(nn.Module):
    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.attentions = nn.ModuleList(CausalAttention(width, 4) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, 2 * width, 4) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for attention, experts in zip(self.attentions, self.experts, strict=True):
            x = x + attention(x)
            x = x + experts(x)
        return self.head(x)


class SharedLayers(nn.Module):
    """ALBERT: one block applied many times."""

    def __init__(self, width: int = 128, times: int = 4) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(1000, width), DecoderBlock(width, 4)
        self.times, self.head = times, nn.Linear(width, 1000)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x)


class LowRank(nn.Module):
    """LoRA by hand: the base layer is frozen, a rank-r product is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def low_rank_decoder() -> nn.Module:
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LowRank(block.attention.qkv)
        block.up = LowRank(block.up)
    return model


# ------------------------------------------------------------------------------------------- vision


class Bottleneck(nn.Module):
    """ResNet's (and, with groups, ResNeXt's) block, in-place ReLU as torchvision writes it."""

    def __init__(self, inner: int, width: int, stride: int = 1, groups: int = 1, grow: int = 4) -> None:
        super().__init__()
        outer = width * grow
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-50 with `depths` (3, 4, 6, 3) and `width` 64."""

    def __init__(
        self,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        width: int = 64,
        groups: int = 1,
        classes: int = 100,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        inner = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(inner, width << stage, stride, groups))
                inner = (width << stage) * 4
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, inner: int, outer: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inner * expand
        self.add = stride == 1 and inner == outer
        self.body = nn.Sequential(
            nn.Conv2d(inner, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(),
            nn.Conv2d(hidden, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.add else self.body(x)


def mobilenet() -> nn.Module:
    shapes = ((16, 24, 2, 4), (24, 24, 1, 4), (24, 40, 2, 4), (40, 40, 1, 4))
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(inplace=True),
        *(InvertedResidual(*shape) for shape in shapes),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(40, 100),
    )


class ConvNextBlock(nn.Module):
    """Depthwise 7 x 7, channels-last LayerNorm, gated by a layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 4),
        ConvNextBlock(64),
        ConvNextBlock(64),
        nn.Conv2d(64, 128, 2, 2),
        ConvNextBlock(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 100),
    )


def _double(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1),
        nn.GroupNorm(8, outer),
        nn.SiLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.GroupNorm(8, outer),
        nn.SiLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels down, two up, skips concatenated, transposed convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = _double(3, width), _double(width, 2 * width)
        self.middle = _double(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join2 = _double(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join1 = _double(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down1(x)
        low = self.down2(F.max_pool2d(high, 2))
        y = self.middle(F.max_pool2d(low, 2))
        y = self.join2(torch.cat((low, self.up2(y)), dim=1))
        y = self.join1(torch.cat((high, self.up1(y)), dim=1))
        return self.head(y)


class ViT(nn.Module):
    """Patches by a strided convolution, a class token, nn.TransformerEncoder."""

    def __init__(self, width: int = 128, layers: int = 3, image: int = 64, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Autoencoder(nn.Module):
    """Batch norm in one and two dimensions, in-place activations everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(784, 512),
            nn.BatchNorm1d(512),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Linear(512, 256),
            nn.ELU(inplace=True),
            nn.Linear(256, 32),
        )
        self.decode = nn.Sequential(
            nn.Linear(32, 256),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Linear(256, 784),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        code = self.encode(x)
        image = self.decode(code)
        return {"loss": F.mse_loss(image, x) + 1e-3 * code.pow(2).mean(), "image": image, "code": code}


# --------------------------------------------------------------------------- sequences, audio, tables


class Recurrent(nn.Module):
    """Language model on an LSTM or a GRU."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 128, layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.recurrent = kind(width, width, layers, batch_first=True, **options)
        self.head = nn.Linear(width * (2 if options.get("bidirectional") else 1), 1000)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.tokens(ids))
        return self.head(hidden)


class Recommender(nn.Module):
    """DLRM in small: embedding bags for categories, a tower for numbers, pairwise products."""

    def __init__(self, tables: int = 4, rows: int = 2000, width: int = 64, mode: str = "sum") -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        features = tables + 1
        self.top = nn.Sequential(
            nn.Linear(width + features * (features - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(features, features, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x] + [bag(categories[:, index]) for index, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        flat = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat((x, flat), dim=1)).squeeze(-1)


class AudioClassifier(nn.Module):
    """Dilated one-dimensional convolutions under weight norm, gated (WaveNet)."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(1, width, 5, padding=2))
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv1d(width, 2 * width, 3, padding=2**index, dilation=2**index))
            for index in range(layers)
        )
        self.mix = nn.ModuleList(weight_norm(nn.Conv1d(width, width, 1)) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            filtered, gate = layer(x).chunk(2, dim=1)
            x = x + mix(torch.tanh(filtered) * torch.sigmoid(gate))
        return self.head(x.mean(dim=-1))


class Translator(nn.Module):
    """nn.Transformer, encoder and decoder, causal mask on the target."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 1000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.tokens(source), self.tokens(target), tgt_mask=mask)
        return self.head(hidden)


class Pooler(nn.Module):
    """nn.MultiheadAttention that returns its weights."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 16, width))
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled, weights = self.attention(self.query.expand(x.shape[0], -1, -1), x, x)
        return self.head(pooled.mean(dim=1)), weights


class SquaredReLU(torch.autograd.Function):
    """A user's own backward, which keeps one tensor and makes another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.clamp(min=0)
        ctx.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return 2 * kept * gradient


class Perceptron(nn.Module):
    def __init__(self, width: int = 512, layers: int = 3, activation: str = "squared") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = SquaredReLU.apply(x) if self.activation == "squared" else F.relu(x)
        return x
