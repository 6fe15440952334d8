"""The vision tower of Qwen2-VL (https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from minivllm.models.modules import Activation, LayerNorm, Linear
from minivllm.models.vision.qwen import (
    NORM_EPS,
    Block,
    PatchEmbed,
    QwenTowerConfig,
    as_grid,
    axial_rope,
    frame_lengths,
    patch_positions,
)
from minivllm.models.vision.vit import MLP

__all__ = ["PatchMerger", "Qwen2VLTower", "read_qwen2_vl_tower"]


def read_qwen2_vl_tower(values: Mapping[str, Any]) -> QwenTowerConfig:
    """From the `vision_config` of a Qwen2-VL config.json, where `hidden_size` is the decoder's.

    Raises:
        ConfigError, UnsupportedError: as `QwenTowerConfig.shape`.
    """
    width = values["embed_dim"]
    return QwenTowerConfig(
        **QwenTowerConfig.shape(values, hidden_size=width),
        intermediate_size=int(width * values["mlp_ratio"]),
        out_hidden_size=values["hidden_size"],
    )


class PatchMerger(nn.Module):
    """A block of patches becomes one row of the decoder's width.

    Args:
        norm: over one patch, before the block is put together.
    """

    def __init__(self, config: QwenTowerConfig, norm: nn.Module, **kw: Any) -> None:
        super().__init__()
        self.block = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = norm
        self.mlp = nn.Sequential(
            Linear(self.block, self.block, bias=True, **kw),
            Activation("gelu", ops=kw["ops"]),
            Linear(self.block, config.out_hidden_size, bias=True, **kw),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → [rows, out_hidden]."""
        rows: Tensor = self.mlp(self.ln_q(x).view(-1, self.block))
        return rows


class Qwen2VLTower(nn.Module):
    """One picture or video at a time; parameters are called as in Transformers."""

    def __init__(self, config: QwenTowerConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=False, **kw)
        self.blocks = nn.ModuleList(
            Block(
                config,
                LayerNorm,
                MLP(config.hidden_size, config.intermediate_size, config.hidden_act, **kw),
                **kw,
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, LayerNorm(config.hidden_size, NORM_EPS, **kw), **kw)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of the decoder's width, row by row of each frame pair.

        Args:
            pixels: [patches, channels × frames × side × side].
            grid_thw: [1, 3], frame pairs, rows and columns of patches.

        Returns:
            [rows, out_hidden], and no deepstack features.

        Raises:
            BadMedia: grid and pixels do not belong together.
        """
        grid = as_grid(pixels, grid_thw, self.config)
        positions = patch_positions(grid, self.config.spatial_merge_size)
        cos, sin = (
            table.to(pixels.device)
            for table in axial_rope(positions, self.config.head_dim, self.config.rope_theta)
        )
        x = self.patch_embed(pixels)
        for block in self.blocks:
            x = block(x, cos, sin, frame_lengths(grid))
        return self.merger(x), ()
