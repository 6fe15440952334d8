"""Which host blocks are free. They hold the KV of swapped-out requests, one owner each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minivllm.cache.block_pool import PoolCounts
from minivllm.errors import ConfigError, InvariantError

__all__ = ["HostPool"]


class HostPool:
    """Hands out host block ids 0 … num_blocks - 1, the most recently released first.

    A host block is never shared and never cached, so there is nothing to count but use. Every
    operation is O(1) per block, whatever the size of the pool.

    Raises:
        ConfigError: a negative number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ConfigError(f"the host pool's size must not be negative, got num_host_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the next one is at the end
        self._used: set[int] = set()

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._free)

    def counts(self) -> PoolCounts:
        """How the pool stands; nothing is ever cached in it."""
        return PoolCounts(total=self.num_blocks, free=len(self._free), cached=0, in_use=len(self._used))

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks.

        Raises:
            InvariantError: fewer are available; ask `num_available` first. Nothing changes then.
        """
        if count > len(self._free):
            raise InvariantError(f"{count} blocks taken from a host pool with {len(self._free)} available")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            InvariantError: one of them is not in use.
        """
        for block_id in block_ids:
            if block_id not in self._used:
                raise InvariantError(f"host block {block_id} is released, but it is not in use")
            self._used.remove(block_id)
            self._free.append(block_id)

    def used_blocks(self) -> Iterator[int]:
        """Ids of the blocks in use, ascending."""
        return iter(sorted(self._used))

    def check_integrity(self) -> None:
        """Check that each block is either free or in use.

        Raises:
            InvariantError: naming the broken law.
        """
        if sorted([*self._free, *self._used]) != list(range(self.num_blocks)):
            raise InvariantError(
                f"law 'a host block is either free or in use' is broken: {sorted(self._free)} are free and"
                f" {sorted(self._used)} in use of {self.num_blocks}"
            )
