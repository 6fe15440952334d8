"""Who holds which blocks: the tables of requests, and all of a cache's bookkeeping together."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.cache.block_pool import BlockPool
from minivllm.cache.host_pool import HostPool
from minivllm.cache.prefix_index import PrefixIndex
from minivllm.cache.transfers import Transfers

__all__ = ["BlockTable", "CacheState", "HostTable"]


@dataclass(slots=True)
class BlockTable:
    """One request's device blocks in logical order.

    `num_published` counts leading blocks that need no publishing any more; `num_computed` is in
    tokens. `ids` is `blocks` as a tuple, made anew only when blocks change.
    """

    blocks: list[int] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    num_published: int = 0
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class HostTable:
    """A swapped-out request's host blocks in logical order, and how many tokens they hold."""

    blocks: tuple[int, ...]
    num_computed: int


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a `BlockManager` keeps, for those that only read it."""

    block_size: int
    pool: BlockPool
    host_pool: HostPool
    index: PrefixIndex
    transfers: Transfers
    tables: dict[str, BlockTable]
    host_tables: dict[str, HostTable]
