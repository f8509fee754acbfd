"""How a default configuration is made small: rules as data, by the name of the field.

The first rule whose pattern matches a field's whole name decides. What a model needs beside them stands
in `OVERRIDES`, by model type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LAYERS = 2
HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCABULARY = 512
EXPERTS = 4


class Rule(NamedTuple):
    """What happens to a field."""

    pattern: str
    kind: str
    """cap: at most `value`. set: is `value`. each: every number of a list at most `value`.
    shrink: a list of widths, each divided by `value` and rounded to 16. key_value: heads of keys and
    values. keep: stays. ones: every number of a list at most 1. zero: 0."""
    value: Any = None
    group: str = "width"
    """Rules of one group are switched off together where a model is not happy with them (`LEVELS`)."""


RULES: tuple[Rule, ...] = (
    # Things that must stay: they are no sizes, or sizes that other fields follow from.
    Rule(
        r"(max_)?num_channels|in_chans|channels|in_channels|type_vocab_size|chunk_size_feed_forward", "keep"
    ),
    Rule(r".*(layerdrop|layer_drop|drop_path_rate)", "zero", group="always"),
    Rule(r"mask_time_prob|mask_feature_prob", "zero", group="always"),
    # Depth.
    Rule(
        r"num_hidden_layers|n_layers?|num_layers|depth|(en|de)coder_layers|num_(en|de)coder_layers|"
        r"(en|de)coder_num_layers|(en|de)coder_num_hidden_layers|num_block(s)?_?layers|"
        r"text_encoder_num_layers|num_pooler_layers|pred_num_hidden_layers|query_dec_layers|"
        r"resampler_depth|num_global_layers|num_layers_per_stack|num_adapter_layers|"
        r"num_self_attends_per_block|decoder_config_layers|audio_layers|num_xvector_layers",
        "cap",
        LAYERS,
        "depth",
    ),
    Rule(r"max_window_layers|first_k_dense_replace|num_dense_layers", "cap", 1, "depth"),
    Rule(r"num_nextn_predict_layers|num_kv_shared_layers|mtp_.*layers", "zero", group="depth"),
    Rule(r"depths|num_block_repeats|stage_num_blocks|layer_depths", "ones", group="depth"),
    Rule(r"n_attn_blocks", "ones", group="depth"),
    # Tables.
    Rule(
        r"vocab_size|unpadded_vocab_size|(en|de)coder_vocab_size|vocab_size_per_layer_input|"
        r"text_encoder_vocab_size|entity_vocab_size|pronunciation_vocab_size|shape_vocab_size|"
        r"char_vocab_size|t2u_vocab_size|encoder_hash_byte_group_vocab",
        "cap",
        VOCABULARY,
        "vocabulary",
    ),
    Rule(
        r"max_position_embeddings|n_positions|max_(en|de)coder_position_embeddings|n_ctx|max_seq_len|"
        r"max_sequence_length|max_(source|target|text|speech)_positions|seq_length|model_max_length",
        "keep",
    ),
    # Experts.
    Rule(
        r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num|moe_num_local_experts",
        "cap",
        EXPERTS,
        "experts",
    ),
    Rule(
        r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|experts_top_k|moe_top_k|router_topk",
        "cap",
        2,
        "experts",
    ),
    Rule(r"n_group|topk_group|num_expert_group|moe_n_group|num_limited_groups", "cap", 1, "experts"),
    Rule(r"n_shared_experts|num_shared_experts|moe_num_shared_experts", "cap", 1, "experts"),
    # Heads and widths.
    Rule(
        r"(swa_|text_)?(num_)?(attention_)?key_value_(attention_)?heads|.*num_(key_value|kv)_heads|n_kv_heads|"
        r"num_query_groups|multi_query_group_num",
        "key_value",
    ),
    Rule(r"(qk_)?rope_head_dim|qk_rope_head_dim", "cap", 8),
    Rule(
        r"qk_nope_head_dim|v_head_dim|d_kv|attention_head_size|.*linear_(key|value)_head_dim|linear_head_dim",
        "cap",
        HEAD_DIM,
    ),
    Rule(r"qk_head_dim", "cap", HEAD_DIM + 8),
    Rule(r"(global_|swa_)?head_dim|dim_head|key_dim", "cap", HEAD_DIM),
    Rule(r"query_pre_attn_scalar", "cap", HEAD_DIM),
    Rule(r"rotary_dim", "cap", HEAD_DIM // 2),
    Rule(r"[qk]v?_lora_rank", "cap", 32),
    Rule(r"index_topk", "cap", 16),
    Rule(
        r"num_(attention_)?heads|n_heads?|(en|de)coder_(num_)?attention_heads|attention_heads|"
        r"num_(en|de)coder_attention_heads|decoder_num_heads|swa_num_attention_heads|"
        r"num_sliding_attention_heads|pred_num_attention_heads|linear_num_(key|value)_heads|"
        r"linear_num_heads|index_n_heads|num_self_attention_heads|num_cross_attention_heads",
        "cap",
        HEADS,
    ),
    Rule(
        r"(moe_|shared_|shared_expert_|moe_shared_expert_|dense_|expert_)?intermediate_size(_mlp)?|.*ffn_dim|"
        r"d_ff|mlp_dim|n_inner|ffn_hidden_size|.*dim_feedforward|feed_forward_size|.*intermediate_size|"
        r"share_expert_dim|expert_ffn_hidden_size|ffn_size|linear_units",
        "cap",
        2 * HIDDEN,
    ),
    Rule(
        r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|embedding_size|hidden_dim|projection_dim|"
        r"(text_|vision_|audio_|encoder_|decoder_|cross_attention_)?hidden_size|out_hidden_size|output_dim|"
        r"projection_hidden_size|projector_hidden_size|projector_(in|out)put_dim|text_hidden_size|"
        r"image_text_hidden_size|output_hidden_size|word_embed_proj_dim|pooler_output_size|lru_width|"
        r"attention_hidden_size|input_embedding_size|text_encoder_width|mask_dim|(en|de)coder_hidden_dim|"
        r"fusion_hidden_size|mask_feature_size|fpn_feature_size|entity_emb_size|true_hidden_size|"
        r"embedding_dim|pred_hidden_size|hidden_size_global|router_hidden_size|d_latents|width|"
        r"out_dim|proj_dim|encoder_embed_dim|decoder_embed_dim|classifier_proj_size|text_embed_dim|"
        r"image_token_embed_dim|neck_hidden_size|reduce_dim|codevector_dim|proj_codevector_dim",
        "cap",
        HIDDEN,
    ),
    Rule(r"hidden_size_per_layer_input", "cap", 16),
    Rule(r"hidden_sizes|embed_dims?|neck_hidden_sizes|layer_dims|stage_dims", "shrink", 4, "channels"),
    Rule(r"mamba_n_heads|mamba_num_heads", "cap", 8),
    Rule(r"mamba_d_head|mamba_head_dim", "cap", 16),
    Rule(r"mamba_d_state|ssm_state_size|state_size", "cap", 16),
    Rule(r"tdnn_dim|conv_dim|decoder_in_channels", "each", HIDDEN),
    Rule(r"xvector_output_dim|conv_channels|subsampling_conv_channels", "cap", HIDDEN),
    Rule(r"num_queries|num_query_tokens|num_latents|num_detection_tokens", "cap", 16),
    Rule(r"num_denoising", "cap", 8),
    Rule(r"train_num_points", "cap", 64),
)

LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"depth", "vocabulary", "experts", "width", "channels", "image"}),
    frozenset({"depth", "vocabulary", "experts", "width", "image"}),
    frozenset({"depth", "vocabulary", "experts", "image"}),
    frozenset({"depth", "vocabulary", "experts"}),
    frozenset({"depth"}),
)
"""Groups of rules in force, from the smallest model to the one nearest to its default."""

INDEX_LISTS = (
    r".*_index(es)?|.*_indices|.*attn_indexes|intermediate_layers_indices|cross_attention_layers|"
    r"vision_feature_layer|encode_proj_layers|hybrid_layer_ids|kv_source_layers|insert_layer_id|"
    r"full_attn_idxs|attn_layer_indices"
)
"""Fields that number layers: kept inside the layers that are left."""

RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
SWIN = {
    "model_type": "swin",
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "image_size": 64,
    "window_size": 4,
    "out_indices": [2, 3, 4],
}
VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "out_indices": [1, 2, 3, 4],
}
LAST, LAST_THREE = ["stage4"], ["stage2", "stage3", "stage4"]
LCNET = {
    "model_type": "pp_lcnet_v4",
    "stem_channels": [3, 16, 16],
    "block_configs": [
        [[3, 16, 16, 1, True]],
        *([[3, width // 2, width, 2, False], [3, width, width, 1, True]] for width in (32, 64, 128)),
    ],
    "out_features": ["stage1", *LAST_THREE],
}
"""A detector's backbone: each stage halves both sides (the default, a recognizer's, halves the height)."""

INTRACLASS: dict[str, list[Any]] = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{way}_{name}ratio": [[size * tall or 1, size * wide or 1], [1, 1], [side * tall, side * wide]]
        for way, tall, wide in (
            ("vertical_long_to_small_conv", 1, 0),
            ("horizontal_small_to_long_conv", 0, 1),
            ("symmetric_conv_long", 1, 1),
        )
        for name, size, side in (("long", 7, 3), ("mid", 5, 2), ("short", 3, 1))
    },
}
"""Per convolution of an intra-class block: kernel, stride, padding (PP-OCRv5's published configuration)."""

CONSTRUCTED: dict[str, dict[str, Any]] = {
    **{
        name: {
            "use_timm_backbone": False,
            "backbone": None,
            "backbone_config": {**RESNET, "out_features": LAST},
        }
        for name in ("conditional_detr", "dab-detr", "detr", "table-transformer")
    },
    "deformable_detr": {
        "use_timm_backbone": False,
        "backbone": None,
        "backbone_config": {**RESNET, "out_features": LAST_THREE},
    },
    "omdet-turbo": {
        "use_timm_backbone": False,
        "backbone": None,
        "backbone_config": SWIN,
        "apply_layernorm_after_vision_backbone": False,  # timm's Swin ends in channels, transformers' does not
    },
    "oneformer": {"backbone_config": {**SWIN, "out_indices": [1, 2, 3, 4]}},
    "grounding-dino": {"backbone_config": SWIN},
    "mm-grounding-dino": {"backbone_config": SWIN},
    "lw_detr": {
        "backbone_config": {
            "model_type": "lw_detr_vit",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 256,
            "pretrain_image_size": 64,
            "window_block_indices": [0, 2],
            "out_indices": [2, 4],
        },
        "projector_scale_factors": [1.0],
    },
    "prompt_depth_anything": {
        "backbone_config": {"model_type": "dinov2", **VIT, "reshape_hidden_states": False},
    },
    "depth_anything": {"backbone_config": {"model_type": "dinov2", **VIT, "reshape_hidden_states": False}},
    "tipsv2_dpt": {
        "backbone_config": {"model_type": "tipsv2_vision_model", **VIT, "reshape_hidden_states": False},
    },
    "rf_detr": {
        "backbone_config": {
            "model_type": "rf_detr_dinov2",
            **VIT,
            "num_windows": 2,
            "window_block_indexes": [0, 2],
        }
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    **{
        name: {"backbone_config": LCNET} for name in ("pp_ocrv6_small_det", "pp_ocrv6_medium_det")
    },
    "pp_ocrv5_server_det": {
        "backbone_config": {"model_type": "hgnet_v2", "out_features": ["stage1", *LAST_THREE]}
    },
}
"""Model type -> what its configuration must be constructed with, where its defaults raise, want a library
that is not torch's, or hold a backbone that no rule makes small."""

_QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 500,
    "hc_lowrank": 16,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dots3_note_text": {"head_dim": 32, "qk_nope_head_dim": 24},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "qwen4_exp_text": _QWEN4_EXP,
    "zamba2": {
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
    },
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8},
    "timesfm2_5": {"context_length": 512},  # its running statistics are a loop over patches
    "xlstm": {"num_blocks": 2},  # each walks through the sequence in Python
    "swin": {"embed_dim": 48},
    "swinv2": {"embed_dim": 48},
    "efficientnet": {"hidden_dim": 2560},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "llama4": {
        "vision_config.intermediate_size": 256,
        "vision_config.vision_output_dim": 64,
        "vision_config.projector_output_dim": 64,
        "vision_config.projector_input_dim": 64,
    },
    "reformer/ReformerModelWithLMHead": {"is_decoder": True},
    "reformer": {"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (32, 32)},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {"text_config.head_dim": 32, "text_config.qk_nope_head_dim": 24},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "perceiver": {"num_cross_attention_heads": 1, "num_self_attention_heads": 4},
    "eomt_dinov3": {"num_blocks": 1},
    "eomt": {"num_blocks": 1},
    "qwen4_exp": {
        f"text_config.{name}": value
        for name, value in _QWEN4_EXP.items()
    },
    "blt": {
        "encoder_config.hidden_size_global": 64,
        "global_config.hidden_size": 64,
        "global_config.encoder_cross_output_size": 128,
    },
    "detr/DetrForSegmentation": {
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "backbone_config.out_features": ["stage1", *LAST_THREE],
    },
    **{
        name: {"pad_token_id": 1, "decoder_start_token_id": 2}
        for name in ("vision-encoder-decoder", "speech-encoder-decoder")
    },
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 400, "no_token_index": 401},
    "kyutai_speech_to_text": {"codec_config.upsample_groups": 64},
    "dia": {"decoder_config.cross_hidden_size": 64},
    "omdet-turbo": {
        "encoder_in_channels": [32, 64, 128],
        "vision_features_channels": [64, 64, 64],
        # Its decoder projects the task only where texts are not as wide as images.
        **dict.fromkeys(
            ("text_config.hidden_size", "text_projection_in_dim", "text_projection_out_dim", "class_embed_dim"),
            128,
        ),
    },
    "deepseek_ocr2": {
        "vision_config.sam_config.downsample_channels": [48, 64],
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "text_config.num_experts_per_tok": 2,
    },
    "chameleon": {
        "vq_config.num_embeddings": 64,
        "vq_config.base_channels": 32,
        "vocabulary_map": {
            "<image>": 500,
            **{
                "IMGIMG" + "".join("ABCDEFGHIJ"[int(digit)] for digit in str(code)) + "Z": 100 + code
                for code in range(64)
            },
        },
    },
    "emu3": {
        "vq_config.codebook_size": 64,
        "vq_config.base_channels": 32,
        "vocabulary_map": {
            "<image>": 500,
            "<|extra_200|>": 501,
            **{f"<|visual token {code:06d}|>": 100 + code for code in range(64)},
        },
    },
    "apertus1p5": {
        "vision_config.base_channels": 32,
        "vision_config.codebook_size": 200,
        "audio_config.codebook_size": 100,
        "image_token_offset": 100,
        "audio_token_offset": 300,
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config.num_filters": 4,
        "semantic_tokenizer_encoder_config.num_filters": 4,
    },
    "vibevoice": {"audio_config.num_filters": 4, "semantic_model_config.num_filters": 4},
    "oneformer": {"is_training": True, "text_encoder_n_ctx": 4, "conv_dim": 64},
    **{
        name: {"text_config.num_kv_shared_layers": 2}
        for name in ("gemma4_assistant", "gemma4_unified_assistant")
    },
    "perceiver/PerceiverForMaskedLM": {"max_position_embeddings": 32},
    "blip-2": {"image_token_id": 500, "image_token_index": 500},
    "blip-2/Blip2ForImageTextRetrieval": {"qformer_config.use_qformer_text_input": True},
    "instructblip": {"image_token_id": 500, "image_token_index": 500},
    "instructblipvideo": {"video_token_id": 500, "video_token_index": 500},
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": 505,
        "vision_end_token_id": 506,
        "text_config.rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3],
        },
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 505, "vision_end_token_id": 506},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e5,
            "mrope_section": [3, 3, 2],
        },
    },
    "cohere_compass": {
        "text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 64,
    },
    "step3p7": {"text_config.sliding_window": 16},
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "pp_ocrv6_small_det": {"layer_list_out_channels": [16, 32, 64, 128]},
    "sapiens2": {
        "num_key_value_heads_per_layer": [4] * 8 + [2] * 8 + [4] * 8,
        "head_config.upsample_out_channels": [32, 32],
        "head_config.upsample_kernel_sizes": [4, 4],
        "head_config.conv_out_channels": [32],
        "head_config.conv_kernel_sizes": [1],
    },
    **{
        name: {
            "scale_factor_list": [1, 2, 4, 8],
            "kernel_list": [3, 2, 2],
            "neck_out_channels": 64,
            "intraclass_block_config": INTRACLASS,
        }
        for name in ("pp_ocrv5_server_det", "pp_ocrv6_medium_det")
    },
    "beit/BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision/Data2VecVisionForSemanticSegmentation": {
        "num_hidden_layers": 4,
        "out_indices": [1, 2, 3, 4],
    },
    **{
        f"dpt/{head}": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        for head in ("DPTForSemanticSegmentation", "DPTForDepthEstimation")
    },
    "prompt_depth_anything": {"reassemble_hidden_size": 64},
    "depth_anything": {"reassemble_hidden_size": 64},
    "granite4_vision": {
        "spatial_target_layers": [1, 1, 1, 1],
        "deepstack_layer_map": [(1, 0)],
        "downsample_rate": "1/2",
    },
    "lw_detr": {"num_feature_levels": 1, "projector_in_channels": [64]},
}
"""Per model type, or pair: field (dotted into sub-configurations) -> value. Written after the rules."""
