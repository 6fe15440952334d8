"""Gives requests their blocks: new, cached, shared, copied on write, or back from host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minivllm.cache.block_pool import NULL_BLOCK, BlockPool, PoolCounts
from minivllm.cache.host_pool import HostPool
from minivllm.cache.integrity import check_blocks
from minivllm.cache.prefix_index import PrefixChain, PrefixIndex
from minivllm.cache.snapshot import KVSnapshot, take_snapshot
from minivllm.cache.tables import BlockTable, CacheState, HostTable
from minivllm.cache.transfers import PendingCopies, Transfers
from minivllm.errors import ConfigError, InvariantError
from minivllm.request import BlockCopy, Request
from minivllm.trace import (
    Allocated,
    Copied,
    Evicted,
    Forked,
    PrefixHit,
    Published,
    SwappedIn,
    SwappedOut,
    TraceSink,
    no_trace,
)

__all__ = ["BlockManager", "PrefixMatch", "PrefixStats"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Computed blocks that hold the beginning of a request, and how many tokens they hold."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """How useful the prefix cache was, over first admissions; resumptions do not count.

    Attributes:
        num_requests: admissions that looked into the cache.
        num_queried_tokens: tokens of those requests.
        num_hit_tokens: tokens they found.
    """

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class BlockManager:
    """Block tables of all requests, over a device pool and a host pool.

    A refused call (one that returns False) changes nothing. A block is published only by
    `publish`, that is once its KV has been computed. A freed request's blocks go back tail first,
    so a prefix loses its end before its beginning (vLLM issue 48489).

    Several requests hold one block after a prefix hit, where it is full and never written again,
    or after a `fork`. The forked ones share an unfinished block too, until one of them is about to
    write it: `append` then gives that one a copy.

    A request holds device blocks, or, swapped out, host blocks. `swap_out`, `swap_in` and copies
    on write only note what has to be copied: put `pending_copies` into the next plan, and tell
    `copies_done` when it was carried out.

    Args:
        num_blocks: size of the device pool in blocks, the null block included.
        block_size: tokens per block, any positive number.
        enable_prefix_caching: off, nothing is published and nothing is found.
        prefix_seed: fixes the root of the prefix keys; None: random per process.
        num_host_blocks: size of the host pool in blocks, all of them usable.
        trace: receives Allocated, PrefixHit, Published, Evicted, Forked, Copied, SwappedOut and
            SwappedIn.

    Raises:
        ConfigError: block_size below 1, fewer than two blocks, or a negative host pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        prefix_seed: int | None = None,
        num_host_blocks: int = 0,
        trace: TraceSink = no_trace,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size must be a positive number of tokens, got {block_size}")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostPool(num_host_blocks)
        self.index = PrefixIndex(block_size, prefix_seed)
        self._tables: dict[str, BlockTable] = {}
        self._host_tables: dict[str, HostTable] = {}
        self._transfers = Transfers()
        self._chains: dict[str, PrefixChain] = {}
        self._stats = PrefixStats()
        self._trace = trace

    # --- questions (pure) -------------------------------------------------------------------

    @property
    def stats(self) -> PrefixStats:
        """Hit statistics since the start."""
        return self._stats

    def counts(self) -> PoolCounts:
        """How the device pool stands."""
        return self.pool.counts()

    def host_counts(self) -> PoolCounts:
        """How the host pool stands."""
        return self.host_pool.counts()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def has_table(self, request_id: str) -> bool:
        """Whether the request holds device blocks."""
        return request_id in self._tables

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """Ids of the request's device blocks in logical order; empty if it holds none."""
        table = self._tables.get(request_id)
        return table.ids if table else ()

    def host_table(self, request_id: str) -> tuple[int, ...]:
        """Ids of a swapped-out request's host blocks in logical order; empty for any other."""
        table = self._host_tables.get(request_id)
        return table.blocks if table else ()

    def find_prefix(self, request: Request) -> PrefixMatch:
        """The longest computed prefix of a request that leaves at least one token to compute.

        Nothing for requests for prompt logprobs, as only computed tokens have logits (vLLM issue
        3914), and for swapped-out ones, which get back what they computed themselves.
        """
        if not self._reads_cache(request) or request.request_id in self._host_tables:
            return PrefixMatch()
        limit = (request.num_tokens - 1) // self.block_size
        block_ids = self.index.match(self._chain(request), limit)
        return PrefixMatch(block_ids, len(block_ids) * self.block_size)

    def num_missing(self, request: Request, num_blocks: int, prefix: PrefixMatch | None = None) -> int:
        """Blocks to take from the pool until the request can write up to its `num_blocks`-th block.

        Blocks it holds or would find in the cache are not missing; a block that it must copy
        before it can write is. May be asked for more blocks than a table would have, on behalf of
        sequences still to be forked. `prefix` spares the look-up if the caller has just made it.
        """
        table = self._tables.get(request.request_id)
        if table:
            return max(0, num_blocks - len(table.blocks)) + self._must_copy(table)
        if prefix is None:
            prefix = self.find_prefix(request)
        # A hit on a block nobody holds takes that block from the available ones as well.
        revived = sum(self.pool.references(block_id) == 0 for block_id in prefix.block_ids)
        return num_blocks - len(prefix.block_ids) + revived

    def can_fit(self, request: Request, num_tokens: int, prefix: PrefixMatch | None = None) -> bool:
        """Whether there is room now for the KV of the request's first `num_tokens` tokens.

        Tokens it already holds, or would find in the cache, count too; for `prefix` see
        `num_missing`.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        return self.num_missing(request, num_blocks, prefix) <= self.pool.num_available

    def pending_copies(self) -> PendingCopies:
        """What the next plan has to copy before it computes."""
        return self._transfers.pending()

    def unused_slots(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """Slots that hold no computed KV, for poisoning between steps.

        Returns:
            The blocks whose every slot is unused (the null block and the free ones), and the first
            unused slot of each block in use that is not written to its end. Blocks whose last
            content is still to be swapped out are in neither, even if they have a new owner.
        """
        leaving = {copy.source for copy in self._transfers.pending().swap_out}
        partly: dict[int, int] = {}
        for table in self._tables.values():
            for index in range(table.num_computed // self.block_size, len(table.blocks)):
                if table.blocks[index] not in leaving:
                    partly[table.blocks[index]] = max(0, table.num_computed - index * self.block_size)
        free = sorted(block_id for block_id in self.pool.free_blocks() if block_id not in leaving)
        return (NULL_BLOCK, *free), partly

    def unused_host_blocks(self) -> tuple[int, ...]:
        """Host blocks that nobody holds and no pending swap-in reads, for poisoning between steps."""
        used = set(self.host_pool.used_blocks())
        return tuple(block_id for block_id in range(self.host_pool.num_blocks) if block_id not in used)

    def snapshot(self, requests: Mapping[str, Request]) -> KVSnapshot:
        """Every block with its holders and content. Takes time in proportion to the pools.

        Args:
            requests: at least those that hold blocks, by id.
        """
        return take_snapshot(self._state(), requests)

    # --- changes ----------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int, prefix: PrefixMatch | None = None) -> bool:
        """Give a request without blocks its cached prefix and room up to `num_tokens` tokens.

        Args:
            num_tokens: tokens whose KV must have room, hits included.
            prefix: what `find_prefix` has just answered; None looks it up.

        Returns:
            False if there is no room; nothing has changed then.

        Raises:
            InvariantError: the request holds blocks, or num_tokens ends inside the prefix.
        """
        self._refuse_holder(request.request_id)
        if prefix is None:
            prefix = self.find_prefix(request)
        if num_tokens <= prefix.num_tokens:
            raise InvariantError(
                f"request {request.request_id!r} is allocated {num_tokens} tokens, all of them in its"
                f" cached prefix of {prefix.num_tokens}; at least one must be left to compute"
            )
        if not self.can_fit(request, num_tokens, prefix):
            return False
        for block_id in prefix.block_ids:
            self.pool.hold(block_id)
        table = BlockTable(
            blocks=list(prefix.block_ids),
            num_published=len(prefix.block_ids),
            num_computed=prefix.num_tokens,
        )
        self._tables[request.request_id] = table
        self._record_hit(request, prefix)
        self._extend(request.request_id, table, num_tokens)
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Let a request write up to `num_tokens` tokens: copy what it shares, add what it lacks.

        Returns:
            False if there is no room; nothing has changed then.
        """
        table = self._table(request.request_id)
        if not self.can_fit(request, num_tokens):
            return False
        if self._must_copy(table):
            self._copy_on_write(request.request_id, table)
        self._extend(request.request_id, table, num_tokens)
        return True

    def publish(self, request: Request) -> None:
        """Note how far a request's KV is computed, and publish the blocks that are now full.

        Raises:
            InvariantError: the request holds no blocks, computed more than they hold, or waits for
                copies.
        """
        table = self._table(request.request_id)
        self._refuse_pending(request.request_id, table)
        computed = request.num_computed_tokens
        if computed > len(table.blocks) * self.block_size:
            raise InvariantError(
                f"request {request.request_id!r} computed {computed} tokens in {len(table.blocks)} blocks"
                f" of {self.block_size}"
            )
        table.num_computed = computed
        if not self.enable_prefix_caching:
            return
        chain = self._chain(request)
        for index in range(table.num_published, computed // self.block_size):
            block_id = table.blocks[index]
            self.index.publish(block_id, chain, index)
            self._trace(Published(request.request_id, block_id))
            table.num_published = index + 1

    def fork(self, parent_id: str, child: Request) -> None:
        """Let a new request share all blocks in which its parent has computed anything.

        Args:
            child: a request with the parent's first `num_computed_tokens` tokens, at least.

        Raises:
            InvariantError: the parent holds no blocks or waits for copies, or the child already
                holds some.
        """
        parent = self._table(parent_id)
        self._refuse_pending(parent_id, parent)
        self._refuse_holder(child.request_id)
        blocks = parent.blocks[: self.num_blocks_for(parent.num_computed)]
        for block_id in blocks:
            self.pool.hold(block_id)
        self._tables[child.request_id] = BlockTable(
            blocks, tuple(blocks), parent.num_published, parent.num_computed
        )
        if parent_id in self._chains:
            self._chains[child.request_id] = self._chains[parent_id].fork(child, parent.num_published)
        self._trace(Forked(child.request_id, parent_id, tuple(blocks)))

    def swap_out(self, request_id: str) -> bool:
        """Exchange a request's device blocks for host blocks that hold its computed tokens.

        If its swap-in is still pending, it just keeps the host blocks it came from.

        Returns:
            False if the host pool has no room; nothing has changed then.

        Raises:
            InvariantError: the request holds no device blocks, or nothing is computed in them.
        """
        table = self._table(request_id)
        if table.num_computed < 1:
            raise InvariantError(f"request {request_id!r} is swapped out, but has computed nothing")
        if unfinished := self._transfers.swapping_in(request_id):
            self._transfers.cancel_swap_in(request_id)
            host_blocks = [copy.source for copy in unfinished]
        else:
            computed = table.blocks[: self.num_blocks_for(table.num_computed)]
            if len(computed) > self.host_pool.num_available:
                return False
            host_blocks = self.host_pool.take(len(computed))
            sources = map(self._transfers.source, computed)
            self._transfers.swap_out(map(BlockCopy, sources, host_blocks))
        self._host_tables[request_id] = HostTable(tuple(host_blocks), table.num_computed)
        self._release(request_id)
        self._trace(SwappedOut(request_id, len(host_blocks)))
        return True

    def swap_in(self, request: Request, num_tokens: int) -> bool:
        """Give a swapped-out request device blocks of its own, with room up to `num_tokens` tokens.

        Returns:
            False if there is no room; nothing has changed then.

        Raises:
            InvariantError: the request is not swapped out, or num_tokens leaves nothing to compute.
        """
        request_id = request.request_id
        host_table = self._host_tables.get(request_id)
        if host_table is None:
            raise InvariantError(f"request {request_id!r} is swapped in, but holds no host blocks")
        if num_tokens <= host_table.num_computed:
            raise InvariantError(
                f"request {request_id!r} is swapped in with room for {num_tokens} tokens, but has computed"
                f" {host_table.num_computed}; at least one must be left to compute"
            )
        if not self.can_fit(request, num_tokens):
            return False
        del self._host_tables[request_id]
        table = self._tables[request_id] = BlockTable(num_computed=host_table.num_computed)
        self._extend(request_id, table, num_tokens)
        targets = table.blocks[: len(host_table.blocks)]
        self._transfers.swap_in(request_id, map(BlockCopy, host_table.blocks, targets))
        self._trace(SwappedIn(request_id, len(targets)))
        return True

    def copies_done(self, carried_out: PendingCopies) -> None:
        """A plan with these copies was run: what only they needed is given back."""
        host_blocks, sources = self._transfers.done(carried_out)
        self.host_pool.release(host_blocks)
        for block_id in sources:
            self._release_block(block_id)

    def free(self, request_id: str) -> None:
        """Take back a request's blocks, wherever they are; published ones stay hittable.

        A second call does nothing.
        """
        self._chains.pop(request_id, None)
        host_blocks: tuple[int, ...] = ()
        if unfinished := self._transfers.swapping_in(request_id):
            self._transfers.cancel_swap_in(request_id)
            host_blocks = tuple(copy.source for copy in unfinished)
        elif host_table := self._host_tables.pop(request_id, None):
            host_blocks = host_table.blocks
        self._transfers.cancel_swap_out(host_blocks)
        self.host_pool.release(host_blocks)
        if request_id in self._tables:
            self._release(request_id)

    def discard(self, request_id: str) -> None:
        """Free a request whose KV cannot be trusted: its blocks can no longer be hit."""
        for block_id in self.block_table(request_id):
            if self.index.remove(block_id):
                self._trace(Evicted(block_id))
        self.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while any request holds blocks.

        Host blocks count: after a weight update, they too would be of the old weights.
        """
        if self._tables or self._host_tables:
            return False
        self.index.clear()
        for block_id in reversed(list(self.pool.cached_blocks())):
            self.pool.forget(block_id)
        return True

    def check_integrity(self) -> None:
        """Check every law between tables, pools and index. Takes time in proportion to the pools.

        Raises:
            InvariantError: naming the broken law.
        """
        check_blocks(self._state())

    # --- parts ------------------------------------------------------------------------------

    def _state(self) -> CacheState:
        return CacheState(
            self.block_size,
            self.pool,
            self.host_pool,
            self.index,
            self._transfers,
            self._tables,
            self._host_tables,
        )

    def _reads_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _chain(self, request: Request) -> PrefixChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = self.index.chain(request)
        return chain

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise InvariantError(f"request {request_id!r} holds no blocks")
        return table

    def _refuse_holder(self, request_id: str) -> None:
        if request_id in self._tables or request_id in self._host_tables:
            raise InvariantError(f"request {request_id!r} is allocated twice")

    def _refuse_pending(self, request_id: str, table: BlockTable) -> None:
        """What is not in the blocks yet can neither be published nor shared."""
        written = table.num_computed // self.block_size
        waits = bool(self._transfers.swapping_in(request_id))
        if waits or any(self._transfers.source(b) != b for b in table.blocks[written:]):
            raise InvariantError(
                f"the blocks of request {request_id!r} wait for copies; run the plan that has them and"
                " report copies_done first"
            )

    def _must_copy(self, table: BlockTable) -> bool:
        """Whether the block that the request writes next is somebody else's too."""
        index = table.num_computed // self.block_size
        if index >= len(table.blocks):
            return False
        block_id = table.blocks[index]
        return self.pool.references(block_id) - self._transfers.pins(block_id) > 1

    def _copy_on_write(self, request_id: str, table: BlockTable) -> None:
        index = table.num_computed // self.block_size
        source = table.blocks[index]
        (target,) = self._take(1)
        table.blocks[index] = target
        table.ids = tuple(table.blocks)
        self._transfers.copy_on_write(BlockCopy(source, target))
        self._trace(Copied(request_id, source, target))

    def _extend(self, request_id: str, table: BlockTable, num_tokens: int) -> None:
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return
        taken = self._take(missing)
        table.blocks += taken
        table.ids = tuple(table.blocks)
        self._trace(Allocated(request_id, tuple(taken)))

    def _take(self, count: int) -> list[int]:
        taken = self.pool.take(count)
        for block_id in taken:
            if self.index.remove(block_id):
                self._trace(Evicted(block_id))
        return taken

    def _release(self, request_id: str) -> None:
        """Give back the device blocks of a table, tail first."""
        for block_id in reversed(self._tables.pop(request_id).blocks):
            source = self._transfers.cancel_copy(block_id)
            self._release_block(block_id)
            if source is not None:
                self._release_block(source)

    def _release_block(self, block_id: int) -> None:
        self.pool.release(block_id, cached=block_id in self.index)

    def _record_hit(self, request: Request, prefix: PrefixMatch) -> None:
        resumed = request.num_cached_tokens >= 0
        if self._reads_cache(request) and not resumed:
            self._stats = PrefixStats(
                num_requests=self._stats.num_requests + 1,
                num_queried_tokens=self._stats.num_queried_tokens + request.num_tokens,
                num_hit_tokens=self._stats.num_hit_tokens + prefix.num_tokens,
            )
        if prefix.num_tokens:
            self._trace(PrefixHit(request.request_id, prefix.num_tokens, prefix.block_ids, resumed))
