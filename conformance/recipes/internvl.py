"""InternVL 3.5: pictures in square tiles and a thumbnail, pixel shuffle, scaled residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.recipes.recipe import MechanicsRecipe, VisionParts, chatml_with_pictures
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["INTERNVL_RECIPES"]

_SPECIAL = SpecialTokens(
    tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<video>",
        "<|extra_0|>",
    ),
    pad="<|endoftext|>",
    qwen=True,
)

_PIXELS: Mapping[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"height": 56, "width": 56},
}

INTERNVL_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-internvl",
        summary="InternVL 3.5: up to 4 tiles and a thumbnail, pixel shuffle, layer scale; Qwen3 decoder",
        architecture="InternVLForConditionalGeneration",
        config={
            "model_type": "qwen3",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        special=_SPECIAL,
        end_tokens=("<|im_end|>", "<|endoftext|>"),
        chat_template=chatml_with_pictures("<IMG_CONTEXT>"),
        seed=13,
        vision=VisionParts(
            # 4 × 4 patches a tile, of which the shuffle makes 2 × 2 rows
            vision_config={
                "attention_bias": True,
                "hidden_size": 64,
                "image_size": [56, 56],
                "intermediate_size": 96,
                "num_attention_heads": 2,
                "num_hidden_layers": 3,
                "patch_size": [14, 14],
            },
            processor={
                "image_processor": {
                    **_PIXELS,
                    "crop_to_patches": True,
                    "image_processor_type": "GotOcr2ImageProcessor",
                    "max_patches": 4,
                    "min_patches": 1,
                },
                "image_seq_length": 4,
                "processor_class": "InternVLProcessor",
                "video_processor": {**_PIXELS, "video_processor_type": "InternVLVideoProcessor"},
            },
            config={
                "image_seq_length": 4,
                "image_token_id": _SPECIAL.ids["<IMG_CONTEXT>"],
                "tie_word_embeddings": False,
            },
            tokens={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        ),
    ),
)
