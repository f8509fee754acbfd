"""Llama and its kin (Mistral, Qwen 2.5, Gemma 2): rotary positions, RMS norm, gated feed-forward.

What sets the kin apart are facts: fewer key-value heads, biases on queries, keys and values (Qwen), a
sliding window (Mistral, every other block of Gemma 2), soft-capped scores and logits, norms after each
branch and scaled embeddings (Gemma 2).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from preflop.models.attention import causal_mask, fused_attention, mask_bias, softcapped_attention
from preflop.models.catalog import ModelFacts
from preflop.models.layers import (
    Embedding,
    Linear,
    activate,
    make_norm,
    merge_heads,
    split_heads,
    tied_linear,
)
from preflop.models.loss import Output, next_token_loss
from preflop.models.rotary import rotary_tables, rotate


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions and, where the facts say so, fewer key-value heads."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.heads, self.kv_heads = facts.needed("heads"), facts.needed("kv_heads")
        head_dim = facts.needed("head_dim")
        self.attention_dropout = facts.attention_dropout
        self.softcap = facts.attention_softcap
        self.scale = facts.attention_scale or head_dim**-0.5
        query_features = self.heads * head_dim
        kv_features = self.kv_heads * head_dim
        self.query = Linear(facts.hidden, query_features, bias=facts.qkv_bias)
        self.key = Linear(facts.hidden, kv_features, bias=facts.qkv_bias)
        self.value = Linear(facts.hidden, kv_features, bias=facts.qkv_bias)
        self.output = Linear(query_features, facts.hidden, bias=False)

    def forward(
        self,
        hidden: Float[Tensor, "batch sequence hidden"],
        cos: Float[Tensor, "sequence rotary"],
        sin: Float[Tensor, "sequence rotary"],
        mask: Bool[Tensor, "sequence sequence"] | Float[Tensor, "sequence sequence"] | None,
    ) -> Float[Tensor, "batch sequence hidden"]:
        """What each position gathers from those that the mask (None: causal) lets it see."""
        query = rotate(split_heads(self.query(hidden), self.heads), cos, sin)
        key = rotate(split_heads(self.key(hidden), self.kv_heads), cos, sin)
        value = split_heads(self.value(hidden), self.kv_heads)
        return self.output(merge_heads(self._attend(query, key, value, mask)))

    def _attend(
        self,
        query: Float[Tensor, "batch heads sequence head"],
        key: Float[Tensor, "batch kv_heads sequence head"],
        value: Float[Tensor, "batch kv_heads sequence head"],
        mask: Bool[Tensor, "sequence sequence"] | Float[Tensor, "sequence sequence"] | None,
    ) -> Float[Tensor, "batch heads sequence head"]:
        dropout = self.attention_dropout if self.training else 0.0
        if self.softcap is None:
            return fused_attention(query, key, value, causal=True, mask=mask, dropout=dropout)
        return softcapped_attention(
            query,
            key,
            value,
            bias=mask,
            softcap=self.softcap,
            scale=self.scale,
            dropout=self.attention_dropout,
            training=self.training,
        )


class GatedFeedForward(nn.Module):
    """Three projections: one gates another, the third leads back (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.activation = facts.activation
        self.gate = Linear(facts.hidden, facts.ffn, bias=False)
        self.up = Linear(facts.hidden, facts.ffn, bias=False)
        self.down = Linear(facts.ffn, facts.hidden, bias=False)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """Each position on its own: down(activation(gate) * up)."""
        return self.down(activate(self.gate(hidden), self.activation) * self.up(hidden))


class LlamaBlock(nn.Module):
    """One of `layers` equal blocks. Besides the residual stream it reads the rotary tables and a mask,
    both made once per forward: nothing else passes between blocks."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.attention_norm = make_norm(facts)
        self.attention = LlamaAttention(facts)
        self.feed_forward_norm = make_norm(facts)
        self.feed_forward = GatedFeedForward(facts)
        after = facts.post_norms
        self.attention_post_norm = make_norm(facts) if after else nn.Identity()
        self.feed_forward_post_norm = make_norm(facts) if after else nn.Identity()

    def forward(
        self,
        hidden: Float[Tensor, "batch sequence hidden"],
        cos: Float[Tensor, "sequence rotary"],
        sin: Float[Tensor, "sequence rotary"],
        mask: Bool[Tensor, "sequence sequence"] | Float[Tensor, "sequence sequence"] | None = None,
    ) -> Float[Tensor, "batch sequence hidden"]:
        """The residual stream after attention and feed-forward were added to it."""
        attended = self.attention(self.attention_norm(hidden), cos, sin, mask)
        hidden = hidden + self.attention_post_norm(attended)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.feed_forward_post_norm(fed)


class Llama(nn.Module):
    """A decoder of the Llama kind with its language model head.

    Source: Touvron et al. 2023, arXiv:2302.13971; the operators are those of transformers'
    LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Gemma2ForCausalLM (eager attention).
    """

    residual_projections = ()

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.token_embedding = Embedding(facts.vocab, facts.hidden, padding_idx=facts.padding_token)
        self.blocks = nn.ModuleList(LlamaBlock(facts) for _ in range(facts.layers))
        self.final_norm = make_norm(facts)
        if facts.tied_embeddings:
            self.lm_head = tied_linear(self.token_embedding, bias=False)
        else:
            self.lm_head = Linear(facts.hidden, facts.vocab, bias=False)

    def forward(
        self,
        input_ids: Int[Tensor, "batch sequence"],
        labels: Int[Tensor, "batch sequence"] | None = None,
    ) -> Output:
        """Logits of the next token at each position, and the loss against the labels, shifted here."""
        hidden = self.token_embedding(input_ids)
        if self.facts.scale_embeddings:
            hidden = hidden * self.facts.hidden**0.5
        sequence, like = input_ids.shape[1], {"dtype": hidden.dtype, "device": hidden.device}
        cos, sin = rotary_tables(self.facts, sequence, **like)
        windowed, full = self._masks(sequence, **like)
        for index, block in enumerate(self.blocks):
            is_windowed = index % self.facts.window_every == 0
            hidden = block(hidden, cos, sin, windowed if is_windowed else full)
        logits = self._capped(self.lm_head(self.final_norm(hidden)))
        return Output(logits, None if labels is None else next_token_loss(logits, labels))

    def _masks(
        self, sequence: int, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """The masks of windowed and of other blocks; None where plain causal attention needs none.

        A window that the sequence does not outgrow is no window, so both are then the same.
        """
        window = self.facts.window
        if window is not None and sequence <= window:
            window = None
        if self.facts.attention_softcap is not None:
            full = mask_bias(causal_mask(sequence, window=None, device=device), dtype)
            if window is None:
                return full, full
            return mask_bias(causal_mask(sequence, window=window, device=device), dtype), full
        if window is None:
            return None, None
        return causal_mask(sequence, window=window, device=device), None

    def _capped(self, logits: Float[Tensor, "batch sequence vocab"]) -> Float[Tensor, "batch sequence vocab"]:
        cap = self.facts.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
