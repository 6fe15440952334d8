"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): GLM with a second norm after each branch."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig
from minivllm.models.decoder import DecoderLayer, Rotation
from minivllm.models.glm import GlmForCausalLM, GlmLayer

__all__ = ["Glm4ForCausalLM"]


class Glm4Layer(GlmLayer):
    """Norm before and after attention and MLP, each before the sum."""

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__(config, layer, **kw)
        norm, size, eps = self.norm_class, config.hidden_size, config.rms_norm_eps
        self.post_self_attn_layernorm = norm(size, eps, **kw)
        self.post_mlp_layernorm = norm(size, eps, **kw)

    def forward(self, x: Tensor, rotation: Rotation, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        mixed = self.self_attn(self.input_layernorm(x), rotation, attention)
        x = x + self.post_self_attn_layernorm(mixed)
        output: Tensor = x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))
        return output


class Glm4ForCausalLM(GlmForCausalLM):
    """As GLM but for the layer."""

    model_type: ClassVar[str] = "glm4"
    layer_class: ClassVar[type[DecoderLayer]] = Glm4Layer
