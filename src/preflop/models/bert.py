"""BERT: an encoder with layer norm after each branch, and the masked language model head."""

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
from preflop.models.loss import Output, token_loss


class BertEmbeddings(nn.Module):
    """Words, token types and positions, added and normalised."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.word = Embedding(facts.vocab, facts.hidden, padding_idx=facts.padding_token)
        self.token_type = Embedding(facts.token_types, facts.hidden)
        self.position = Embedding(facts.max_positions, facts.hidden)
        self.norm = make_norm(facts)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(self, input_ids: Int[Tensor, "batch sequence"]) -> Float[Tensor, "batch sequence hidden"]:
        """The encoder's input. Every token is of the first type, as when no types are given."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.word(input_ids) + self.token_type(torch.zeros_like(input_ids))
        hidden = hidden + self.position(rearrange(position, "sequence -> 1 sequence"))
        return self.dropout(self.norm(hidden))


class BertAttention(nn.Module):
    """Self-attention in both directions, without an attention mask: batches are full."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.heads = facts.needed("heads")
        self.attention_dropout = facts.attention_dropout
        self.query = Linear(facts.hidden, facts.hidden)
        self.key = Linear(facts.hidden, facts.hidden)
        self.value = Linear(facts.hidden, facts.hidden)
        self.output = Linear(facts.hidden, facts.hidden)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """What each position gathers from all of them."""
        query = split_heads(self.query(hidden), self.heads)
        key = split_heads(self.key(hidden), self.heads)
        value = split_heads(self.value(hidden), self.heads)
        dropout = self.attention_dropout if self.training else 0.0
        attended = fused_attention(query, key, value, causal=False, dropout=dropout)
        return self.dropout(self.output(merge_heads(attended)))


class BertFeedForward(nn.Module):
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


class BertBlock(nn.Module):
    """One of `layers` equal blocks; only the residual stream passes between them."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.attention = BertAttention(facts)
        self.attention_norm = make_norm(facts)
        self.feed_forward = BertFeedForward(facts)
        self.feed_forward_norm = make_norm(facts)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """Each branch added to its input, and the sum normalised."""
        hidden = self.attention_norm(self.attention(hidden) + hidden)
        return self.feed_forward_norm(self.feed_forward(hidden) + hidden)


class BertHead(nn.Module):
    """Guesses the word at each position: a transform, then the tied output projection with a bias."""

    def __init__(self, facts: ModelFacts, word: nn.Embedding) -> None:
        super().__init__()
        self.activation = facts.activation
        self.transform = Linear(facts.hidden, facts.hidden)
        self.norm = make_norm(facts)
        self.decoder = tied_linear(word, bias=True)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence vocab"]:
        """Logits over the vocabulary."""
        return self.decoder(self.norm(activate(self.transform(hidden), self.activation)))


class Bert(nn.Module):
    """BERT with its masked language model head and without the pooler.

    Source: Devlin et al. 2018, arXiv:1810.04805; the operators are those of transformers'
    BertForMaskedLM.
    """

    residual_projections = ()

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.embeddings = BertEmbeddings(facts)
        self.blocks = nn.ModuleList(BertBlock(facts) for _ in range(facts.layers))
        self.head = BertHead(facts, self.embeddings.word)

    def forward(
        self,
        input_ids: Int[Tensor, "batch sequence"],
        labels: Int[Tensor, "batch sequence"] | None = None,
    ) -> Output:
        """Logits of the word at each position, and the loss where labels are not -100."""
        hidden = self.embeddings(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return Output(logits, None if labels is None else token_loss(logits, labels))
