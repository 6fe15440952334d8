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

    def expand(self, modality: str, media: Sequence[Image], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002
        """One run of placeholders per picture, always equally long."""
        settings = self._images.settings(settings)
        return [self._expand(picture, settings) for picture in media]

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _expand(self, picture: Image, settings: Mapping[str, Any]) -> Expansion:
        pixels = self._images([picture], **settings)["pixel_values"]
        check_square(pixels, self._vision.tower.image_size, settings)
        count = self._vision.rows_per_square
        item = MediaItem(
            content_hash=image_hash(picture, settings),
            modality="image",
            num_embeddings=count,
            data={"pixel_values": pixels},
            patches=tuple(self._rects(picture, settings))[-count:],
            facts={**self._images.facts, "size": picture.size, "mode": picture.mode},
        )
        return Expansion(item, (self._vision.image_token_id,) * count, (True,) * count)

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
