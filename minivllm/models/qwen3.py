"""Qwen3 (dense, text only)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minivllm.models.decoder import DecoderModel

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(DecoderModel):
    """Llama with a norm over each head of q and k before the rotation."""

    model_type: ClassVar[str] = "qwen3"
    sliding_windows: ClassVar[bool] = True
    gguf_architecture: ClassVar[str | None] = "qwen3"

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:
        """`attention_bias` covers the output projection too."""
        return {
            "attention_bias": bool(values["attention_bias"]),
            "attention_output_bias": bool(values["attention_bias"]),
            "mlp_bias": False,
            "qk_norm": True,
        }
