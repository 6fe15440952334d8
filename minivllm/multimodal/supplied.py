"""Embeddings that the user brings: made elsewhere, decoded here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.device import ran_out_of_memory
from minivllm.errors import BadMedia
from minivllm.multimodal.hashing import tensors_hash
from minivllm.request import MediaItem

__all__ = ["checked_embeddings", "checked_rows", "prompt_item"]


def checked_rows(source: Any, hidden_size: int, name: str) -> Tensor:
    """Embeddings of the right shape and type, detached, as a copy that nobody else writes.

    Raises:
        BadMedia: another shape or type, or values that are not finite.
    """
    if not isinstance(source, Tensor):
        raise BadMedia(f"{name} must be a tensor [rows, {hidden_size}], got {type(source).__name__}")
    if source.dim() != 2 or source.shape[1] != hidden_size or len(source) < 1:
        raise BadMedia(f"{name} must have the shape [rows, {hidden_size}], got {list(source.shape)}")
    if not source.dtype.is_floating_point:
        raise BadMedia(f"{name} must be floating point, got {source.dtype}")
    try:
        finite = bool(torch.isfinite(source).all())
    except RuntimeError as error:  # no values, not dense, or a type of eight bits
        if ran_out_of_memory(error):
            raise
        raise BadMedia(
            f"{name} must be dense and at least float16, got {source.dtype} of layout {source.layout} on "
            f"{source.device}"
        ) from error
    if not finite:
        raise BadMedia(f"{name} must be finite, got NaN or infinite values")
    return source.detach().clone()


def checked_embeddings(source: Any, name: str, hidden_size: int) -> Tensor | dict[str, Any]:
    """What stands for one item's encoder output: a tensor, or a mapping with more facts.

    Args:
        source: [rows, hidden], or {name: [rows, hidden], "deepstack": [layers, rows, hidden], …},
            where the model has deepstack, and with what its family needs to place the rows.
        name: "image_embeds" or "video_embeds".

    Returns:
        The same form, its embeddings checked and copied.

    Raises:
        BadMedia: another form, shape or type, or values that are not finite.
    """
    if not isinstance(source, Mapping):
        return checked_rows(source, hidden_size, name)
    checked = {**source, name: checked_rows(source.get(name), hidden_size, name)}
    if (deepstack := source.get("deepstack")) is not None:
        if not isinstance(deepstack, Tensor | list | tuple):
            raise BadMedia(
                f"deepstack must be tensors [rows, {hidden_size}], one per layer, got {deepstack!r}"
            )
        checked["deepstack"] = tuple(checked_rows(layer, hidden_size, "deepstack") for layer in deepstack)
    return checked


def prompt_item(source: Any, hidden_size: int) -> MediaItem:
    """Embeddings of a whole prompt as one item.

    Raises:
        BadMedia: another shape or type, or values that are not finite.
    """
    rows = checked_rows(source, hidden_size, "prompt_embeds")
    digest = tensors_hash("prompt_embeds", {"embeddings": rows}, {})
    return MediaItem(digest, "embeds", len(rows), {"embeddings": rows})
