"""LLaVA-OneVision: a picture as a squashed overview and as tiles at its own shape.

https://arxiv.org/abs/2408.03326. The rows of a tiled picture are those of the overview, then those
of the tiles put together and cut back to the picture (`unpadded_size`), a learned row after each
line. A picture among several is one square and one such row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.models.llava import LlavaVision, TowerFeatures
from minivllm.models.modules import new_parameter
from minivllm.models.vlm import MediaEmbeddings
from minivllm.request import MediaItem

__all__ = [
    "LlavaOnevisionForConditionalGeneration",
    "OnevisionVision",
    "best_resolution",
    "feature_size",
    "unpadded_size",
]

#: A picture is shrunk if its features exceed the most allowed by more than this, per side.
_TOLERANCE = 1.1


@dataclass(frozen=True, kw_only=True)
class OnevisionVision(LlavaVision):
    """`LlavaVision`, and how pictures are tiled.

    Attributes:
        pinpoints: sizes (height, width) a picture may be tiled to, in pixels.
        max_squares: most squares' worth of features that tiles may have.
    """

    pinpoints: tuple[tuple[int, int], ...]
    max_squares: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> OnevisionVision:
        """As `LlavaVision.read`; also refuses features and tilings that make no grid."""
        base = LlavaVision.read(values)
        if base.rows_per_square != base.tower.grid**2:
            raise ConfigError(
                f"a square has {base.rows_per_square} features where tiles need one per patch, "
                f"{base.tower.grid**2}: the tower and vision_feature_select_strategy do not fit"
            )
        ratio = str(values["vision_aspect_ratio"])
        limit = ratio.removeprefix("anyres_max_")
        if limit == ratio or not limit.isdecimal() or int(limit) < 1:
            raise ConfigError(f"vision_aspect_ratio must be anyres_max_ and a number, got {ratio!r}")
        pinpoints = tuple((int(high), int(wide)) for high, wide in values["image_grid_pinpoints"])
        side = base.tower.image_size
        odd = [point for point in pinpoints if point[0] % side or point[1] % side or min(point) < side]
        if odd or not pinpoints:
            raise ConfigError(f"image_grid_pinpoints must be multiples of {side}, got {odd or 'none'}")
        return cls(**vars(base), pinpoints=pinpoints, max_squares=int(limit))


def best_resolution(size: tuple[int, int], pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size (height, width) to tile a picture to: most of its pixels kept, then least padding.

    Args:
        size: (height, width) of the picture.
    """
    high, wide = size

    def worth(point: tuple[int, int]) -> tuple[int, int]:
        scale = min(point[1] / wide, point[0] / high)
        kept = min(int(wide * scale) * int(high * scale), wide * high)
        return kept, kept - point[0] * point[1]

    return max(pinpoints, key=worth)  # the first of equals, as Transformers has it


def unpadded_size(size: tuple[int, int], grid: tuple[int, int]) -> tuple[int, int]:
    """What is left of a grid of features (height, width) without the padding of the picture.

    Rounded to 7 digits before it is cut, as Transformers has it: the number of placeholders
    follows from it. Padding is the same on both sides, so one odd line of it may stay.
    """
    (high, wide), (rows, columns) = size, grid
    if wide / high > columns / rows:
        rows -= 2 * ((rows - int(round(high * (columns / wide), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(wide * (rows / high), 7))) // 2)
    return rows, columns


def feature_size(size: tuple[int, int], vision: OnevisionVision) -> tuple[int, int]:
    """Lines, and features per line, of the tiles of a picture of `size` (height, width)."""
    side, grid = vision.tower.image_size, vision.tower.grid
    tiled = best_resolution(size, vision.pinpoints)
    rows, columns = unpadded_size(size, (tiled[0] // side * grid, tiled[1] // side * grid))
    ratio = math.sqrt(rows * columns / (vision.max_squares * grid**2))
    return (int(rows // ratio), int(columns // ratio)) if ratio > _TOLERANCE else (rows, columns)


class LlavaOnevisionForConditionalGeneration(TowerFeatures):
    """Pictures of any shape; videos are not implemented."""

    model_type: ClassVar[str] = "llava_onevision"

    def __init__(self, config: Any, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._tiling: OnevisionVision = config.vision
        self.image_newline = new_parameter(
            config.hidden_size, dtype=kw["dtype"], device=torch.device(kw["device"])
        )

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> OnevisionVision:
        return OnevisionVision.read(values)

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """`item.data`: "pixel_values" [1, 1 + tiles, 3, side, side] (the overview first; only it
        for a picture among several) and "image_sizes" [1, 2], the picture's (height, width).
        """
        rows = self.project(item.data["pixel_values"][0])
        if len(rows) == 1:
            return MediaEmbeddings(torch.cat((rows[0], self.image_newline[None])))
        high, wide = (int(side) for side in item.data["image_sizes"][0])
        return MediaEmbeddings(torch.cat((rows[0], self._lines(rows[1:], (high, wide)))))

    def _lines(self, tiles: Tensor, size: tuple[int, int]) -> Tensor:
        """[tiles, rows, hidden] → [lines × (features per line + 1), hidden]."""
        side, grid = self._tiling.tower.image_size, self._tiling.tower.grid
        down, across = (length // side for length in best_resolution(size, self._tiling.pinpoints))
        whole = tiles.view(down, across, grid, grid, -1).permute(4, 0, 2, 1, 3)
        whole = whole.flatten(1, 2).flatten(2, 3)  # [hidden, lines, features per line], with padding
        rows, columns = unpadded_size(size, (down * grid, across * grid))
        top, left = (whole.shape[1] - rows) // 2, (whole.shape[2] - columns) // 2
        whole = whole[:, top : top + rows, left : left + columns]
        wanted = feature_size(size, self._tiling)
        if wanted != (rows, columns):
            whole = nn.functional.interpolate(whole[None], wanted, mode="bilinear")[0]
        ends = self.image_newline[:, None, None].expand(-1, whole.shape[1], 1)
        return torch.cat((whole, ends), dim=-1).flatten(1).transpose(0, 1)
