"""Batches of single pairs or model types, where names of arguments do not say what fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .batches import BATCH, LENGTH, ids, image_side, images

Batch = dict[str, Any]
Maker = Callable[[Any], Batch]


def _codebooks(config: Any) -> Batch:
    tokens = ids(config, batch=BATCH * config.num_codebooks)
    labels = tokens.reshape(BATCH, config.num_codebooks, LENGTH).transpose(1, 2)
    return {"input_ids": tokens, "labels": labels.contiguous()}


def _series_with_whole_horizon(config: Any) -> Batch:
    return {
        "past_values": torch.rand(BATCH, config.context_length),
        "future_values": torch.rand(BATCH, config.horizon_length),
    }


def _images_to_labels(config: Any) -> Batch:
    return {"pixel_values": images(config.encoder), "labels": ids(config, 16)}


def _sound_to_labels(config: Any) -> Batch:
    return {"input_values": torch.rand(BATCH, 8000), "labels": ids(config, 16)}


def _kosmos2(config: Any) -> Batch:
    tokens = ids(config, config.latent_query_num + 16)
    places = torch.zeros_like(tokens)
    places[:, 2 : 2 + config.latent_query_num] = 1
    return {
        "pixel_values": images(config),
        "input_ids": tokens,
        "image_embeds_position_mask": places,
        "labels": tokens.clone(),
    }


def _idefics(config: Any) -> Batch:
    tokens = ids(config, 16)
    return {
        "pixel_values": images(config)[:, None],
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "image_attention_mask": torch.ones(BATCH, 16, 1, dtype=torch.long),
    }


def _video(config: Any) -> Batch:
    frames = getattr(config, "num_frames", None) or 4
    return {"pixel_values_videos": images(config)[:, None].repeat(1, frames, 1, 1, 1)}


def _videoprism(config: Any) -> Batch:
    vision = config.vision_config
    return {**_video(vision), "input_ids": ids(config, 16), "return_loss": True}


def _siglip2(config: Any) -> Batch:
    patch = config.vision_config.patch_size
    return {
        "pixel_values": torch.rand(BATCH, 16, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
        "input_ids": ids(config, 16),
        "return_loss": True,
    }


def _question_and_answer(config: Any) -> Batch:
    return {"pixel_values": images(config), "input_ids": ids(config, 16), "labels": ids(config, 8)}


def _text_matching(config: Any) -> Batch:
    return {
        "pixel_values": images(config),
        "input_ids": ids(config, 16),
        "use_image_text_matching_head": True,
    }


def _omdet(config: Any) -> Batch:
    classes = 3
    return {
        "pixel_values": images(config),
        "classes_input_ids": ids(config, 8, BATCH * classes),
        "classes_attention_mask": torch.ones(BATCH * classes, 8, dtype=torch.long),
        "tasks_input_ids": ids(config, 8),
        "tasks_attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
        "classes_structure": torch.tensor([classes] * BATCH),
    }


def _shared_keys_and_values(config: Any) -> Batch:
    """What the assisted model hands its assistant: embeddings, and keys and values by kind of layer."""
    text = config.text_config
    wide = getattr(text, "global_head_dim", None) or text.head_dim
    heads = {
        "sliding_attention": (text.num_key_value_heads, text.head_dim),
        "full_attention": (
            getattr(text, "num_global_key_value_heads", None) or text.num_key_value_heads,
            wide,
        ),
    }
    return {
        "inputs_embeds": torch.rand(BATCH, LENGTH, 2 * config.backbone_hidden_size),
        "shared_kv_states": {
            kind: (torch.rand(BATCH, count, LENGTH, width), torch.rand(BATCH, count, LENGTH, width))
            for kind, (count, width) in heads.items()
        },
    }


def _robot(config: Any) -> Batch:
    vision = config.vlm_config.vision_config
    image = config.vlm_config.image_token_id
    pixels = images(vision)[:, None]
    per_image = (image_side(vision)[0] // vision.patch_size) ** 2
    tokens = ids(config, per_image + 8)
    tokens[:, :per_image] = image
    return {
        "state": torch.rand(BATCH, config.max_state_dim),
        "input_ids": tokens,
        "pixel_values": pixels,
        "attention_mask": torch.ones_like(tokens),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "actions": torch.rand(BATCH, config.chunk_size, config.max_action_dim),
    }


def _dialogue(config: Any) -> Batch:
    channels = config.decoder_config.num_channels
    tokens = ids(config, batch=BATCH * channels)
    spoken = tokens.reshape(BATCH, channels, LENGTH).transpose(1, 2).contiguous()
    return {"input_ids": ids(config) % 200, "decoder_input_ids": spoken, "labels": tokens}


def _speech_of_phonemes(config: Any) -> Batch:
    """Two spectrogram frames a phoneme, with a pitch and an energy for each phoneme."""
    count = 8
    return {
        "input_ids": ids(config, count) % config.vocab_size,
        "attention_mask": torch.ones(BATCH, count, dtype=torch.long),
        "spectrogram_labels": torch.rand(BATCH, 2 * count, config.num_mel_bins),
        "duration_labels": torch.full((BATCH, count), 2),
        "pitch_labels": torch.rand(BATCH, count, 1),
        "energy_labels": torch.rand(BATCH, count, 1),
    }


def _transducer(config: Any, *, labels: bool = True) -> Batch:
    """Sound, and the tokens said with a blank before them, as the prediction network reads them."""
    said, frames = ids(config, 4), 48  # few: the loss walks over each in Python
    blank = torch.full((BATCH, 1), config.blank_token_id)
    batch = {
        "input_features": torch.rand(BATCH, frames, config.encoder_config.num_mel_bins),
        "attention_mask": torch.ones(BATCH, frames, dtype=torch.long),
        "decoder_input_ids": torch.cat([blank, said], dim=1),
    }
    return {**batch, "labels": said} if labels else batch


def _transducer_without_labels(config: Any) -> Batch:
    """Their loss is torchaudio's, which the sweep does without."""
    return _transducer(config, labels=False)


