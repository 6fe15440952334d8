"""The vision tower of Qwen2.5-VL: attention in windows, but for a few layers (https://arxiv.org/abs/2502.13923)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.models.modules import Activation, Linear, RMSNorm
from minivllm.models.vision.qwen import (
    NORM_EPS,
    Block,
    Grid,
    PatchEmbed,
    QwenTowerConfig,
    as_grid,
    axial_rope,
    frame_lengths,
    patch_positions,
)
from minivllm.models.vision.qwen2_vl import PatchMerger

__all__ = ["Qwen25VLTower", "WindowTowerConfig", "windows"]


@dataclass(frozen=True, kw_only=True)
class WindowTowerConfig(QwenTowerConfig):
    """`QwenTowerConfig`, and what only this tower has.

    Attributes:
        window_size: side of a window, in pixels.
        full_attention_blocks: the layers that see the whole frame pair.
    """

    window_size: int
    full_attention_blocks: tuple[int, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> WindowTowerConfig:
        """From the `vision_config` of a config.json with defaults filled in.

        Raises:
            ConfigError: a window smaller than one row; as `QwenTowerConfig.shape`.
            UnsupportedError: as `QwenTowerConfig.shape`.
        """
        config = cls(
            **cls.shape(values, hidden_size=values["hidden_size"]),
            intermediate_size=values["intermediate_size"],
            out_hidden_size=values["out_hidden_size"],
            window_size=values["window_size"],
            full_attention_blocks=tuple(values["fullatt_block_indexes"]),
        )
        if config.window_side < 1:
            raise ConfigError(
                f"vision_config: window_size ({config.window_size} pixels) is smaller than a block of "
                f"{config.spatial_merge_size} patches of {config.patch_size}"
            )
        return config

    @property
    def window_side(self) -> int:
        """Side of a window, in blocks."""
        return self.window_size // self.spatial_merge_size // self.patch_size


def windows(grid: Grid, merge: int, side: int) -> tuple[Tensor, list[int]]:
    """The blocks of each window one after another, and how many patches each window has.

    Windows do not overlap; those at the right and lower edge may be smaller.

    Returns:
        [blocks] int64 on the CPU, indices of blocks; patches per window.
    """
    frames, high, wide = grid[0], grid[1] // merge, grid[2] // merge
    index = torch.arange(frames * high * wide).view(frames, high, wide)
    cut = [
        index[frame, top : top + side, left : left + side].flatten()
        for frame in range(frames)
        for top in range(0, high, side)
        for left in range(0, wide, side)
    ]
    return torch.cat(cut), [len(window) * merge**2 for window in cut]


class MLP(nn.Module):
    """SwiGLU with biases."""

    def __init__(self, config: QwenTowerConfig, **kw: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=True, **kw)
        self.up_proj = Linear(hidden, inner, bias=True, **kw)
        self.down_proj = Linear(inner, hidden, bias=True, **kw)
        self.act = Activation(config.hidden_act, ops=kw["ops"])

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → the same."""
        output: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return output


class Qwen25VLTower(nn.Module):
    """One picture or video at a time; parameters are called as in Transformers."""

    def __init__(self, config: WindowTowerConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=False, **kw)
        self.blocks = nn.ModuleList(
            Block(config, RMSNorm, MLP(config, **kw), **kw) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, RMSNorm(config.hidden_size, NORM_EPS, **kw), **kw)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `Qwen2VLTower.forward`. Inside, the patches of a window are neighbours."""
        config = self.config
        grid = as_grid(pixels, grid_thw, config)
        order, lengths = windows(grid, config.spatial_merge_size, config.window_side)
        block = config.spatial_merge_size**2
        patches = (order[:, None] * block + torch.arange(block)).flatten()
        positions = patch_positions(grid, config.spatial_merge_size)[patches]
        cos, sin = (
            table.to(pixels.device) for table in axial_rope(positions, config.head_dim, config.rope_theta)
        )
        x = self.patch_embed(pixels)[patches.to(pixels.device)]
        for index, layer in enumerate(self.blocks):
            whole = index in config.full_attention_blocks
            x = layer(x, cos, sin, frame_lengths(grid) if whole else lengths)
        return self.merger(x)[order.argsort().to(pixels.device)], ()
