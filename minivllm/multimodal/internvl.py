"""InternVL: each picture is squashed to the grid of tiles nearest to its shape, and to an overview."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError
from minivllm.multimodal.hashing import image_hash
from minivllm.multimodal.image_embeds import is_supplied, supplied_item
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.llava import check_square
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.rects import grid_rects
from minivllm.request import MediaItem, PatchRect

__all__ = ["InternVLProcessor", "tile_grid"]

#: Around the placeholders of each picture.
_START, _END = "<img>", "</img>"

#: What Transformers' processor of the family tells its image processor, whatever its file says.
_DEFAULTS: Mapping[str, Any] = {"crop_to_patches": True}


def tile_grid(size: tuple[int, int], tile: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of the grid of `least` to `most` tiles whose shape is nearest to a picture's.

    Of equally near ones a larger one is taken while its area is less than twice the picture's.

    Args:
        size: (width, height) of the picture.
        tile: side of a tile.
    """
    width, height = size
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    best, nearest = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        large_enough = width * height > 0.5 * tile * tile * columns * rows
        if distance < nearest or (distance == nearest and large_enough):
            best, nearest = (columns, rows), distance
    return best


class InternVLProcessor:
    """See `minivllm.multimodal.MultiModalProcessor`."""

    modalities: tuple[str, ...] = ("image",)

    def __init__(
        self, directory: Path, config: ModelConfig, tokenizer: TextEncoder, settings: Mapping[str, Any]
    ) -> None:
        self._vision = config.vision
        self._images = ImageProcessor(directory, {**_DEFAULTS, **settings})
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.image_token_id}
        self._start, self._end = (self._id(tokenizer, token, directory) for token in (_START, _END))

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """`<img>`, the placeholders of all tiles, `</img>`; per picture.

        Supplied embeddings are [rows of whole tiles, hidden], or {"image_embeds": …}.
        """
        settings = self._images.settings(settings)
        rows = self._vision.rows_per_tile
        items = [
            supplied_item(source, rows, "a tile has so many")
            if is_supplied(source)
            else self._item(source, settings)
            for source in media
        ]
        return [self._expansion(item) for item in items]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        settings = self._images.settings(settings)
        rows = self._vision.rows_per_tile
        return sum(
            supplied_item(source, rows, "a tile has so many").num_embeddings + 2
            if is_supplied(source)
            else len(list(self._rects(self._grid(source, settings)))) + 2
            for source in media
        )

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _expansion(self, item: MediaItem) -> Expansion:
        count = item.num_embeddings
        ids = (self._start, *(self._vision.image_token_id,) * count, self._end)
        return Expansion(item, ids, (False, *(True,) * count, False))

    def _item(self, picture: Image, settings: Mapping[str, Any]) -> MediaItem:
        pixels = self._images([picture], **settings)["pixel_values"]
        check_square(pixels, self._vision.tower.image_size, settings)
        grid = self._grid(picture, settings)
        rects = tuple(self._rects(grid))
        return MediaItem(
            content_hash=image_hash(picture, settings),
            modality="image",
            num_embeddings=len(rects),
            data={"pixel_values": pixels},
            patches=rects,
            facts={**self._images.facts, "size": picture.size, "mode": picture.mode, "grid": grid},
        )

    def _grid(self, picture: Image, settings: Mapping[str, Any]) -> tuple[int, int]:
        names = ("min_patches", "max_patches", "crop_to_patches")
        least, most, cropped = (settings.get(name, getattr(self._images.hf, name)) for name in names)
        if not cropped:
            return 1, 1
        return tile_grid(picture.size, self._vision.tower.image_size, least, most)

    def _rects(self, grid: tuple[int, int]) -> Iterator[PatchRect]:
        columns, rows = grid
        side = self._vision.tower.grid // self._vision.shuffle
        for row in range(rows):
            for column in range(columns):
                left, top = column / columns, row / rows
                yield from grid_rects(side, side, left=left, top=top, width=1 / columns, height=1 / rows)
        if columns * rows > 1:
            yield from grid_rects(side, side)

    @staticmethod
    def _id(tokenizer: TextEncoder, token: str, directory: Path) -> int:
        found = tokenizer.token_id(token)
        if found is None:
            raise ConfigError(f"{directory}: the tokenizer has no token {token!r}, which InternVL needs")
        return found
