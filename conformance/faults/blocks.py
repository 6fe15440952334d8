"""Faults of blocks and their reference counts."""

from __future__ import annotations

from typing import Any

from conformance.faults.base import NANO, Seam, Table
from minivllm.attention import KVCache, kv_cache
from minivllm.attention import base as attention_base
from minivllm.cache import BlockManager
from minivllm.cache import block_pool as block_pool_module
from minivllm.scheduler import Scheduler

__all__ = ["KV_CACHE"]

KV_CACHE = Table("kv-cache")


# --- blocks and reference counts -----------------------------------------------------------------


@KV_CACHE.add(
    "double-free-of-the-last-block",
    "kv-cache/two-fit-exactly",
    origin="https://github.com/sgl-project/sglang-jax/pull/982",
    at="BlockManager.free: last block twice",
    detector="pool_conserved",
)
def _double_free(seam: Seam) -> None:
    """The end of a request is freed by two paths."""

    def twice(self: BlockManager, request_id: str) -> None:
        last = self.block_table(request_id)[-1:]
        genuine(self, request_id)
        again = [block for block in last if block in self.pool._free]
        seam.fire(again)
        self.pool._free += again

    genuine = seam.set(BlockManager, "free", twice)


@KV_CACHE.add(
    "frees-nothing",
    "kv-cache/two-fit-exactly",
    "kv-cache/one-block-short",
    origin="https://github.com/sgl-project/sglang/pull/10871 (leak at the end of a request)",
    at="BlockManager.free: all blocks",
    detector="pool_conserved",
)
def _frees_nothing(seam: Seam) -> None:
    """Blocks of requests that end are not given back."""
    seam.set(BlockManager, "free", lambda self, request_id: seam.fire(self.has_table(request_id)))


@KV_CACHE.add(
    "leak-on-abort",
    "kv-cache/abort-in-each-state",
    origin="https://github.com/sgl-project/sglang/issues/38981",
    at="Scheduler.abort: blocks of a partly computed prompt",
    detector="pool_conserved",
)
def _leak_on_abort(seam: Seam) -> None:
    """A request aborted in the middle of its prompt keeps its last block for ever."""

    def abort(self: Scheduler, request_id: str) -> Any:
        manager = self.block_manager
        request = self._requests.get(request_id)
        if request is not None and 0 < request.num_computed_tokens < request.num_prompt_tokens:
            for block in manager.block_table(request_id)[-1:]:
                manager.pool.hold(block)
                seam.fire()
        return genuine(self, request_id)

    genuine = seam.set(Scheduler, "abort", abort)


@KV_CACHE.add(
    "leak-when-the-first-token-is-the-last",
    "scheduling/one-token",
    origin="https://github.com/sgl-project/sglang/pull/10871",
    at="Scheduler._finish: requests of one token",
    detector="pool_conserved",
)
def _leak_on_first_token(seam: Seam) -> None:
    """A request that ends with its very first token keeps its last block."""

    def finish(self: Scheduler, request: Any, reason: Any, stop_reason: Any) -> None:
        if request.num_output_tokens == 1:
            for block in self.block_manager.block_table(request.request_id)[-1:]:
                self.block_manager.pool.hold(block)
                seam.fire()
        genuine(self, request, reason, stop_reason)

    genuine = seam.set(Scheduler, "_finish", finish)


@KV_CACHE.add(
    "cached-blocks-counted-twice",
    "prefix-cache/shared-prefix",
    origin="https://github.com/sgl-project/sglang/issues/35270",
    at="BlockPool.counts: cached blocks",
    detector="pool_conserved",
)
def _cached_twice(seam: Seam) -> None:
    """The count of evictable blocks takes shared blocks more than once."""
    pool_class = block_pool_module.BlockPool

    def counts(self: Any) -> Any:
        found = genuine(self)
        seam.fire(found.cached)
        return type(found)(found.total, found.free, 2 * found.cached, found.in_use)

    genuine = seam.set(pool_class, "counts", counts)


