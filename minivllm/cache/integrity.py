"""The laws between tables, pools, prefix index and pending copies. Slow, for tests."""

from __future__ import annotations

from collections import Counter

from minivllm.cache.tables import BlockTable, CacheState
from minivllm.errors import InvariantError

__all__ = ["check_blocks"]


def check_blocks(state: CacheState) -> None:
    """Check every law of a `BlockManager`. Takes time in proportion to the pools.

    Raises:
        InvariantError: naming the broken law.
    """
    state.pool.check_integrity()
    state.host_pool.check_integrity()
    state.index.check_integrity()
    _check_references(state)
    for block_id in state.pool.cached_blocks():
        if block_id not in state.index:
            raise InvariantError(f"law 'a cached block is published' is broken: block {block_id}")
    for block_id in state.pool.free_blocks():
        if block_id in state.index:
            raise InvariantError(f"law 'a free block is not published' is broken: block {block_id}")
    for request_id, table in state.tables.items():
        _check_table(state, request_id, table)
    _check_writable(state)
    _check_host(state)
    _check_pending(state)


def _check_references(state: CacheState) -> None:
    holders = Counter(block_id for table in state.tables.values() for block_id in table.blocks)
    holders.update(state.transfers.pinned())
    for block_id in range(state.pool.num_blocks):
        if state.pool.references(block_id) != holders[block_id]:
            raise InvariantError(
                f"law 'references equal holders' is broken: block {block_id} has"
                f" {state.pool.references(block_id)} references and {holders[block_id]} holders"
            )


def _check_table(state: CacheState, request_id: str, table: BlockTable) -> None:
    if table.ids != tuple(table.blocks):
        raise InvariantError(f"law 'the block table is what was handed out' is broken: {request_id!r}")
    if len(set(table.blocks)) != len(table.blocks):
        raise InvariantError(f"law 'a table holds a block once' is broken: {request_id!r}: {table.ids}")
    if table.num_computed > len(table.blocks) * state.block_size:
        raise InvariantError(f"law 'computed tokens have a block' is broken: {request_id!r}")
    if table.num_published * state.block_size > table.num_computed:
        raise InvariantError(f"law 'published means computed' is broken: {request_id!r}")
    if request_id in state.host_tables:
        raise InvariantError(f"law 'blocks are on the device or on the host' is broken: {request_id!r}")


def _check_writable(state: CacheState) -> None:
    """Whoever writes a block holds it alone, so all holders have computed equally far in it."""
    filled: dict[int, int] = {}
    for request_id, table in state.tables.items():
        for index, block_id in enumerate(table.blocks):
            mine = max(0, min(state.block_size, table.num_computed - index * state.block_size))
            if filled.setdefault(block_id, mine) != mine:
                raise InvariantError(
                    f"law 'a block is not written while others hold it' is broken: block {block_id} of"
                    f" {request_id!r}"
                )


def _check_host(state: CacheState) -> None:
    held = [block_id for table in state.host_tables.values() for block_id in table.blocks]
    for request_id in state.transfers.swap_in_requests():
        held += [copy.source for copy in state.transfers.swapping_in(request_id)]
    if sorted(held) != list(state.host_pool.used_blocks()):
        raise InvariantError(
            f"law 'a used host block has one holder' is broken: held {sorted(held)}, used"
            f" {list(state.host_pool.used_blocks())}"
        )
    for request_id, host_table in state.host_tables.items():
        if len(host_table.blocks) != -(-host_table.num_computed // state.block_size):
            raise InvariantError(f"law 'a host table holds computed tokens' is broken: {request_id!r}")


def _check_pending(state: CacheState) -> None:
    pending = state.transfers.pending()
    used = set(state.host_pool.used_blocks())
    for copy in pending.swap_out:
        if copy.target not in used:
            raise InvariantError(f"law 'a swap-out ends in a block in use' is broken: {copy}")
    for request_id in state.transfers.swap_in_requests():
        table = state.tables.get(request_id)
        targets = [copy.target for copy in state.transfers.swapping_in(request_id)]
        if table is None or table.blocks[: len(targets)] != targets:
            raise InvariantError(f"law 'a swap-in ends in the request's blocks' is broken: {request_id!r}")
    for copy in pending.copies:
        if state.pool.references(copy.target) != 1:
            raise InvariantError(f"law 'a copy on write has one owner' is broken: {copy}")
