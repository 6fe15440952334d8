"""Reference counts of all blocks, and the order in which free ones are reused."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from minivllm.errors import ConfigError, InvariantError

__all__ = ["NULL_BLOCK", "BlockPool", "PoolCounts"]

#: The block that is never handed out: padding may point at it.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How a pool stands, in blocks: free + cached + in_use = total.

    Attributes:
        total: blocks that can be handed out (all but the null block).
        free: unreferenced and without reusable content.
        cached: unreferenced, but their content can still be hit.
        in_use: referenced by at least one request.
    """

    total: int
    free: int
    cached: int
    in_use: int


class BlockPool:
    """Hands out block ids 1 … num_blocks - 1; block 0 is the null block.

    Blocks without reusable content are handed out first (the most recently freed first, fresh
    ones in ascending order), then cached ones, the least recently released first. All of it is
    deterministic, and every operation is O(1) per block whatever the size of the pool.

    Raises:
        ConfigError: fewer than two blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a pool needs at least 2 blocks (one is the null block), got num_blocks={num_blocks};"
                " raise num_kv_blocks or kv_cache_memory_bytes"
            )
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the next one is at the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PoolCounts:
        total, free, cached = self.num_blocks - 1, len(self._free), len(self._cached)
        return PoolCounts(total=total, free=free, cached=cached, in_use=total - free - cached)

    def references(self, block_id: int) -> int:
        """How many holders the block has."""
        return self._references[block_id]

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each.

        What a cached block held is lost: the caller takes it out of the prefix index.

        Raises:
            InvariantError: fewer are available; ask `num_available` first. Nothing changes then.
        """
        if count > self.num_available:
            raise InvariantError(f"{count} blocks taken from a pool with {self.num_available} available")
        taken = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._cached.popitem(last=False)[0]
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def hold(self, block_id: int) -> None:
        """Add a reference to a block that is in use or cached (a prefix hit).

        Raises:
            InvariantError: the block is free, so its content is nobody's.
        """
        if self._references[block_id] == 0:
            if block_id not in self._cached:
                raise InvariantError(f"block {block_id} is held although it is neither in use nor cached")
            del self._cached[block_id]
        self._references[block_id] += 1

    def release(self, block_id: int, *, cached: bool) -> None:
        """Drop a reference; with the last one the block is cached or free.

        Raises:
            InvariantError: the block has no reference.
        """
        if self._references[block_id] == 0:
            raise InvariantError(f"block {block_id} is released more often than it was held")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            if cached:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def forget(self, block_id: int) -> None:
        """Make a cached block free: its content may not be hit any more. Others are left alone."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def free_blocks(self) -> Iterator[int]:
        """Ids of the blocks nobody holds and nobody can hit."""
        return iter(self._free)

    def cached_blocks(self) -> Iterator[int]:
        """Ids of the cached blocks, the next to be evicted first."""
        return iter(self._cached)

    def shuffle_free(self, seed: int) -> None:
        """Put the free blocks in another order, drawn from `seed`; nothing may depend on it."""
        random.Random(seed).shuffle(self._free)

    def check_integrity(self) -> None:
        """Check that each block is in exactly one place.

        Raises:
            InvariantError: naming the broken law.
        """
        listed = [*self._free, *self._cached]
        if len(listed) != len(set(listed)):
            raise InvariantError(f"law 'a block is listed once' is broken: {sorted(listed)}")
        if self._references[NULL_BLOCK] != 0 or NULL_BLOCK in listed:
            raise InvariantError("law 'the null block is never handed out' is broken")
        unused = {b for b in range(1, self.num_blocks) if self._references[b] == 0}
        if unused != set(listed):
            wrong = sorted(unused ^ set(listed))
            raise InvariantError(f"law 'a block is either listed or referenced' is broken for blocks {wrong}")
