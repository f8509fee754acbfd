"""GPT-2: learned positions, layer norm before each branch, GELU, dropout, tied output projection."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from preflop.models.attention import fused_attention
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


class GPT2Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.heads = facts.needed("heads")
        self.attention_dropout = facts.attention_dropout
        self.query_key_value = Linear(facts.hidden, 3 * facts.hidden)
        self.output = Linear(facts.hidden, facts.hidden)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """What each position gathers from itself and those before it."""
        query, key, value = (
            split_heads(part, self.heads)
            for part in self.query_key_value(hidden).split(hidden.shape[-1], dim=-1)
        )
        dropout = self.attention_dropout if self.training else 0.0
        attended = fused_attention(query, key, value, causal=True, dropout=dropout)
        return self.dropout(self.output(merge_heads(attended)))


class GPT2FeedForward(nn.Module):
    """Two projections with a non-linearity between."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.activation = facts.activation
        self.up = Linear(facts.hidden, facts.ffn)
        self.down = Linear(facts.ffn, facts.hidden)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """Each position on its own: up, non-linearity, down."""
        return self.dropout(self.down(activate(self.up(hidden), self.activation)))


class GPT2Block(nn.Module):
    """One of `layers` equal blocks; only the residual stream passes between them."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.attention_norm = make_norm(facts)
        self.attention = GPT2Attention(facts)
        self.feed_forward_norm = make_norm(facts)
        self.feed_forward = GPT2FeedForward(facts)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """The residual stream after attention and feed-forward were added to it."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class GPT2(nn.Module):
    """GPT-2 with its language model head.

    Source: Radford et al. 2019; the operators are those of transformers' GPT2LMHeadModel.
    """

    residual_projections = ("attention.output.weight", "feed_forward.down.weight")
    """Initialised smaller, by the square root of twice the layers (section 2.3 of the paper)."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.token_embedding = Embedding(facts.vocab, facts.hidden)
        self.position_embedding = Embedding(facts.max_positions, facts.hidden)
        self.dropout = nn.Dropout(facts.dropout)
        self.blocks = nn.ModuleList(GPT2Block(facts) for _ in range(facts.layers))
        self.final_norm = make_norm(facts)
        self.lm_head = tied_linear(self.token_embedding, bias=False)

    def forward(
        self,
        input_ids: Int[Tensor, "batch sequence"],
        labels: Int[Tensor, "batch sequence"] | None = None,
    ) -> Output:
        """Logits of the next token at each position, and the loss against the labels, shifted here."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = self.position_embedding(rearrange(position, "sequence -> 1 sequence"))
        hidden = self.dropout(self.token_embedding(input_ids) + positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(self.final_norm(hidden))
        return Output(logits, None if labels is None else next_token_loss(logits, labels))
