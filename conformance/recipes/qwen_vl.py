"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL checkpoints: pictures and videos of any size, M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL, QWEN_SYSTEM_TURN
from conformance.recipes.recipe import MechanicsRecipe, VisionParts

__all__ = ["QWEN_VL_RECIPES"]

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# Content is a string or a list of parts; where a part's picture goes is where the part is.
_TURNS = """\
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

_IDS: Mapping[str, Any] = {
    "image_token_id": QWEN_SPECIAL.ids["<|image_pad|>"],
    "video_token_id": QWEN_SPECIAL.ids["<|video_pad|>"],
    "vision_start_token_id": QWEN_SPECIAL.ids["<|vision_start|>"],
    "vision_end_token_id": QWEN_SPECIAL.ids["<|vision_end|>"],
}

# hidden_size must be heads × head_dim in Qwen2-VL and Qwen2.5-VL.
_NARROW: Mapping[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def _processor(
    family: str, video: str, *, patch: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """processor_config.json; at most 64 placeholders per picture, so that "too large" is cheap to test."""
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
        "video_processor": {**pixels, "video_processor_type": f"{video}VideoProcessor"},
    }


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
        chat_template=QWEN_SYSTEM_TURN + _TURNS,
        seed=25,
        vision=VisionParts(
            vision_config={
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "mlp_ratio": 2,
                "num_heads": 2,
            },
            processor=_processor("Qwen2VL", "Qwen2VL", patch=14, mean=_CLIP_MEAN, std=_CLIP_STD),
            config={**_IDS, "tie_word_embeddings": False},
        ),
    ),
)
