"""SmolVLM checkpoint, and one of Idefics3, the same computation: with larger crops and a BOS token."""

from __future__ import annotations

from typing import Any

from conformance.recipes.recipe import MechanicsRecipe, VisionParts
from conformance.recipes.tokenizer import NUM_BPE_TOKENS, SpecialTokens

__all__ = ["CROP", "IDEFICS3_CROP", "SMOLVLM_RECIPES"]

#: Side of a crop in pixels; the tower sees 4 × 4 patches of it and hands on 2 × 2 tokens.
CROP = 56

#: The same for Idefics3: 6 × 6 patches, 3 × 3 tokens.
IDEFICS3_CROP = 84

_PATCH, _SCALE = 14, 2

_PICTURE_TOKENS = (
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    # Up to 3 × 3 crops by name; the published models go up to 6 × 6.
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)

_SPECIAL = SpecialTokens(
    tokens=("<|endoftext|>", "<|im_start|>", *_PICTURE_TOKENS),
    pad="<|endoftext|>",
)

_IDEFICS3_SPECIAL = SpecialTokens(
    tokens=("<|begin_of_text|>", "<|end_of_text|>", *_PICTURE_TOKENS),
    pad="<|end_of_text|>",
    bos="<|begin_of_text|>",
)

# As in the published models, what opens the conversation is written once, and the colon after a role is
# followed by a space only where text follows.
_CHAT_TEMPLATE = """\
{{- 'OPENING' -}}
{%- for message in messages -%}
{{- message['role'] | capitalize -}}
{%- if message['content'] is string -%}
{{- ': ' + message['content'] -}}
{%- else -%}
{{- ':' if message['content'][0]['type'] == 'image' else ': ' -}}
{%- for part in message['content'] -%}
{{- '<image>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}
"""


def _recipe(
    name: str, family: str, summary: str, special: SpecialTokens, opening: str, crop: int, seed: int
) -> MechanicsRecipe:
    """A model of crops; `family` begins the names of its Transformers classes."""
    return MechanicsRecipe(
        name=name,
        summary=summary,
        architecture=f"{family}ForConditionalGeneration",
        config={
            "model_type": "llama",
            "vocab_size": NUM_BPE_TOKENS + len(special.tokens),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        special=special,
        end_tokens=("<end_of_utterance>", special.pad),
        chat_template=_CHAT_TEMPLATE.replace("OPENING", opening),
        seed=seed,
        vision=VisionParts(
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": crop,
                "patch_size": _PATCH,
            },
            config={
                "scale_factor": _SCALE,
                "image_token_id": special.ids["<image>"],
                "pad_token_id": special.ids[special.pad],
                "tie_word_embeddings": False,
            },
            tokens={
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_token": "<global-img>",
                "end_of_utterance_token": "<end_of_utterance>",
            },
            processor=_processor(family, crop),
        ),
    )


def _processor(family: str, crop: int) -> dict[str, Any]:
    """processor_config.json; SmolVLM's class has a part for videos too, and cannot be made without."""
    frames = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": crop},
        "resample": 1,
        "rescale_factor": 1 / 255,
    }
    pictures = frames | {
        "do_image_splitting": True,
        "image_processor_type": f"{family}ImageProcessor",
        "size": {"longest_edge": 2 * crop},
    }
    videos = frames | {
        "fps": 1,
        "num_frames": 8,
        "size": {"longest_edge": crop},
        "video_processor_type": f"{family}VideoProcessor",
    }
    return {
        "image_processor": dict(sorted(pictures.items())),
        "image_seq_len": (crop // _PATCH // _SCALE) ** 2,
        "processor_class": f"{family}Processor",
        **({"video_processor": dict(sorted(videos.items()))} if family == "SmolVLM" else {}),
    }


SMOLVLM_RECIPES: tuple[MechanicsRecipe, ...] = (
    _recipe(
        "tiny-smolvlm",
        "SmolVLM",
        "SmolVLM: crops in rows and columns, SigLIP tower, pixel shuffle, Llama decoder",
        _SPECIAL,
        "<|im_start|>",
        CROP,
        seed=12,
    ),
    _recipe(
        "tiny-idefics3",
        "Idefics3",
        "Idefics3: SmolVLM's computation, with larger crops of 3 × 3 tokens and a BOS token",
        _IDEFICS3_SPECIAL,
        "<|begin_of_text|>",
        IDEFICS3_CROP,
        seed=21,
    ),
)
