"""Each public kind of control-plane fault, put back one at a time, is found within the CI profile.

A fault patches one seam of minivllm and re-creates what the cited project did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from conformance.contracts import Target, find_target
from conformance.fuzz.driver import Failure, Fuzzer
from conformance.fuzz.session import PROFILES
from minivllm import scheduler as scheduler_module
from minivllm.attention import KVCache
from minivllm.cache import BlockManager, EncoderCache, PrefixChain, PrefixIndex, PrefixMatch
from minivllm.cache import prefix_index as prefix_index_module
from minivllm.cache.host_pool import HostPool
from minivllm.cache.tables import BlockTable
from minivllm.cache.transfers import PendingCopies
from minivllm.config import PreemptionMode
from minivllm.request import Request, StepPlan
from minivllm.scheduler import Scheduler

ALLOCATOR, ENGINE, TENSORS = (
    f"conformance.contracts.minivllm:{name}"
    for name in ("MiniVLLMAllocator", "MiniVLLMEngine", "MiniVLLMTensors")
)

Fault = Callable[[pytest.MonkeyPatch], None]


# --- blocks and the prefix index -----------------------------------------------------------------


def stale_hash_on_reuse(patch: pytest.MonkeyPatch) -> None:
    """A reused block is reset, but its old hash still names it (nano-vllm issue 163)."""
    patch.setattr(PrefixIndex, "remove", lambda self, block: self._content.pop(block, None) is not None)


def evict_keeps_entry(patch: pytest.MonkeyPatch) -> None:
    """A cached block handed out as writable is still found (vLLM pull request 4761)."""
    patch.setattr(PrefixIndex, "remove", lambda *_: False)


def double_free_of_the_last_slot(patch: pytest.MonkeyPatch) -> None:
    """The end of a request is freed by two paths (sglang-jax pull request 982)."""
    free = BlockManager.free

    def twice(self: BlockManager, request_id: str) -> None:
        last = self.block_table(request_id)[-1:]
        free(self, request_id)
        self.pool._free += [block for block in last if block in self.pool._free]

    patch.setattr(BlockManager, "free", twice)


def free_in_forward_order(patch: pytest.MonkeyPatch) -> None:
    """The head of a prefix is evicted before its tail (vLLM issue 48489)."""
    release = BlockManager._release

    def forward(self: BlockManager, request_id: str) -> None:
        self._tables[request_id].blocks.reverse()
        release(self, request_id)

    patch.setattr(BlockManager, "_release", forward)


def publish_before_compute(patch: pytest.MonkeyPatch) -> None:
    """A block can be hit as soon as it is allocated (nano-vllm issue 208)."""
    allocate = BlockManager.allocate

    def early(
        self: BlockManager, request: Request, num_tokens: int, prefix: PrefixMatch | None = None
    ) -> bool:
        done = allocate(self, request, num_tokens, prefix)
        if done:
            _publish_up_to(self, request, num_tokens)
        return done

    patch.setattr(BlockManager, "allocate", early)


def publish_then_cancelled_in_the_same_step(patch: pytest.MonkeyPatch) -> None:
    """What a step is to compute is published with its plan, and stays so if the request is
    cancelled before the step is done (vLLM pull request 43569)."""
    plan = Scheduler.plan

    def eager(self: Scheduler) -> StepPlan | None:
        made = plan(self)
        waiting = {c.target for c in (*made.swap_in, *made.copies)} if made else set()
        for s in made.requests if made else ():
            if waiting.isdisjoint(s.block_table):
                _publish_up_to(self.block_manager, s.request, s.end)
        return made

    patch.setattr(Scheduler, "plan", eager)


def _publish_up_to(manager: BlockManager, request: Request, num_tokens: int) -> None:
    table = manager._tables[request.request_id]
    before = request.num_computed_tokens, table.num_computed
    request.num_computed_tokens = num_tokens
    manager.publish(request)
    request.num_computed_tokens, table.num_computed = before


def count_before_allocate(patch: pytest.MonkeyPatch) -> None:
    """Tokens to run are counted before the allocation finds a prefix (nano-vllm pull request 211)."""
    find_prefix, admit = BlockManager.find_prefix, Scheduler._admit

    def late(self: Scheduler, request: Request, start: int, num_tokens: int, prefix: PrefixMatch) -> None:
        if not start:
            prefix = find_prefix(self.block_manager, request)
            start = prefix.num_tokens
        admit(self, request, start, num_tokens, prefix)

    patch.setattr(BlockManager, "find_prefix", lambda *_: PrefixMatch())
    patch.setattr(Scheduler, "_admit", late)


def forgets_the_salt_and_the_images(patch: pytest.MonkeyPatch) -> None:
    """Keys hold tokens only (vLLM issue 20261)."""

    def no_tags(*_: object) -> Iterator[tuple[str, ...]]:
        return iter(())

    patch.setattr(PrefixChain, "_tags", no_tags)


def chains_no_parent(patch: pytest.MonkeyPatch) -> None:
    """A block is found by its own tokens, whatever came before them."""
    key = prefix_index_module.block_key
    patch.setattr(prefix_index_module, "block_key", lambda _, token_ids, tags: key(b"", token_ids, tags))
    patch.setattr(
        prefix_index_module, "same_content", lambda a, b: a.token_ids == b.token_ids and a.tags == b.tags
    )


def counts_hit_blocks_as_free(patch: pytest.MonkeyPatch) -> None:
    """A cached block is counted as found and as available at once (vLLM pull request 6849)."""
    num_missing = BlockManager.num_missing

    def optimistic(
        self: BlockManager, request: Request, num_blocks: int, prefix: PrefixMatch | None = None
    ) -> int:
        if request.request_id in self._tables:
            return num_missing(self, request, num_blocks)
        prefix = prefix or self.find_prefix(request)
        return num_blocks - len(prefix.block_ids)

    patch.setattr(BlockManager, "num_missing", optimistic)


def hits_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    """A full hit leaves no token to compute (vLLM pull request 3239)."""

    def greedy(self: BlockManager, request: Request) -> PrefixMatch:
        blocks = self.index.match(self.index.chain(request), request.num_tokens // self.block_size)
        return PrefixMatch(blocks, len(blocks) * self.block_size)

    patch.setattr(BlockManager, "find_prefix", greedy)


def never_hits(patch: pytest.MonkeyPatch) -> None:
    """A prefix cache that finds nothing is only slow."""
    patch.setattr(PrefixIndex, "match", lambda *_: ())


def frees_nothing(patch: pytest.MonkeyPatch) -> None:
    """Blocks of requests that end are not given back."""
    patch.setattr(BlockManager, "free", lambda *_: None)


# --- forks ---------------------------------------------------------------------------------------


def copy_on_write_without_copy(patch: pytest.MonkeyPatch) -> None:
    """The writer gets a block of its own, but nothing is copied there."""

    def forgetful(self: BlockManager, request_id: str, table: BlockTable) -> None:  # noqa: ARG001 # patched in
        index = table.num_computed // self.block_size
        source = table.blocks[index]
        (table.blocks[index],) = self._take(1)
        table.ids = tuple(table.blocks)
        self._release_block(source)

    patch.setattr(BlockManager, "_copy_on_write", forgetful)


def copy_on_write_copies_keys_but_not_values(patch: pytest.MonkeyPatch) -> None:
    """Only half of a copied block arrives."""
    copy = KVCache.copy

    def keys_only(self: KVCache, copies: Any) -> None:
        values, self.values = self.values, []
        copy(self, copies)
        self.values = values

    patch.setattr(KVCache, "copy", keys_only)


def writes_into_a_shared_block(patch: pytest.MonkeyPatch) -> None:
    """Nobody copies before writing."""
    patch.setattr(BlockManager, "_must_copy", lambda *_: False)


# --- swap ----------------------------------------------------------------------------------------


def swap_map_transposed_between_two_requests(patch: pytest.MonkeyPatch) -> None:
    """Two swapped-out requests get each other's first block back."""
    swap_in = BlockManager.swap_in

    def transposed(self: BlockManager, request: Request, num_tokens: int) -> bool:
        tables, name = self._host_tables, request.request_id
        for other in tables:
            if other != name:
                first, second = tables[name].blocks[0], tables[other].blocks[0]
                tables[name] = replace(tables[name], blocks=(second, *tables[name].blocks[1:]))
                tables[other] = replace(tables[other], blocks=(first, *tables[other].blocks[1:]))
                break
        return swap_in(self, request, num_tokens)

    patch.setattr(BlockManager, "swap_in", transposed)


