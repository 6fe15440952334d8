"""Faults of preemption, by recomputing and by swapping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.faults.base import NANO, VLLM, Seam, Table
from minivllm import runner as runner_module
from minivllm.attention import KVCache, kv_cache
from minivllm.cache import BlockManager, PendingCopies
from minivllm.cache.host_pool import HostPool
from minivllm.errors import CapacityError, InvariantError
from minivllm.output.generation import Generation
from minivllm.request import BlockCopy, TokenView
from minivllm.runner import ModelRunner
from minivllm.sampling import sampler as sampler_module
from minivllm.scheduler import Scheduler

__all__ = ["PREEMPTION"]

PREEMPTION = Table("preemption")

GAUDI = "https://github.com/vllm-project/vllm-gaudi"

ALL_AT_ONCE = "preemption/all-at-once[preemption_mode=recompute]"
ALL_SWAPPED = "preemption/all-at-once[preemption_mode=swap]"
PRESSURE = "preemption/by-pressure[model=tiny-llama]"
PRESSURE_COLD = "preemption/by-pressure[model=tiny-llama, enable_prefix_caching=False]"


# --- what a resumed request knows ----------------------------------------------------------------


@PREEMPTION.add(
    "outputs-dropped",
    "fuzz:engine",
    origin=f"{GAUDI}/pull/524",
    at="Scheduler._put_back: generated tokens",
    detector="fuzz",
)
def _outputs_dropped(seam: Seam) -> None:
    """A resumed request knows its prompt only, and generates everything again."""

    def forgetful(self: Scheduler, request: Any, mode: Any) -> None:
        genuine(self, request, mode)
        if not request.num_computed_tokens:
            seam.fire(request.num_output_tokens)
            del request.token_ids[request.num_prompt_tokens :]

    genuine = seam.set(Scheduler, "_put_back", forgetful)


@PREEMPTION.add(
    "outputs-not-computed-again",
    PRESSURE_COLD,
    origin=f"{GAUDI}/pull/524 (the prompt alone is prefilled again)",
    at="_Batch.token_ids: outputs of a resumed request",
    detector="tokens_match_golden",
)
def _outputs_not_recomputed(seam: Seam) -> None:
    """What a resumed request had generated is computed anew from padding."""

    def init(self: Any, requests: Any, device: Any) -> None:
        genuine(self, requests, device)
        for r, first in zip(requests, self.first_row, strict=True):
            behind = max(r.start, r.num_prompt_tokens)
            if r.request.num_preemptions and behind < r.end - 1:
                seam.fire()
                self.token_ids[first + behind - r.start : first + r.num_tokens - 1] = 0

    genuine = seam.set(runner_module._Batch, "__init__", init)


@PREEMPTION.add(
    "token-appended-twice",
    ALL_AT_ONCE,
    origin=f"{GAUDI}/pull/524 (its second cause)",
    at="Scheduler._put_back: history",
    detector="tokens_match_golden",
)
def _appended_twice(seam: Seam) -> None:
    """The token that came last before a preemption is in the resumed history twice."""

    def stutter(self: Scheduler, request: Any, mode: Any) -> None:
        genuine(self, request, mode)
        if request.num_output_tokens:
            seam.fire()
            request.token_ids.append(request.token_ids[-1])

    genuine = seam.set(Scheduler, "_put_back", stutter)


@PREEMPTION.add(
    "end-only-is-computed-again",
    PRESSURE_COLD,
    origin=f"{NANO}/issues/144",
    at="Scheduler._admit: start of a resumed request",
    detector="tokens_match_golden",
)
def _decodes_at_once(seam: Seam) -> None:
    """A resumed request is taken for one that decodes, because it has generated already."""

    def admit(self: Scheduler, request: Any, start: int, num_tokens: int, prefix: Any) -> None:
        swapped = self.block_manager.host_table(request.request_id)
        genuine(self, request, start, num_tokens, prefix)
        if request.num_preemptions and not swapped and start + num_tokens < request.num_tokens:
            seam.fire()
            self.block_manager.append(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens - num_tokens

    genuine = seam.set(Scheduler, "_admit", admit)


@PREEMPTION.add(
    "resumed-batch-starts-at-zero",
    "preemption/again-and-again",
    ALL_AT_ONCE,
    ALL_SWAPPED,
    origin="https://github.com/tenstorrent/vllm/pull/326",
    at="runner._positions: requests that resume",
    detector="tokens_match_golden",
)
def _resumed_positions(seam: Seam) -> None:
    """Positions of a chunk of a resumed request count from 0 when it goes on behind a hit or a swap."""

    def positions(r: Any) -> Any:
        found = genuine(r)
        if r.request.num_preemptions and r.start:
            seam.fire()
            return found - found.min()
        return found

    genuine = seam.set(runner_module, "_positions", positions)


@PREEMPTION.add(
    "text-cut-at-a-preemption",
    "preemption/text-and-penalties",
    origin=f"{VLLM}/issues/16832",
    at="Generation.add_token: text before a preemption",
    detector="text_equals",
)
def _text_cut(seam: Seam) -> None:
    """The text of a request that was preempted begins after the preemption."""
    seen: dict[int, int] = {}

    def add_token(self: Generation, request: Any, sampled: Any, logprobs: Any) -> Any:
        if request.num_preemptions > seen.get(id(self), 0):
            seen[id(self)] = request.num_preemptions
            seam.fire(self._stops.text)
            self._stops.text = ""
        return genuine(self, request, sampled, logprobs)

    genuine = seam.set(Generation, "add_token", add_token)


@PREEMPTION.add(
    "penalties-forget-what-came-before",
    "preemption/text-and-penalties",
    origin=f"{VLLM}/issues/29045",
    at="adjust: history of a resumed request",
    detector="sampled_within_kept_set",
)
def _penalties_forget(seam: Seam) -> None:
    """Penalties of a resumed request count only what it generated since."""
    resumed_at: dict[tuple[str, int], int] = {}

    def adjust(logits: Any, row: Any) -> None:
        request = row.request
        start = resumed_at.setdefault((request.request_id, request.num_preemptions), len(row.tokens))
        if request.num_preemptions:
            seam.fire(start > row.num_prompt_tokens)
            tokens = [*row.tokens[: row.num_prompt_tokens], *row.tokens[start:]]
            row = replace(row, tokens=TokenView(tokens))
        genuine(logits, row)

    genuine = seam.set(sampler_module, "adjust", adjust)


@PREEMPTION.add(
    "draw-is-not-taken-again",
    "preemption/text-and-penalties",
    "sampling/seeded",
    origin=f"{VLLM}/issues/29045 (random state moved by tokens that are thrown away)",
    at="uniform: position",
    detector="equal",
)
def _draws_counted(seam: Seam) -> None:
    """Random numbers are counted by draws of the engine, not by the position of the token."""
    count = iter(range(10**9))

    def uniform(seed: int, position: int, sequence_index: int = 0) -> float:
        number = next(count)
        seam.fire(number != position)
        return float(genuine(seed, number, sequence_index))

    genuine = seam.set(sampler_module, "uniform", uniform)


@PREEMPTION.add(
    "out-of-memory-raises",
    PRESSURE,
    origin="https://github.com/vllm-project/vllm-metal/pull/128",
    at="BlockManager.append: no room",
    detector="history",
)
def _oom_raises(seam: Seam) -> None:
    """A full pool is an error of the engine instead of a reason to preempt."""

    def append(self: BlockManager, request: Any, num_tokens: int) -> bool:
        if not genuine(self, request, num_tokens):
            seam.fire()
            raise CapacityError("the pool is full")
        return True

    genuine = seam.set(BlockManager, "append", append)


@PREEMPTION.add(
    "victim-is-the-oldest",
    "fuzz:engine",
    origin=f"{VLLM}/issues/8844 (the oldest request starves)",
    at="Scheduler._plan_running: victim",
    detector="fuzz",
)
def _oldest(seam: Seam) -> None:
    """The victim is the request that is closest to its end."""

    class Reversed(list[Any]):
        def pop(self, index: Any = 0) -> Any:
            seam.fire()
            return super().pop(index)

    def init(self: Scheduler, **arguments: Any) -> None:
        genuine(self, **arguments)
        self._running = Reversed()

    genuine = seam.set(Scheduler, "__init__", init)


@PREEMPTION.add(
    "late-write-to-blocks-of-another",
    ALL_AT_ONCE,
    PRESSURE_COLD,
    origin="https://github.com/sgl-project/sglang/pull/38179",
    at="ModelRunner.run: KV of a step written once more in the next",
    detector="tokens_match_golden",
)
def _late_write(seam: Seam) -> None:
    """The KV that a preempted request wrote last is written again after its blocks have a new owner."""
    late: list[tuple[Any, list[int]]] = []

    def put_back(self: Scheduler, request: Any, mode: Any) -> None:
        table = self.block_manager.block_table(request.request_id)
        size = self.block_manager.block_size
        slots = kv_cache.slot_numbers(table, 0, min(request.num_computed_tokens, len(table) * size), size)
        late.append((None, [int(slot) for slot in slots]))
        genuine(self, request, mode)

    def run(self: ModelRunner, plan: Any) -> Any:
        cache = self._cache
        keep = [
            (slots, [cache.gather(i, torch.tensor(slots)) for i in range(cache.num_layers)])
            for _, slots in late
        ]
        late.clear()
        result = run_genuine(self, plan)
        for slots, layers in keep:
            for layer, (k, v) in enumerate(layers):
                cache.write(layer, torch.tensor(slots), k, v)
            seam.fire(slots)
        return result

    genuine = seam.set(Scheduler, "_put_back", put_back)
    run_genuine = seam.set(ModelRunner, "run", run)


# --- swap ----------------------------------------------------------------------------------------


@PREEMPTION.add(
    "swap-map-transposed-between-requests",
    ALL_SWAPPED,
    origin="first principles: two requests get each other's block back",
    at="BlockManager.swap_in: host blocks of two requests",
    detector="tokens_match_golden",
)
def _swap_transposed(seam: Seam) -> None:
    """Two swapped-out requests get each other's first block back."""

    def transposed(self: BlockManager, request: Any, num_tokens: int) -> bool:
        tables, name = self._host_tables, request.request_id
        other = next((other for other in tables if other != name), None)
        if other is not None:
            seam.fire()
            first, second = tables[name].blocks[0], tables[other].blocks[0]
            tables[name] = replace(tables[name], blocks=(second, *tables[name].blocks[1:]))
            tables[other] = replace(tables[other], blocks=(first, *tables[other].blocks[1:]))
        return bool(genuine(self, request, num_tokens))

    genuine = seam.set(BlockManager, "swap_in", transposed)


