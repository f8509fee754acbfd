"""GPT-NeoX (Pythia): partly rotary heads, attention and feed-forward side by side, untied output."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from preflop.models.attention import fused_attention
from preflop.models.catalog import ModelFacts
from preflop.models.layers import Embedding, Linear, activate, make_norm, merge_heads, split_heads
from preflop.models.loss import Output, next_token_loss
from preflop.models.rotary import rotary_tables, rotate


class NeoXAttention(nn.Module):
    """Causal self-attention; each head's query, key and value lie side by side in one projection."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.heads = facts.needed("heads")
        self.attention_dropout = facts.attention_dropout
        self.query_key_value = Linear(facts.hidden, 3 * facts.hidden)
        self.output = Linear(facts.hidden, facts.hidden)

    def forward(
        self,
        hidden: Float[Tensor, "batch sequence hidden"],
        cos: Float[Tensor, "sequence rotary"],
        sin: Float[Tensor, "sequence rotary"],
    ) -> Float[Tensor, "batch sequence hidden"]:
        """What each position gathers from itself and those before it."""
        heads = split_heads(self.query_key_value(hidden), self.heads)
        query, key, value = heads.chunk(3, dim=-1)
        dropout = self.attention_dropout if self.training else 0.0
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = fused_attention(query, key, value, causal=True, dropout=dropout)
        return self.output(merge_heads(attended))


class NeoXFeedForward(nn.Module):
    """Two projections with a non-linearity between."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.activation = facts.activation
        self.up = Linear(facts.hidden, facts.ffn)
        self.down = Linear(facts.ffn, facts.hidden)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """Each position on its own: up, non-linearity, down."""
        return self.down(activate(self.up(hidden), self.activation))


class NeoXBlock(nn.Module):
    """One of `layers` equal blocks: both branches read the same residual stream.

    Besides it a block reads the rotary tables, made once per forward.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.attention_norm = make_norm(facts)
        self.attention = NeoXAttention(facts)
        self.feed_forward_norm = make_norm(facts)
        self.feed_forward = NeoXFeedForward(facts)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self,
        hidden: Float[Tensor, "batch sequence hidden"],
        cos: Float[Tensor, "sequence rotary"],
        sin: Float[Tensor, "sequence rotary"],
    ) -> Float[Tensor, "batch sequence hidden"]:
        """The residual stream after both branches were added to it."""
        attended = self.dropout(self.attention(self.attention_norm(hidden), cos, sin))
        fed = self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return fed + attended + hidden


class NeoX(nn.Module):
    """GPT-NeoX with its language model head.

    Source: Black et al. 2022, arXiv:2204.06745; the operators are those of transformers'
    GPTNeoXForCausalLM.
    """

    residual_projections = ()

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.token_embedding = Embedding(facts.vocab, facts.hidden)
        self.dropout = nn.Dropout(facts.dropout)
        self.blocks = nn.ModuleList(NeoXBlock(facts) for _ in range(facts.layers))
        self.final_norm = make_norm(facts)
        self.lm_head = Linear(facts.hidden, facts.vocab, bias=False)

    def forward(
        self,
        input_ids: Int[Tensor, "batch sequence"],
        labels: Int[Tensor, "batch sequence"] | None = None,
    ) -> Output:
        """Logits of the next token at each position, and the loss against the labels, shifted here."""
        hidden = self.dropout(self.token_embedding(input_ids))
        cos, sin = rotary_tables(self.facts, input_ids.shape[1], dtype=hidden.dtype, device=hidden.device)
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        logits = self.lm_head(self.final_norm(hidden))
        return Output(logits, None if labels is None else next_token_loss(logits, labels))
