"""The runner's side of media: encode what the plan says, and put embeddings where the spans are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.device import ran_out_of_memory
from minivllm.errors import InvariantError
from minivllm.layers.probe import threads
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem, ScheduledRequest

__all__ = ["MediaStore"]


class _Piece(NamedTuple):
    """Rows first … last - 1 of an item, which belong at row `place` of the batch."""

    item: MediaItem
    first: int
    last: int
    place: int


class MediaStore:
    """Embeddings by content hash, exactly those that the scheduler's `EncoderCache` says are held.

    What could not be encoded is held as the reason why not, and fails every request that needs it.

    Args:
        model: `encode`s, if it is a vision-language model.
    """

    def __init__(self, model: object) -> None:
        self._model = model
        self._held: dict[str, MediaEmbeddings | str] = {}

    def update(self, evict: Iterable[str], encode: Iterable[MediaItem]) -> None:
        """Drop, then encode, one item at a time, so that no item's bits depend on another.

        Raises:
            InvariantError: something is dropped that is not held, or the model has no encoder.
            MemoryError, torch.OutOfMemoryError: no reason to give an item up; the step may be done again.
        """
        for content_hash in evict:
            if self._held.pop(content_hash, None) is None:
                raise InvariantError(f"media {content_hash} is evicted but not held")
        for item in encode:
            if not isinstance(self._model, VisionLanguageModel):
                raise InvariantError(f"a model without an encoder is to encode an {item.modality}")
            self._held[item.content_hash] = _encode(self._model, item)

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()

    def merge(
        self, embeddings: Tensor, requests: Sequence[ScheduledRequest], first_rows: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], dict[str, str]]:
        """Put media rows in the places of their spans, whatever the token ids there are.

        Args:
            embeddings: [rows, hidden] of the packed token ids; changed in place.
            first_rows: row of each request's first token.

        Returns:
            The embeddings; per decoder layer what is to be added after it, [rows, hidden], -0.0 at
            all other rows; request id → why its media have no embeddings.
        """
        deepstack: list[Tensor] = []
        if any("deepstack" in r.request.capture for r in requests):  # also in steps without media
            layers = getattr(self._model, "num_deepstack_layers", 0)
            deepstack = [torch.full_like(embeddings, -0.0) for _ in range(layers)]
        failures: dict[str, str] = {}
        for r, first_row in zip(requests, first_rows, strict=True):
            for piece in _pieces(r, first_row):
                found = self._find(piece.item, embeddings)
                if isinstance(found, str):
                    failures[r.request_id] = found
                    continue
                where = slice(piece.place, piece.place + piece.last - piece.first)
                embeddings[where] = found.rows[piece.first : piece.last].to(embeddings)
                while len(deepstack) < len(found.deepstack):
                    deepstack.append(torch.full_like(embeddings, -0.0))
                for added, rows in zip(deepstack, found.deepstack, strict=False):
                    added[where] = rows[piece.first : piece.last].to(embeddings)
        return embeddings, deepstack, failures

    def stages(self, r: ScheduledRequest) -> dict[str, NDArray[np.generic]]:
        """What the request asked to see of the items that this step touches."""
        order = list(dict.fromkeys(span.content_hash for span in r.request.media))
        found: dict[str, NDArray[np.generic]] = {}
        for item in {piece.item.content_hash: piece.item for piece in _pieces(r, 0)}.values():
            number = order.index(item.content_hash)
            pixels = [value for name, value in item.data.items() if name.startswith("pixel_values")]
            if "pixel_values" in r.request.capture and pixels:
                found[f"pixel_values.{number}"] = _to_numpy(torch.as_tensor(pixels[0]))
            held = _supplied(item.data) if item.is_supplied else self._held[item.content_hash]
            if "vision" in r.request.capture and isinstance(held, MediaEmbeddings):
                found[f"vision.{number}"] = _to_numpy(held.rows)
        return found

    def _find(self, item: MediaItem, like: Tensor) -> MediaEmbeddings | str:
        if item.is_supplied:
            return _supplied(item.data)
        found = self._held.get(item.content_hash)
        if found is None:
            raise InvariantError(f"{_name(item)} is needed but neither held nor encoded in this step")
        if isinstance(found, MediaEmbeddings) and found.rows.shape[1] != like.shape[1]:
            raise InvariantError(f"{_name(item)} has rows of {found.rows.shape[1]}, not {like.shape[1]}")
        return found


def _encode(model: VisionLanguageModel, item: MediaItem) -> MediaEmbeddings | str:
    """The item's embeddings, or why it has none.

    With ops that keep bits, on one thread: then an item's products have one shape and one order of
    summation, and need no probe.
    """
    try:
        with threads(1) if model.ops.bitwise else nullcontext():
            found = model.encode(item)
    except InvariantError:
        raise
    except Exception as error:  # damaged tensors of one request must not stop the others
        if ran_out_of_memory(error):
            raise
        return f"{_name(item)} cannot be encoded: {type(error).__name__}: {error}"
    for what, rows in (
        ("row", found.rows),
        *((f"deepstack {i} row", d) for i, d in enumerate(found.deepstack)),
    ):
        if len(rows) != item.num_embeddings:
            return f"the encoder made {len(rows)} {what}s of {_name(item)}, not {item.num_embeddings}"
        finite = torch.isfinite(rows).all(dim=-1)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            return f"the embeddings of {_name(item)} are not finite (NaN or infinite) at {what} {first}"
    return found


def _pieces(r: ScheduledRequest, first_row: int) -> Iterator[_Piece]:
    """What this step computes of each span, by rows of the item and of the batch."""
    if not r.request.media or r.request.media[-1].end <= r.start:
        return
    for span in r.request.media:
        start, end = max(span.start, r.start), min(span.end, r.end)
        if start < end:
            row = span.first_row + start - span.start
            item = r.request.media_items[span.content_hash]
            yield _Piece(item, row, row + end - start, first_row + start - r.start)


def _supplied(data: Mapping[str, Any]) -> MediaEmbeddings:
    return MediaEmbeddings(data["embeddings"], tuple(data.get("deepstack", ())))


def _name(item: MediaItem) -> str:
    return f"{item.modality} {item.content_hash[:12]}"


def _to_numpy(rows: Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = rows.detach().to(torch.float32).to("cpu", copy=True).numpy()
    return array
