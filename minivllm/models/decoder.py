"""The decoder that all families share; what differs is flags of `ModelConfig` and small overrides.

Parameter names are those of the Transformers checkpoints, so loading is the identity on names.
Matrix products and attention go through the two seams only: `ops` and the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig, RopeConfig
from minivllm.layers.ops import Ops
from minivllm.layers.rope import RopeTable
from minivllm.models.base import LanguageModel, Observer
from minivllm.models.modules import Embedding, Linear, RMSNorm

__all__ = ["DecoderModel"]

#: Cosines and sines of the rows of a batch, each [rows, rotated dimensions], in the model's dtype.
Rotation = tuple[Tensor, Tensor]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [rows, heads, head_dim] by `cos`, `sin` [rows, head_dim]; halves are the pairs."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


class Attention(nn.Module):
    """Grouped-query self-attention; the backend owns the KV cache and the softmax."""

    #: Of the queries and keys, where there is one.
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.windows[layer] if config.windows else None
        hidden = config.hidden_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, q_size, bias=config.attention_bias, **kw)
        self.k_proj = Linear(hidden, kv_size, bias=config.attention_bias, **kw)
        self.v_proj = Linear(hidden, kv_size, bias=config.attention_bias, **kw)
        self.o_proj = Linear(q_size, hidden, bias=config.attention_output_bias, **kw)
        # one weight vector for all heads: the norm is over head_dim, not over the projection
        norm, eps = self.norm_class, config.rms_norm_eps
        self.q_norm = norm(config.head_dim, eps, **kw) if config.qk_norm else None
        self.k_norm = norm(config.head_dim, eps, **kw) if config.qk_norm else None

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Turn queries or keys [rows, heads, head_dim] by their positions."""
        return rotate_halves(x, *rotation)

    def forward(self, x: Tensor, rotation: Rotation, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]; writes this layer's K and V of these rows first."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, rotation), self.rotate(k, rotation)
        attention.write(self.layer, k, v)
        output: Tensor = self.o_proj(attention.attend(self.layer, q, self.scale, self.window))
        return output


class MLP(nn.Module):
    """Gated linear unit with SiLU (https://arxiv.org/abs/2002.05202), or another activation."""

    def __init__(self, config: ModelConfig, **kw: Any) -> None:
        super().__init__()
        self.ops: Ops = kw["ops"]
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias, **kw)
        self.up_proj = Linear(hidden, inner, bias=bias, **kw)
        self.down_proj = Linear(inner, hidden, bias=bias, **kw)

    def activate(self, gate: Tensor) -> Tensor:
        """[rows, inner] → [rows, inner]."""
        return self.ops.silu(gate)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        output: Tensor = self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))
        return output


