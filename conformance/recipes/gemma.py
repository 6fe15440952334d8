"""Gemma 3: windows, two ropes, norms by 1 + weight, scaled embeddings, capped logits; also with eyes."""

from __future__ import annotations

from conformance.recipes.recipe import MechanicsRecipe, VisionParts
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

# As above for contents in parts. The picture's paragraph is made by the processor.
_VISION_TEMPLATE = """\
{{- bos_token -}}
{%- set is_system = messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] if is_system else '' -%}
{%- set system = system if system is string else system[0]['text'] -%}
{%- set turns = messages[1:] if is_system else messages -%}
{%- for message in turns -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + (system + '\\n\\n' if loop.first and is_system else '') -}}
{%- if message['content'] is string -%}
{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<start_of_image>' -}}
{%- else -%}
{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

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
    MechanicsRecipe(
        name="tiny-gemma3-vision",
        summary="Gemma 3 with SigLIP: pooled patches; image tokens see one another, under a window too",
        architecture="Gemma3ForConditionalGeneration",
        config={
            "model_type": "gemma3_text",
            "rms_norm_eps": 1e-4,
            # Shorter than a picture, so that it cuts what image tokens see of one another.
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        special=_SPECIAL,
        end_tokens=("<eos>", "<end_of_turn>"),
        chat_template=_VISION_TEMPLATE,
        seed=7,
        vision=VisionParts(
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 7,
                "vision_use_head": False,
            },
            processor={
                "image_processor": {
                    "do_convert_rgb": None,
                    "do_normalize": True,
                    "do_pan_and_scan": None,
                    "do_rescale": True,
                    "do_resize": True,
                    "image_mean": [0.5, 0.5, 0.5],
                    "image_processor_type": "Gemma3ImageProcessor",
                    "image_std": [0.5, 0.5, 0.5],
                    "resample": 2,
                    "rescale_factor": 1 / 255,
                    "size": {"height": 56, "width": 56},
                },
                "image_seq_length": 16,
                "processor_class": "Gemma3Processor",
            },
            config={
                "mm_tokens_per_image": 16,
                "boi_token_index": _SPECIAL.ids["<start_of_image>"],
                "eoi_token_index": _SPECIAL.ids["<end_of_image>"],
                "image_token_index": _SPECIAL.ids["<image_soft_token>"],
            },
            tokens={
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
        ),
    ),
)
