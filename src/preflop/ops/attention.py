"""Fused attention. Dense convention: every (query, key) pair counts, whatever the mask; the attended
pairs are given beside it. FLOPs go by the *query* heads, so grouped key/value heads cost no less.

Softmax, scale, mask and dropout inside the kernel are not counted (they are element-wise).
"""

from __future__ import annotations

from dataclasses import dataclass

from preflop.ops.arguments import argument, keyword, need, product, tensor
from preflop.ops.registry import Kind, Work, flops
from preflop.tape.events import Signature, TensorMeta


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes one attention call works on."""

    batch: int
    heads: int
    """Query heads."""
    queries: int
    keys: int
    qk_width: int
    v_width: int


def causal_pairs(queries: int, keys: int, *, bottom_right: bool = False) -> int:
    """(query, key) pairs of a causal mask over one sequence: query i attends to keys 0..i.

    With `bottom_right` the last query sees the last key (flash-attention >= 2.1); otherwise the first
    query sees the first key (torch's scaled_dot_product_attention).

    >>> causal_pairs(1024, 1024), causal_pairs(2, 5), causal_pairs(2, 5, bottom_right=True)
    (524800, 3, 9)
    """
    first = 1 + (keys - queries if bottom_right else 0)
    skipped = max(0, 1 - first)
    low = max(first, 1)
    rising = max(0, min(queries - skipped, keys - low + 1))
    full = queries - skipped - rising
    return rising * low + rising * (rising - 1) // 2 + max(0, full) * keys


def window_pairs(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """Pairs of a sliding window, aligned bottom-right: query i sees keys from i + keys - queries - left
    to i + keys - queries + right; None or a negative size means no limit on that side.

    >>> window_pairs(2048, 2048, 511, 0)            # W(W+1)/2 + (S-W)·W with W = 512
    917760
    """
    total = 0
    for i in range(queries):
        centre = i + keys - queries
        low = 0 if left is None or left < 0 else max(0, centre - left)
        high = keys - 1 if right is None or right < 0 else min(keys - 1, centre + right)
        total += max(0, high - low + 1)
    return total


def forward_work(sizes: Sizes, pairs: int | None, estimate: bool = False) -> Work:
    """FLOPs of scores and values: 2·(D_qk + D_v) per pair and query head.

    Args:
        pairs: attended pairs summed over batch, None where all of them are.
    Source: scaling-book, "Transformer math": 4·B·H·S·S·D for equal widths.
    """
    each = 2 * sizes.heads * (sizes.qk_width + sizes.v_width)
    dense = each * sizes.batch * sizes.queries * sizes.keys
    attended = None if pairs is None else each * pairs
    return Work(dense, Kind.ATTENTION, None, attended, estimate=estimate)


def backward_work(sizes: Sizes, pairs: int | None, estimate: bool = False) -> Work:
    """FLOPs of the gradients: four matmuls (dV and dP over D_v, dQ and dK over D_qk), twice forward.
    The kernel computes the scores once more (five matmuls): that is hardware work, not model work.

    Source: Dao, "FlashAttention-2" (2023), section 3.1.2, "the backward pass has 5 matmuls".
    """
    each = 4 * sizes.heads * (sizes.qk_width + sizes.v_width)
    all_pairs = sizes.batch * sizes.queries * sizes.keys
    scores = 2 * sizes.heads * sizes.qk_width * all_pairs
    attended = None if pairs is None else each * pairs
    return Work(each * all_pairs, Kind.ATTENTION, each * all_pairs + scores, attended, estimate=estimate)


def _heads_first(sig: Signature, first: int) -> Sizes:
    """Sizes of query, key, value laid out (batch..., heads, sequence, width), starting at argument
    `first`."""
    q, k, v = need(sig, first, "query"), need(sig, first + 1, "key"), need(sig, first + 2, "value")
    has_heads = len(q.shape) > 3 or (len(q.shape) == 3 and sig.op != "aten.scaled_dot_product_attention")
    batch = product(q.shape[:-3]) if has_heads else product(q.shape[:-2])
    heads = q.shape[-3] if has_heads else 1
    return Sizes(batch, heads, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])


def _pairs(sig: Signature, sizes: Sizes, is_causal: bool) -> int | None:
    if sig.attended_pairs is not None:
        return sig.attended_pairs
    return sizes.batch * causal_pairs(sizes.queries, sizes.keys) if is_causal else None


# Where `is_causal` stands in each schema (torch 2.13, unchanged since 2.6).
_FORWARD_CAUSAL = {
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
    "aten._scaled_dot_product_fused_attention_overrideable": 5,
    "aten.scaled_dot_product_attention": 5,
    "aten._scaled_dot_product_attention_math": 5,
    "aten._scaled_dot_product_attention_math_for_mps": 5,
}
_BACKWARD_CAUSAL = {
    "aten._scaled_dot_product_flash_attention_backward": 11,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten._scaled_dot_product_efficient_attention_backward": 11,
    "aten._scaled_dot_product_cudnn_attention_backward": 14,
    "aten._cudnn_attention_backward": 14,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": 13,
}


@flops(*_FORWARD_CAUSAL)
def forward(sig: Signature) -> Work:
    """FLOPs of fused scaled_dot_product_attention, (batch, heads, sequence, width)."""
    sizes = _heads_first(sig, 0)
    position = _FORWARD_CAUSAL[sig.op] + (3 if sig.overload == "quantized" else 0)
    return forward_work(sizes, _pairs(sig, sizes, bool(argument(sig, position, "is_causal", False))))


@flops(*_BACKWARD_CAUSAL)
def backward(sig: Signature) -> Work:
    """FLOPs of its gradients."""
    sizes = _heads_first(sig, 1)
    causal = bool(argument(sig, _BACKWARD_CAUSAL[sig.op], "is_causal", False))
    return backward_work(sizes, _pairs(sig, sizes, causal))


def _sequence_first(
    sig: Signature, first: int, packed_q: TensorMeta | None, max_keys: object
) -> tuple[Sizes, bool]:
    """Sizes of (batch, sequence, heads, width), or of packed (total, heads, width) sequences whose
    lengths are data: then every query is taken to meet the longest key sequence, an upper bound."""
    q, k, v = need(sig, first, "query"), need(sig, first + 1, "key"), need(sig, first + 2, "value")
    heads, width = q.shape[-2], q.shape[-1]
    if packed_q is None:
        return Sizes(product(q.shape[:-3]), heads, q.shape[-3], k.shape[-3], width, v.shape[-1]), False
    keys = max_keys if isinstance(max_keys, int) and max_keys > 0 else k.shape[-3]
    return Sizes(1, heads, q.shape[-3], keys, width, v.shape[-1]), True


def _flash(sig: Signature, first: int) -> tuple[Sizes, int | None, bool]:
    backward = first == 1
    packed = tensor(sig, 6 if backward else 3, "cum_seq_q")
    if backward and packed is not None and packed.elements == 0:
        packed = None
    if backward and len(need(sig, 1, "query").shape) == 4:
        packed = None
    sizes, estimate = _sequence_first(sig, first, packed, argument(sig, 9 if backward else 6, "max_k"))
    causal = bool(argument(sig, 11 if backward else 8, "is_causal", False))
    left = keyword(sig, "window_size_left")
    right = keyword(sig, "window_size_right")
    pairs = sig.attended_pairs
    has_window = any(isinstance(side, int) and side >= 0 for side in (left, right))
    if pairs is None and not estimate and has_window:
        pairs = sizes.batch * window_pairs(sizes.queries, sizes.keys, left, 0 if causal else right)
    elif pairs is None and not estimate and causal:
        pairs = sizes.batch * causal_pairs(sizes.queries, sizes.keys, bottom_right=True)
    return sizes, pairs, estimate


@flops("aten._flash_attention_forward")
def flash_forward(sig: Signature) -> Work:
    """FLOPs of flash attention, (batch, sequence, heads, width) or packed."""
    return forward_work(*_flash(sig, 0))


@flops("aten._flash_attention_backward")
def flash_backward(sig: Signature) -> Work:
    """FLOPs of its gradients."""
    return backward_work(*_flash(sig, 1))


def _efficient(sig: Signature, first: int) -> tuple[Sizes, int | None, bool]:
    backward = first == 1
    packed = tensor(sig, 6 if backward else 4, "cu_seqlens_q")
    longest = argument(sig, 9 if backward else 7, "max_seqlen_k")
    sizes, estimate = _sequence_first(sig, first, packed, longest)
    # custom_mask_type: 0 none, 1 causal from the top left, 2 causal from the bottom right.
    mask = argument(sig, 14 if backward else 9, "custom_mask_type", 0)
    pairs = sig.attended_pairs
    if pairs is None and mask and not estimate:
        pairs = sizes.batch * causal_pairs(sizes.queries, sizes.keys, bottom_right=mask == 2)
    return sizes, pairs, estimate


@flops("aten._efficient_attention_forward")
def efficient_forward(sig: Signature) -> Work:
    """FLOPs of memory-efficient attention, (batch, sequence, heads, width) or packed."""
    return forward_work(*_efficient(sig, 0))


@flops("aten._efficient_attention_backward")
def efficient_backward(sig: Signature) -> Work:
    """FLOPs of its gradients."""
    return backward_work(*_efficient(sig, 1))


@flops("aten._cudnn_attention_forward")
def cudnn_forward(sig: Signature) -> Work:
    """FLOPs of cuDNN attention, (batch, heads, sequence, width)."""
    sizes = _heads_first(sig, 0)
    return forward_work(sizes, _pairs(sig, sizes, bool(argument(sig, 10, "is_causal", False))))


FLEX_NAMES = ("flex_attention", "higher_order.flex_attention", "aten.flex_attention")
FLEX_BACKWARD_NAMES = (
    "flex_attention_backward",
    "higher_order.flex_attention_backward",
    "aten.flex_attention_backward",
)


@flops(*FLEX_NAMES)
def flex_forward(sig: Signature) -> Work:
    """FLOPs of flex_attention, dense: its mask is a program, so only pairs counted while recording
    make the attended number."""
    return forward_work(_heads_first(sig, 0), sig.attended_pairs)


@flops(*FLEX_BACKWARD_NAMES)
def flex_backward(sig: Signature) -> Work:
    """FLOPs of the gradients of flex_attention."""
    return backward_work(_heads_first(sig, 0), sig.attended_pairs)


def _joined(parts: tuple[Work, ...]) -> Work:
    """One call's work made of parts of several kinds; its own kind is that of the largest."""
    largest = max(parts, key=lambda part: part.flops)
    attended = sum(p.flops if p.attended_flops is None else p.attended_flops for p in parts)
    return Work(sum(part.flops for part in parts), largest.kind, None, attended, parts)


@flops("aten._native_multi_head_attention")
def multi_head_attention(sig: Signature) -> Work:
    """FLOPs of the fused evaluation path of nn.MultiheadAttention: the q, k, v and output projections
    (2·rows·E·E each) and the attention between them."""
    q, k, v = need(sig, 0, "query"), need(sig, 1, "key"), need(sig, 2, "value")
    width = argument(sig, 3, "embed_dim", q.shape[-1])
    heads = argument(sig, 4, "num_head", 1)
    projections = 2 * width * width * (2 * _rows(q) + _rows(k) + _rows(v))
    sizes = Sizes(q.shape[0], heads, q.shape[1], k.shape[1], width // heads, width // heads)
    return _joined((Work(projections, Kind.MATMUL), forward_work(sizes, sig.attended_pairs)))


@flops("aten._transformer_encoder_layer_fwd")
def encoder_layer(sig: Signature) -> Work:
    """FLOPs of the fused evaluation path of nn.TransformerEncoderLayer, as its parts would cost:
    2·rows·(4·E² + 2·E·F) for the projections and the feed-forward, and the attention."""
    x, up = need(sig, 0, "src"), need(sig, 14, "ffn_weight_1")
    width, heads = argument(sig, 1, "embed_dim", x.shape[-1]), argument(sig, 2, "num_heads", 1)
    matmuls = 2 * _rows(x) * (4 * width * width + 2 * up.elements)
    sizes = Sizes(x.shape[0], heads, x.shape[1], x.shape[1], width // heads, width // heads)
    return _joined((Work(matmuls, Kind.MATMUL), forward_work(sizes, sig.attended_pairs)))


def _rows(meta: TensorMeta) -> int:
    return product(meta.shape[:-1])
