"""Vision transformer: patches as tokens, a class token, layer norm before each branch."""

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from preflop.models.attention import fused_attention
from preflop.models.catalog import ModelFacts
from preflop.models.layers import Conv2d, Linear, activate, make_norm, merge_heads, split_heads
from preflop.models.loss import Output, class_loss


class PatchEmbedding(nn.Module):
    """Patches projected by one convolution, the class token before them, learned positions added."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        patches = (facts.needed("image_size") // facts.needed("patch_size")) ** 2
        self.projection = Conv2d(
            facts.channels, facts.hidden, kernel_size=facts.patch_size, stride=facts.patch_size
        )
        self.class_token = nn.Parameter(torch.empty(1, 1, facts.hidden))
        self.position = nn.Parameter(torch.empty(1, patches + 1, facts.hidden))
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """The encoder's input: one position per patch and one for the class, in the weights' dtype."""
        patches = rearrange(
            self.projection(images.to(self.projection.weight.dtype)),
            "batch hidden rows columns -> batch (rows columns) hidden",
        )
        class_token = repeat(self.class_token, "1 1 hidden -> batch 1 hidden", batch=len(images))
        hidden = torch.cat((class_token, patches), dim=1)
        return self.dropout(hidden + self.position)


class ViTAttention(nn.Module):
    """Self-attention among patches."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.heads = facts.needed("heads")
        self.attention_dropout = facts.attention_dropout
        self.query = Linear(facts.hidden, facts.hidden)
        self.key = Linear(facts.hidden, facts.hidden)
        self.value = Linear(facts.hidden, facts.hidden)
        self.output = Linear(facts.hidden, facts.hidden)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """What each position gathers from all of them."""
        query = split_heads(self.query(hidden), self.heads)
        key = split_heads(self.key(hidden), self.heads)
        value = split_heads(self.value(hidden), self.heads)
        dropout = self.attention_dropout if self.training else 0.0
        attended = fused_attention(query, key, value, causal=False, dropout=dropout)
        return self.output(merge_heads(attended))


class ViTFeedForward(nn.Module):
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


class ViTBlock(nn.Module):
    """One of `layers` equal blocks; only the residual stream passes between them."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.attention_norm = make_norm(facts)
        self.attention = ViTAttention(facts)
        self.feed_forward_norm = make_norm(facts)
        self.feed_forward = ViTFeedForward(facts)
        self.dropout = nn.Dropout(facts.dropout)

    def forward(
        self, hidden: Float[Tensor, "batch sequence hidden"]
    ) -> Float[Tensor, "batch sequence hidden"]:
        """The residual stream after attention and feed-forward were added to it."""
        hidden = self.dropout(self.attention(self.attention_norm(hidden))) + hidden
        return self.dropout(self.feed_forward(self.feed_forward_norm(hidden))) + hidden


class ViT(nn.Module):
    """A vision transformer with a linear classifier on the class token.

    Source: Dosovitskiy et al. 2020, arXiv:2010.11929; the operators are those of transformers'
    ViTForImageClassification.
    """

    residual_projections = ()

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        self.facts = facts
        self.embedding = PatchEmbedding(facts)
        self.blocks = nn.ModuleList(ViTBlock(facts) for _ in range(facts.layers))
        self.final_norm = make_norm(facts)
        self.classifier = Linear(facts.hidden, facts.classes)

    def forward(
        self,
        images: Float[Tensor, "batch channels height width"],
        labels: Int[Tensor, " batch"] | None = None,  # type: ignore[name-defined]
    ) -> Output:
        """Logits of the classes, and the loss against the labels."""
        hidden = self.embedding(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.classifier(self.final_norm(hidden)[:, 0])
        return Output(logits, None if labels is None else class_loss(logits, labels))
