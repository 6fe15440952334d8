"""BLIP-2: each picture is squashed to one square and becomes a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia
from minivllm.models.blip2 import Blip2Config
from minivllm.multimodal.hashing import image_hash, tensors_hash
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.llava import check_square
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.request import MediaItem, PatchRect

__all__ = ["Blip2Processor"]

_WHOLE = PatchRect(0, 0.0, 0.0, 1.0, 1.0)


class Blip2Processor:
    """See `minivllm.multimodal.MultiModalProcessor`. Every row sees the whole picture."""

    modalities: tuple[str, ...] = ("image",)
    #: Prompts name no placeholder: a picture goes before everything, the first token included.
    implicit_placeholders: bool = True

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tokenizer: TextEncoder,  # noqa: ARG002 - part of the protocol
        settings: Mapping[str, Any],
    ) -> None:
        self._vision: Blip2Config = config.vision
        self._hidden = config.hidden_size
        self._images = ImageProcessor(directory, settings)
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.image_token_id}

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """One run of placeholders per picture, always equally long."""
        settings = self._images.settings(settings)
        return [
            self._supplied(source)
            if isinstance(source, Mapping | Tensor)
            else self._picture(source, settings)
            for source in media
        ]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        return self._vision.num_query_tokens * len(media)

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _picture(self, picture: Image, settings: Mapping[str, Any]) -> Expansion:
        pixels = self._images([picture], **settings)["pixel_values"]
        check_square(pixels, self._vision.tower.image_size, settings)
        return self._expansion(
            image_hash(picture, settings),
            {"pixel_values": pixels},
            {**self._images.facts, "size": picture.size, "mode": picture.mode},
        )

    def _supplied(self, source: Mapping[str, Any] | Tensor) -> Expansion:
        given = {"image_embeds": source} if isinstance(source, Tensor) else dict(source)
        if set(given) != {"image_embeds"}:
            raise BadMedia(
                f"supplied embeddings of this model are 'image_embeds', got {sorted(map(str, given))}"
            )
        embeddings = torch.as_tensor(given["image_embeds"])
        wanted = (self._vision.num_query_tokens, self._hidden)
        if embeddings.shape != wanted:
            raise BadMedia(f"a picture needs embeddings {list(wanted)}, got {list(embeddings.shape)}")
        hashed = tensors_hash("image_embeds", {"image_embeds": embeddings}, {})
        return self._expansion(hashed, {"embeddings": embeddings}, {})

    def _expansion(self, content_hash: str, data: Mapping[str, Any], facts: Mapping[str, Any]) -> Expansion:
        count = self._vision.num_query_tokens
        item = MediaItem(
            content_hash=content_hash,
            modality="image",
            num_embeddings=count,
            data=data,
            patches=(_WHOLE,) * count,
            facts=facts,
        )
        return Expansion(item, (self._vision.image_token_id,) * count, (True,) * count)
