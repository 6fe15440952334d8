"""GLM, the ChatGLM line in Transformers' own format (GLM-4-9B is of this family)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.layers.ops import Ops
from minivllm.layers.rope import RopeTable
from minivllm.models.decoder import Attention, DecoderLayer, DecoderModel, Rotation
from minivllm.models.modules import Linear

__all__ = ["GlmForCausalLM", "GlmLayer"]


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of `x` [rows, heads, head_dim]; neighbours are the pairs.

    `cos`, `sin` are [rows, n]: the first n dimensions turn, the others pass.
    """
    size = cos.shape[-1]
    turning, passing = x[..., :size], x[..., size:]
    turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turning * cos[:, None] + turned * sin[:, None], passing), dim=-1)


class GlmAttention(Attention):
    """Turns a part of each head, pair by neighbouring pair."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate_pairs(x, *rotation)


class GlmMLP(nn.Module):
    """SwiGLU whose two input matrices are one: gate, then up."""

    def __init__(self, config: ModelConfig, **kw: Any) -> None:
        super().__init__()
        self.ops: Ops = kw["ops"]
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False, **kw)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(up * self.ops.silu(gate))
        return output


class GlmLayer(DecoderLayer):
    """The usual block of GLM's parts."""

    attention_class: ClassVar[type[Attention]] = GlmAttention
    mlp_class: ClassVar[type[nn.Module]] = GlmMLP


class GlmForCausalLM(DecoderModel):
    """Partial, interleaved rotation; fused gate and up; a bias on q, k and v if the config has it."""

    model_type: ClassVar[str] = "glm"
    partial_rotary: ClassVar[bool] = True
    layer_class: ClassVar[type[DecoderLayer]] = GlmLayer

    def rotation(self, rope: RopeTable, positions: Tensor) -> Rotation:
        """Each angle twice in a row, for the two neighbours that it turns."""
        cos, sin = super().rotation(rope, positions)
        half = cos.shape[-1] // 2
        return cos[:, :half].repeat_interleave(2, dim=-1), sin[:, :half].repeat_interleave(2, dim=-1)

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:
        """`attention_bias` does not cover the output projection."""
        return {
            "attention_bias": bool(values["attention_bias"]),
            "attention_output_bias": False,
            "mlp_bias": False,
            "qk_norm": False,
        }
