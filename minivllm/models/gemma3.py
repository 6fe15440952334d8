"""Gemma 3, the text decoder (https://arxiv.org/abs/2503.19786)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig, RopeConfig
from minivllm.errors import ConfigError
from minivllm.models.decoder import MLP, Attention, DecoderLayer, DecoderModel, Rotation
from minivllm.models.modules import RMSNorm, RMSNormPlusOne

__all__ = ["Gemma3Details", "Gemma3ForCausalLM"]


@dataclass(frozen=True, slots=True)
class Gemma3Details:
    """What only Gemma has.

    Attributes:
        query_pre_attn_scalar: scores are multiplied by its inverse square root.
        final_logit_softcapping: logits are bent into ± this; None: not at all.
    """

    query_pre_attn_scalar: float
    final_logit_softcapping: float | None


class Gemma3Attention(Attention):
    """Norms over each head of q and k; a scale that head_dim does not give."""

    norm_class: ClassVar[type[RMSNorm]] = RMSNormPlusOne

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__(config, layer, **kw)
        self.scale = config.details.query_pre_attn_scalar**-0.5


class Gemma3MLP(MLP):
    """The gated unit with GELU for SiLU."""

    def activate(self, gate: Tensor) -> Tensor:
        return self.ops.gelu_tanh(gate)


class Gemma3Layer(DecoderLayer):
    """Norm before and after attention and MLP; `post_attention_layernorm` is the one after attention."""

    attention_class: ClassVar[type[Attention]] = Gemma3Attention
    mlp_class: ClassVar[type[nn.Module]] = Gemma3MLP
    norm_class: ClassVar[type[RMSNorm]] = RMSNormPlusOne

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__(config, layer, **kw)
        norm, size, eps = self.norm_class, config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = norm(size, eps, **kw)
        self.post_feedforward_layernorm = norm(size, eps, **kw)

    def forward(self, x: Tensor, rotation: Rotation, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        mixed = self.self_attn(self.input_layernorm(x), rotation, attention)
        x = x + self.post_attention_layernorm(mixed)
        output: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return output


class Gemma3ForCausalLM(DecoderModel):
    """Sliding and full layers with a rope each, scaled embeddings, 1 + weight norms, capped logits."""

    model_type: ClassVar[str] = "gemma3_text"
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    sliding_windows: ClassVar[bool] = True
    gguf_architecture: ClassVar[str | None] = "gemma3"
    gguf_names: ClassVar[Mapping[str, str]] = {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    gguf_norms_are_plus_one: ClassVar[bool] = True
    layer_class: ClassVar[type[DecoderLayer]] = Gemma3Layer

    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, hidden], times √hidden rounded to the model's dtype."""
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)
        return super().embed(token_ids) * scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] (normed) → [rows, vocab]."""
        rows = super().logits(hidden)
        cap = self.config.details.final_logit_softcapping
        return rows if cap is None else self.ops.tanh(rows / cap) * cap

    @classmethod
    def unsupported(cls, values: Mapping[str, Any]) -> str | None:
        """Text that sees what follows, and a cap that Transformers reads and does not apply."""
        if values["use_bidirectional_attention"]:
            return "use_bidirectional_attention"
        if values["attn_logit_softcapping"] is not None:
            return f"attn_logit_softcapping {values['attn_logit_softcapping']!r}"
        return None

    @classmethod
    def standard_values(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """One rope for the full layers, one for the sliding ones."""
        ropes = values["rope_parameters"]
        return {
            **values,
            "hidden_act": values["hidden_activation"],
            "rope_parameters": ropes["full_attention"],
            "local_rope_parameters": ropes["sliding_attention"],
        }

    @classmethod
    def read_details(cls, values: Mapping[str, Any]) -> Gemma3Details:
        """The scale of the scores and the cap of the logits; ConfigError if not positive."""
        scalar, cap = values["query_pre_attn_scalar"], values["final_logit_softcapping"]
        if not scalar > 0 or (cap is not None and not cap > 0):
            raise ConfigError(
                "query_pre_attn_scalar and final_logit_softcapping must be positive, "
                f"got {scalar!r} and {cap!r}"
            )
        return Gemma3Details(query_pre_attn_scalar=scalar, final_logit_softcapping=cap)

    @classmethod
    def finish_gguf(cls, config: ModelConfig, number: Callable[[str, float], float]) -> ModelConfig:
        """A GGUF file tells the window, but neither the pattern of layers nor the scale of scores.

        Both are the published ones: five layers in six have the window, and the scalar is head_dim,
        but hidden_size / heads in the model of 62 layers (27B), as llama.cpp has it.
        """
        window = int(number("attention.sliding_window", 0))
        if window < 1:
            raise ConfigError(f"gemma3.attention.sliding_window must be a positive integer, got {window}")
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        cap = number("final_logit_softcapping", 0)
        return replace(
            config,
            windows=tuple(window if (i + 1) % 6 else None for i in range(layers)),
            local_rope=RopeConfig(theta=number("rope.freq_base_swa", 10_000.0)),
            details=Gemma3Details(
                query_pre_attn_scalar=config.hidden_size / heads if layers == 62 else config.head_dim,
                final_logit_softcapping=cap or None,
            ),
        )

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:
        """`attention_bias` covers the output projection too."""
        return {
            "attention_bias": bool(values["attention_bias"]),
            "attention_output_bias": bool(values["attention_bias"]),
            "mlp_bias": False,
            "qk_norm": True,
        }
