"""What a KV cache holds at one moment, as plain values: to look at, to draw, to compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from minivllm.cache.block_pool import NULL_BLOCK
from minivllm.cache.media_rows import MediaRows, media_rows
from minivllm.cache.prefix_index import BlockContent
from minivllm.cache.tables import CacheState
from minivllm.request import Request

__all__ = ["BlockOwner", "BlockSnapshot", "KVSnapshot", "take_snapshot"]

HASH_DIGITS = 12

BlockState = Literal["null", "free", "cached", "in_use"]


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """A request that holds the block, and the block's index in its block table."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """One block.

    Attributes:
        block_id: its number in its pool.
        state: "null" (never handed out), "free", "cached" (nobody holds it, but its content can
            be hit) or "in_use".
        ref_count: how many hold it: its owners, and copies on write that are still to read it.
        owners: who holds it.
        token_ids: tokens whose KV it holds, in order of its slots.
        first_position: position of its first slot in its sequence; None if it is nobody's.
        num_computed: slots that hold KV, from the first on, once the pending copies are done.
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


def take_snapshot(state: CacheState, requests: Mapping[str, Request]) -> KVSnapshot:
    """Every block of both pools; see `BlockManager.snapshot`."""
    held: dict[int, list[_Held]] = defaultdict(list)
    for request_id, table in state.tables.items():
        for index, block_id in enumerate(table.blocks):
            held[block_id].append(_Held(request_id, index, table.num_computed))
    on_host: dict[int, list[_Held]] = defaultdict(list)
    for request_id, host_table in state.host_tables.items():
        for index, block_id in enumerate(host_table.blocks):
            on_host[block_id].append(_Held(request_id, index, host_table.num_computed))
    for request_id in state.transfers.swap_in_requests():
        for index, copy in enumerate(state.transfers.swapping_in(request_id)):
            on_host[copy.source].append(_Held(request_id, index, state.tables[request_id].num_computed))

    draw = _Draughtsman(state, requests)
    return KVSnapshot(
        block_size=state.block_size,
        blocks=tuple(
            draw.device_block(block_id, held[block_id]) for block_id in range(state.pool.num_blocks)
        ),
        host_blocks=tuple(
            draw.host_block(block_id, on_host[block_id]) for block_id in range(state.host_pool.num_blocks)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Held:
    request_id: str
    index: int
    num_computed: int  # of the request


class _Draughtsman:
    """Turns holders and published contents into block snapshots."""

    def __init__(self, state: CacheState, requests: Mapping[str, Request]) -> None:
        self._state = state
        self._requests = requests
        self._depths: dict[int, int] = {}  # of contents, by object

    def device_block(self, block_id: int, held: Sequence[_Held]) -> BlockSnapshot:
        state = self._state
        published = state.index.content(block_id) if block_id in state.index else None
        digits = published.key.hex()[:HASH_DIGITS] if published else None
        references = state.pool.references(block_id)
        if held:
            return self._in_use(block_id, held, references, digits)
        if published is not None and not references:
            return BlockSnapshot(
                block_id,
                "cached",
                token_ids=published.token_ids,
                first_position=self._depth(published) * state.block_size,
                num_computed=state.block_size,
                hash=digits,
                media=published.media,
            )
        name: BlockState = "null" if block_id == NULL_BLOCK else "in_use" if references else "free"
        return BlockSnapshot(block_id, name, ref_count=references, hash=digits)

    def host_block(self, block_id: int, held: Sequence[_Held]) -> BlockSnapshot:
        return self._in_use(block_id, held, len(held), None) if held else BlockSnapshot(block_id, "free")

    def _in_use(
        self, block_id: int, held: Sequence[_Held], references: int, digits: str | None
    ) -> BlockSnapshot:
        first, size = held[0], self._state.block_size
        request = self._requests[first.request_id]
        start = first.index * size
        end = max(start, min(start + size, first.num_computed))
        spans = sorted(request.media, key=lambda span: span.start)
        return BlockSnapshot(
            block_id,
            "in_use",
            ref_count=references,
            owners=tuple(BlockOwner(h.request_id, h.index) for h in held),
            token_ids=tuple(request.token_ids[start:end]),
            first_position=start,
            num_computed=end - start,
            hash=digits,
            media=media_rows(spans, request.media_items, start, end),
        )

    def _depth(self, content: BlockContent) -> int:
        """How many contents come before this one."""
        path = []
        one: BlockContent | None = content
        while one is not None and id(one) not in self._depths:
            path.append(one)
            one = one.parent
        depth = -1 if one is None else self._depths[id(one)]
        for one in reversed(path):
            depth += 1
            self._depths[id(one)] = depth
        return self._depths[id(content)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
