"""Faults of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.faults.base import NANO, VLLM, Seam, Table
from minivllm.cache import BlockManager, PrefixChain, PrefixIndex, PrefixMatch
from minivllm.cache import prefix_index as prefix_index_module
from minivllm.engine import LLMEngine
from minivllm.request import StepPlan
from minivllm.scheduler import Scheduler

__all__ = ["PREFIX_CACHE"]

PREFIX_CACHE = Table("prefix-cache")


# --- the prefix index ----------------------------------------------------------------------------


@PREFIX_CACHE.add(
    "stale-hash-on-reuse",
    "prefix-cache/eviction",
    origin=f"{NANO}/issues/163",
    at="PrefixIndex.remove: entry of the key",
    detector="history",
)
def _stale_hash(seam: Seam) -> None:
    """A reused block is reset, but its old hash still names it."""

    def remove(self: PrefixIndex, block_id: int) -> bool:
        found = self._content.pop(block_id, None) is not None
        seam.fire(found)
        return found

    seam.set(PrefixIndex, "remove", remove)


@PREFIX_CACHE.add(
    "evict-keeps-entry",
    "prefix-cache/eviction",
    origin=f"{VLLM}/pull/4761",
    at="BlockManager._take: removal from the index",
    detector="history",
)
def _evict_keeps_entry(seam: Seam) -> None:
    """A cached block handed out as writable can still be hit."""

    def take(self: BlockManager, count: int) -> list[int]:
        taken = self.pool.take(count)
        seam.fire(any(block in self.index for block in taken))
        return taken

    seam.set(BlockManager, "_take", take)


@PREFIX_CACHE.add(
    "head-evicted-first",
    "prefix-cache/eviction",
    origin=f"{VLLM}/issues/48489",
    at="BlockManager._release: order",
    detector="cached_tokens",
)
def _head_first(seam: Seam) -> None:
    """Blocks are freed in forward order, so a prefix loses its beginning first and its end is unreachable."""

    def forward(self: BlockManager, request_id: str) -> None:
        blocks = self._tables[request_id].blocks
        seam.fire(len(blocks) > 1)
        blocks.reverse()
        genuine(self, request_id)

    genuine = seam.set(BlockManager, "_release", forward)


def _publish_up_to(manager: BlockManager, request: Any, num_tokens: int) -> None:
    table = manager._tables[request.request_id]
    before = request.num_computed_tokens, table.num_computed
    request.num_computed_tokens = num_tokens
    manager.publish(request)
    request.num_computed_tokens, table.num_computed = before


@PREFIX_CACHE.add(
    "publish-before-compute",
    "fuzz:engine",
    origin=f"{NANO}/issues/208",
    at="BlockManager.allocate: publication",
    detector="fuzz",
)
def _publish_early(seam: Seam) -> None:
    """A block can be hit as soon as it is allocated, before its KV is computed."""

    def early(self: BlockManager, request: Any, num_tokens: int, prefix: Any = None) -> bool:
        done: bool = genuine(self, request, num_tokens, prefix)
        if done and self.enable_prefix_caching:
            seam.fire(num_tokens >= self.block_size)
            _publish_up_to(self, request, num_tokens)
        return done

    genuine = seam.set(BlockManager, "allocate", early)


@PREFIX_CACHE.add(
    "published-then-cancelled",
    "fuzz:engine",
    origin=f"{VLLM}/pull/43569",
    at="Scheduler.plan: publication",
    detector="fuzz",
)
def _publish_with_the_plan(seam: Seam) -> None:
    """What a step is to compute is published with its plan, and stays so if the request is cancelled."""

    def eager(self: Scheduler) -> StepPlan | None:
        made: StepPlan | None = genuine(self)
        waiting = {c.target for c in (*made.swap_in, *made.copies)} if made else set()
        for s in made.requests if made else ():
            if waiting.isdisjoint(s.block_table):
                seam.fire()
                _publish_up_to(self.block_manager, s.request, s.end)
        return made

    genuine = seam.set(Scheduler, "plan", eager)


@PREFIX_CACHE.add(
    "counted-before-found",
    "prefix-cache/full-prefix-hit",
    origin=f"{NANO}/pull/211",
    at="Scheduler._admit: tokens to run",
    detector="history",
)
def _count_before_allocate(seam: Seam) -> None:
    """Tokens to run are counted before the allocation finds a prefix, so too many are computed."""

    def late(self: Scheduler, request: Any, start: int, num_tokens: int, prefix: Any) -> None:
        if not start:
            prefix = find(self.block_manager, request)
            start = prefix.num_tokens
            seam.fire(start)
        admit(self, request, start, num_tokens, prefix)

    find = seam.set(BlockManager, "find_prefix", lambda *_: PrefixMatch())
    admit = seam.set(Scheduler, "_admit", late)


@PREFIX_CACHE.add(
    "no-salt",
    "prefix-cache/salt-isolation",
    origin=f"{VLLM}/issues/20261",
    at="PrefixChain._tags: salt",
    detector="cached_tokens",
)
def _no_salt(seam: Seam) -> None:
    """Keys do not hold the tenant's salt, so one tenant hits the blocks of another."""

    def no_salt(self: PrefixChain, start: int, media: Any) -> Iterator[Any]:
        for tag in genuine(self, start, media):
            if tag[0] != "salt":
                yield tag
            else:
                seam.fire()

    genuine = seam.set(PrefixChain, "_tags", no_salt)


