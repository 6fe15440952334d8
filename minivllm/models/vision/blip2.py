"""The vision tower of BLIP-2: a ViT with a class token, one matrix for q, k and v, and a last norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadMedia
from minivllm.models.modules import LayerNorm, Linear, new_parameter
from minivllm.models.vision.vit import MLP, PatchEmbedding, ViTConfig, attend

__all__ = ["Blip2Tower"]


class Embeddings(nn.Module):
    """Class token and patches row by row, a learned position each."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.side = config.image_size
        place = {"dtype": kw["dtype"], "device": kw["device"]}
        self.class_embedding = new_parameter(1, 1, config.hidden_size, **place)
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, bias=True, **kw
        )
        self.position_embedding = new_parameter(1, config.grid**2 + 1, config.hidden_size, **place)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, 3, side, side] → [pictures, 1 + patches, hidden].

        Raises:
            BadMedia: pictures of another size. (Transformers would interpolate the positions if asked.)
        """
        if tuple(pixels.shape[-2:]) != (self.side, self.side):
            raise BadMedia(
                f"pixel values are {pixels.shape[-2]} × {pixels.shape[-1]}, the model takes {self.side} × "
                f"{self.side}: leave size as the checkpoint has it"
            )
        patches = self.patch_embedding(pixels)
        cls = self.class_embedding.expand(len(patches), -1, -1)
        return torch.cat((cls, patches), dim=1) + self.position_embedding


class SelfAttention(nn.Module):
    """Multi-head attention; q, k and v come from one matrix."""

    def __init__(self, config: ViTConfig, *, qkv_bias: bool, **kw: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.head_dim = size // self.heads
        self.qkv = Linear(size, 3 * size, bias=qkv_bias, **kw)
        self.projection = Linear(size, size, bias=True, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, tokens, hidden] → the same. The softmax is in the dtype of the model."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        output: Tensor = self.projection(attend(q, k, v, self.head_dim**-0.5, wide_softmax=False))
        return output


class EncoderLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ViTConfig, *, qkv_bias: bool, **kw: Any) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.self_attn = SelfAttention(config, qkv_bias=qkv_bias, **kw)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, tokens, hidden] → the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        mixed: Tensor = x + self.mlp(self.layer_norm2(x))
        return mixed


class Encoder(nn.Module):
    """The stack of layers; exists so that parameters are called "encoder.layers.…"."""

    def __init__(self, config: ViTConfig, *, qkv_bias: bool, **kw: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config, qkv_bias=qkv_bias, **kw) for _ in range(config.num_hidden_layers)
        )


class Blip2Tower(nn.Module):
    """The normed output of the ViT, class token included.

    Args:
        qkv_bias: whether queries and values have a bias. (The keys' is stored too, as zeros.)
    """

    def __init__(self, config: ViTConfig, *, qkv_bias: bool, **kw: Any) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, **kw)
        self.encoder = Encoder(config, qkv_bias=qkv_bias, **kw)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, 3, side, side] → [pictures, 1 + patches, hidden].

        Raises:
            BadMedia: pictures of another size.
        """
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        normed: Tensor = self.post_layernorm(x)
        return normed
