"""Llama 2 and 3, SmolLM2 and everything else saved as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minivllm.models.decoder import DecoderModel

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(DecoderModel):
    """Optional biases on all four attention projections (one flag) and on the MLP."""

    model_type: ClassVar[str] = "llama"
    gguf_architecture: ClassVar[str | None] = "llama"
    gguf_permutes_qk: ClassVar[bool] = True

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:
        """`attention_bias` covers the output projection too."""
        return {
            "attention_bias": bool(values["attention_bias"]),
            "attention_output_bias": bool(values["attention_bias"]),
            "mlp_bias": bool(values["mlp_bias"]),
            "qk_norm": False,
        }