def swap_in_admitted_without_room(patch: pytest.MonkeyPatch) -> None:
    """Admission counts the blocks swapped out, not those still to be written (vLLM pull request 8824)."""
    num_missing = BlockManager.num_missing

    def undercounts(
        self: BlockManager, request: Request, num_blocks: int, prefix: PrefixMatch | None = None
    ) -> int:
        swapped = self.host_table(request.request_id)
        return len(swapped) if swapped else num_missing(self, request, num_blocks, prefix)

    patch.setattr(BlockManager, "num_missing", undercounts)


def host_block_freed_before_copied(patch: pytest.MonkeyPatch) -> None:
    """Host blocks are free as soon as the swap-in is planned (LMCache pull request 5248)."""
    swap_in, release = BlockManager.swap_in, HostPool.release

    def at_once(self: BlockManager, request: Request, num_tokens: int) -> bool:
        blocks = self.host_table(request.request_id)
        done = swap_in(self, request, num_tokens)
        if done:
            release(self.host_pool, blocks)
        return done

    def later(self: BlockManager, carried_out: PendingCopies) -> None:
        _, sources = self._transfers.done(carried_out)
        for block in sources:
            self._release_block(block)

    patch.setattr(BlockManager, "swap_in", at_once)
    patch.setattr(BlockManager, "copies_done", later)
    patch.setattr(
        HostPool, "release", lambda self, blocks: release(self, [b for b in blocks if b in self._used])
    )


