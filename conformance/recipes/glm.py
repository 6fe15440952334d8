"""GLM and GLM-4 checkpoints: a part of each head turns, pair by neighbouring pair; fused gate and up."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe
from conformance.recipes.tokenizer import SpecialTokens

__all__ = ["GLM_RECIPES"]

_SPECIAL = SpecialTokens(
    tokens=(
        "<|endoftext|>",
        "[MASK]",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
    ),
    pad="<|endoftext|>",
)

# A turn ends where the next one's role begins, so the roles are end-of-sequence tokens.
_CHAT_TEMPLATE = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}
"""


def _glm(name: str, summary: str, architecture: str, seed: int) -> MechanicsRecipe:
    return MechanicsRecipe(
        name=name,
        summary=summary,
        architecture=architecture,
        config={
            # Far above the class default (1.5625e-7), or its use instead would not show.
            "rms_norm_eps": 1e-4,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
        special=_SPECIAL,
        end_tokens=("<|endoftext|>", "<|user|>", "<|observation|>"),
        chat_template=_CHAT_TEMPLATE,
        seed=seed,
    )


GLM_RECIPES: tuple[MechanicsRecipe, ...] = (
    _glm(
        "tiny-glm",
        "GLM: half of each head turns by neighbouring pairs, fused gate and up, biases on q, k and v",
        "GlmForCausalLM",
        seed=22,
    ),
    _glm(
        "tiny-glm4",
        "GLM-4: GLM with a norm after attention and after the MLP",
        "Glm4ForCausalLM",
        seed=12,
    ),
)
