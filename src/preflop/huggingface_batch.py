"""What a Hugging Face model reads at given sizes: tokens, images, sound, tokens of a source and a target.

The batch follows from the configuration and from what the class's forward takes; what it does not describe
is the user's to make.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from preflop.axes import FRAMES, OPTIONS, SEQ, SOURCE, TARGET, Axis, Sizes, lengths_of, sizes_text
from preflop.errors import BadSubject

Make = Callable[..., Any]
"""From a batch and a length along each axis to the batch."""


@dataclass(frozen=True, slots=True)
class Described:
    """How a class's batch is made at any size."""

    axes: tuple[Axis, ...]
    make: Make
    unit: str
    """What a sample without a length is."""
    counts_tokens: bool = False
    """The first axis counts tokens."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Lengths that the class reads and that cannot be others."""


@dataclass(frozen=True, slots=True)
class Made:
    """A batch of one size."""

    make: Callable[[], Any]
    text: str
    tokens: int | None
    sizes: tuple[int, ...]
    axes: tuple[Axis, ...]


def batch_of(config: Any, model_class: Any, sizes: Sizes) -> Made:
    """The batch of a class at the sizes asked for.

    Raises:
        BadSubject: sizes do not describe its batch, or are not sizes that it runs.
    """
    found = _described(config, model_class)
    lengths = lengths_of(found.axes, _without(found.fixed, sizes.lengths, model_class.__name__), model_class.__name__)
    # Of an axis with a unit, a fit holds for lengths that leave the same rest.
    axes = tuple(replace(axis, rest=length % axis.unit) for axis, length in zip(found.axes, lengths))
    return Made(
        make=lambda: found.make(sizes.batch, *lengths),
        text=sizes_text(axes, sizes.batch, lengths, found.unit),
        tokens=sizes.batch * lengths[0] if found.counts_tokens else None,
        sizes=(sizes.batch, *lengths),
        axes=axes,
    )


def axes_of_class(config: Any, model_class: Any) -> tuple[Axis, ...]:
    """The axes of a class's batch.

    Raises:
        BadSubject: sizes do not describe its batch.
    """
    return _described(config, model_class).axes


def _without(fixed: Mapping[str, int], asked: Mapping[str, int], who: str) -> dict[str, int]:
    """The lengths asked for that can be chosen."""
    for name, length in fixed.items():
        if asked.get(name, length) != length:
            raise BadSubject(
                f"{who} reads {length} {name} and no other number, and got {asked[name]}.\n"
                f"  Leave {OPTIONS[name]} out."
            )
    return {name: length for name, length in asked.items() if name not in fixed}


def _described(config: Any, model_class: Any) -> Described:
    name, main = model_class.__name__, getattr(model_class, "main_input_name", "input_ids")
    if "MultipleChoice" in name:
        raise BadSubject(
            f"{name} reads several choices a sample, which --batch and --seq do not "
            "describe.\n  Make its batch yourself: --batch-from FILE:function."
        )
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if main == "pixel_values" and getattr(config, "image_size", None):
        return _images(config, name)
    if main == "input_values" and getattr(config, "conv_stride", None) and getattr(config, "conv_kernel", None):
        return _waveform(config, name)
    if main == "input_features" and config.model_type == "whisper":
        return _spectrogram(config, model_class)
    if main != "input_ids" or not getattr(text_config, "vocab_size", None):
        raise BadSubject(
            f"{name} reads {main!r}, which --batch and --seq do not describe.\n"
            "  Make its batch yourself: --batch-from FILE:function."
        )
    if _reads_a_target(config, model_class):
        return _source_and_target(config, text_config, name)
    return _tokens(config, text_config, name)


# -- tokens ---------------------------------------------------------------------------------------


def positions(config: Any) -> int | None:
    """Positions that the configuration names; None where it names none."""
    return _limit(config, "max_position_embeddings", "n_positions")


def rotary(config: Any) -> bool:
    """Whether positions are computed (RoPE) and not looked up in a table, which would end."""
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_theta"))


def _limit(config: Any, *names: str) -> int | None:
    """The first of these fields that is a length."""
    found = (getattr(config, name, None) for name in names)
    return next((limit for limit in found if isinstance(limit, int) and limit > 0), None)


def _table(config: Any, *names: str) -> int | None:
    """How many positions there are to look up; None where they are computed, or relative to each other (T5)."""
    if rotary(config):
        return None
    relative = getattr(config, "relative_attention_num_buckets", None)
    return _limit(config, *names, "max_position_embeddings", *(() if relative else ("n_positions",)))


def _tokens(config: Any, text_config: Any, name: str) -> Described:
    def make(batch: int, length: int) -> dict[str, Any]:
        ids = _ids(text_config, batch, length)
        return {"input_ids": ids, **_labels(name, ids, config)}

    return Described((Axis(SEQ, _table(text_config)),), make, "samples", counts_tokens=True)


