"""The model that is trained: a named one with the data's vocabulary, and its loss as a sum over tokens."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from preflop.errors import BadSubject
from preflop.models.build import build
from preflop.models.catalog import Activation, Architecture, ModelFacts, find
from preflop.models.loss import IGNORED_LABEL
from preflop.record.recompute import apply_recompute, blocks_of
from preflop.trainer.config import TrainConfig

_NEXT_TOKEN = (Architecture.GPT2, Architecture.LLAMA, Architecture.NEOX)


class TokenLoss(nn.Module):
    """A model with its loss: the cross entropy of every labelled token, summed, in fp32.

    A sum and not a mean, so that microbatches with different numbers of tokens add up to the mean over
    the whole step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The summed loss, fp32, a scalar; labels of -100 take no part."""
        logits = self.model(input_ids).logits
        return functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )


def trained_facts(config: TrainConfig, data_vocab: int) -> ModelFacts:
    """The named model's facts with this run's vocabulary and dropout.

    GPT-2's spelled-out GELU becomes the one call that computes the same function: eight calls and three
    kept tensors fewer per block.

    Raises:
        BadSubject: not a model of the next token, too few positions, too few rows for the data's ids.
    """
    facts = find(config.model)
    if facts.architecture not in _NEXT_TOKEN:
        raise BadSubject(
            f"{facts.name} does not predict the next token, which is what this trainer trains.\n"
            "  Take a gpt2, llama, mistral, qwen, gemma or pythia model of `preflop models`."
        )
    if facts.max_positions is not None and config.seq > facts.max_positions:
        raise BadSubject(
            f"{facts.name} has {facts.max_positions} positions, and got a sequence length of {config.seq}.\n"
            f"  Use --seq {facts.max_positions} or less, or another model."
        )
    vocab = data_vocab if config.vocab is None else config.vocab
    if vocab < data_vocab:
        raise BadSubject(
            f"the vocabulary is {vocab}, and the data has token ids up to {data_vocab - 1}.\n"
            f"  Use --vocab {data_vocab} or more, or leave it out."
        )
    changed: dict[str, object] = {"vocab": vocab}
    if facts.activation is Activation.GELU_TANH_UNFUSED:
        changed["activation"] = Activation.GELU_TANH
    if config.dropout is not None:
        changed |= {"dropout": config.dropout, "attention_dropout": config.dropout}
    return dataclasses.replace(facts, **changed)  # type: ignore[arg-type]


def make_model(facts: ModelFacts, dtype: torch.dtype, recompute: str) -> TokenLoss:
    """The module, its weights not yet initialised, with recomputation set."""
    model = TokenLoss(build(facts, dtype))
    if recompute != "none":
        refuse_batch_norm(blocks_of(model))
        apply_recompute(model, recompute)
    return model


def refuse_batch_norm(blocks: list[nn.Module]) -> None:
    """Recomputing a batch norm updates its running statistics twice a step.

    Raises:
        BadSubject: a block that would be recomputed holds one.
    """
    for block in blocks:
        for name, module in block.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise BadSubject(
                    f"a recomputed block holds a batch norm ({name or type(module).__name__}), whose running "
                    "statistics would be updated twice a step.\n"
                    "  Train without --recompute, or recompute blocks that hold none."
                )