@PREFIX_CACHE.add(
    "prompt-embeddings-not-in-the-key",
    "prefix-cache/other-prompt-embeddings[model=tiny-llama]",
    origin="https://github.com/InternLM/lmdeploy/issues/4933",
    at="PrefixChain._tags: embeddings of a prompt",
    detector="cached_tokens",
)
def _no_embeddings(seam: Seam) -> None:
    """Keys hold token ids and pictures, and a prompt of embeddings has neither."""

    def tags(self: PrefixChain, start: int, media: Any) -> Iterator[Any]:
        seen = [rows for rows in media if rows.modality != "embeds"]
        seam.fire(len(seen) < len(media))
        yield from genuine(self, start, seen)

    genuine = seam.set(PrefixChain, "_tags", tags)


@PREFIX_CACHE.add(
    "no-parent-in-the-key",
    "prefix-cache/same-block-behind-another",
    origin=f"{NANO}/issues/163 (its second input: equal block, other parent)",
    at="block_key: parent",
    detector="cached_tokens",
)
def _no_parent(seam: Seam) -> None:
    """A block is found by its own tokens, whatever came before them."""

    def key(parent_key: bytes, token_ids: Any, tags: Any) -> bytes:
        seam.fire(parent_key)
        found: bytes = genuine(b"", token_ids, tags)
        return found

    genuine = seam.set(prefix_index_module, "block_key", key)
    seam.set(
        prefix_index_module, "same_content", lambda a, b: a.token_ids == b.token_ids and a.tags == b.tags
    )


@PREFIX_CACHE.add(
    "weak-hash-not-verified",
    "prefix-cache/eviction",
    "prefix-cache/hit-equals-cold",
    origin="https://github.com/openvinotoolkit/openvino.genai/issues/3722",
    at="same_content: comparison",
    detector="cached_tokens",
)
def _weak_hash(seam: Seam) -> None:
    """Keys are a few bits, and a hit compares nothing but keys."""

    def key(parent_key: bytes, token_ids: Any, tags: Any) -> bytes:
        seam.fire()
        found: bytes = genuine(parent_key, token_ids, tags)
        return bytes([found[0] % 2])

    genuine = seam.set(prefix_index_module, "block_key", key)
    seam.set(prefix_index_module, "same_content", lambda *_: True)


@PREFIX_CACHE.add(
    "hit-blocks-counted-as-free",
    "fuzz:allocator",
    origin=f"{VLLM}/pull/6849",
    at="BlockManager.num_missing: revived blocks",
    detector="fuzz",
)
def _hits_counted_free(seam: Seam) -> None:
    """A cached block is counted as found and as available at once."""

    def optimistic(self: BlockManager, request: Any, num_blocks: int, prefix: Any = None) -> int:
        if request.request_id in self._tables:
            return int(genuine(self, request, num_blocks))
        prefix = prefix or self.find_prefix(request)
        seam.fire(prefix.block_ids)
        return num_blocks - len(prefix.block_ids)

    genuine = seam.set(BlockManager, "num_missing", optimistic)


