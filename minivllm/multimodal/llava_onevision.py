"""LLaVA-OneVision: a picture alone is tiled, one among several is padded to a square.

The number of placeholders follows from the picture's shape; see
`minivllm.models.llava_onevision.feature_size`, which the model uses too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError
from minivllm.models.llava_onevision import feature_size
from minivllm.multimodal.hashing import image_hash
from minivllm.multimodal.image_embeds import is_supplied, supplied_item
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.llava import check_square
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.rects import grid_rects
from minivllm.request import MediaItem, PatchRect

__all__ = ["LlavaOnevisionProcessor"]


class LlavaOnevisionProcessor:
    """See `minivllm.multimodal.MultiModalProcessor`."""

    modalities: tuple[str, ...] = ("image",)

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tokenizer: TextEncoder,  # noqa: ARG002 - part of the protocol
        settings: Mapping[str, Any],
    ) -> None:
        self._vision = config.vision
        reason = "the model reads it from config.json"
        self._images = ImageProcessor(directory, settings, refused={"image_grid_pinpoints": reason})
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.image_token_id}
        found = tuple(tuple(point) for point in self._images.hf.image_grid_pinpoints)
        if found != self._vision.pinpoints:
            raise ConfigError(
                f"{directory}: image_grid_pinpoints of the image processor {found} are not those of "
                f"config.json {self._vision.pinpoints}"
            )

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """One run of placeholders per picture; how many depends on how many pictures there are.

        Supplied embeddings are [rows, hidden], or {"image_embeds": …}; they count among the
        pictures.
        """
        settings = self._images.settings(settings)
        pictures = [source for source in media if not is_supplied(source)]
        made = iter(self._items(pictures, len(media), settings))
        items = [
            supplied_item(source, 1, "any number") if is_supplied(source) else next(made) for source in media
        ]
        token = self._vision.image_token_id
        return [Expansion(i, (token,) * i.num_embeddings, (True,) * i.num_embeddings) for i in items]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        shown = self._tiled if len(media) == 1 else self._padded
        return sum(
            supplied_item(source, 1, "any number").num_embeddings
            if is_supplied(source)
            else len(list(shown(source)))
            for source in media
        )

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _items(self, pictures: list[Image], count: int, settings: Mapping[str, Any]) -> list[MediaItem]:
        """The items of all pictures of a prompt that has `count`, supplied ones included."""
        if not pictures:
            return []
        # One list per prompt: the number of pictures in it decides whether they are tiled.
        whole = [*pictures, *[pictures[0]] * (count - len(pictures))]
        made = self._images([whole], **settings)
        check_square(made["pixel_values"], self._vision.tower.image_size, settings)
        return [
            self._item(picture, made["pixel_values"][i : i + 1], made["image_sizes"][i : i + 1], settings)
            for i, picture in enumerate(pictures)
        ]

    def _item(self, picture: Image, pixels: Tensor, sizes: Tensor, settings: Mapping[str, Any]) -> MediaItem:
        tiles = pixels.shape[1] - 1
        rects = tuple(self._tiled(picture) if tiles else self._padded(picture))
        return MediaItem(
            # Alone or among others, the same picture has other embeddings.
            content_hash=image_hash(picture, {"settings": settings, "tiles": tiles}),
            modality="image",
            num_embeddings=len(rects),
            data={"pixel_values": pixels, "image_sizes": sizes},
            patches=rects,
            facts={**self._images.facts, "size": picture.size, "mode": picture.mode, "tiles": tiles},
        )

    def _tiled(self, picture: Image) -> Iterator[PatchRect]:
        """The overview, then the lines of the tiles, each ended by a row at the right edge."""
        lines, columns = feature_size((picture.height, picture.width), self._vision)
        yield from grid_rects(
            self._vision.rows_per_square // self._vision.tower.grid, self._vision.tower.grid
        )
        for line in range(lines):
            top, height = line / lines, 1 / lines
            yield from grid_rects(1, columns, top=top, height=height)
            yield PatchRect(0, 1.0, top, 0.0, height)

    def _padded(self, picture: Image) -> Iterator[PatchRect]:
        """The picture in the middle of a square, then a row at its end."""
        side = max(picture.size)
        width, height = side / picture.width, side / picture.height
        grid = self._vision.tower.grid
        yield from grid_rects(
            grid, grid, left=(1 - width) / 2, top=(1 - height) / 2, width=width, height=height
        )
        yield PatchRect(0, 1.0, 1.0, 0.0, 0.0)
