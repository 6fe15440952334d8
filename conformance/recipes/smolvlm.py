"""SmolVLM checkpoint. Idefics3 is the same computation under another name."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe, VisionParts
from conformance.recipes.tokenizer import NUM_BPE_TOKENS, SpecialTokens

__all__ = ["CROP", "SMOLVLM_RECIPES"]

#: Side of a crop in pixels; the tower sees 4 × 4 patches of it and hands on 2 × 2 tokens.
CROP = 56

_SPECIAL = SpecialTokens(
    tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<end_of_utterance>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        # Up to 3 × 3 crops by name; the published models go up to 6 × 6.
        *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    ),
    pad="<|endoftext|>",
)

# As in the published models, "<|im_start|>" is written once, and the colon after a role is followed
# by a space only where text follows.
_CHAT_TEMPLATE = """\
{{- '<|im_start|>' -}}
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

SMOLVLM_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-smolvlm",
        summary="SmolVLM: crops in rows and columns, SigLIP tower, pixel shuffle, Llama decoder",
        architecture="SmolVLMForConditionalGeneration",
        config={
            "model_type": "llama",
            "vocab_size": NUM_BPE_TOKENS + len(_SPECIAL.tokens),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        special=_SPECIAL,
        end_tokens=("<end_of_utterance>", "<|endoftext|>"),
        chat_template=_CHAT_TEMPLATE,
        seed=12,
        vision=VisionParts(
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": CROP,
                "patch_size": 14,
            },
            config={
                "scale_factor": 2,
                "image_token_id": _SPECIAL.ids["<image>"],
                "pad_token_id": _SPECIAL.ids["<|endoftext|>"],
                "tie_word_embeddings": False,
            },
            tokens={
                "image_token": "<image>",
                "fake_image_token": "<fake_token_around_image>",
                "global_image_token": "<global-img>",
                "end_of_utterance_token": "<end_of_utterance>",
            },
            processor={
                "image_processor": {
                    "do_convert_rgb": True,
                    "do_image_splitting": True,
                    "do_normalize": True,
                    "do_pad": True,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_mean": [0.5, 0.5, 0.5],
                    "image_processor_type": "SmolVLMImageProcessor",
                    "image_std": [0.5, 0.5, 0.5],
                    "max_image_size": {"longest_edge": CROP},
                    "resample": 1,
                    "rescale_factor": 1 / 255,
                    "size": {"longest_edge": 2 * CROP},
                },
                "image_seq_len": 4,
                "processor_class": "SmolVLMProcessor",
            },
        ),
    ),
)
