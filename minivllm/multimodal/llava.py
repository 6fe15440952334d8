"""LLaVA: each picture is cropped to one square."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia
from minivllm.multimodal.hashing import image_hash
from minivllm.multimodal.image_embeds import is_supplied, supplied_item
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.rects import grid_rects
from minivllm.request import MediaItem, PatchRect

__all__ = ["LlavaProcessor", "check_square"]


def check_square(pixels: Tensor, side: int, settings: Mapping[str, Any]) -> None:
    """Raise BadMedia unless pixel values [..., height, width] are what a tower has positions for."""
    if pixels.shape[-2:] != (side, side):
        raise BadMedia(
            f"the image processor made {pixels.shape[-2]} × {pixels.shape[-1]} pixels where the model takes "
            f"{side} × {side}: leave out the settings about sizes, got {dict(settings)}"
        )


class LlavaProcessor:
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
        self._images = ImageProcessor(directory, settings)
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.image_token_id}

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """One run of placeholders per picture, always equally long.

        Supplied embeddings are [rows, hidden], or {"image_embeds": …}.
        """
        settings = self._images.settings(settings)
        items = []
        for source in media:
            if is_supplied(source):
                rows = self._vision.rows_per_square
                item = supplied_item(source, rows, "one picture has so many")
                if item.num_embeddings != rows:
                    raise BadMedia(f"image_embeds of one picture have {rows} rows, got {item.num_embeddings}")
            else:
                item = self._item(source, settings)
            items.append(item)
        token = self._vision.image_token_id
        return [Expansion(i, (token,) * i.num_embeddings, (True,) * i.num_embeddings) for i in items]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        return len(media) * int(self._vision.rows_per_square)

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _item(self, picture: Image, settings: Mapping[str, Any]) -> MediaItem:
        pixels = self._images([picture], **settings)["pixel_values"]
        check_square(pixels, self._vision.tower.image_size, settings)
        count = self._vision.rows_per_square
        return MediaItem(
            content_hash=image_hash(picture, settings),
            modality="image",
            num_embeddings=count,
            data={"pixel_values": pixels},
            patches=tuple(self._rects(picture, settings))[-count:],
            facts={**self._images.facts, "size": picture.size, "mode": picture.mode},
        )

    def _rects(self, picture: Image, settings: Mapping[str, Any]) -> Iterator[PatchRect]:
        """The square in the middle of the picture, all of it for the class token."""
        cropped = settings.get("do_center_crop", getattr(self._images.hf, "do_center_crop", False))
        side = min(picture.size)
        width, height = (side / picture.width, side / picture.height) if cropped else (1.0, 1.0)
        left, top = (1 - width) / 2, (1 - height) / 2
        if self._vision.has_class_token:
            yield PatchRect(0, left, top, width, height)
        grid = self._vision.tower.grid
        yield from grid_rects(grid, grid, left=left, top=top, width=width, height=height)
