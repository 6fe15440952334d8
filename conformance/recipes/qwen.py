"""Qwen2 (biases on q, k and v; tied) and Qwen3 (norms on q and k) checkpoints."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["QWEN_ENDS", "QWEN_RECIPES", "QWEN_SPECIAL", "QWEN_SYSTEM_TURN"]

QWEN_SPECIAL = SpecialTokens(
    tokens=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|fim_pad|>",
    ),
    pad="<|endoftext|>",
    qwen=True,
)

_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

#: Like the published Qwen2 template, a conversation without a system turn is given one.
QWEN_SYSTEM_TURN = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
"""
_QWEN2_TEMPLATE = QWEN_SYSTEM_TURN + _TURNS

QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")

QWEN_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-qwen2",
        summary="Qwen2: biases on q, k and v, tied head, two end-of-sequence ids, default system turn",
        architecture="Qwen2ForCausalLM",
        config={
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=_QWEN2_TEMPLATE,
        seed=12,
    ),
    MechanicsRecipe(
        name="tiny-qwen2-window",
        summary="Qwen2 whose last two layers see a window of 16 tokens",
        architecture="Qwen2ForCausalLM",
        config={
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=_QWEN2_TEMPLATE,
        seed=7,
    ),
    MechanicsRecipe(
        name="tiny-qwen3",
        summary="Qwen3: RMSNorm over each head of q and k before rope, untied head",
        architecture="Qwen3ForCausalLM",
        config={
            # Far above the class default (1e-6), or its use instead would hardly show.
            "rms_norm_eps": 1e-4,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
        special=QWEN_SPECIAL,
        end_tokens=QWEN_ENDS,
        chat_template=_TURNS,
        seed=1,
    ),
)
