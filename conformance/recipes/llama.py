"""Llama checkpoints: one per kind of rope that Llama-style models use, and a tied one."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["LLAMA_RECIPES"]

_SPECIAL = SpecialTokens(
    tokens=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
    ),
    bos="<|begin_of_text|>",
    pad="<|end_of_text|>",
)

# The template writes BOS itself, and the tokenizer adds one to plain text: whoever tokenizes a
# rendered chat with special tokens gets two.
_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{{- message['content'] | trim -}}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""


def _llama(
    name: str, summary: str, rope: dict[str, object], seed: int, *, tied: bool = False
) -> MechanicsRecipe:
    return MechanicsRecipe(
        name=name,
        summary=summary,
        architecture="LlamaForCausalLM",
        config={"rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "rope_parameters": rope},
        special=_SPECIAL,
        end_tokens=("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
        chat_template=_CHAT_TEMPLATE,
        seed=seed,
    )


LLAMA_RECIPES: tuple[MechanicsRecipe, ...] = (
    _llama(
        "tiny-llama",
        "Llama with llama3 rope, untied head, three end-of-sequence ids, BOS in the chat template",
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
        seed=9,
    ),
    _llama(
        "tiny-llama-tied",
        "Llama with default rope whose output head is the embedding",
        {"rope_type": "default", "rope_theta": 500.0},
        seed=3,
        tied=True,
    ),
    _llama(
        "tiny-llama-linear",
        "Llama with linearly interpolated positions",
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        seed=6,
    ),
    _llama(
        "tiny-llama-yarn",
        "Llama with YaRN: per-frequency interpolation and scaled attention",
        {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 32.0,
            "original_max_position_embeddings": 256,
        },
        seed=5,
    ),
)
