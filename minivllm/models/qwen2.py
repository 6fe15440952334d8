"""Qwen2 and Qwen2.5 (dense, text only)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from minivllm.models.decoder import DecoderModel

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(DecoderModel):
    """Llama with a bias on q, k and v, always, and none elsewhere."""

    model_type: ClassVar[str] = "qwen2"
    sliding_windows: ClassVar[bool] = True
    gguf_architecture: ClassVar[str | None] = "qwen2"

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:  # noqa: ARG003 (fixed by the family)
        """The same for every checkpoint."""
        return {
            "attention_bias": True,
            "attention_output_bias": False,
            "mlp_bias": False,
            "qk_norm": False,
        }
