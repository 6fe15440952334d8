"""LLaVA (CLIP tower, one square per picture) and LLaVA-OneVision (SigLIP tower, pictures in tiles)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.recipes.recipe import MechanicsRecipe, VisionParts, chatml_with_pictures
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["LLAVA_RECIPES"]

_LLAVA_SPECIAL = SpecialTokens(
    tokens=("<unk>", "<s>", "</s>", "<pad>", "<image>", "<extra_0>", "<extra_1>", "<extra_2>"),
    bos="<s>",
    pad="<pad>",
)

_ONEVISION_SPECIAL = SpecialTokens(
    tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
        "<video>",
        "<|extra_0|>",
        "<|extra_1|>",
        "<|extra_2|>",
    ),
    pad="<|endoftext|>",
    qwen=True,
)

# The pictures of a turn come before its text, wherever they were among its parts.
_LLAVA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}
{{- message['role'] | upper + ': ' -}}
{%- endif -%}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] if part['type'] in ('image', 'image_url') -%}
{{- '<image>\\n' -}}
{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- eos_token if message['role'] == 'assistant' else ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'ASSISTANT:' -}}
{%- endif -%}
"""

#: 4 × 4 patches a square.
_TOWER: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}

_PIXELS: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    # unequal, so that swapped channels show
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}

#: Sizes a picture may be tiled to: 1 to 3 squares high and wide.
_PINPOINTS = [[56 * high, 56 * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]

#: At most 4 squares' worth of patches, so that 3 × 2 and 3 × 3 tiles are shrunk.
_ASPECT_RATIO = "anyres_max_4"

LLAVA_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-llava",
        summary="LLaVA: CLIP tower read one layer before its end, class token dropped; Llama decoder",
        architecture="LlavaForConditionalGeneration",
        config={
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        special=_LLAVA_SPECIAL,
        end_tokens=("</s>", "<extra_2>"),
        chat_template=_LLAVA_TEMPLATE,
        seed=6,
        vision=VisionParts(
            vision_config={"model_type": "clip_vision_model", **_TOWER, "projection_dim": 64},
            processor={
                "image_processor": {
                    **_PIXELS,
                    "crop_size": {"height": 56, "width": 56},
                    "do_center_crop": True,
                    "image_processor_type": "CLIPImageProcessor",
                    "size": {"shortest_edge": 56},
                },
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": 14,
                "processor_class": "LlavaProcessor",
                "vision_feature_select_strategy": "default",
            },
            config={"image_token_index": _LLAVA_SPECIAL.ids["<image>"], "image_seq_length": 16},
            tokens={"image_token": "<image>"},
        ),
    ),
    MechanicsRecipe(
        name="tiny-llava-onevision",
        summary="LLaVA-OneVision: SigLIP tower, unpadded tiles with line ends, tied Qwen2 decoder",
        architecture="LlavaOnevisionForConditionalGeneration",
        config={
            "model_type": "qwen2",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        special=_ONEVISION_SPECIAL,
        end_tokens=("<|im_end|>", "<|endoftext|>"),
        chat_template=chatml_with_pictures("<image>"),
        seed=5,
        vision=VisionParts(
            vision_config={"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
            processor={
                "image_processor": {
                    **_PIXELS,
                    "do_pad": True,
                    "image_grid_pinpoints": _PINPOINTS,
                    "image_processor_type": "LlavaOnevisionImageProcessor",
                    "size": {"height": 56, "width": 56},
                },
                "image_token": "<image>",
                "num_image_tokens": 16,
                "processor_class": "LlavaOnevisionProcessor",
                "video_processor": {
                    **_PIXELS,
                    "size": {"height": 56, "width": 56},
                    "video_processor_type": "LlavaOnevisionVideoProcessor",
                },
                "video_token": "<video>",
                "vision_aspect_ratio": _ASPECT_RATIO,
                "vision_feature_select_strategy": "full",
            },
            config={
                "image_grid_pinpoints": _PINPOINTS,
                "image_token_index": _ONEVISION_SPECIAL.ids["<image>"],
                "video_token_index": _ONEVISION_SPECIAL.ids["<video>"],
                "vision_aspect_ratio": _ASPECT_RATIO,
            },
            tokens={"image_token": "<image>", "video_token": "<video>"},
        ),
    ),
)