@PREFIX_CACHE.add(
    "whole-prompt-hit",
    "prefix-cache/full-prefix-hit",
    origin=f"{VLLM}/pull/3239",
    at="BlockManager.find_prefix: limit",
    detector="history",
)
def _whole_prompt(seam: Seam) -> None:
    """A full hit leaves no token to compute."""

    def greedy(self: BlockManager, request: Any) -> PrefixMatch:
        found: PrefixMatch = genuine(self, request)
        if not self._reads_cache(request) or request.request_id in self._host_tables:
            return found
        blocks = self.index.match(self._chain(request), request.num_tokens // self.block_size)
        seam.fire(len(blocks) > len(found.block_ids))
        return PrefixMatch(blocks, len(blocks) * self.block_size)

    genuine = seam.set(BlockManager, "find_prefix", greedy)


@PREFIX_CACHE.add(
    "never-hits",
    "prefix-cache/shared-prefix",
    origin="https://github.com/sgl-project/sglang/issues/11785",
    at="PrefixIndex.match: result",
    detector="cached_tokens",
)
def _never_hits(seam: Seam) -> None:
    """A prefix cache that finds nothing is only slow."""

    def match(self: PrefixIndex, chain: Any, limit: int) -> tuple[int, ...]:
        seam.fire(genuine(self, chain, limit))
        return ()

    genuine = seam.set(PrefixIndex, "match", match)


@PREFIX_CACHE.add(
    "one-block-found-for-all",
    "prefix-cache/partial-block[block_size=4]",
    origin=f"{VLLM}/issues/9744",
    at="PrefixIndex.match: blocks behind the first",
    detector="tokens_match_golden",
)
def _first_for_all(seam: Seam) -> None:
    """A hit gives the first block again for every block behind it."""

    def match(self: PrefixIndex, chain: Any, limit: int) -> tuple[int, ...]:
        found: tuple[int, ...] = genuine(self, chain, limit)
        seam.fire(len(found) > 1)
        return found[:1] * len(found)

    genuine = seam.set(PrefixIndex, "match", match)


@PREFIX_CACHE.add(
    "survives-a-reset",
    "prefix-cache/reset",
    origin=f"{VLLM}/issues/9744",
    at="BlockManager.reset_prefix_cache: index",
    detector="cached_tokens",
)
def _survives_reset(seam: Seam) -> None:
    """A reset is answered with success and forgets nothing."""

    def reset(self: BlockManager) -> bool:
        seam.fire(len(self.index))
        return not (self._tables or self._host_tables)

    seam.set(BlockManager, "reset_prefix_cache", reset)


@PREFIX_CACHE.add(
    "survives-a-weight-update",
    "prefix-cache/new-weights",
    origin="https://github.com/InternLM/lmdeploy/issues/4917",
    at="LLMEngine.update_weights: reset of the prefix cache",
    detector="cached_tokens",
)
def _survives_weights(seam: Seam) -> None:
    """After a weight update, blocks computed with the old weights are still hit."""

    def update(self: LLMEngine, tensors: Any) -> None:
        seam.fire(len(self._scheduler.block_manager.index))
        self._scheduler.reset_prefix_cache = lambda: True  # type: ignore[method-assign]  # the fault
        genuine(self, tensors)
        del self._scheduler.reset_prefix_cache

    genuine = seam.set(LLMEngine, "update_weights", update)


@PREFIX_CACHE.add(
    "prompt-logprobs-from-a-hit",
    "parity/logprobs",
    origin=f"{VLLM}/issues/3914",
    at="BlockManager._reads_cache: prompt logprobs",
    detector="logprobs_by_value",
)
def _prompt_logprobs_hit(seam: Seam) -> None:
    """A request for prompt logprobs takes a hit, so hit tokens have none."""

    def reads(self: BlockManager, request: Any) -> bool:
        seam.fire(request.sampling.prompt_logprobs is not None)
        return self.enable_prefix_caching

    seam.set(BlockManager, "_reads_cache", reads)


@PREFIX_CACHE.add(
    "resumption-counted-as-a-hit",
    "prefix-cache/resumed-is-not-a-hit",
    origin=f"{VLLM}/issues/44701 (accounting of cached tokens)",
    at="Scheduler._admit: num_cached_tokens",
    detector="cached_tokens",
)
def _resumed_is_hit(seam: Seam) -> None:
    """A preempted request that finds its own blocks again tells them as cached tokens."""

    def admit(self: Scheduler, request: Any, start: int, num_tokens: int, prefix: Any) -> None:
        seam.fire(request.num_cached_tokens >= 0 and start)
        request.num_cached_tokens = -1
        genuine(self, request, start, num_tokens, prefix)

    genuine = seam.set(Scheduler, "_admit", admit)


@PREFIX_CACHE.add(
    "used-though-disabled",
    "prefix-cache/disabled",
    origin=f"{VLLM}/pull/4761 (the switch is ignored)",
    at="BlockManager.__init__: enable_prefix_caching",
    detector="cached_tokens",
)
def _used_though_disabled(seam: Seam) -> None:
    """The prefix cache works although it was turned off."""

    def init(self: BlockManager, *args: Any, enable_prefix_caching: bool, **more: Any) -> None:
        seam.fire(not enable_prefix_caching)
        genuine(self, *args, enable_prefix_caching=True, **more)

    genuine = seam.set(BlockManager, "__init__", init)
