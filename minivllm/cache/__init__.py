"""The paged KV cache's bookkeeping: who owns which block, and what each block holds.

`BlockPool` counts references and orders free blocks, `HostPool` does so for swapped-out requests,
`PrefixIndex` finds blocks by content, `Transfers` keeps the copies still to be made, and
`BlockManager` ties them to requests. `EncoderCache` does the same for vision embeddings. No tensor
is touched here.
"""

from __future__ import annotations

from minivllm.cache.block_manager import BlockManager, PrefixMatch, PrefixStats
from minivllm.cache.block_pool import NULL_BLOCK, BlockPool, PoolCounts
from minivllm.cache.encoder_cache import EncoderCache
from minivllm.cache.host_pool import HostPool
from minivllm.cache.media_rows import MediaRows
from minivllm.cache.prefix_index import BlockContent, PrefixChain, PrefixIndex
from minivllm.cache.snapshot import BlockOwner, BlockSnapshot, KVSnapshot
from minivllm.cache.transfers import PendingCopies

__all__ = [
    "NULL_BLOCK",
    "BlockContent",
    "BlockManager",
    "BlockOwner",
    "BlockPool",
    "BlockSnapshot",
    "EncoderCache",
    "HostPool",
    "KVSnapshot",
    "MediaRows",
    "PendingCopies",
    "PoolCounts",
    "PrefixChain",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixStats",
]
