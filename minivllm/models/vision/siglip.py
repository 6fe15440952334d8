"""The SigLIP vision tower (https://arxiv.org/abs/2303.15343), without its pooling head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from minivllm.errors import BadMedia
from minivllm.models.modules import Embedding, LayerNorm
from minivllm.models.vision.vit import Encoder, PatchEmbedding, ViTConfig, hidden_states, layer_index

__all__ = ["SiglipTower"]


class Embeddings(nn.Module):
    """The patches row by row, a learned position each; no class token."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.grid = config.grid
        self.patch_embedding = PatchEmbedding(
            config.num_channels, config.hidden_size, config.patch_size, bias=True, **kw
        )
        self.position_embedding = Embedding(
            config.grid**2, config.hidden_size, dtype=kw["dtype"], device=kw["device"]
        )

    def forward(self, pixels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[pictures, 3, height, width] → [pictures, patches, hidden].

        Args:
            position_ids: [patches] or [pictures, patches] int64, the row of the position table
                each patch takes; None: its own, which needs pictures of the size of the table.
        """
        patches = self.patch_embedding(pixels)
        side = self.patch_embedding.patch
        grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
        if position_ids is None and grid != (self.grid, self.grid):
            raise BadMedia(
                f"pixel values are {pixels.shape[-2]} × {pixels.shape[-1]}, the model has positions for "
                f"{self.grid} × {self.grid} patches of {side}: leave size as the checkpoint has it"
            )
        table = self.position_embedding
        embedded: Tensor = patches + (table.weight if position_ids is None else table(position_ids))
        return embedded


class SiglipTower(nn.Module):
    """Hidden states of the SigLIP encoder; `post_layernorm` is for families that want the normed output."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, **kw)
        self.encoder = Encoder(config, **kw)
        self.post_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)

    def forward(
        self, pixels: Tensor, layers: Sequence[int] = (-1,), position_ids: Tensor | None = None
    ) -> list[Tensor]:
        """The hidden states number `layers` of pictures [n, 3, height, width], before `post_layernorm`.

        Args:
            layers: 0 is the embeddings, i the output of layer i; negative from the end.
            position_ids: see `Embeddings.forward`.

        Returns:
            For each of `layers`: [n, patches, hidden].

        Raises:
            BadMedia: pictures of another size.
        """
        wanted = [layer_index(layer, self.config.num_hidden_layers) for layer in layers]
        return hidden_states(self.embeddings(pixels, position_ids), self.encoder.layers, wanted)
