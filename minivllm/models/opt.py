"""OPT (https://arxiv.org/abs/2205.01068), the language model of BLIP-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig
from minivllm.layers.ops import Ops
from minivllm.models.base import Observer
from minivllm.models.decoder import DecoderModel, Rotation, Stack
from minivllm.models.modules import Embedding, LayerNorm, Linear

__all__ = ["OPTForCausalLM"]

_POSITION_OFFSET = 2
"""Position p has row p + 2 of the table; the first two rows are never read."""

_LAYER_NORM_EPS = 1e-5


class Attention(nn.Module):
    """Multi-head attention with biases, without rotation; positions are in the embeddings."""

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        hidden = config.hidden_size
        self.q_proj = Linear(hidden, hidden, bias=True, **kw)
        self.k_proj = Linear(hidden, hidden, bias=True, **kw)
        self.v_proj = Linear(hidden, hidden, bias=True, **kw)
        self.out_proj = Linear(hidden, hidden, bias=True, **kw)

    def forward(self, x: Tensor, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]. The queries are scaled, not the scores, as in Transformers."""
        q = (self.q_proj(x) * self.head_dim**-0.5).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        attention.write(self.layer, k, v)
        output: Tensor = self.out_proj(attention.attend(self.layer, q, 1.0))
        return output


class Layer(nn.Module):
    """Pre-norm residual block; the second norm has the name that elsewhere is the last one's."""

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__()
        self.ops: Ops = kw["ops"]
        hidden, inner = config.hidden_size, config.intermediate_size
        self.self_attn = Attention(config, layer, **kw)
        self.self_attn_layer_norm = LayerNorm(hidden, _LAYER_NORM_EPS, **kw)
        self.fc1 = Linear(hidden, inner, bias=True, **kw)
        self.fc2 = Linear(inner, hidden, bias=True, **kw)
        self.final_layer_norm = LayerNorm(hidden, _LAYER_NORM_EPS, **kw)

    def forward(self, x: Tensor, rotation: None, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        del rotation
        x = x + self.self_attn(self.self_attn_layer_norm(x), attention)
        mixed: Tensor = x + self.fc2(self.ops.relu(self.fc1(self.final_layer_norm(x))))
        return mixed


class Decoder(Stack):
    """Token and position embeddings, layers, final norm."""

    def __init__(self, config: ModelConfig, **kw: Any) -> None:
        super().__init__()
        placement = {"dtype": kw["dtype"], "device": kw["device"]}
        rows = config.max_position_embeddings + _POSITION_OFFSET
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placement)
        self.embed_positions = Embedding(rows, config.hidden_size, **placement)
        self.final_layer_norm = LayerNorm(config.hidden_size, _LAYER_NORM_EPS, **kw)
        self.layers = nn.ModuleList(Layer(config, i, **kw) for i in range(config.num_hidden_layers))

    def finish(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.final_layer_norm(hidden)
        return normed


class Model(nn.Module):
    """Exists so that parameters are called "model.decoder.…"."""

    def __init__(self, config: ModelConfig, **kw: Any) -> None:
        super().__init__()
        self.decoder = Decoder(config, **kw)


class OPTForCausalLM(DecoderModel):
    """Learned positions, layer norms, ReLU, biases everywhere but in the head."""

    model_type: ClassVar[str] = "opt"
    activations: ClassVar[tuple[str, ...]] = ("relu",)

    def make_body(self, config: ModelConfig, **kw: Any) -> nn.Module:
        return Model(config, **kw)

    @property
    def embedding_name(self) -> str:
        return "model.decoder.embed_tokens.weight"

    @property
    def stack(self) -> Stack:
        assert isinstance(self.model, Model)
        return self.model.decoder

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Observer | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """As in `DecoderModel`; `hidden` are the embeddings of tokens, and perhaps media, alone."""
        assert isinstance(self.stack, Decoder)
        placed = hidden + self.stack.embed_positions(positions + _POSITION_OFFSET)
        return super().forward(placed, positions, attention, observe, deepstack)

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:  # noqa: ARG002 - it turns nothing
        return [None] * len(self.stack.layers)

    @classmethod
    def unsupported(cls, values: Mapping[str, Any]) -> str | None:
        """The published variants that few checkpoints have."""
        wanted = {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": values["hidden_size"],
        }
        other = [
            f"{name} {values[name]!r} (only {value!r})"
            for name, value in wanted.items()
            if values[name] != value
        ]
        return ", ".join(other) or None

    @classmethod
    def standard_values(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """OPT's own names, and what it fixes."""
        return {
            **values,
            "intermediate_size": values["ffn_dim"],
            "num_key_value_heads": values["num_attention_heads"],
            "head_dim": None,
            "hidden_act": values["activation_function"],
            "rms_norm_eps": _LAYER_NORM_EPS,
            "rope_parameters": None,
        }

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:  # noqa: ARG003 (fixed by the family)
        """The same for every checkpoint."""
        return {
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "qk_norm": False,
        }