def _source_and_target(config: Any, text_config: Any, name: str) -> Described:
    def make(batch: int, source: int, target: int) -> dict[str, Any]:
        ids, wanted = _ids(text_config, batch, source), _ids(text_config, batch, target)
        return {"input_ids": ids, **(_labels(name, wanted, config) or {"decoder_input_ids": wanted})}

    source = _table(config, "max_encoder_position_embeddings", "max_source_positions")
    target = _table(config, "max_decoder_position_embeddings", "max_target_positions")
    return Described((Axis(SOURCE, source), Axis(TARGET, target)), make, "samples", counts_tokens=True)


_SHIFTS_ITS_SOURCE = ("SequenceClassification", "QuestionAnswering", "TokenClassification")
"""Heads whose decoder reads the encoder's tokens, shifted by one."""


def _reads_a_target(config: Any, model_class: Any) -> bool:
    """Whether the class has a decoder with tokens of its own."""
    return (
        bool(getattr(config, "is_encoder_decoder", False))
        and "decoder_input_ids" in inspect.signature(model_class.forward).parameters
        and not any(part in model_class.__name__ for part in _SHIFTS_ITS_SOURCE)
    )


def _ids(config: Any, batch: int, length: int) -> Any:
    import torch

    return (torch.arange(batch * length) % config.vocab_size).reshape(batch, length)


def _labels(head: str, ids: Any, config: Any) -> dict[str, Any]:
    """What makes a head return its own loss: one class per sequence or token, or the tokens themselves.

    Source: the signatures of transformers' heads (`ForTokenClassification.forward` and so on).
    """
    per_sequence = ids.new_zeros(ids.shape[0])
    if "QuestionAnswering" in head:
        return {"start_positions": per_sequence, "end_positions": per_sequence.clone()}
    if "SequenceClassification" in head or "NextSentencePrediction" in head:
        return {"labels": per_sequence}
    if "TokenClassification" in head:
        return {"labels": ids % max(int(getattr(config, "num_labels", 1)), 1)}
    if "ForPreTraining" in head and config.model_type in _NEXT_SENTENCE:
        return {"labels": ids.clone(), "next_sentence_label": per_sequence}
    if any(part in head for part in ("LM", "ConditionalGeneration", "PreTraining")):
        return {"labels": ids.clone()}
    return {}


# Their pre-training head also predicts whether one sentence follows another.
_NEXT_SENTENCE = ("bert", "mobilebert", "megatron-bert", "nezha")


# -- images and sound -----------------------------------------------------------------------------


def _images(config: Any, name: str) -> Described:
    side = config.image_size
    height, width = side if isinstance(side, (list, tuple)) else (side, side)

    def make(batch: int) -> dict[str, Any]:
        import torch

        images = torch.zeros(batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": images, **_classes(name, batch)}

    return Described((), make, "images")


def _classes(name: str, batch: int) -> dict[str, Any]:
    import torch

    return {"labels": torch.zeros(batch, dtype=torch.int64)} if "Classification" in name else {}


def _waveform(config: Any, name: str) -> Described:
    """Sound as samples, through convolutions with strides (wav2vec 2.0 and its kin).

    A transcription's labels have a length of their own.
    """
    strides, transcribes = config.conv_stride, "CTC" in name
    least = 1 + sum((kernel - 1) * prod(strides[:n]) for n, kernel in enumerate(config.conv_kernel))

    def make(batch: int, frames: int, target: int = 0) -> dict[str, Any]:
        import torch

        labels = {"labels": _transcript(config, batch, target)} if transcribes else _classes(name, batch)
        return {"input_values": torch.zeros(batch, frames), **labels}

    axes = (Axis(FRAMES, least=least, unit=prod(strides)), *((Axis(TARGET),) if transcribes else ()))
    return Described(axes, make, "samples")


def _transcript(config: Any, batch: int, length: int) -> Any:
    """Labels of CTC: any but the blank, which is the padding token (`Wav2Vec2ForCTC.forward`)."""
    ids = _ids(config, batch, length)
    blank = config.pad_token_id or 0
    return ids.where(ids != blank, (blank + 1) % config.vocab_size)


def _spectrogram(config: Any, model_class: Any) -> Described:
    """Whisper's mel spectrograms, all of one length: two frames for each of the encoder's positions.

    Source: `WhisperEncoder.forward` of transformers, which refuses any other.
    """
    name, frames = model_class.__name__, 2 * config.max_source_positions
    reads_tokens = _reads_a_target(config, model_class)

    def make(batch: int, target: int = 0) -> dict[str, Any]:
        import torch

        labels = _classes(name, batch)
        if reads_tokens:
            ids = _ids(config, batch, target)
            labels = _labels(name, ids, config) or {"decoder_input_ids": ids}
        return {"input_features": torch.zeros(batch, config.num_mel_bins, frames), **labels}

    axes = (Axis(TARGET, config.max_target_positions),) if reads_tokens else ()
    return Described(axes, make, "samples", fixed={FRAMES: frames})
