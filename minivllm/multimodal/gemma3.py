"""Gemma 3: each picture is squeezed into one square, whose rows see one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia, UnsupportedError
from minivllm.multimodal.hashing import image_hash
from minivllm.multimodal.image_embeds import is_supplied, supplied_item
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.llava import check_square
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.rects import grid_rects
from minivllm.request import MediaItem

__all__ = ["Gemma3Processor"]

_NO_CROPS = "pan and scan writes a text of its own around each crop, which is not implemented"

#: What Transformers' processor of the family tells its image processor, where files say null.
_DEFAULTS: Mapping[str, Any] = {"do_convert_rgb": True}


class Gemma3Processor:
    """See `minivllm.multimodal.MultiModalProcessor`."""

    modalities: tuple[str, ...] = ("image",)
    #: In a text, a picture stands in a paragraph of its own.
    around_placeholders: tuple[str, str] = ("\n\n", "\n\n")

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tokenizer: TextEncoder,  # noqa: ARG002 - part of the protocol
        settings: Mapping[str, Any],
    ) -> None:
        """Raises UnsupportedError for a checkpoint that cuts pictures by itself."""
        self._vision = config.vision
        names = ("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops")
        refused = dict.fromkeys((*names, "pan_and_scan_min_ratio_to_activate"), _NO_CROPS)
        self._images = ImageProcessor(directory, {**_DEFAULTS, **settings}, refused=refused)
        if self._images.hf.do_pan_and_scan:
            raise UnsupportedError(f"{directory} has do_pan_and_scan: {_NO_CROPS}")
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.begin_token_id}

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """One run of rows per picture, always equally long, between the tokens of its ends.

        Supplied embeddings are [rows, hidden], or {"image_embeds": …}.
        """
        settings = self._images.settings(settings)
        items = [self._supplied(one) if is_supplied(one) else self._item(one, settings) for one in media]
        vision = self._vision
        return [
            Expansion(
                item,
                (
                    vision.begin_token_id,
                    *(vision.image_token_id,) * item.num_embeddings,
                    vision.end_token_id,
                ),
                (False, *(True,) * item.num_embeddings, False),
                whole=True,
            )
            for item in items
        ]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        return len(media) * (int(self._vision.side) ** 2 + 2)

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _supplied(self, source: Any) -> MediaItem:
        rows = self._vision.side**2
        item = supplied_item(source, rows, "one picture has so many")
        if item.num_embeddings != rows:
            raise BadMedia(f"image_embeds of one picture have {rows} rows, got {item.num_embeddings}")
        return item

    def _item(self, picture: Image, settings: Mapping[str, Any]) -> MediaItem:
        pixels = self._images([picture], **settings)["pixel_values"]
        check_square(pixels, self._vision.tower.image_size, settings)
        side = self._vision.side
        return MediaItem(
            content_hash=image_hash(picture, settings),
            modality="image",
            num_embeddings=side**2,
            data={"pixel_values": pixels},
            patches=tuple(grid_rects(side, side)),
            facts={**self._images.facts, "size": picture.size, "mode": picture.mode},
        )