@PREEMPTION.add(
    "swap-in-without-room",
    "fuzz:allocator",
    origin=f"{VLLM}/pull/8824",
    at="BlockManager.num_missing: swapped-out requests",
    detector="fuzz",
)
def _swap_without_room(seam: Seam) -> None:
    """Admission counts the blocks swapped out, not those still to be written."""

    def undercounts(self: BlockManager, request: Any, num_blocks: int, prefix: Any = None) -> int:
        swapped = self.host_table(request.request_id)
        found = int(genuine(self, request, num_blocks, prefix))
        seam.fire(swapped and len(swapped) < found)
        return len(swapped) if swapped else found

    genuine = seam.set(BlockManager, "num_missing", undercounts)


@PREEMPTION.add(
    "host-block-freed-before-copied",
    "fuzz:allocator",
    "fuzz:engine",
    origin="https://github.com/LMCache/LMCache/pull/5248",
    at="BlockManager.copies_done: host blocks",
    detector="fuzz",
)
def _host_freed_early(seam: Seam) -> None:
    """Host blocks are free as soon as the swap-in is planned."""

    def at_once(self: BlockManager, request: Any, num_tokens: int) -> bool:
        blocks = self.host_table(request.request_id)
        done = bool(swap_in(self, request, num_tokens))
        if done:
            seam.fire()
            release(self.host_pool, blocks)
        return done

    def if_used(self: HostPool, blocks: Any) -> None:
        release(self, [block for block in blocks if block in self._used])

    def later(self: BlockManager, carried_out: PendingCopies) -> None:
        _, sources = self._transfers.done(carried_out)
        for block in sources:
            self._release_block(block)

    release = HostPool.release
    swap_in = seam.set(BlockManager, "swap_in", at_once)
    seam.set(BlockManager, "copies_done", later)
    seam.set(HostPool, "release", if_used)