def swap_copies_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """The copy out is made when the blocks hold something else already."""
    pending = BlockManager.pending_copies

    def reordered(self: BlockManager) -> PendingCopies:
        now = pending(self)
        return PendingCopies((), now.swap_in, now.copies)

    patch.setattr(BlockManager, "pending_copies", reordered)


# --- the encoder cache ---------------------------------------------------------------------------


def pinned_item_evicted(patch: pytest.MonkeyPatch) -> None:
    """The victim may be an image that the same step needs."""
    victim = EncoderCache._victim

    def careless(self: EncoderCache) -> str | None:
        pinned, self._pinned = self._pinned, {}
        found = victim(self)
        self._pinned = pinned
        return found

    patch.setattr(EncoderCache, "_victim", careless)


def evicted_item_not_encoded_anew(patch: pytest.MonkeyPatch) -> None:
    """A preempted request is taken to have its images still."""
    claim = EncoderCache.claim

    def trusting(self: EncoderCache, request: Request, start: int, num_tokens: int) -> None:
        claim(self, request, start, num_tokens)
        if request.num_preemptions:
            self._to_encode.clear()

    patch.setattr(EncoderCache, "claim", trusting)


def encoder_budget_counts_a_step_alone(patch: pytest.MonkeyPatch) -> None:
    """What earlier steps left in the cache is not counted."""

    def forgetful(self: EncoderCache) -> int:
        return sum(e.item.num_embeddings for e in self._to_encode.values())

    patch.setattr(EncoderCache, "_planned_rows", forgetful)
    patch.setattr(EncoderCache, "check_integrity", lambda *_: None)


def item_forgotten_with_its_first_request(patch: pytest.MonkeyPatch) -> None:
    """The end of one of two requests that share an image drops it for both."""
    leave = EncoderCache.leave

    def greedy(self: EncoderCache, request: Request) -> None:
        leave(self, request)
        for content_hash in request.media_items:
            if content_hash not in self._pinned:
                self._held.pop(content_hash, None)

    patch.setattr(EncoderCache, "leave", greedy)


