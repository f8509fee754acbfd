"""What a model returns, and the losses, all in fp32."""

from typing import NamedTuple

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

# The label that takes no part in the loss: torch's default `ignore_index`.
IGNORED_LABEL = -100


class Output(NamedTuple):
    """What every model here returns."""

    logits: Tensor
    """Scores: (batch, sequence, vocab) of token models, (batch, classes) of image models."""
    loss: Tensor | None
    """Mean cross entropy in fp32, a scalar; None where no labels were given."""


def next_token_loss(
    logits: Float[Tensor, "batch sequence vocab"], labels: Int[Tensor, "batch sequence"]
) -> Float[Tensor, ""]:
    """Mean cross entropy of each position's logits against the next position's label.

    Labels are shifted and not logits, so that the logits are not copied; the last position is ignored.

    Source: ForCausalLMLoss of transformers.
    """
    shifted = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:].contiguous()
    return token_loss(logits, shifted)


def token_loss(
    logits: Float[Tensor, "batch sequence vocab"], labels: Int[Tensor, "batch sequence"]
) -> Float[Tensor, ""]:
    """Mean cross entropy of each position's logits against its own label, ignoring label -100."""
    return functional.cross_entropy(
        rearrange(logits.float(), "batch sequence vocab -> (batch sequence) vocab"),
        rearrange(labels, "batch sequence -> (batch sequence)"),
        ignore_index=IGNORED_LABEL,
    )


def class_loss(
    logits: Float[Tensor, "batch classes"],
    labels: Int[Tensor, " batch"],  # type: ignore[name-defined]
) -> Float[Tensor, ""]:
    """Mean cross entropy over images."""
    return functional.cross_entropy(logits.float(), labels)
