"""Gemma 3 text checkpoint: windows, two ropes, norms by 1 + weight, scaled embeddings, capped logits."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["GEMMA_RECIPES"]

_SPECIAL = SpecialTokens(
    tokens=(
        "<pad>",
        "<eos>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
    bos="<bos>",
    pad="<pad>",
)

# The assistant is called model, and a system turn becomes the beginning of the first user turn.
_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
{%- for message in turns -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') -}}
{{- message['content'] | trim -}}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

GEMMA_RECIPES: tuple[MechanicsRecipe, ...] = (
    MechanicsRecipe(
        name="tiny-gemma3",
        summary="Gemma 3: windows of 16 in two of three layers, two ropes, 1 + weight norms, capped logits",
        architecture="Gemma3ForCausalLM",
        config={
            # Far above the class default (1e-6), or its use instead would hardly show.
            "rms_norm_eps": 1e-4,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            # Neither head_dim nor hidden_size / heads.
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 30.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        special=_SPECIAL,
        end_tokens=("<eos>", "<end_of_turn>"),
        chat_template=_CHAT_TEMPLATE,
        seed=11,
    ),
)
