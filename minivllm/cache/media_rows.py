"""Which rows of which pictures a run of tokens holds."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minivllm.request import MediaItem, MediaSpan, PatchRect

__all__ = ["MediaRows", "media_rows"]


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows first_row … first_row + num_rows - 1 of an image or video, from slot first_slot on.

    Attributes:
        modality: "image", "video" or "embeds".
        size: width and height of the picture in pixels; None if unknown.
        patches: which part of the picture each of the rows stands for; () if unknown.
    """

    content_hash: str
    first_row: int
    num_rows: int
    first_slot: int
    modality: str = ""
    size: tuple[int, int] | None = None
    patches: tuple[PatchRect, ...] = ()


def media_rows(
    spans: Sequence[MediaSpan],
    items: Mapping[str, MediaItem],
    start: int,
    end: int,
) -> tuple[MediaRows, ...]:
    """The media rows of tokens start … end - 1, with slots counted from `start`.

    Args:
        spans: in order, and apart.
        items: by content hash; one that is missing has no patches to tell.
    """
    found = []
    first_span = bisect.bisect_right(spans, start, key=lambda span: span.end)
    for index in range(first_span, len(spans)):
        span = spans[index]
        if span.start >= end:
            break
        first, last = max(span.start, start), min(span.end, end)
        if first >= last:
            continue
        row = span.first_row + first - span.start
        item = items.get(span.content_hash)
        size = item.facts.get("size") if item is not None else None
        found.append(
            MediaRows(
                span.content_hash,
                row,
                last - first,
                first - start,
                span.modality,
                (int(size[0]), int(size[1])) if size is not None else None,
                item.patches[row : row + last - first] if item is not None else (),
            )
        )
    return tuple(found)
