"""The zoo: one line per member, what is trained and how. Adding a member is adding an entry.

A member's numbers are read from a real step on this machine and compared with the prediction; see
`test_zoo.py`. Sizes keep each member under a second or two and its peak at several megabytes, so that a
tenth of a percent is a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import architectures as plain
from . import hugging_face as hf

EXACT = 1e-3
"""Allowed relative difference between predicted and measured peak."""
WITH_WORKSPACE = 5e-3
"""The same where oneDNN's kernels allocate inside themselves."""


@dataclass(frozen=True)
class Member:
    """One training step of the zoo."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Any = "adamw-loop"
    precision: str = "fp32"
    microbatches: int = 1
    recompute: str = "none"
    keep_output: bool = False
    tolerance: float = EXACT
    sample: bool = False
    """In the quick run too."""
    options: dict[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """What `preflop.account` and `preflop.verify` take beside model and batch."""
        return {
            "loss": self.loss,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "keep_output": self.keep_output,
            **self.options,
        }


# ------------------------------------------------------------------------------------------ batches


def ids(batch: int = 4, length: int = 128) -> Tensor:
    return torch.randint(1000, (batch, length))


def labelled(batch: int = 4, length: int = 128) -> dict[str, Tensor]:
    tokens = ids(batch, length)
    return {"input_ids": tokens, "labels": tokens}


def padded() -> dict[str, Tensor]:
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[:, 100:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def images(batch: int = 4, side: int = 64) -> Tensor:
    return torch.randn(batch, 3, side, side)


def labelled_images() -> dict[str, Tensor]:
    return {"pixel_values": images(), "labels": torch.randint(100, (4,))}


def sentence_pair() -> tuple[Tensor, Tensor]:
    return ids(4, 96), ids(4, 80)


def clicks() -> tuple[Tensor, Tensor]:
    return torch.randn(256, 13), torch.randint(2000, (256, 4, 8))


def seq2seq() -> dict[str, Tensor]:
    return {"input_ids": ids(4, 96), "labels": ids(4, 64)}


# ------------------------------------------------------------------------------------------- losses


def next_token(logits: Tensor) -> Tensor:
    """Cross-entropy against a fixed class: the same operators as real targets."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long))


