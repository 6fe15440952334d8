"""The InternVL vision tower: a ViT whose residual branches are scaled (https://arxiv.org/abs/2312.14238)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.models.modules import LayerNorm, Linear, RMSNorm, new_parameter
from minivllm.models.vision.vit import (
    MLP,
    PatchEmbedding,
    ViTConfig,
    attend,
    hidden_states,
    layer_index,
)

__all__ = ["InternViT", "InternViTConfig"]

#: Transformers gives the norms on q and k no eps of the config's.
_QK_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class InternViTConfig(ViTConfig):
    """`ViTConfig`, and what only this tower has; field names follow the Transformers config.

    Attributes:
        attention_bias: a bias on q, k and v; the output projection always has one.
        use_qk_norm: an RMSNorm over the whole of q and of k.
        norm_type: "layer_norm" or "rms_norm", of the two norms of a layer.
        use_absolute_position_embeddings: learned positions.
        final_norm: a LayerNorm after the last layer (`use_mean_pooling` off).
    """

    attention_bias: bool
    use_qk_norm: bool
    norm_type: str
    use_absolute_position_embeddings: bool
    final_norm: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> InternViTConfig:
        """As `ViTConfig.read`; a mask token is refused too, as it only serves training."""
        if values["use_mask_token"]:
            raise UnsupportedError("vision_config: use_mask_token is not implemented")
        if values["norm_type"] not in ("layer_norm", "rms_norm"):
            raise ConfigError(
                f"vision_config: norm_type must be layer_norm or rms_norm, got {values['norm_type']!r}"
            )
        return cls(
            **vars(ViTConfig.read(values)),
            attention_bias=values["attention_bias"],
            use_qk_norm=values["use_qk_norm"],
            norm_type=values["norm_type"],
            use_absolute_position_embeddings=values["use_absolute_position_embeddings"],
            final_norm=not values["use_mean_pooling"],
        )


class PatchEmbeddings(nn.Module):
    """Exists so that the convolution is called "patch_embeddings.projection"."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        self.projection = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, bias=True, **kw
        )


class Embeddings(nn.Module):
    """A class token, then the patches row by row; a learned position each."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        placement = {"dtype": kw["dtype"], "device": kw["device"]}
        self.image_size = config.image_size
        self.cls_token = new_parameter(1, 1, config.hidden_size, **placement)
        self.patch_embeddings = PatchEmbeddings(config, **kw)
        self.position_embeddings = (
            new_parameter(1, config.grid**2 + 1, config.hidden_size, **placement)
            if config.use_absolute_position_embeddings
            else None
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """[tiles, 3, image_size, image_size] → [tiles, 1 + patches, hidden]."""
        if pixels.shape[-2:] != (self.image_size, self.image_size):
            raise BadMedia(
                f"tiles are {pixels.shape[-2]} × {pixels.shape[-1]}, the model has positions for "
                f"{self.image_size} × {self.image_size}: leave size as the checkpoint has it"
            )
        patches = self.patch_embeddings.projection(pixels)
        embedded = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1)
        return embedded if self.position_embeddings is None else embedded + self.position_embeddings


class SelfAttention(nn.Module):
    """Multi-head attention; the softmax keeps the model's dtype, as Transformers eager has it here."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self.head_dim = size // config.num_attention_heads
        self.q_proj = Linear(size, size, bias=bias, **kw)
        self.k_proj = Linear(size, size, bias=bias, **kw)
        self.v_proj = Linear(size, size, bias=bias, **kw)
        self.projection_layer = Linear(size, size, bias=True, **kw)
        self.q_norm = RMSNorm(size, _QK_NORM_EPS, **kw) if config.use_qk_norm else None
        self.k_norm = RMSNorm(size, _QK_NORM_EPS, **kw) if config.use_qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, tokens, hidden] → the same."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        output: Tensor = self.projection_layer(attend(q, k, v, self.head_dim**-0.5, wide_softmax=False))
        return output


class Layer(nn.Module):
    """Pre-norm block; each branch is multiplied by a learned vector before it is added."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        placement = {"dtype": kw["dtype"], "device": kw["device"]}
        norm = LayerNorm if config.norm_type == "layer_norm" else RMSNorm
        self.attention = SelfAttention(config, **kw)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, **kw)
        self.layernorm_before = norm(config.hidden_size, config.layer_norm_eps, **kw)
        self.layernorm_after = norm(config.hidden_size, config.layer_norm_eps, **kw)
        self.lambda_1 = new_parameter(config.hidden_size, **placement)
        self.lambda_2 = new_parameter(config.hidden_size, **placement)

    def forward(self, x: Tensor) -> Tensor:
        """[tiles, tokens, hidden] → the same."""
        x = self.lambda_1 * self.attention(self.layernorm_before(x)) + x
        mixed: Tensor = self.lambda_2 * self.mlp(self.layernorm_after(x)) + x
        return mixed


class Encoder(nn.Module):
    """The stack of layers; exists so that parameters are called "encoder.layer.…"."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, **kw) for _ in range(config.num_hidden_layers))


class InternViT(nn.Module):
    """Hidden states of the InternVL encoder."""

    def __init__(self, config: InternViTConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, **kw)
        self.encoder = Encoder(config, **kw)
        self.layernorm = (
            LayerNorm(config.hidden_size, config.layer_norm_eps, **kw) if config.final_norm else None
        )

    def forward(self, pixels: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
        """The hidden states number `layers` of tiles [n, 3, image_size, image_size].

        Args:
            layers: 0 is the embeddings, i the output of layer i; -1 is the tower's output, after
                the final norm if it has one; other negative numbers count from the end.

        Returns:
            For each of `layers`: [n, 1 + patches, hidden], the class token first.

        Raises:
            BadMedia: tiles of another size.
        """
        wanted = [layer_index(layer, self.config.num_hidden_layers) for layer in layers]
        states = hidden_states(self.embeddings(pixels), self.encoder.layer, wanted)
        if self.layernorm is None:
            return states
        return [
            self.layernorm(state) if layer == -1 else state
            for layer, state in zip(layers, states, strict=True)
        ]
