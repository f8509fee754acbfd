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
    """What the assisted model hands its assistant for a token: embeddings, keys and values by kind of layer."""
    text = config.text_config
    layers = {kind: text.per_layer_config[index] for index, kind in enumerate(text.layer_types)}
    shapes = {kind: (BATCH, it.num_key_value_heads, LENGTH, it.head_dim) for kind, it in layers.items()}
    return {
        "inputs_embeds": torch.rand(BATCH, 1, 2 * config.backbone_hidden_size),
        "shared_kv_states": {kind: (torch.rand(shape), torch.rand(shape)) for kind, shape in shapes.items()},
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


def _patches_of_space_and_time(config: Any) -> Batch:
    """One token for each patch of a few frames."""
    vision, count = config.vision_config, 4
    tokens = ids(config, count + 16)
    tokens[:, 2 : 2 + count] = config.image_token_id
    patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size, vision.num_channels)
    return {
        "pixel_values": torch.rand(BATCH * count, *patch),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens == config.image_token_id, -100),
    }


def _instructed_video(config: Any) -> Batch:
    """As many video tokens as queries of four frames, with the instruction that the queries read too."""
    frames = 4
    count = frames * config.num_query_tokens
    tokens = ids(config, count + 16)
    tokens[:, 2 : 2 + count] = config.video_token_id
    return {
        "pixel_values": images(config)[:, None].repeat(1, frames, 1, 1, 1),
        "qformer_input_ids": ids(config, 8),
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens == config.video_token_id, -100),
    }


def _speech_beside_text(config: Any) -> Batch:
    """Text and speech of the same length, added token by token."""
    tokens = ids(config)
    frames = LENGTH * config.audio_length_per_tok
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "input_features": torch.rand(BATCH, config.audio_config.num_mel_bins, frames),
        "labels": tokens.clone(),
    }


def _waveform_in_text(config: Any, tokenizer: Any) -> Batch:
    """A token for each hop of the tokenizer that makes latents of a waveform."""
    count = 2
    samples = count * tokenizer.hop_length
    tokens = ids(config, count + 16)
    tokens[:, 2 : 2 + count] = config.audio_token_id
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "input_values": torch.rand(BATCH, 1, samples),
        "padding_mask": torch.ones(BATCH, samples, dtype=torch.bool),
        "labels": tokens.masked_fill(tokens == config.audio_token_id, -100),
    }


def _heard_speech(config: Any) -> Batch:
    return _waveform_in_text(config, config.acoustic_tokenizer_encoder_config)


def _spoken_text(config: Any) -> Batch:
    """With the loss of the diffusion that speaks, over the audio tokens."""
    batch = _waveform_in_text(config, config.audio_config)
    return {**batch, "acoustic_loss_mask": batch["input_ids"] == config.audio_token_id}


def _masks_by_task_and_text(config: Any) -> Batch:
    """An image, its task and, in training, a text for each query that has no learnt one."""
    pixels = images(config)
    height, width = pixels.shape[-2:]
    texts = config.num_queries - config.text_encoder_n_ctx
    length = config.text_encoder_context_length
    return {
        "pixel_values": pixels,
        "task_inputs": ids(config, config.task_seq_len),
        "text_inputs": ids(config, texts * length).reshape(BATCH, texts, length),
        "mask_labels": [(torch.arange(2 * height * width).reshape(2, height, width) % 2).float()] * BATCH,
        "class_labels": [torch.tensor([0, 1])] * BATCH,
    }


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
    "inkling_mm_model": _patches_of_space_and_time,
    "instructblipvideo": _instructed_video,
    "voxtral_realtime": _speech_beside_text,
    "vibevoice_asr": _heard_speech,
    "vibevoice": _spoken_text,
    "oneformer": _masks_by_task_and_text,
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
