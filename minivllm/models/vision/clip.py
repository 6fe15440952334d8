"""The CLIP vision tower (https://arxiv.org/abs/2103.00020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadMedia
from minivllm.models.modules import Embedding, LayerNorm, new_parameter
from minivllm.models.vision.vit import Encoder, PatchEmbedding, ViTConfig, hidden_states, layer_index

__all__ = ["CLIPTower"]


class Embeddings(nn.Module):
    """A class token, then the patches row by row; a learned position each."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        placement = {"dtype": kw["dtype"], "device": kw["device"]}
        self.image_size = config.image_size
        self.class_embedding = new_parameter(config.hidden_size, **placement)
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, bias=False, **kw
        )
        self.position_embedding = Embedding(config.grid**2 + 1, config.hidden_size, **placement)

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, 3, image_size, image_size] → [pictures, 1 + patches, hidden]."""
        if pixels.shape[-2:] != (self.image_size, self.image_size):
            raise BadMedia(
                f"pixel values are {pixels.shape[-2]} × {pixels.shape[-1]}, the model has positions for "
                f"{self.image_size} × {self.image_size}: leave size and crop_size as the checkpoint has them"
            )
        patches = self.patch_embedding(pixels)
        head = self.class_embedding.expand(patches.shape[0], 1, -1)
        embedded: Tensor = torch.cat((head, patches), dim=1) + self.position_embedding.weight
        return embedded


class CLIPTower(nn.Module):
    """Hidden states of the CLIP encoder.

    `post_layernorm` is loaded, as checkpoints have it, and never applied: it belongs to the pooled
    output, which language models do not use.
    """

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, **kw)
        # spelt so in every checkpoint
        self.pre_layrnorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.encoder = Encoder(config, **kw)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)

    def forward(self, pixels: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """The hidden states number `layers` of pictures [n, 3, image_size, image_size].

        Args:
            layers: 0 is the input of the first layer, i the output of layer i; negative from the end.

        Returns:
            For each of `layers`: [n, 1 + patches, hidden], the class token first.

        Raises:
            BadMedia: pictures of another size.
        """
        wanted = [layer_index(layer, self.config.num_hidden_layers) for layer in layers]
        return hidden_states(self.pre_layrnorm(self.embeddings(pixels)), self.encoder.layers, wanted)
