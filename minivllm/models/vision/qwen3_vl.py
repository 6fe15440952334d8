"""The vision tower of Qwen3-VL: learned positions beside the rope, features of several depths.

Sources: Qwen3-VL (https://arxiv.org/abs/2511.21631), DeepStack (https://arxiv.org/abs/2406.04334).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.models.modules import Activation, Embedding, LayerNorm, Linear
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

__all__ = ["DeepstackTowerConfig", "Qwen3VLTower", "bilinear_taps"]


@dataclass(frozen=True, kw_only=True)
class DeepstackTowerConfig(QwenTowerConfig):
    """`QwenTowerConfig`, and what only this tower has.

    Attributes:
        table_side: the learned positions are a square of this side.
        deepstack_blocks: layers whose output goes, merged, into the decoder's first layers.
    """

    table_side: int
    deepstack_blocks: tuple[int, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> DeepstackTowerConfig:
        """From the `vision_config` of a config.json with defaults filled in.

        Raises:
            ConfigError: learned positions that are no square, a deepstack layer that is not there;
                as `QwenTowerConfig.shape`.
            UnsupportedError: as `QwenTowerConfig.shape`.
        """
        count, depth = values["num_position_embeddings"], values["depth"]
        side = math.isqrt(count)
        if side**2 != count:
            raise ConfigError(f"vision_config: num_position_embeddings must be a square, got {count}")
        blocks = tuple(values["deepstack_visual_indexes"])
        if len(set(blocks)) != len(blocks) or not all(0 <= block < depth for block in blocks):
            raise ConfigError(
                f"vision_config: deepstack_visual_indexes must be distinct layers of {depth}, "
                f"got {list(blocks)}"
            )
        return cls(
            **cls.shape(values, hidden_size=values["hidden_size"]),
            intermediate_size=values["intermediate_size"],
            out_hidden_size=values["out_hidden_size"],
            table_side=side,
            deepstack_blocks=blocks,
        )


def bilinear_taps(places: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """The two entries of a table of `side` that a place lies between, and their weights.

    The first and last place of a picture lie on the first and last entry of the table.

    Args:
        places: [patches] int64, each in 0 … size - 1.
        size: places along this side of the picture.

    Returns:
        [patches, 2] int64 and [patches, 2] float32.
    """
    exact = places.to(torch.float32) * (side - 1) / max(size - 1, 1)
    lower = exact.floor()
    step = torch.arange(2)
    weights = 1 - (exact[:, None] - lower[:, None] - step).abs()
    return (lower.long()[:, None] + step).clamp(max=side - 1), weights


class MLP(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self, config: QwenTowerConfig, **kw: Any) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True, **kw)
        self.act = Activation(config.hidden_act, ops=kw["ops"])
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → the same."""
        output: Tensor = self.linear_fc2(self.act(self.linear_fc1(x)))
        return output


class PatchMerger(nn.Module):
    """A block of patches becomes one row of the decoder's width.

    Args:
        norm_block: norm over the block; else over each of its patches.
    """

    def __init__(self, config: QwenTowerConfig, *, norm_block: bool, **kw: Any) -> None:
        super().__init__()
        self.block = config.hidden_size * config.spatial_merge_size**2
        self.norm_block = norm_block
        self.norm = LayerNorm(self.block if norm_block else config.hidden_size, NORM_EPS, **kw)
        self.linear_fc1 = Linear(self.block, self.block, bias=True, **kw)
        self.act = Activation("gelu", ops=kw["ops"])
        self.linear_fc2 = Linear(self.block, config.out_hidden_size, bias=True, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → [rows, out_hidden]."""
        if self.norm_block:
            x = x.view(-1, self.block)
        rows: Tensor = self.linear_fc2(self.act(self.linear_fc1(self.norm(x).view(-1, self.block))))
        return rows


class Qwen3VLTower(nn.Module):
    """One picture or video at a time; parameters are called as in Transformers."""

    def __init__(self, config: DeepstackTowerConfig, **kw: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, bias=True, **kw)
        self.pos_embed = Embedding(
            config.table_side**2, config.hidden_size, dtype=kw["dtype"], device=kw["device"]
        )
        self.blocks = nn.ModuleList(
            Block(config, LayerNorm, MLP(config, **kw), **kw) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, norm_block=False, **kw)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_block=True, **kw) for _ in config.deepstack_blocks
        )

    def learned_positions(self, positions: Tensor, high: int, wide: int) -> Tensor:
        """[patches, hidden]: the table stretched over high × wide patches; float32 inside.

        Args:
            positions: [patches, 2] on the CPU, row and column.
        """
        side, device = self.config.table_side, self.pos_embed.weight.device
        rows, row_weights = bilinear_taps(positions[:, 0], high, side)
        columns, column_weights = bilinear_taps(positions[:, 1], wide, side)
        taps = (rows[:, :, None] * side + columns[:, None, :]).flatten(1).to(device)
        weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1).to(device)
        stretched: Tensor = (self.pos_embed(taps) * weights[:, :, None]).sum(1)
        return stretched.to(self.pos_embed.weight.dtype)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `Qwen2VLTower.forward`; also the deepstack features, each [rows, out_hidden]."""
        config = self.config
        grid = as_grid(pixels, grid_thw, config)
        positions = patch_positions(grid, config.spatial_merge_size)
        cos, sin = (
            table.to(pixels.device) for table in axial_rope(positions, config.head_dim, config.rope_theta)
        )
        x = self.patch_embed(pixels) + self.learned_positions(positions, grid[1], grid[2])
        features: dict[int, Tensor] = {}
        for index, layer in enumerate(self.blocks):
            x = layer(x, cos, sin, frame_lengths(grid))
            if index in config.deepstack_blocks:
                place = config.deepstack_blocks.index(index)
                features[place] = self.deepstack_merger_list[place](x)
        # in the order of the layers, as Transformers hands them on
        return self.merger(x), tuple(features.values())
