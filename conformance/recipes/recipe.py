"""What a checkpoint made from random weights is determined by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.recipes.tokenizer import NUM_BPE_TOKENS, SpecialTokens

__all__ = ["MAX_POSITIONS", "MechanicsRecipe", "TINY", "VisionParts", "chatml_with_pictures"]

MAX_POSITIONS = 8192

#: The shape all families share: small enough for a repository. head_dim 32 is the smallest that
#: paged-attention kernels for CPUs and GPUs commonly accept; with 4 heads it also makes
#: heads × head_dim differ from hidden_size.
TINY: Mapping[str, Any] = {
    "vocab_size": NUM_BPE_TOKENS + 8,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
}


@dataclass(frozen=True, kw_only=True)
class VisionParts:
    """What a vision-language model has beside its decoder.

    Attributes:
        vision_config: fields of the vision tower's config.
        config: other fields of the outer config, such as the ids of placeholders.
        processor: content of processor_config.json. Written out, not made by a processor object:
            some processor classes cannot be made without torchvision.
        tokens: special tokens that the processor looks up: attribute of the tokenizer → token.
    """

    vision_config: Mapping[str, Any]
    processor: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MechanicsRecipe:
    """One checkpoint of random weights for testing mechanics in float32.

    Attributes:
        name: directory name below golden/checkpoints.
        summary: what it is there to show, in one line.
        architecture: Transformers class name.
        config: fields of its config, beyond `shape`; of the decoder's, if it has `vision`.
        special: special tokens; their ids follow the BPE vocabulary.
        end_tokens: tokens that end generation, for generation_config.json; the first is also the
            config's own.
        chat_template: Jinja source; None for families that have none.
        seed: found by `conformance.recipes.search`, kept so that a rebuild needs no search.
        shape: fields of the config that make it small; others for decoders that call them otherwise.
        vision: the rest of a vision-language model; None: a model of text.
    """

    name: str
    summary: str
    architecture: str
    config: Mapping[str, Any]
    special: SpecialTokens
    end_tokens: tuple[str, ...]
    chat_template: str | None
    seed: int
    shape: Mapping[str, Any] = field(default_factory=lambda: TINY)
    vision: VisionParts | None = None


def chatml_with_pictures(placeholder: str) -> str:
    """A chat template of ChatML turns in which `placeholder`, on a line of its own, stands for a picture."""
    return _CHATML.replace("PICTURE", placeholder)


_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- 'PICTURE\\n' -}}
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
