"""The paged KV cache's bookkeeping: who owns which block, and what each block holds.

`BlockPool` counts references and orders free blocks, `PrefixIndex` finds blocks by content,
`BlockManager` ties both to requests. No tensor is touched here.
"""

from __future__ import annotations

from minivllm.cache.block_manager import BlockManager, PrefixMatch, PrefixStats
from minivllm.cache.block_pool import NULL_BLOCK, BlockPool, PoolCounts
from minivllm.cache.prefix_index import BlockContent, PrefixChain, PrefixIndex
from minivllm.cache.snapshot import BlockOwner, BlockSnapshot, KVSnapshot, MediaRows

__all__ = [
    "NULL_BLOCK",
    "BlockContent",
    "BlockManager",
    "BlockOwner",
    "BlockPool",
    "BlockSnapshot",
    "KVSnapshot",
    "MediaRows",
    "PoolCounts",
    "PrefixChain",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixStats",
]