def classes(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def first_of_pair(output: tuple[Tensor, Tensor]) -> Tensor:
    logits, weights = output
    return classes(logits) + weights.mean()


def clicked(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def squared(output: Tensor) -> Tensor:
    return output.pow(2).mean()


# ------------------------------------------------------------------------------------------- members

def _decoder(name: str, **changes: Any) -> Member:
    """The plain decoder in another precision or loop."""
    model = changes.pop("model", plain.Decoder)
    return Member(name, model, ids, next_token, **changes)


def _optimizer(optimizer: Any, name: str = "", **changes: Any) -> Member:
    """The plain decoder on so few tokens that the peak is the optimizer's own."""
    return Member(name or optimizer, plain.Decoder, partial(ids, 1, 16), next_token, optimizer, **changes)


MEMBERS: tuple[Member, ...] = (
    # decoders
    Member("gpt2-hf", hf.gpt2, labelled, sample=True),
    _decoder("gpt2-plain", sample=True),
    _decoder("gpt2-manual-attention", model=partial(plain.Decoder, manual=True)),
    Member("llama-hf", hf.llama, labelled),
    Member("llama-plain", plain.Llama, ids, next_token, sample=True),
    Member("neox-hf", hf.neox, labelled),
    Member("mistral-sliding-window-hf", hf.mistral, labelled),
    Member("mixtral-hf", hf.mixtral, labelled),
    Member("experts-plain", plain.ExpertDecoder, ids, next_token, sample=True),
    # encoders, encoder-decoders
    Member("bert-hf", hf.bert, padded, sample=True),
    Member("t5-hf", hf.t5, seq2seq),
    Member("nn-transformer", plain.Translator, sentence_pair, next_token),
    Member("multihead-attention", plain.Pooler, lambda: torch.randn(16, 128, 128), first_of_pair),
    # vision
    Member("vit-hf", hf.vit, labelled_images, tolerance=WITH_WORKSPACE),
    Member("vit-plain", plain.ViT, images, classes, tolerance=WITH_WORKSPACE),
    Member("resnet50", plain.ResNet, images, classes, "momentum-loop", tolerance=WITH_WORKSPACE),
    Member(
        "resnext-grouped",
        partial(plain.ResNet, (1, 1, 1, 1), groups=8),
        images,
        classes,
        "momentum-loop",
        tolerance=WITH_WORKSPACE,
        sample=True,
    ),
    Member(
        "resnet50-channels-last",
        lambda: plain.ResNet().to(memory_format=torch.channels_last),
        lambda: images().to(memory_format=torch.channels_last),
        classes,
        tolerance=WITH_WORKSPACE,
    ),
    Member("mobilenet-depthwise", plain.mobilenet, images, classes, "rmsprop", tolerance=WITH_WORKSPACE),
    Member("convnext", plain.convnext, images, classes, tolerance=WITH_WORKSPACE),
    Member("unet", plain.UNet, images, squared, "adam-loop", tolerance=WITH_WORKSPACE, sample=True),
    Member(
        "resnet50-bf16",
        plain.ResNet,
        partial(images, side=128),
        classes,
        precision="bf16",
        tolerance=WITH_WORKSPACE,
    ),
    # recurrent, audio, tables
    Member("lstm", partial(plain.Recurrent, nn.LSTM), partial(ids, 8, 64), next_token, sample=True),
    Member(
        "lstm-bidirectional",
        partial(plain.Recurrent, nn.LSTM, bidirectional=True, dropout=0.1),
        partial(ids, 8, 64),
        next_token,
    ),
    Member("gru", partial(plain.Recurrent, nn.GRU), partial(ids, 8, 64), next_token),
    Member("rnn-tanh", partial(plain.Recurrent, nn.RNN), partial(ids, 8, 64), next_token),
    Member("embedding-bags", plain.Recommender, clicks, clicked, "adagrad", sample=True),
    Member("embedding-bags-mean", partial(plain.Recommender, mode="mean"), clicks, clicked, "sgd"),
    Member(
        "audio-weight-norm",
        plain.AudioClassifier,
        lambda: torch.randn(4, 1, 4000),
        classes,
        tolerance=WITH_WORKSPACE,
    ),
    # how layers and weights are shared, frozen, written over
    Member("shared-layers", plain.SharedLayers, ids, next_token),
    Member("lora-plain", plain.low_rank_decoder, ids, next_token),
    Member("lora-peft", hf.gpt2_lora, labelled),
    Member("inplace-batch-norm-dict", plain.Autoencoder, lambda: torch.randn(256, 784), sample=True),
    Member("custom-function", plain.Perceptron, lambda: torch.randn(512, 512), squared),
    _decoder("dropout", model=partial(plain.Decoder, dropout=0.1)),
    _decoder("dropout-manual-attention", model=partial(plain.Decoder, dropout=0.1, manual=True)),
    # recomputation
    _decoder("checkpoint-reentrant", model=partial(plain.Decoder, recompute="reentrant")),
    _decoder(
        "checkpoint-non-reentrant", model=partial(plain.Decoder, recompute="non_reentrant"), sample=True
    ),
    Member("recompute-block-hf", hf.gpt2, labelled, recompute="block"),
    _decoder("recompute-selective", recompute="selective"),
    # the loop
    _decoder("accumulate-2", microbatches=2, sample=True),
    _decoder("accumulate-4-kept-output", microbatches=4, keep_output=True),
    _decoder("kept-output", keep_output=True),
    _decoder("no-optimizer", optimizer=None),
    # optimizers
    _optimizer("sgd"),
    _optimizer("momentum"),
    _optimizer("momentum-foreach"),
    _optimizer("adam"),
    _optimizer("adamw-loop"),
    _optimizer("adamw-foreach", sample=True),
    _optimizer("adamw-fused"),
    _optimizer("adagrad"),
    _optimizer("rmsprop"),
    _optimizer("adafactor"),
    _optimizer("nadam"),
    _optimizer("adamw", "bf16-master-optimizer", precision="bf16-master"),
    _optimizer("adamw", "bf16-fp32-states-optimizer", precision="bf16-fp32-states"),
    _optimizer(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, amsgrad=True, foreach=False),
        "adamw-by-callable",
    ),
    # precision
    _decoder("bf16", precision="bf16", sample=True),
    _decoder("bf16-fp32-states", precision="bf16-fp32-states"),
    _decoder("bf16-master", precision="bf16-master"),
    _decoder("autocast-bf16", precision="bf16-mixed", sample=True),
    Member("autocast-bf16-llama-hf", hf.llama, labelled, precision="bf16-mixed"),
    Member(
        "autocast-bf16-resnext",
        partial(plain.ResNet, (1, 1, 1, 1), groups=8),
        images,
        classes,
        precision="bf16-mixed",
        tolerance=WITH_WORKSPACE,
    ),
)
