"""Configurations of published checkpoints, for tests that build them without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LLAVA_LINE", "SMOLVLM_AND_BLIP2", "Published"]


@dataclass(frozen=True)
class Published:
    """One checkpoint.

    Attributes:
        config: its config.json.
        spelling: prefixes of parameters in memory → in the published files; the first that fits.
        unconfirmed: fields of `config` that Transformers' defaults do not confirm.
        parameters: how many it is said to have, in billions, tied ones once.
    """

    config: Mapping[str, Any]
    spelling: Mapping[str, str]
    unconfirmed: tuple[str, ...]
    parameters: float


#: As the first conversions of LLaVA spelt them; towers of CLIP and SigLIP have one more level there.
_LLAVA_SPELLING = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.": "",
}

#: LLaVA and what Transformers derives from it. Towers and placeholders are confirmed by the defaults
#: of their classes; decoders are those the model cards name.
LLAVA_LINE: dict[str, Published] = {
    "llava-1.5-7b": Published(
        config={
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_index": 32000,
            "model_type": "llava",
            "projector_hidden_act": "gelu",
            "text_config": {
                "max_position_embeddings": 4096,
                "model_type": "llama",
                "rms_norm_eps": 1e-05,
                "torch_dtype": "float16",
                "vocab_size": 32064,
            },
            "torch_dtype": "float16",
            "vision_config": {
                "hidden_size": 1024,
                "image_size": 336,
                "intermediate_size": 4096,
                "model_type": "clip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "projection_dim": 768,
            },
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        spelling=_LLAVA_SPELLING,
        unconfirmed=(
            "text_config.max_position_embeddings",
            "text_config.rms_norm_eps",
            "text_config.vocab_size",
        ),
        parameters=7.06,
    ),
    "llava-onevision-qwen2-0.5b": Published(
        config={
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "image_token_index": 151646,
            "model_type": "llava_onevision",
            "projector_hidden_act": "gelu",
            "text_config": {
                "bos_token_id": 151643,
                "eos_token_id": 151645,
                "hidden_act": "silu",
                "hidden_size": 896,
                "intermediate_size": 4864,
                "max_position_embeddings": 32768,
                "max_window_layers": 24,
                "model_type": "qwen2",
                "num_attention_heads": 14,
                "num_hidden_layers": 24,
                "num_key_value_heads": 2,
                "rope_theta": 1000000.0,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
                "vocab_size": 152000,
            },
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
            "video_token_index": 151647,
            "vision_aspect_ratio": "anyres_max_9",
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 384,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 26,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        spelling=_LLAVA_SPELLING,
        unconfirmed=(
            "text_config.bos_token_id",
            "text_config.eos_token_id",
            "text_config.hidden_size",
            "text_config.intermediate_size",
            "text_config.num_attention_heads",
            "text_config.num_hidden_layers",
            "text_config.num_key_value_heads",
            "text_config.rope_theta",
            "text_config.tie_word_embeddings",
            "text_config.vocab_size",
            "tie_word_embeddings",
        ),
        parameters=0.89,
    ),
    "InternVL3.5-4B": Published(
        # Of the repository in Transformers' format. Its card names Qwen3-4B with 4.4 of 4.7 billion
        # parameters, which are as many only if the head is not tied.
        config={
            "architectures": ["InternVLForConditionalGeneration"],
            "downsample_ratio": 0.5,
            "dtype": "bfloat16",
            "image_seq_length": 256,
            "image_token_id": 151671,
            "model_type": "internvl",
            "projector_hidden_act": "gelu",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": 151643,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "max_position_embeddings": 40960,
                "max_window_layers": 36,
                "model_type": "qwen3",
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_theta": 1000000,
                "tie_word_embeddings": False,
                "use_sliding_window": False,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "attention_bias": True,
                "hidden_act": "gelu",
                "hidden_size": 1024,
                "image_size": [448, 448],
                "intermediate_size": 4096,
                "layer_norm_eps": 1e-06,
                "layer_scale_init_value": 0.1,
                "model_type": "internvl_vision",
                "norm_type": "layer_norm",
                "num_attention_heads": 16,
                "num_hidden_layers": 24,
                "patch_size": [14, 14],
                "use_absolute_position_embeddings": True,
                "use_mask_token": False,
                "use_mean_pooling": True,
                "use_qk_norm": False,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
        spelling={
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.": "",
        },
        unconfirmed=(
            "image_token_id",
            "text_config.attention_bias",
            "text_config.bos_token_id",
            "text_config.eos_token_id",
            "text_config.head_dim",
            "text_config.hidden_size",
            "text_config.intermediate_size",
            "text_config.max_position_embeddings",
            "text_config.num_hidden_layers",
            "text_config.num_key_value_heads",
            "text_config.rope_theta",
            "tie_word_embeddings",
            "vision_config.attention_bias",
        ),
        parameters=4.73,
    ),
}

#: All of BLIP-2 but its decoder's shape is confirmed by the defaults, little of SmolVLM2.
SMOLVLM_AND_BLIP2: dict[str, Published] = {
    "SmolVLM2-2.2B": Published(
        config={
            "architectures": ["SmolVLMForConditionalGeneration"],
            "image_token_id": 49190,
            "model_type": "smolvlm",
            "scale_factor": 3,
            "text_config": {
                "architectures": ["VLlama3ForCausalLM"],
                "head_dim": 64,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "max_position_embeddings": 16384,
                "model_type": "llama",
                "num_attention_heads": 32,
                "num_hidden_layers": 24,
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-05,
                "rope_theta": 273768.0,
                "torch_dtype": "bfloat16",
                "vocab_size": 49280,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 384,
                "intermediate_size": 4304,
                "model_type": "smolvlm_vision",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        spelling={},
        unconfirmed=(
            "image_token_id",
            "scale_factor",
            "text_config.head_dim",
            "text_config.hidden_size",
            "text_config.intermediate_size",
            "text_config.max_position_embeddings",
            "text_config.num_hidden_layers",
            "text_config.rope_theta",
            "text_config.vocab_size",
            "vision_config.image_size",
            "vision_config.intermediate_size",
            "vision_config.num_hidden_layers",
            "vision_config.patch_size",
        ),
        parameters=2.25,
    ),
    "BLIP-2-OPT-2.7B": Published(
        config={
            "architectures": ["Blip2ForConditionalGeneration"],
            "image_text_hidden_size": 256,
            "image_token_index": 50265,
            "model_type": "blip-2",
            "num_query_tokens": 32,
            "qformer_config": {"model_type": "blip_2_qformer"},
            "text_config": {
                "architectures": ["OPTForCausalLM"],
                "eos_token_id": 50118,
                "ffn_dim": 10240,
                "hidden_size": 2560,
                "model_type": "opt",
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "torch_dtype": "float16",
                "vocab_size": 50304,
                "word_embed_proj_dim": 2560,
            },
            "torch_dtype": "float32",
            "vision_config": {"model_type": "blip_2_vision_model"},
        },
        spelling={},
        unconfirmed=(
            "image_token_index",
            "text_config.eos_token_id",
            "text_config.ffn_dim",
            "text_config.hidden_size",
            "text_config.num_attention_heads",
            "text_config.num_hidden_layers",
            "text_config.vocab_size",
            "text_config.word_embed_proj_dim",
        ),
        parameters=3.74,
    ),
}