@KV_CACHE.add(
    "copy-on-write-without-copy",
    "fork/copy-on-write[block_size=4]",
    origin="first principles: a writer that must copy does not (no public report with a confirmed cause)",
    at="BlockManager._copy_on_write: copy",
    detector="tokens_match_golden",
)
def _cow_without_copy(seam: Seam) -> None:
    """The writer gets a block of its own, but nothing is copied there."""

    def forgetful(self: BlockManager, request_id: str, table: Any) -> None:
        seam.fire()
        genuine(self, request_id, table)
        self._transfers.cancel_copy(table.blocks[table.num_computed // self.block_size])

    genuine = seam.set(BlockManager, "_copy_on_write", forgetful)


@KV_CACHE.add(
    "copy-of-keys-only",
    "fork/copy-on-write[block_size=4]",
    origin="first principles: half of a copied block arrives",
    at="KVCache.copy: values",
    detector="tokens_match_golden",
)
def _keys_only(seam: Seam) -> None:
    """A copied block gets its keys, not its values."""

    def keys_only(self: KVCache, copies: Any) -> None:
        seam.fire(copies)
        values, self.values = self.values, []
        genuine(self, copies)
        self.values = values

    genuine = seam.set(KVCache, "copy", keys_only)


@KV_CACHE.add(
    "writes-into-a-shared-block",
    "fork/copy-on-write[block_size=4]",
    origin="https://github.com/sgl-project/mini-sglang/pull/142 (no copy before writing)",
    at="BlockManager._must_copy: answer",
    detector="history",
)
def _no_cow(seam: Seam) -> None:
    """Nobody copies before writing into a block that others hold."""

    def never(self: BlockManager, table: Any) -> bool:
        seam.fire(genuine(self, table))
        return False

    genuine = seam.set(BlockManager, "_must_copy", never)


@KV_CACHE.add(
    "fork-forgets-to-hold",
    "fork/copy-on-write[block_size=4]",
    "fork/full-blocks-are-shared",
    origin="https://github.com/vllm-project/vllm/issues/8844",
    at="BlockManager.fork: reference counts",
    detector="history",
)
def _fork_without_hold(seam: Seam) -> None:
    """A fork shares blocks without counting the new holder."""

    def fork(self: BlockManager, parent_id: str, child: Any) -> None:
        genuine(self, parent_id, child)
        shared = self.block_table(child.request_id)
        for block in shared[:1]:
            self.pool._references[block] -= 1
            seam.fire()

    genuine = seam.set(BlockManager, "fork", fork)


@KV_CACHE.add(
    "slots-taken-for-consecutive",
    "scheduling/fragmented-pool[model=tiny-llama]",
    "parity/recall-bfloat16[dtype=bfloat16]",
    origin="https://github.com/huggingface/text-generation-inference/pull/2711",
    at="slot_numbers: block ids after the first",
    detector="tokens_match_golden",
)
def _contiguous(seam: Seam) -> None:
    """The blocks of a table are taken to follow one another in memory."""

    def consecutive(block_table: Any, start: int, end: int, block_size: int) -> Any:
        first, last = block_table[0], max(block_table)  # never beyond the pool, where it would crash
        table = [1 + (first - 1 + i) % last for i in range(len(block_table))]
        seam.fire(list(block_table) != table)
        return genuine(table, start, end, block_size)

    genuine = seam.set(kv_cache, "slot_numbers", consecutive)
    seam.set(attention_base, "slot_numbers", consecutive)


@KV_CACHE.add(
    "boundary-off-by-one",
    "kv-cache/block-size-one",
    "scheduling/block-boundaries",
    origin=f"{NANO}/pull/66",
    at="BlockManager.num_blocks_for: rounding",
    detector="history",
)
def _boundary(seam: Seam) -> None:
    """A new block is taken one step too late."""

    def late(self: BlockManager, num_tokens: int) -> int:
        found: int = max(1, -(-(num_tokens - 1) // self.block_size))
        seam.fire(found != genuine(self, num_tokens))
        return found

    genuine = seam.set(BlockManager, "num_blocks_for", late)


@KV_CACHE.add(
    "one-key-stale",
    "parity/recall-bfloat16[dtype=bfloat16]",
    "scheduling/mixed-step",
    origin="first principles: one KV entry that is not written",
    at="KVCache.write: one slot of one layer, keys",
    detector="tokens_match_golden",
)
def _stale_key(seam: Seam) -> None:
    """The key of the last row of each write keeps what was there before, in one layer."""

    def write(self: KVCache, layer: int, slots: Any, k: Any, v: Any) -> None:
        if layer != self.num_layers - 1:
            genuine(self, layer, slots, k, v)
            return
        old = self.gather(layer, slots[-1:])[0]
        genuine(self, layer, slots, k, v)
        seam.fire()
        self.keys[layer].view(-1, *self.keys[layer].shape[2:])[slots[-1:]] = old

    genuine = seam.set(KVCache, "write", write)


@KV_CACHE.add(
    "values-of-the-neighbour",
    "parity/recall-bfloat16[dtype=bfloat16]",
    "scheduling/mixed-step",
    origin="https://github.com/pytorch/pytorch/issues/175191 (writes in storage order)",
    at="KVCache.write: order of values",
    detector="tokens_match_golden",
)
def _rolled_values(seam: Seam) -> None:
    """Values are written in another order than their slots."""

    def write(self: KVCache, layer: int, slots: Any, k: Any, v: Any) -> None:
        seam.fire(len(slots) > 1)
        genuine(self, layer, slots, k, v.roll(1, 0))

    genuine = seam.set(KVCache, "write", write)


@KV_CACHE.add(
    "kept-in-bfloat16",
    "parity/tiny-families[model=tiny-llama]",
    origin="https://github.com/vllm-project/vllm-metal/pull/125",
    at="KVCache.write: dtype",
    detector="logits_within_yardstick",
)
def _kv_dtype(seam: Seam) -> None:
    """The cache keeps fewer bits than the model computes with."""

    def write(self: KVCache, layer: int, slots: Any, k: Any, v: Any) -> None:
        seam.fire(k.dtype.itemsize > 2)
        genuine(self, layer, slots, k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))

    genuine = seam.set(KVCache, "write", write)