def _stacked_mels(config: Any) -> Batch:
    """Four frames in one, as the feature extractor makes them."""
    return {
        "input_features": torch.rand(BATCH, 128, 4 * config.encoder_config.num_mel_bins),
        "attention_mask": torch.ones(BATCH, 128, dtype=torch.long),
        "labels": ids(config, 8),
    }


def _stacked_sound_and_text(config: Any) -> Batch:
    """One audio token for each frame that the feature extractor stacks."""
    frames = 16
    tokens = ids(config, frames + 16)
    tokens[:, 2 : 2 + frames] = config.audio_token_id
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "input_features": torch.rand(BATCH, frames, config.audio_config.input_size),
        "input_features_mask": torch.ones(BATCH, frames, dtype=torch.long),
        "labels": tokens.masked_fill(tokens == config.audio_token_id, -100),
    }


def _text_and_codes(config: Any) -> Batch:
    """A text token and one code of each codebook a step."""
    tokens = ids(config, LENGTH * (config.num_codebooks + 1)).reshape(BATCH, LENGTH, -1)
    return {"input_ids": tokens, "labels": tokens[:, :, 0].clone()}


def _shuffled_patches(config: Any) -> Batch:
    """As many image tokens as patches are left after the pixel shuffle."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    count = int(patches * vision.pixel_shuffle_ratio**2)
    tokens = ids(config, count + 16)
    tokens[:, 2 : 2 + count] = config.image_token_id
    return {"pixel_values": images(config), "input_ids": tokens, "labels": tokens.clone()}


def _policy_question(config: Any) -> Batch:
    tokens = ids(config, config.mm_tokens_per_image + 16)
    kinds = torch.zeros_like(tokens)
    kinds[:, 2 : 2 + config.mm_tokens_per_image] = 1
    tokens = tokens.masked_fill(kinds.bool(), config.image_token_id)
    return {
        "pixel_values": images(config),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": kinds,
    }


OVERRIDES: dict[str, Maker] = {
    "pi0": _robot,
    "llama4/Llama4ForConditionalGeneration": _shuffled_patches,
    "fun_asr_nano": _stacked_sound_and_text,
    "kyutai_speech_to_text": _text_and_codes,
    "parakeet_tdt/ParakeetForTDT": _transducer,
    "parakeet_rnnt/ParakeetForRNNT": _transducer_without_labels,
    "nemotron_asr_streaming/NemotronAsrStreamingForRNNT": _transducer_without_labels,
    "nemotron3_5_asr/Nemotron3_5AsrForRNNT": _transducer_without_labels,
    "granite_speech5_ctc/GraniteSpeech5ForCTC": _stacked_mels,
    "dia/DiaForConditionalGeneration": _dialogue,
    "fastspeech2_conformer/FastSpeech2ConformerModel": _speech_of_phonemes,
    "shieldgemma2": _policy_question,
    "musicgen/MusicgenForCausalLM": _codebooks,
    "musicgen_melody/MusicgenMelodyForCausalLM": _codebooks,
    "timesfm": _series_with_whole_horizon,
    "vision-encoder-decoder": _images_to_labels,
    "speech-encoder-decoder": _sound_to_labels,
    "kosmos-2": _kosmos2,
    "idefics/IdeficsForVisionText2Text": _idefics,
    "videomt": _video,
    "videoprism/VideoPrismClipModel": _videoprism,
    "siglip2/Siglip2Model": _siglip2,
    "blip/BlipForQuestionAnswering": _question_and_answer,
    "blip-2/Blip2ForImageTextRetrieval": _text_matching,
    "omdet-turbo": _omdet,
    "gemma4_assistant": _shared_keys_and_values,
    "gemma4_unified_assistant": _shared_keys_and_values,
}
"""Model type or pair name -> configuration -> batch."""
