"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL checkpoints: pictures and videos of any size, M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL, QWEN_SYSTEM_TURN
from conformance.recipes.recipe import MechanicsRecipe, VisionParts

__all__ = ["QWEN_VL_IDS", "QWEN_VL_RECIPES", "QWEN_VL_TURNS", "qwen2_vl_processor"]

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# Content is a string or a list of parts; where a part's picture goes is where the part is.
QWEN_VL_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

QWEN_VL_IDS: Mapping[str, Any] = {
    "image_token_id": QWEN_SPECIAL.ids["<|image_pad|>"],
    "video_token_id": QWEN_SPECIAL.ids["<|video_pad|>"],
    "vision_start_token_id": QWEN_SPECIAL.ids["<|vision_start|>"],
    "vision_end_token_id": QWEN_SPECIAL.ids["<|vision_end|>"],
}

# hidden_size must be heads × head_dim in Qwen2-VL and Qwen2.5-VL.
_NARROW: Mapping[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def _processor(
    family: str, video: str, *, patch: int, mean: tuple[float, ...], std: tuple[float, ...], **videos: Any
) -> dict[str, Any]:
    """processor_config.json; at most 64 placeholders per picture, so that "too large" is cheap to test.

    `videos` goes to the video processor only.
    """
    unit = (2 * patch) ** 2
    pixels: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(mean),
        "image_std": list(std),
        "merge_size": 2,
        "patch_size": patch,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 64 * unit, "shortest_edge": 4 * unit},
        "temporal_patch_size": 2,
    }
    return {
        "image_processor": {**pixels, "image_processor_type": "Qwen2VLImageProcessor"},
        "processor_class": f"{family}Processor",
        "video_processor": {
            **pixels,
            # All frames that are given are used; choosing some is the caller's affair.
            "do_sample_frames": False,
            "cap_pixels_per_frame": False,
            "video_processor_type": f"{video}VideoProcessor",
            **videos,
        },
    }


def qwen2_vl_processor() -> dict[str, Any]:
    """processor_config.json of Qwen2-VL checkpoints."""
    return _processor("Qwen2VL", "Qwen2VL", patch=14, mean=_CLIP_MEAN, std=_CLIP_STD)


QWEN_VL_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-qwen2-vl",
        summary="Qwen2-VL: pictures of any size, M-RoPE in chunks, tower with 2-D rope; Qwen2 decoder",
        architecture="Qwen2VLForConditionalGeneration",
        config={
            **_NARROW,
            "rms_norm_eps": 1e-5,
            "use_sliding_window": False,
            # In tiny heads a large theta leaves most frequencies without effect.
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=QWEN_SYSTEM_TURN + QWEN_VL_TURNS,
        seed=25,
        vision=VisionParts(
            vision_config={
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "mlp_ratio": 2,
                "num_heads": 2,
            },
            processor=qwen2_vl_processor(),
            config={**QWEN_VL_IDS, "tie_word_embeddings": False},
        ),
    ),
    MechanicsRecipe(
        name="tiny-qwen2-5-vl",
        summary="Qwen2.5-VL: attention in windows, time in seconds for video; tied Qwen2 decoder",
        architecture="Qwen2_5_VLForConditionalGeneration",
        config={
            **_NARROW,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]},
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=QWEN_SYSTEM_TURN + QWEN_VL_TURNS,
        seed=20,
        vision=VisionParts(
            vision_config={
                "depth": 3,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_heads": 2,
                "out_hidden_size": 64,
                # Two by two placeholders: small pictures have several windows, cut ones among them.
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
            },
            processor=_processor("Qwen2_5_VL", "Qwen2VL", patch=14, mean=_CLIP_MEAN, std=_CLIP_STD),
            config={**QWEN_VL_IDS, "tie_word_embeddings": True},
        ),
    ),
    MechanicsRecipe(
        name="tiny-qwen3-vl",
        summary="Qwen3-VL: interleaved M-RoPE, deepstack, positions interpolated, timestamps; Qwen3 decoder",
        architecture="Qwen3VLForConditionalGeneration",
        config={
            "intermediate_size": 128,
            "rms_norm_eps": 1e-4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=QWEN_VL_TURNS,
        seed=19,
        vision=VisionParts(
            vision_config={
                "depth": 3,
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_heads": 2,
                "out_hidden_size": 64,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 1],
            },
            processor=_processor(
                "Qwen3VL",
                "Qwen3VL",
                patch=16,
                mean=(0.5, 0.5, 0.5),
                std=(0.5, 0.5, 0.5),
                # Here the budget is for the whole video, not for a frame.
                size={"longest_edge": 256 * 32**2, "shortest_edge": 4 * 32**2},
            ),
            config={**QWEN_VL_IDS, "tie_word_embeddings": False},
        ),
    ),
)