class DecoderLayer(nn.Module):
    """Pre-norm residual block: attention, then MLP. A family names its own parts."""

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[nn.Module]] = MLP
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int, **kw: Any) -> None:
        super().__init__()
        norm, size, eps = self.norm_class, config.hidden_size, config.rms_norm_eps
        self.self_attn = self.attention_class(config, layer, **kw)
        self.mlp = self.mlp_class(config, **kw)
        self.input_layernorm = norm(size, eps, **kw)
        self.post_attention_layernorm = norm(size, eps, **kw)

    def forward(self, x: Tensor, rotation: Rotation, attention: PlannedAttention) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Stack(nn.Module):
    """What `DecoderModel` needs below the head: embeddings, layers, and what follows the last one."""

    embed_tokens: Embedding
    layers: nn.ModuleList

    def finish(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] after the last layer → normed."""
        raise NotImplementedError(f"{type(self).__name__} does not say what follows the last layer")


class Body(Stack):
    """The usual stack; exists so that parameters are called "model.…"."""

    def __init__(self, config: ModelConfig, layer_class: type[DecoderLayer], **kw: Any) -> None:
        super().__init__()
        placement = {"dtype": kw["dtype"], "device": kw["device"]}
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **placement)
        self.layers = nn.ModuleList(layer_class(config, i, **kw) for i in range(config.num_hidden_layers))
        self.norm = layer_class.norm_class(config.hidden_size, config.rms_norm_eps, **kw)

    def finish(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed


class DecoderModel(LanguageModel):
    """A decoder-only language model without autograd, on flat rows of mixed requests.

    Args:
        config: shapes and flags.
        dtype: of parameters and activations.
        device: "meta" gives shapes only.
        ops: linear, norm, activation.
        max_model_len: positions to prepare; None: `config.max_position_embeddings`.

    Parameters are uninitialised until `minivllm.models.load_model` fills them. They may be
    exchanged in place through `named_parameters()`.
    """

    #: `general.architecture` of this family's GGUF files, or None if there are none.
    gguf_architecture: ClassVar[str | None] = None
    #: Whether llama.cpp's converter reorders the rows of q_proj and k_proj of this family.
    gguf_permutes_qk: ClassVar[bool] = False
    #: Names of a layer's tensors in this family's GGUF files that mean something else in others, or nothing.
    gguf_names: ClassVar[Mapping[str, str]] = {}
    #: Whether llama.cpp's converter adds 1 to the weights of norms.
    gguf_norms_are_plus_one: ClassVar[bool] = False
    #: `hidden_act` values that this family computes.
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    #: Whether only a part of each head may turn; else a smaller part is refused.
    partial_rotary: ClassVar[bool] = False
    #: What the layers are.
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    #: Whether layers of the type "sliding_attention" see a window; else they are refused.
    sliding_windows: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: Ops,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        kw: dict[str, Any] = {"ops": ops, "dtype": dtype, "device": device}
        self.config = config
        self.ops = ops
        self.max_model_len = max_model_len or config.max_position_embeddings
        if config.rope is not None:
            self.rope = self.make_rope(config.rope, device)
        if config.local_rope is not None:
            self.local_rope = self.make_rope(config.local_rope, device)
        self.model = self.make_body(config, **kw)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, **kw)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.stack.embed_tokens.weight
        self.eval()

    def make_rope(self, rope: RopeConfig, device: torch.device) -> RopeTable:
        """The table for the part of a head that turns."""
        return RopeTable(
            rope,
            head_dim=int(self.config.head_dim * rope.rotary_fraction),
            max_position_embeddings=self.config.max_position_embeddings,
            max_model_len=self.max_model_len,
            device=device,
        )

    def make_body(self, config: ModelConfig, **kw: Any) -> nn.Module:
        """What is called "model" in the checkpoint."""
        return Body(config, self.layer_class, **kw)

    @property
    def embedding_name(self) -> str:
        return "model.embed_tokens.weight"

    @property
    def stack(self) -> Stack:
        """Embeddings and layers."""
        assert isinstance(self.model, Stack)
        return self.model

    @classmethod
    def unsupported(cls, values: Mapping[str, Any]) -> str | None:  # noqa: ARG003 - most refuse nothing
        """Why this family cannot run a config.json with these values, or None if it can."""
        return None

    @classmethod
    def standard_values(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of config.json under the names that most families use."""
        return values

    @classmethod
    def read_details(cls, values: Mapping[str, Any]) -> Any:  # noqa: ARG003 - most have none
        """What only this family has in config.json, as a frozen dataclass; None if nothing."""
        return None

    @classmethod
    def finish_gguf(cls, config: ModelConfig, number: Callable[[str, float], float]) -> ModelConfig:  # noqa: ARG003
        """The configuration of a GGUF file with what only this family has.

        Args:
            number: metadata by name, without the architecture in front, or the default.
        """
        return config

    @classmethod
    def config_flags(cls, values: Mapping[str, Any]) -> dict[str, bool]:
        """The flags of `ModelConfig` that this family fixes or reads from `values` (its config.json)."""
        raise NotImplementedError(f"{cls.__name__} does not say which flags it has")

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self.stack.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.stack.embed_tokens.weight.device

    def untie_lm_head(self) -> None:
        """Give the head a weight of its own, uninitialised."""
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.lm_head.weight), requires_grad=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, hidden]."""
        rows: Tensor = self.stack.embed_tokens(token_ids)
        return rows

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Observer | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the layers and the final norm; see `LanguageModel.forward`."""
        rotations = self.rotations(positions)
        for index, layer in enumerate(self.stack.layers):
            hidden = layer(hidden, rotations[index], attention)
            if index < len(deepstack):
                hidden = hidden + deepstack[index]
            if observe is not None:
                observe(f"hidden.{index}", hidden)
        return self.stack.finish(hidden)

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        """How each layer turns its queries and keys; None for a family that does not.

        Args:
            positions: as in `forward`.
        """
        rotation = self.rotation(self.rope, positions)
        if self.config.local_rope is None or not self.config.windows:
            return [rotation] * len(self.stack.layers)
        local = self.rotation(self.local_rope, positions)
        return [rotation if window is None else local for window in self.config.windows]

    def rotation(self, rope: RopeTable, positions: Tensor) -> Rotation:
        """Cosines and sines in the form that the layers want."""
        cos, sin = rope.cos_sin(positions)
        return cos.to(self.dtype), sin.to(self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] (normed) → [rows, vocab]."""
        rows: Tensor = self.lm_head(hidden)
        return rows
