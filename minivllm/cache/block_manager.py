"""Gives requests their blocks, reusing computed prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minivllm.cache.block_pool import NULL_BLOCK, BlockPool, PoolCounts
from minivllm.cache.prefix_index import PrefixChain, PrefixIndex
from minivllm.errors import ConfigError, InvariantError
from minivllm.request import Request
from minivllm.trace import Allocated, Evicted, PrefixHit, Published, TraceSink, no_trace

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


@dataclass(slots=True)
class _Table:
    """One request's blocks in logical order.

    `num_published` counts leading blocks that need no publishing any more; `num_computed` is in
    tokens. `ids` is `blocks` as a tuple, made anew only when blocks were added.
    """

    blocks: list[int] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    num_published: int = 0
    num_computed: int = 0


class BlockManager:
    """Block tables of all requests over one pool.

    A refused call (`can_fit`, `allocate`, `append` returning False) changes nothing. A block is
    published only by `publish`, that is once its KV has been computed. A freed request's blocks
    go back tail first, so a prefix loses its end before its beginning (vLLM issue 48489).

    Args:
        num_blocks: size of the pool in blocks, the null block included.
        block_size: tokens per block, any positive number.
        enable_prefix_caching: off, nothing is published and nothing is found.
        prefix_seed: fixes the root of the prefix keys; None: random per process.
        num_host_blocks: size of the host pool for swapped-out requests, all of it usable.
        trace: receives Allocated, PrefixHit, Published and Evicted.

    Raises:
        ConfigError: block_size below 1, or fewer than two blocks.
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
        self.num_host_blocks = num_host_blocks
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(block_size, prefix_seed)
        self._tables: dict[str, _Table] = {}
        self._chains: dict[str, PrefixChain] = {}
        self._stats = PrefixStats()
        self._trace = trace

    # --- questions (pure) -------------------------------------------------------------------

    @property
    def stats(self) -> PrefixStats:
        """Hit statistics since the start."""
        return self._stats

    def counts(self) -> PoolCounts:
        """How the pool stands."""
        return self.pool.counts()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def has_table(self, request_id: str) -> bool:
        """Whether the request holds blocks."""
        return request_id in self._tables

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """Ids of the request's blocks in logical order; empty if it holds none."""
        table = self._tables.get(request_id)
        return table.ids if table else ()

    def find_prefix(self, request: Request) -> PrefixMatch:
        """The longest computed prefix of a request that leaves at least one token to compute.

        Requests for prompt logprobs find nothing: only computed tokens have logits (vLLM
        issue 3914).
        """
        if not self._reads_cache(request):
            return PrefixMatch()
        limit = (request.num_tokens - 1) // self.block_size
        block_ids = self.index.match(self._chain(request), limit)
        return PrefixMatch(block_ids, len(block_ids) * self.block_size)

    def can_fit(self, request: Request, num_tokens: int, prefix: PrefixMatch | None = None) -> bool:
        """Whether there is room now for the KV of the request's first `num_tokens` tokens.

        Tokens it already holds or would find in the cache count too. `prefix` spares the look-up
        when the caller has just made it.
        """
        needed = self.num_blocks_for(num_tokens)
        table = self._tables.get(request.request_id)
        if table:
            return needed - len(table.blocks) <= self.pool.num_available
        if prefix is None:
            prefix = self.find_prefix(request)
        # A hit on a block nobody holds takes that block from the available ones as well.
        revived = sum(self.pool.references(block_id) == 0 for block_id in prefix.block_ids)
        return needed - len(prefix.block_ids) + revived <= self.pool.num_available

    def unused_slots(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """Slots that hold no computed KV, for poisoning between steps.

        Returns:
            The blocks whose every slot is unused (the null block and the free ones), and the
            first unused slot of each block in use that is not written to its end.
        """
        partly: dict[int, int] = {}
        for table in self._tables.values():
            for index in range(table.num_computed // self.block_size, len(table.blocks)):
                partly[table.blocks[index]] = max(0, table.num_computed - index * self.block_size)
        return (NULL_BLOCK, *sorted(self.pool.free_blocks())), partly

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
        if request.request_id in self._tables:
            raise InvariantError(f"request {request.request_id!r} is allocated twice")
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
        table = _Table(
            blocks=list(prefix.block_ids),
            ids=prefix.block_ids,
            num_published=len(prefix.block_ids),
            num_computed=prefix.num_tokens,
        )
        self._tables[request.request_id] = table
        self._record_hit(request, prefix)
        self._extend(request, table, num_tokens)
        return True

    def append(self, request: Request, num_tokens: int) -> bool:
        """Add blocks to a request's table until it has room for `num_tokens` tokens.

        Returns:
            False if there is no room; nothing has changed then.
        """
        table = self._table(request.request_id)
        if not self.can_fit(request, num_tokens):
            return False
        self._extend(request, table, num_tokens)
        return True

    def publish(self, request: Request) -> None:
        """Note how far a request's KV is computed, and publish the blocks that are now full.

        Raises:
            InvariantError: the request holds no blocks, or computed more than they hold.
        """
        table = self._table(request.request_id)
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

    def free(self, request_id: str) -> None:
        """Take back a request's blocks; published ones stay hittable. A second call does nothing."""
        self._chains.pop(request_id, None)
        table = self._tables.pop(request_id, None)
        if table:
            for block_id in reversed(table.blocks):
                self.pool.release(block_id, cached=block_id in self.index)

    def discard(self, request_id: str) -> None:
        """Free a request whose KV cannot be trusted: its blocks can no longer be hit."""
        for block_id in self.block_table(request_id):
            if self.index.remove(block_id):
                self._trace(Evicted(block_id))
        self.free(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing changes, while any block is in use."""
        if self._tables:
            return False
        self.index.clear()
        for block_id in reversed(list(self.pool.cached_blocks())):
            self.pool.forget(block_id)
        return True

    def check_integrity(self) -> None:
        """Check every law between tables, pool and index. Takes time in proportion to the pool.

        Raises:
            InvariantError: naming the broken law.
        """
        self.pool.check_integrity()
        self.index.check_integrity()
        holders = Counter(block_id for table in self._tables.values() for block_id in table.blocks)
        for block_id in range(self.pool.num_blocks):
            if self.pool.references(block_id) != holders[block_id]:
                raise InvariantError(
                    f"law 'references equal holders' is broken: block {block_id} has"
                    f" {self.pool.references(block_id)} references and {holders[block_id]} holders"
                )
        for block_id in self.pool.cached_blocks():
            if block_id not in self.index:
                raise InvariantError(f"law 'a cached block is published' is broken: block {block_id}")
        for block_id in self.pool.free_blocks():
            if block_id in self.index:
                raise InvariantError(f"law 'a free block is not published' is broken: block {block_id}")
        for request_id, table in self._tables.items():
            self._check_table(request_id, table)

    def _check_table(self, request_id: str, table: _Table) -> None:
        if table.ids != tuple(table.blocks):
            raise InvariantError(f"law 'the block table is what was handed out' is broken: {request_id!r}")
        if len(set(table.blocks)) != len(table.blocks):
            raise InvariantError(f"law 'a table holds a block once' is broken: {request_id!r}: {table.ids}")
        if table.num_computed > len(table.blocks) * self.block_size:
            raise InvariantError(f"law 'computed tokens have a block' is broken: {request_id!r}")
        if table.num_published * self.block_size > table.num_computed:
            raise InvariantError(f"law 'published means computed' is broken: {request_id!r}")

    # --- parts ------------------------------------------------------------------------------

    def _reads_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _chain(self, request: Request) -> PrefixChain:
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = self._chains[request.request_id] = self.index.chain(request)
        return chain

    def _table(self, request_id: str) -> _Table:
        table = self._tables.get(request_id)
        if table is None:
            raise InvariantError(f"request {request_id!r} holds no blocks")
        return table

    def _extend(self, request: Request, table: _Table, num_tokens: int) -> None:
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return
        taken = self.pool.take(missing)
        for block_id in taken:
            if self.index.remove(block_id):
                self._trace(Evicted(block_id))
        table.blocks += taken
        table.ids = tuple(table.blocks)
        self._trace(Allocated(request.request_id, tuple(taken)))

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