@PREEMPTION.add(
    "swap-out-after-the-step",
    ALL_SWAPPED,
    origin="https://github.com/NVIDIA/TensorRT-LLM/pull/15546",
    at="ModelRunner.run: order of copies and forward pass",
    detector="tokens_match_golden",
)
def _swap_out_late(seam: Seam) -> None:
    """The copy to host memory is made one step late, when the blocks hold something else already."""

    def run(self: ModelRunner, plan: Any) -> Any:
        result = genuine(self, replace(plan, swap_out=()))
        seam.fire(plan.swap_out)
        self._cache.swap_out(plan.swap_out)
        return result

    genuine = seam.set(ModelRunner, "run", run)


@PREEMPTION.add(
    "swap-moves-keys-only",
    ALL_SWAPPED,
    origin="https://github.com/pytorch/pytorch/issues/108978 (an assignment that does nothing)",
    at="KVCache.swap_in: values",
    detector="tokens_match_golden",
)
def _swap_keys_only(seam: Seam) -> None:
    """Keys come back from host memory, values do not."""

    def swap_in(self: KVCache, copies: Any) -> None:
        seam.fire(copies)
        kept = [value.clone() for value in self.values]
        genuine(self, copies)
        for value, before in zip(self.values, kept, strict=True):
            value.copy_(before)

    genuine = seam.set(KVCache, "swap_in", swap_in)


@PREEMPTION.add(
    "swapped-blocks-in-reverse",
    ALL_SWAPPED,
    origin="first principles: source and target of a swap are paired in the wrong order",
    at="KVCache.swap_out: pairs",
    detector="tokens_match_golden",
)
def _swap_reversed(seam: Seam) -> None:
    """Blocks of all requests of one swap-out are written to host blocks in reverse order."""

    def swap_out(self: KVCache, copies: Any) -> None:
        sources = [copy.source for copy in copies][::-1]
        seam.fire(len(copies) > 1)
        genuine(self, [BlockCopy(s, copy.target) for s, copy in zip(sources, copies, strict=True)])

    genuine = seam.set(KVCache, "swap_out", swap_out)


@PREEMPTION.add(
    "no-fallback-without-swap-space",
    "preemption/swap-space-zero",
    origin=f"{VLLM}/issues/546",
    at="Scheduler._put_back: fallback",
    detector="history",
)
def _no_fallback(seam: Seam) -> None:
    """A request that cannot be swapped out, for want of host memory, is not recomputed either."""

    def swap_out(self: BlockManager, request_id: str) -> bool:
        if not genuine(self, request_id):
            seam.fire()
            raise InvariantError("no host blocks are left")
        return True

    genuine = seam.set(BlockManager, "swap_out", swap_out)
