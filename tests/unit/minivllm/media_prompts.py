"""What tests of the multimodal families share: pictures, prompts put together by hand, their logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from minivllm.attention import AttentionMetadata, KVCache
from minivllm.attention.dense import DenseBackend
from minivllm.models import MediaEmbeddings, VisionLanguageModel
from minivllm.multimodal import Expansion, MultiModalProcessor
from minivllm.request import MediaItem, MediaSpan

__all__ = ["Placed", "hf_media", "logits", "picture", "place", "prompt_logits"]

BLOCK = 4


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


def hf_media(placed: Placed) -> dict[str, Tensor]:
    """Arguments of Transformers' model for the media of a prompt, in order, repeated ones repeatedly."""
    given: dict[str, list[Tensor]] = {}
    for span in placed.spans:
        if span.first_row == 0:
            for key, value in placed.items[span.content_hash].data.items():
                given.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in given.items()}


def logits(model: VisionLanguageModel, processor: MultiModalProcessor, placed: Placed, chunk: int) -> Tensor:
    """Logits of all rows of a prompt, as `prompt_logits`."""
    found = processor.positions(*placed)
    return prompt_logits(model, placed, None if found is None else found[0], chunk=chunk)


def prompt_logits(
    model: VisionLanguageModel,
    placed: Placed,
    positions: NDArray[np.int64] | None,
    *,
    chunk: int | None = None,
    encoded: Mapping[str, MediaEmbeddings] | None = None,
) -> Tensor:
    """Logits of all rows, computed `chunk` rows at a time through the paged cache.

    Args:
        positions: [3, tokens], or None for 0, 1, 2, ….
        chunk: None: all at once.
        encoded: embeddings by content hash; None: `model.encode` makes them.
    """
    length = len(placed.token_ids)
    table = tuple(reversed(range(1, length // BLOCK + 2)))
    cache_ = KVCache(
        model.config,
        num_blocks=length // BLOCK + 3,
        block_size=BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backend = DenseBackend(cache_)
    places = torch.arange(length) if positions is None else torch.from_numpy(positions)
    ids = torch.tensor(placed.token_ids)
    hidden = model.embed(ids)
    if encoded is None:
        encoded = {name: model.encode(item) for name, item in placed.items.items()}
    features = max((len(e.deepstack) for e in encoded.values()), default=0)
    deepstack = [torch.full_like(hidden, -0.0) for _ in range(features)]
    for span in placed.spans:
        item, rows = encoded[span.content_hash], slice(span.first_row, span.first_row + span.length)
        hidden[span.start : span.end] = item.rows[rows]
        for added, feature in zip(deepstack, item.deepstack, strict=True):
            added[span.start : span.end] = feature[rows]
    parts = []
    step = chunk or length
    for start in range(0, length, step):
        end = min(start + step, length)
        plan = backend.plan(
            AttentionMetadata(
                query_start_loc=(0, end - start),
                starts=(start,),
                seq_lens=(end,),
                block_tables=(table,),
                slot_mapping=cache_.slots(table, start, end),
                block_size=BLOCK,
            )
        )
        here = [added[start:end] for added in deepstack]
        parts.append(model.logits(model(hidden[start:end], places[..., start:end], plan, None, here)))
    return torch.cat(parts)
