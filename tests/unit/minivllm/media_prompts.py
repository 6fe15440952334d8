"""What tests of the multimodal families share: pictures, and prompts put together by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from minivllm.multimodal import Expansion
from minivllm.request import MediaItem, MediaSpan

__all__ = ["Placed", "picture", "place"]


class Placed(NamedTuple):
    """An expanded prompt."""

    token_ids: list[int]
    spans: list[MediaSpan]
    items: dict[str, MediaItem]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise of a size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def place(parts: Sequence[list[int] | Expansion]) -> Placed:
    """Token ids and expansions one after another."""
    token_ids: list[int] = []
    spans: list[MediaSpan] = []
    items: dict[str, MediaItem] = {}
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        item, row = part.item, 0
        items[item.content_hash] = item
        start: int | None = None
        for offset, flag in enumerate([*part.is_embed, False]):
            if flag and start is None:
                start = offset
            elif not flag and start is not None:
                length = offset - start
                spans.append(MediaSpan(len(token_ids) + start, length, item.modality, item.content_hash, row))
                row, start = row + length, None
        assert row == item.num_embeddings
        token_ids += part.token_ids
    return Placed(token_ids, spans, items)
