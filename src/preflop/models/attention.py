"""Scaled dot-product attention, fused and spelled out, and the masks of windowed attention."""

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional


def repeat_kv_heads(
    tensor: Float[Tensor, "batch kv_heads sequence head"], groups: int
) -> Float[Tensor, "batch heads sequence head"]:
    """Each key or value head repeated for the query heads that read it. A copy when groups > 1."""
    if groups == 1:
        return tensor
    return repeat(
        tensor,
        "batch kv_heads sequence head -> batch (kv_heads groups) sequence head",
        groups=groups,
    )


def fused_attention(
    query: Float[Tensor, "batch heads sequence head"],
    key: Float[Tensor, "batch kv_heads sequence head"],
    value: Float[Tensor, "batch kv_heads sequence head"],
    *,
    causal: bool,
    mask: Bool[Tensor, "sequence sequence"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch heads sequence head"]:
    """torch's own attention: fused wherever a kernel for it exists.

    Without a mask, fewer key-value heads go to the kernel as they are (`enable_gqa`); with one they are
    repeated first, because fused CUDA kernels take either grouped heads or a mask and torch would fall
    back to the unfused form. transformers does the same (`use_gqa_in_sdpa`).
    """
    groups = query.shape[1] // key.shape[1]
    grouped = groups > 1 and mask is None
    if groups > 1 and not grouped:
        key, value = repeat_kv_heads(key, groups), repeat_kv_heads(value, groups)
    options = {"enable_gqa": True} if grouped else {}
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        **options,
    )


def softcapped_attention(
    query: Float[Tensor, "batch heads sequence head"],
    key: Float[Tensor, "batch kv_heads sequence head"],
    value: Float[Tensor, "batch kv_heads sequence head"],
    *,
    bias: Float[Tensor, "sequence sequence"],
    softcap: float,
    scale: float,
    dropout: float = 0.0,
    training: bool = False,
) -> Float[Tensor, "batch heads sequence head"]:
    """Attention whose scores are squashed to (-softcap, softcap) before the softmax, spelled out.

    No torch kernel squashes scores, so every sequence x sequence tensor here is real: this is what
    Gemma 2 costs without a custom kernel. `bias` is 0 where a query may attend and very negative elsewhere.

    Source: Gemma 2, arXiv:2408.00118, section 2; eager attention of transformers.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv_heads(key, groups), repeat_kv_heads(value, groups)
    keys_last = rearrange(key, "batch heads sequence head -> batch heads head sequence")
    scores = torch.matmul(query, keys_last) * scale
    scores = torch.tanh(scores / softcap) * softcap
    weights = functional.softmax(scores + bias, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=training)
    return torch.matmul(weights, value)


def causal_mask(
    sequence: int, *, window: int | None, device: torch.device
) -> Bool[Tensor, "sequence sequence"]:
    """True where a query (row) may attend to a key (column): itself and what is before it, of which
    only the last `window` positions where there is a window."""
    position = torch.arange(sequence, device=device)
    query = rearrange(position, "query -> query 1")
    key = rearrange(position, "key -> 1 key")
    allowed = key <= query
    if window is not None:
        allowed = allowed & (key > query - window)
    return allowed


def mask_bias(
    allowed: Bool[Tensor, "sequence sequence"], dtype: torch.dtype
) -> Float[Tensor, "sequence sequence"]:
    """A mask as something to add to scores: 0 where allowed, the lowest finite number elsewhere."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill(~allowed, torch.finfo(dtype).min)
