"""A fitting batch for each kind of head, from the configuration and the signature of `forward`.

What a batch holds is decided by names of arguments, as a data collator would; where an image-text model
could read its images in several layouts, each is tried on the small model and the first that runs is it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .pairs import Pair

BATCH, LENGTH = 2, 32
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 400
"""Ids between the special tokens at either end of the small vocabulary."""


def batches(pair: Pair, config: Any, model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Batches that may fit, the fullest first, each with a word for what it is.

    Args:
        model: a real small model; only read, and run without gradients to count image tokens.
    """
    from .by_pair import OVERRIDES

    names = _argument_names(model)
    override = OVERRIDES.get(pair.name) or OVERRIDES.get(pair.model_type)
    if override is not None:
        yield "", override(config)
        return
    family = pair.family
    if family == "image and text":
        yield from _image_text(pair, config, model, names)
    elif family == "audio and speech":
        yield from _audio(pair, config, names)
    elif family in ("vision", "detection", "segmentation and depth"):
        yield from _vision(pair, config, model, names)
    elif family == "time series":
        yield "", _series(config, names)
    else:
        main = getattr(model, "main_input_name", "input_ids")
        if main == "input_ids" or "input_ids" in names:
            yield "", _text(pair, config, names)
        if "input_features" in names or "input_values" in names:
            yield from _audio(pair, config, names)
        yield from _image_text(pair, config, model, names)


