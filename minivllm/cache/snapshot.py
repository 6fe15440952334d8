"""What a KV cache holds at one moment, as plain values: to look at, to draw, to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["BlockOwner", "BlockSnapshot", "KVSnapshot", "MediaRows"]

BlockState = Literal["null", "free", "cached", "in_use"]


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """A request that holds the block, and the block's index in its block table."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows first_row … first_row + num_rows - 1 of an image or video, from slot first_slot on."""

    content_hash: str
    modality: str
    first_row: int
    num_rows: int
    first_slot: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """One block.

    Attributes:
        block_id: its number in its pool.
        state: "null" (never handed out), "free", "cached" (nobody holds it, but its content can
            be hit) or "in_use".
        ref_count: how many hold it.
        owners: who holds it; usually ref_count many, see `BlockManager.snapshot`.
        token_ids: tokens whose KV it holds, in order of its slots.
        first_position: position of its first slot in the sequence; None if it holds nothing.
        num_computed: slots that hold KV, from the first on.
        hash: the first 12 hex digits of its prefix key, if it is published.
        media: rows of images and videos among its tokens.
    """

    block_id: int
    state: BlockState
    ref_count: int = 0
    owners: tuple[BlockOwner, ...] = ()
    token_ids: tuple[int, ...] = ()
    first_position: int | None = None
    num_computed: int = 0
    hash: str | None = None
    media: tuple[MediaRows, ...] = ()


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """All blocks of the device pool and of the host pool, by block id."""

    block_size: int
    blocks: tuple[BlockSnapshot, ...]
    host_blocks: tuple[BlockSnapshot, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: field names as keys, tuples as lists."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