# --- the scheduler -------------------------------------------------------------------------------


def outputs_dropped_on_recompute(patch: pytest.MonkeyPatch) -> None:
    """A resumed request knows its prompt only (vllm-gaudi pull request 524)."""
    put_back = Scheduler._put_back

    def forgetful(self: Scheduler, request: Request, mode: PreemptionMode) -> None:
        put_back(self, request, mode)
        if not request.num_computed_tokens:
            del request.token_ids[request.num_prompt_tokens :]

    patch.setattr(Scheduler, "_put_back", forgetful)


def never_fit_hangs(patch: pytest.MonkeyPatch) -> None:
    """A request larger than the pool is queued (vLLM issue 39734)."""
    patch.setattr(scheduler_module, "check_capacity", lambda *_: None)


def preempts_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """The victim is the request that is closest to its end."""

    class Reversed(list[Request]):
        def pop(self, index: int = 0) -> Request:  # type: ignore[override] # the fault
            return super().pop(index)

    init = Scheduler.__init__

    def broken(self: Scheduler, **arguments: Any) -> None:
        init(self, **arguments)
        self._running = Reversed()

    patch.setattr(Scheduler, "__init__", broken)


#: Fault → the targets it must be found on. The first fourteen are the list of the requirement.
FAULTS: dict[Fault, tuple[str, ...]] = {
    stale_hash_on_reuse: (ALLOCATOR, ENGINE),
    evict_keeps_entry: (ALLOCATOR, ENGINE),
    double_free_of_the_last_slot: (ALLOCATOR, ENGINE),
    free_in_forward_order: (ALLOCATOR, ENGINE),
    publish_before_compute: (ALLOCATOR, ENGINE),
    publish_then_cancelled_in_the_same_step: (ENGINE,),
    count_before_allocate: (ENGINE,),
    copy_on_write_without_copy: (ALLOCATOR, ENGINE),
    copy_on_write_copies_keys_but_not_values: (TENSORS,),
    swap_map_transposed_between_two_requests: (ALLOCATOR, ENGINE),
    swap_in_admitted_without_room: (ALLOCATOR, ENGINE),
    host_block_freed_before_copied: (ALLOCATOR, ENGINE),
    outputs_dropped_on_recompute: (ENGINE,),
    never_fit_hangs: (ENGINE,),
    # Beyond the list.
    forgets_the_salt_and_the_images: (ALLOCATOR, ENGINE),
    chains_no_parent: (ALLOCATOR, ENGINE),
    counts_hit_blocks_as_free: (ALLOCATOR, ENGINE),
    hits_the_whole_prompt: (ALLOCATOR, ENGINE),
    never_hits: (ALLOCATOR, ENGINE),
    frees_nothing: (ALLOCATOR, ENGINE),
    writes_into_a_shared_block: (ALLOCATOR, ENGINE),
    swap_copies_after_the_step: (ALLOCATOR, ENGINE),
    preempts_the_oldest: (ENGINE,),
    pinned_item_evicted: (ENGINE,),
    evicted_item_not_encoded_anew: (ENGINE,),
    encoder_budget_counts_a_step_alone: (ENGINE,),
    item_forgotten_with_its_first_request: (ENGINE,),
}


def fuzz(name: str, seed: int = 0) -> tuple[Failure | None, Fuzzer]:
    """The CI profile of one target."""
    target: Target = find_target(name)
    fuzzer = Fuzzer(target, seed)
    return fuzzer.run(PROFILES["ci"].examples_of(target)), fuzzer


@pytest.mark.parametrize(
    ("fault", "target"),
    [(fault, target) for fault, targets in FAULTS.items() for target in targets],
    ids=lambda value: value.__name__ if callable(value) else value.rpartition("MiniVLLM")[2].lower(),
)
def test_the_fuzzer_finds_the_seeded_fault_within_the_ci_profile(fault: Fault, target: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        failure, fuzzer = fuzz(target)
    assert failure is not None, f"unnoticed in {fuzzer.num_examples} examples"
