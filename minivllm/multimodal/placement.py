"""Finds the placeholders of media in a prompt, expands them, and says where the rows go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minivllm.errors import BadMedia
from minivllm.multimodal.processor import Expansion
from minivllm.request import MediaItem, MediaSpan

__all__ = ["Placement", "place"]


@dataclass(frozen=True, slots=True)
class Placement:
    """An expanded prompt.

    Attributes:
        token_ids: with every placeholder expanded.
        spans: runs of tokens that take embedding rows, in order.
        items: content hash → item.
    """

    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    items: dict[str, MediaItem]


def place(
    token_ids: Sequence[int],
    expansions: Mapping[str, Sequence[Expansion]],
    placeholder_ids: Mapping[str, int],
) -> Placement:
    """Put expansions where their placeholders are.

    The prompt holds either one placeholder per item, or every item's whole expansion already, as
    when its ids come from another processor; a prompt of the second kind is taken as it is.

    Args:
        expansions: modality → its items in order.
        placeholder_ids: modality → token id; modalities may share one if only one is used.

    Raises:
        BadMedia: more or fewer placeholders than items, with both numbers.
    """
    parts = _match_expanded(token_ids, expansions)
    if parts is None:
        _check_counts(token_ids, expansions, placeholder_ids)
        parts = list(_match_single(token_ids, expansions, placeholder_ids))
    placed: list[int] = []
    spans: list[MediaSpan] = []
    items: dict[str, MediaItem] = {}
    for part in parts:
        if isinstance(part, Expansion):
            spans += _spans(part, len(placed))
            placed += part.token_ids
            items[part.item.content_hash] = part.item
        else:
            placed.append(part)
    return Placement(placed, tuple(spans), items)


def _match_single(
    token_ids: Sequence[int],
    expansions: Mapping[str, Sequence[Expansion]],
    placeholder_ids: Mapping[str, int],
) -> Iterator[int | Expansion]:
    """The prompt's tokens, with the next item of a modality for each of its placeholders."""
    following = {placeholder_ids[modality]: iter(items) for modality, items in expansions.items() if items}
    for token in token_ids:
        yield next(following[token]) if token in following else token


def _match_expanded(
    token_ids: Sequence[int], expansions: Mapping[str, Sequence[Expansion]]
) -> list[int | Expansion] | None:
    """The prompt's tokens with every expansion found in it, in order; None if one is missing."""
    waiting = {modality: list(items) for modality, items in expansions.items() if items}
    ids = tuple(token_ids)
    found: list[int | Expansion] = []
    position = 0
    while position < len(ids):
        for items in waiting.values():
            if items and ids[position : position + len(items[0].token_ids)] == items[0].token_ids:
                expansion = items.pop(0)
                found.append(expansion)
                position += len(expansion.token_ids)
                break
        else:
            found.append(ids[position])
            position += 1
    return None if any(waiting.values()) or not waiting else found


def _check_counts(
    token_ids: Sequence[int],
    expansions: Mapping[str, Sequence[Expansion]],
    placeholder_ids: Mapping[str, int],
) -> None:
    count = Counter(token_ids)
    for modality, placeholder in placeholder_ids.items():
        given = len(expansions.get(modality, ()))
        if any(
            expansions.get(m)
            for m, other in placeholder_ids.items()
            if other == placeholder and m != modality
        ):
            continue  # counted with the modality that shares the token
        if count[placeholder] == given:
            continue
        if not given:
            raise BadMedia(
                f"the prompt has {count[placeholder]} {modality} placeholders (token {placeholder}) but no "
                f"{modality} was given: extra placeholders"
            )
        wanted = sum(sum(e.is_embed) for e in expansions[modality])
        raise BadMedia(
            f"the prompt has {count[placeholder]} {modality} placeholders (token {placeholder}) for {given} "
            f"{modality}s; it needs one for each, or their whole expansions with {wanted}"
        )


def _spans(expansion: Expansion, start: int) -> Iterator[MediaSpan]:
    """Runs of the expansion that take rows, when its first token is at `start`."""
    item, row, first = expansion.item, 0, None
    for offset, takes_row in enumerate((*expansion.is_embed, False)):
        if takes_row and first is None:
            first = offset
        elif not takes_row and first is not None:
            length = offset - first
            yield MediaSpan(start + first, length, item.modality, item.content_hash, row, expansion.whole)
            row += offset - first
            first = None
