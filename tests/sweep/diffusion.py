"""diffusers' U-Nets, transformers and autoencoders, small; tried where the library is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BATCH = 2


def _image(channels: int = 4, side: int = 16) -> torch.Tensor:
    return torch.rand(BATCH, channels, side, side)


def _times() -> torch.Tensor:
    return torch.tensor([3.0, 7.0])


def _steps() -> torch.Tensor:
    return torch.tensor([3, 7])


def _text(width: int, length: int = 8) -> torch.Tensor:
    return torch.rand(BATCH, length, width)


_HALVES = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
_CROSS = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
    "down_block_types": _HALVES[0], "norm_num_groups": 8, "attention_head_dim": 8,
}
_FLUX = {
    "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def _flux() -> dict[str, Any]:
    return {
        "hidden_states": torch.rand(BATCH, 16, 16), "encoder_hidden_states": _text(32),
        "pooled_projections": torch.rand(BATCH, 32), "timestep": _times(),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3), "guidance": _times(),
    }


MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "UNet2DModel": (
        {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        lambda: {"sample": _image(3), "timestep": _steps()},
    ),
    "UNet2DConditionModel": (
        {**_CROSS, "up_block_types": _HALVES[1]},
        lambda: {"sample": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32)},
    ),
    "ControlNetModel": (
        {**{k: v for k, v in _CROSS.items() if k != "sample_size"}},
        lambda: {
            "sample": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32),
            "controlnet_cond": _image(3, 128),
        },
    ),
    "UNet3DConditionModel": (
        {**_CROSS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        lambda: {
            "sample": torch.rand(BATCH, 4, 4, 16, 16), "timestep": _steps(), "encoder_hidden_states": _text(32),
        },
    ),
    "AutoencoderKL": (
        {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8},
        lambda: {"sample": _image(3, 32)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
         "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)},
        lambda: {"sample": _image(3, 32)},
    ),
    "VQModel": (
        {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8},
        lambda: {"sample": _image(3, 32)},
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8,
         "num_layers": 2, "sample_size": 16},
        lambda: {"hidden_states": _image(), "timestep": _steps(), "class_labels": torch.tensor([1, 2])},
    ),
    "PixArtTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8,
         "num_layers": 2, "sample_size": 16, "cross_attention_dim": 32, "caption_channels": 32,
         "use_additional_conditions": False},
        lambda: {
            "hidden_states": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32,
         "pooled_projection_dim": 32, "pos_embed_max_size": 16},
        lambda: {
            "hidden_states": _image(), "encoder_hidden_states": _text(32),
            "pooled_projections": torch.rand(BATCH, 32), "timestep": _steps(),
        },
    ),
    "FluxTransformer2DModel": ({**_FLUX, "guidance_embeds": True}, _flux),
    "SanaTransformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
         "num_layers": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
         "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 16},
        lambda: {"hidden_states": _image(), "timestep": _steps(), "encoder_hidden_states": _text(32)},
    ),
    "WanTransformer3DModel": (
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4,
         "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2},
        lambda: {
            "hidden_states": torch.rand(BATCH, 4, 2, 8, 8), "timestep": _steps(),
            "encoder_hidden_states": _text(32),
        },
    ),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
         "time_embed_dim": 16, "text_embed_dim": 32, "num_layers": 2, "sample_width": 16, "sample_height": 16,
         "sample_frames": 9, "max_text_seq_length": 8},
        lambda: {
            "hidden_states": torch.rand(BATCH, 3, 4, 16, 16), "timestep": _steps(),
            "encoder_hidden_states": _text(32),
        },
    ),
}
"""Class -> what it is constructed with, and its batch."""


def build(name: str) -> nn.Module:
    """The small model."""
    import diffusers

    return getattr(diffusers, name)(**MODELS[name][0]).train()


def installed() -> bool:
    """Whether diffusers can be imported here."""
    try:
        import diffusers  # noqa: F401
    except ImportError:
        return False
    return True