def _argument_names(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


# -- text -----------------------------------------------------------------------------------------


def ids(config: Any, length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """Random tokens, none of them special."""
    text = text_config(config)
    size = _first(text, ("vocab_size",)) or _first(config, ("vocab_size",)) or 100
    high = min(size, HIGHEST_TOKEN)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(LOWEST_TOKEN, high - 1), high, (batch, length), generator=generator)


def text_config(config: Any) -> Any:
    """The language model's own part of the configuration."""
    try:
        return config.get_text_config(decoder=True)
    except Exception:
        return config


def _first(config: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _text(pair: Pair, config: Any, names: frozenset[str], length: int = LENGTH) -> dict[str, Any]:
    tokens = ids(config, length)
    batch: dict[str, Any] = {"input_ids": tokens}
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(tokens)
    if "bbox" in names:
        batch["bbox"] = boxes(length)
    if "labels" in names:
        if "SequenceClassification" in pair.head or "MultipleChoice" in pair.head:
            batch["labels"] = torch.arange(BATCH) % 2
            end = _first(text_config(config), ("eos_token_id",))
            if isinstance(end, int) and 0 <= end < HIGHEST_TOKEN:  # some read the sentence at its end token
                tokens[:, -1] = end
        else:
            batch["labels"] = tokens.clone()
    elif "decoder_input_ids" in names:
        batch["decoder_input_ids"] = tokens.clone()
    return batch


def boxes(length: int) -> Tensor:
    """Boxes of words on a page: x0 <= x1, y0 <= y1, in thousandths."""
    corner = torch.arange(BATCH * length).reshape(BATCH, length, 1) % 400
    return torch.cat([corner, corner, corner + 60, corner + 30], dim=-1)


# -- images ---------------------------------------------------------------------------------------


def image_side(config: Any) -> tuple[int, int]:
    """Height and width that the configuration asks for; 64 where it does not say."""
    for part in (
        config,
        getattr(config, "vision_config", None),
        getattr(config, "backbone_config", None),
        getattr(config, "encoder", None),
    ):
        size = (
            _first(part, ("image_size", "img_size", "pretrain_image_size", "input_size", "crop_size"))
            if part
            else None
        )
        if isinstance(size, int):
            return size, size
        if isinstance(size, dict):
            return size.get("height", 64), size.get("width", 64)
        if isinstance(size, (list, tuple)) and len(size) == 2:
            return int(size[0]), int(size[1])
    return 64, 64


def image_channels(config: Any) -> int:
    """Three, or what the configuration says."""
    for part in (config, getattr(config, "vision_config", None)):
        value = _first(part, ("num_channels", "in_chans", "in_channels")) if part is not None else None
        if isinstance(value, int):
            return value
    return 3


def images(config: Any, batch: int = BATCH) -> Tensor:
    """Random images."""
    height, width = image_side(config)
    generator = torch.Generator().manual_seed(0)
    return torch.rand(batch, image_channels(config), height, width, generator=generator)


def _vision(
    pair: Pair, config: Any, model: nn.Module, names: frozenset[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if "spatial_shapes" in names:
        patch = config.vision_config.patch_size
        yield (
            "",
            {
                "pixel_values": torch.rand(BATCH, 16, 3 * patch * patch),
                "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
                "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
                "labels": torch.arange(BATCH) % 2,
            },
        )
        return
    if "input_ids" in names and _image_token(config) is not None:
        yield from _image_text(pair, config, model, names)
        return
    batch: dict[str, Any] = {}
    main = getattr(model, "main_input_name", "pixel_values")
    pixels = images(config)
    if pair.mapping == "VIDEO_CLASSIFICATION":
        frames = _first(config, ("num_frames", "frames_per_clip")) or 4
        pixels = pixels[:, None].repeat(1, frames, 1, 1, 1)
    pixel_names = [main, "pixel_values", *sorted(names)]
    name = next((n for n in pixel_names if n in names and "pixel_values" in n), "pixel_values")
    batch[name] = pixels
    height, width = pixels.shape[-2:]
    if "input_ids" in names:
        batch["input_ids"] = ids(config, 8)
        if "attention_mask" in names:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        if "bbox" in names:
            batch["bbox"] = boxes(8)
    if "bool_masked_pos" in names and pair.mapping == "MASKED_IMAGE_MODELING":
        patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
        count = (height // patch) * (width // patch)
        batch["bool_masked_pos"] = (torch.arange(count) % 2 == 0)[None].repeat(BATCH, 1)
    batch.update(_vision_labels(pair, config, names, height, width))
    yield "", batch
    unlabelled = {k: v for k, v in batch.items() if "label" not in k}
    if len(unlabelled) < len(batch):
        yield "without labels", unlabelled


def _vision_labels(pair: Pair, config: Any, names: frozenset[str], height: int, width: int) -> dict[str, Any]:
    if "mask_labels" in names:
        return {
            "mask_labels": [
                (torch.arange(2 * height * width).reshape(2, height, width) % 2).float() for _ in range(BATCH)
            ],
            "class_labels": [torch.tensor([0, 1]) for _ in range(BATCH)],
        }
    if "labels" not in names or pair.mapping == "MASKED_IMAGE_MODELING":
        return {}
    if "DETECTION" in pair.mapping or pair.mapping in ("INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION"):
        one = {
            "class_labels": torch.tensor([0, 1]),
            "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.2, 0.4]]),
        }
        if "SEGMENTATION" in pair.mapping:
            one["masks"] = torch.zeros(2, height, width)
        return {"labels": [{k: v.clone() for k, v in one.items()} for _ in range(BATCH)]}
    if "DEPTH" in pair.mapping:
        return {"labels": torch.ones(BATCH, height, width)}
    if "SEGMENTATION" in pair.mapping:
        return {"labels": torch.arange(BATCH * height * width).reshape(BATCH, height, width) % 2}
    return {"labels": torch.arange(BATCH) % 2}


# -- images and text ------------------------------------------------------------------------------


def _image_text(
    pair: Pair, config: Any, model: nn.Module, names: frozenset[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if "pixel_values" in names and hasattr(model, "get_image_features") and _image_token(config) is not None:
        for layout in _layouts(config, names):
            count = _image_tokens(model, layout)
            if count:
                yield "", _with_image(pair, config, names, layout, count)
    if "pixel_values" in names:
        batch = {"pixel_values": images(config)}
        if "input_ids" in names:
            batch.update(_text(pair, config, names, 16))
        batch.update(_instruction(config, names))
        if "return_loss" in names:
            batch["return_loss"] = True
        if pair.mapping == "VISUAL_QUESTION_ANSWERING" and "labels" in names:
            batch["labels"] = torch.zeros(BATCH, getattr(config, "num_labels", 2))
        yield "", batch
        if "labels" in batch:
            yield "without labels", {k: v for k, v in batch.items() if k != "labels"}
        if "input_ids" in names and "decoder_input_ids" in names:
            yield "", {"pixel_values": batch["pixel_values"], "labels": ids(config, 16)}
    if "flattened_patches" in names:
        patches = torch.rand(BATCH, 16, 2 + 3 * 16 * 16)
        patches[..., :2] = torch.arange(16)[None, :, None] % 4 + 1
        yield "", {"flattened_patches": patches, "labels": ids(config, 16)}
    if "input_ids" in names:
        made = _text(pair, config, names)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in names:
                made[name] = torch.zeros_like(made["input_ids"])
        yield "text only", made


def _instruction(config: Any, names: frozenset[str]) -> dict[str, Any]:
    """The text that a query transformer reads beside the image."""
    return {"qformer_input_ids": ids(config, 8)} if "qformer_input_ids" in names else {}


def _image_token(config: Any) -> int | None:
    value = _first(
        config, ("image_token_id", "image_token_index", "media_placeholder_token_id", "img_context_token_id")
    )
    return value if isinstance(value, int) else None


def _layouts(config: Any, names: frozenset[str]) -> Iterator[dict[str, Any]]:
    vision = _first(config, ("vision_config", "vision_tower_config")) or config
    height, width = image_side(config)
    plain = images(config)
    grid = next(
        (n for n in ("image_grid_thw", "image_grid_hws", "grid_thws", "image_grid_hw") if n in names), None
    )
    if grid is not None:
        patch = _first(vision, ("patch_size", "spatial_patch_size")) or 14
        patch = patch if isinstance(patch, int) else patch[0]
        frames = _first(vision, ("temporal_patch_size",)) or 1
        side = 4 * max(1, (_first(vision, ("spatial_merge_size",)) or 2) // 2)
        for length in {
            image_channels(config) * frames * patch * patch,
            image_channels(config) * patch * patch,
        }:
            flat = torch.rand(BATCH * side * side, length)
            size = [1, side, side] if "thw" in grid else [side, side]
            yield {"pixel_values": flat, grid: torch.tensor([size] * BATCH)}
    sizes = torch.tensor([[height, width]] * BATCH)
    if "image_sizes" in names:
        yield {"pixel_values": plain[:, None].repeat(1, 2, 1, 1, 1), "image_sizes": sizes}
        yield {"pixel_values": plain[:, None].repeat(1, 3, 1, 1, 1), "image_sizes": sizes}
        yield {"pixel_values": plain, "image_sizes": sizes}
    if "spatial_shapes" in names:
        patch = _first(vision, ("patch_size",)) or 16
        yield {
            "pixel_values": torch.rand(BATCH, 16, 3 * patch * patch),
            "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
            "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        }
    if "pixel_attention_mask" in names:
        yield {
            "pixel_values": plain[:, None],
            "pixel_attention_mask": torch.ones(BATCH, 1, height, width, dtype=torch.bool),
        }
    yield {"pixel_values": plain}
    yield {"pixel_values": plain[:, None]}


def _image_tokens(model: nn.Module, layout: dict[str, Any]) -> int:
    """Image tokens that a batch of these images becomes; 0 where the model does not read them so."""
    accepted = inspect.signature(model.get_image_features).parameters
    given = {name: value for name, value in layout.items() if name in accepted or "kwargs" in accepted}
    if len(given) < len(layout):
        return 0
    try:
        with torch.no_grad():
            found = model.get_image_features(**given)
    except Exception:
        return 0
    found = getattr(found, "pooler_output", None) if not isinstance(found, (Tensor, list, tuple)) else found
    width = getattr(text_config(model.config), "hidden_size", None)
    tensors = [t for t in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(t, Tensor)]
    if not tensors or not width:
        return 0
    return sum(t.numel() for t in tensors) // width


def _with_image(
    pair: Pair, config: Any, names: frozenset[str], layout: dict[str, Any], count: int
) -> dict[str, Any]:
    per_row = math.ceil(count / BATCH)
    tokens = ids(config, per_row + 16)
    image = _image_token(config)
    tokens[tokens == image] = LOWEST_TOKEN + 1
    tokens[:, 2 : 2 + per_row] = image
    for name, position in (("vision_start_token_id", 1), ("vision_end_token_id", 2 + per_row)):
        value = getattr(config, name, None)
        if isinstance(value, int) and value != image:
            tokens[:, position] = value
    is_image = (tokens == image).long()
    batch = {"input_ids": tokens, **layout, **_instruction(config, names)}
    if "attention_mask" in names:
        batch["attention_mask"] = torch.ones_like(tokens)
    if "labels" in names:
        batch["labels"] = (
            torch.arange(BATCH) % 2
            if "SequenceClassification" in pair.head
            else tokens.masked_fill(is_image.bool(), -100)
        )
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names:
            batch[name] = is_image
    if "mm_token_type_ids" not in names and "image_grid_thw" in names:
        batch["mm_token_type_ids"] = is_image
    return batch


# -- sound ----------------------------------------------------------------------------------------


def _audio(pair: Pair, config: Any, names: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    labels: dict[str, Any] = {}
    tokens = ids(config, 8)
    if pair.mapping in ("AUDIO_CLASSIFICATION", "AUDIO_XVECTOR"):
        labels["labels"] = torch.arange(BATCH) % 2
    elif "labels" in names and pair.mapping != "AUDIO_FRAME_CLASSIFICATION":
        labels["labels"] = tokens
    elif "decoder_input_ids" in names:
        labels["decoder_input_ids"] = tokens
    if pair.mapping == "TEXT_TO_SPECTROGRAM":
        mels = _first(config, ("num_mel_bins",)) or 80
        made = {"input_ids": tokens, "labels": torch.rand(BATCH, 20, mels)}
        if "attention_mask" in names:
            made["attention_mask"] = torch.ones_like(tokens)
        yield "", made
        return
    for word, made in _sounds(config, names):
        full = {**made, **{k: v for k, v in labels.items() if k in names}}
        yield word, full
        features = made.get("input_features")
        if features is not None and features.ndim == 3 and "attention_mask" in names:
            yield word, {**full, "attention_mask": torch.ones(features.shape[:2], dtype=torch.long)}
        samples = made.get("input_values")
        if samples is not None and "padding_mask" in names:
            yield word, {**full, "padding_mask": torch.ones(BATCH, samples.shape[-1], dtype=torch.long)}


def _sounds(config: Any, names: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    part = _first(config, ("audio_config", "encoder_config", "encoder", "speech_encoder_config")) or config
    mels = (
        _first(
            part,
            ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_projection_input_dim", "input_dim"),
        )
        or _first(config, ("num_mel_bins", "input_feat_per_channel"))
        or 80
    )
    frames = 2 * (_first(part, ("max_source_positions",)) or 64)
    if "input_features" in names:
        longest = _first(config, ("max_length",)) or 128
        yield "", {"input_features": torch.rand(BATCH, mels, min(frames, 3000))}
        yield "", {"input_features": torch.rand(BATCH, 128, mels)}
        yield "", {"input_features": torch.rand(BATCH, longest, mels)}
        for width in {2 * mels, 160, getattr(config, "d_model", mels)} - {mels}:
            yield "", {"input_features": torch.rand(BATCH, 128, width)}
        yield "", {"input_features": torch.rand(BATCH, 1, longest, mels)}
    if "input_values" in names:
        mel_first = _first(config, ("max_length",))
        if mel_first and _first(config, ("num_mel_bins",)):
            yield "", {"input_values": torch.rand(BATCH, mel_first, config.num_mel_bins)}
        yield "", {"input_values": torch.rand(BATCH, 8000)}
        yield "", {"input_values": torch.rand(BATCH, 1, 8000)}
    if "input_ids" in names:
        yield (
            "text only",
            {"input_ids": ids(config), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)},
        )


# -- series ---------------------------------------------------------------------------------------


def _series(config: Any, names: frozenset[str]) -> dict[str, Any]:
    context = _first(config, ("context_length", "seq_length")) or 32
    channels = _first(config, ("num_input_channels", "input_size")) or 1
    lags = max(getattr(config, "lags_sequence", None) or [0])
    flat = channels == 1 and not hasattr(config, "num_input_channels")
    shape = (BATCH, context + lags) if flat else (BATCH, context + lags, channels)
    batch: dict[str, Any] = {"past_values": torch.rand(shape)}
    ahead = _first(config, ("prediction_length",)) or 8
    if "past_time_features" in names:
        features = getattr(config, "num_time_features", 0) or 0
        batch["past_time_features"] = torch.rand(BATCH, context + lags, features)
        batch["past_observed_mask"] = torch.ones(shape)
        batch["future_time_features"] = torch.rand(BATCH, ahead, features)
    if "future_values" in names:
        batch["future_values"] = torch.rand((BATCH, ahead) if flat else (BATCH, ahead, channels))
    if "target_values" in names:
        classes = "Classification" in getattr(config, "sweep_head", "")
        targets = getattr(config, "num_targets", 1)
        batch["target_values"] = (
            torch.zeros(BATCH, dtype=torch.long) if classes else torch.rand(BATCH, targets)
        )
    return batch
