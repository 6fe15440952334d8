"""Items of supplied embeddings, for families that need to know nothing but the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from minivllm.errors import BadMedia
from minivllm.multimodal.hashing import tensors_hash
from minivllm.request import MediaItem

__all__ = ["is_supplied", "supplied_item"]

_NAME = "image_embeds"


def is_supplied(source: Any) -> bool:
    """Whether this is embeddings, and not a picture to encode."""
    return isinstance(source, Mapping | Tensor)


def supplied_item(source: Mapping[str, Any] | Tensor, rows_of: int, unit: str) -> MediaItem:
    """The item of [rows, hidden], or of {"image_embeds": [rows, hidden]}.

    Args:
        source: as `minivllm.multimodal.checked_embeddings` leaves it.
        rows_of: the number of rows must be a multiple of it.
        unit: what has so many rows, for messages.

    Raises:
        BadMedia: more than rows, or another number of them.
    """
    if isinstance(source, Mapping):
        if set(source) != {_NAME}:
            raise BadMedia(
                f"supplied embeddings of this model are a tensor or {{{_NAME!r}: tensor}}, "
                f"got {sorted(map(str, source))}"
            )
        source = source[_NAME]
    assert isinstance(source, Tensor)
    if len(source) % rows_of:
        raise BadMedia(f"{_NAME} must be a multiple of {rows_of} rows ({unit}), got {len(source)}")
    return MediaItem(
        content_hash=tensors_hash(_NAME, {"embeddings": source}, {}),
        modality="image",
        num_embeddings=len(source),
        data={"embeddings": source},
    )
