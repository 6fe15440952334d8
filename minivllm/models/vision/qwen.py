"""What the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share.

A picture or video comes as flat patches of two frames each, in the order of the blocks of
`spatial_merge_size` × `spatial_merge_size` patches that become one row for the decoder. Attention
is within a frame pair, with a rope over rows and columns (https://arxiv.org/abs/2409.12191).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.layers.ops import Ops
from minivllm.models.modules import LayerNorm, Linear, RMSNorm, new_parameter
from minivllm.models.vision.vit import attend, square_side

__all__ = [
    "NORM_EPS",
    "Block",
    "FrameAttention",
    "Grid",
    "PatchEmbed",
    "QwenTowerConfig",
    "as_grid",
    "axial_rope",
    "frame_lengths",
    "patch_positions",
]

#: Transformers gives the norms of these towers no eps of the config's.
NORM_EPS = 1e-6

#: Frame pairs, rows and columns of patches: the grid of one picture or video.
Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class QwenTowerConfig:
    """Shape of a tower.

    Attributes:
        hidden_size: width of the tower.
        patch_size: side of a patch, in pixels.
        temporal_patch_size: frames in a patch.
        spatial_merge_size: side of the block of patches that becomes one row.
        out_hidden_size: width of the rows; the decoder's.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    hidden_act: str
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    rope_theta: float

    @classmethod
    def shape(cls, values: Mapping[str, Any], *, hidden_size: int) -> dict[str, Any]:
        """The fields that the three families read alike from `vision_config`.

        Raises:
            ConfigError: heads that do not divide the width, or are too small for the rope.
            UnsupportedError: patches that are not square, another rope.
        """
        rope = values["rope_parameters"]
        if rope["rope_type"] != "axial":
            raise UnsupportedError(
                f"vision_config: rope_type {rope['rope_type']!r} is not implemented; known: axial"
            )
        heads = values["num_heads"]
        if hidden_size % heads or hidden_size // heads % 4:
            raise ConfigError(
                f"vision_config: the width {hidden_size} must be a multiple of num_heads ({heads}), "
                "and a head a multiple of 4"
            )
        return {
            "depth": values["depth"],
            "hidden_size": hidden_size,
            "num_heads": heads,
            "hidden_act": values["hidden_act"],
            "in_channels": values["in_channels"],
            "patch_size": square_side(values["patch_size"], "patch_size"),
            "temporal_patch_size": square_side(values["temporal_patch_size"], "temporal_patch_size"),
            "spatial_merge_size": values["spatial_merge_size"],
            "rope_theta": rope["rope_theta"],
        }

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def as_grid(pixels: Tensor, grid_thw: Tensor, config: QwenTowerConfig) -> Grid:
    """The grid of one item as numbers.

    Args:
        pixels: [patches, values of a patch].
        grid_thw: [1, 3].

    Raises:
        BadMedia: the two do not belong together, or to this tower.
    """
    if grid_thw.numel() != 3:
        raise BadMedia(f"the grid of one item must be 3 numbers, got shape {list(grid_thw.shape)}")
    frames, high, wide = (int(n) for n in grid_thw.flatten())
    merge = config.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    if min(frames, high, wide) < 1 or high % merge or wide % merge:
        raise BadMedia(f"grid {frames} × {high} × {wide} is not one of whole {merge} × {merge} blocks")
    if tuple(pixels.shape) != (frames * high * wide, width):
        raise BadMedia(
            f"pixel values of shape {list(pixels.shape)}: grid {frames} × {high} × {wide} of this model "
            f"needs {[frames * high * wide, width]}"
        )
    return frames, high, wide


def patch_positions(grid: Grid, merge: int) -> Tensor:
    """[patches, 2] int64 on the CPU: row and column of each patch, in the order of the patches."""
    frames, high, wide = grid
    place = torch.cartesian_prod(torch.arange(high), torch.arange(wide))
    blocks = place.view(high // merge, merge, wide // merge, merge, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(frames, 1)


def frame_lengths(grid: Grid) -> list[int]:
    """How many patches each frame pair has."""
    frames, high, wide = grid
    return [high * wide] * frames


def axial_rope(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [patches, head_dim] float32 on the CPU; half of the frequencies follow the
    row, half the column.

    Args:
        positions: [patches, 2], row and column.
    """
    side = head_dim // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, side, 2, dtype=torch.float) / side))
    angles = (positions[..., None].float() * inv_freq).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class PatchProjection(nn.Module):
    """A convolution over whole patches, as the matrix product it is; the weight keeps its five axes."""

    def __init__(
        self, config: QwenTowerConfig, *, bias: bool, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.ops = ops
        patch = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.weight = new_parameter(
            config.hidden_size, config.in_channels, *patch, dtype=dtype, device=device
        )
        self.bias = new_parameter(config.hidden_size, dtype=dtype, device=device) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels × frames × side × side] → [patches, hidden]."""
        return self.ops.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Exists so that the projection is called "patch_embed.proj"."""

    def __init__(self, config: QwenTowerConfig, *, bias: bool, **kw: Any) -> None:
        super().__init__()
        self.proj = PatchProjection(config, bias=bias, **kw)

    def forward(self, patches: Tensor) -> Tensor:
        """[patches, channels × frames × side × side] → [patches, hidden]."""
        rows: Tensor = self.proj(patches)
        return rows


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [patches, heads, head_dim] turned in float32, whatever its dtype."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class FrameAttention(nn.Module):
    """Attention within runs of patches, with one matrix for q, k and v."""

    def __init__(self, config: QwenTowerConfig, **kw: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True, **kw)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True, **kw)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """[patches, hidden] → the same.

        Args:
            cos, sin: [patches, head_dim] float32.
            lengths: sizes of the runs of patches that see each other; their sum is the patches.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        runs = [part.transpose(0, 1)[None].split(list(lengths), dim=2) for part in (q, k, v)]
        scale = self.head_dim**-0.5
        mixed = [attend(q, k, v, scale)[0] for q, k, v in zip(*runs, strict=True)]
        output: Tensor = self.proj(torch.cat(mixed))
        return output


class Block(nn.Module):
    """Pre-norm residual block.

    Args:
        norm: class of both norms.
        mlp: [patches, hidden] → the same.
    """

    def __init__(
        self, config: QwenTowerConfig, norm: type[LayerNorm] | type[RMSNorm], mlp: nn.Module, **kw: Any
    ) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, NORM_EPS, **kw)
        self.norm2 = norm(config.hidden_size, NORM_EPS, **kw)
        self.attn = FrameAttention(config, **kw)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
        """[patches, hidden] → the same; arguments as `FrameAttention.forward`."""
        x = x + self.attn(self.norm1(x), cos, sin, lengths)
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed
