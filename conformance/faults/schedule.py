"""Faults of the scheduler, and of packing a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.faults.base import VLLM, Seam, Table
from minivllm import runner as runner_module
from minivllm import scheduler as scheduler_module
from minivllm.attention import base as attention_base
from minivllm.attention import kv_cache
from minivllm.attention.dense import DenseBackend
from minivllm.cache import EncoderCache, PendingCopies
from minivllm.errors import CapacityError, PromptTooLong
from minivllm.runner import ModelRunner
from minivllm.sampling import sampler as sampler_module
from minivllm.scheduler import Scheduler

__all__ = ["BATCHING", "SCHEDULING"]

SCHEDULING = Table("scheduling")
BATCHING = Table("batching")


# --- admission and limits ------------------------------------------------------------------------


@SCHEDULING.add(
    "never-fits-is-queued",
    "refusals/never-fits",
    origin=f"{VLLM}/issues/39734",
    at="check_capacity: refusal",
    detector="error",
)
def _never_fits(seam: Seam) -> None:
    """A request larger than the pool is queued, and waits for ever."""

    def check(*args: Any) -> None:
        try:
            genuine(*args)
        except CapacityError:
            seam.fire()

    genuine = seam.set(scheduler_module, "check_capacity", check)


@SCHEDULING.add(
    "prompt-of-the-whole-length-admitted",
    "refusals/max-model-len",
    origin=f"{VLLM}/pull/23683",
    at="check_prompt: limit",
    detector="history",
)
def _whole_length(seam: Seam) -> None:
    """A prompt that fills max_model_len is admitted, although no token can follow."""
    from minivllm import processor as processor_module

    def check(*args: Any) -> None:
        try:
            genuine(*args)
        except PromptTooLong:
            seam.fire()

    def lenient(self: Any, token_ids: Any, sampling: Any, capture: Any) -> None:
        try:
            checked(self, token_ids, sampling, capture)
        except PromptTooLong:
            seam.fire()

    genuine = seam.set(scheduler_module, "check_prompt", check)
    checked = seam.set(processor_module.Processor, "_check", lenient)


@SCHEDULING.add(
    "one-token-beyond-the-limit",
    "refusals/max-model-len",
    origin=f"{VLLM}/pull/23683 (the other side of the limit)",
    at="most_tokens: one more",
    detector="tokens_match_golden",
)
def _one_beyond(seam: Seam) -> None:
    """Generation stops one token after max_tokens or max_model_len."""

    def most(request: Any, max_model_len: int) -> int:
        seam.fire()
        return int(genuine(request, max_model_len)) + 1

    genuine = seam.set(scheduler_module, "most_tokens", most)


@SCHEDULING.add(
    "last-token-missing",
    "scheduling/mixed-step",
    origin=f"{VLLM}/issues/16832 (an answer that is too short)",
    at="most_tokens: one less",
    detector="tokens_match_golden",
)
def _one_short(seam: Seam) -> None:
    """Generation stops one token early."""

    def most(request: Any, max_model_len: int) -> int:
        seam.fire()
        return int(max(request.num_prompt_tokens + 1, int(genuine(request, max_model_len)) - 1))

    genuine = seam.set(scheduler_module, "most_tokens", most)


@SCHEDULING.add(
    "priority-ignored",
    "scheduling/priority-order",
    origin=f"{VLLM}/issues/8844 (order of service)",
    at="Scheduler.add: ticket",
    detector="happened",
)
def _priority_ignored(seam: Seam) -> None:
    """Requests are served in order of arrival, whatever their priority."""

    def add(self: Scheduler, request: Any) -> None:
        seam.fire(request.priority)
        request.priority = 0
        genuine(self, request)

    genuine = seam.set(Scheduler, "add", add)


@SCHEDULING.add(
    "budget-exceeded",
    "scheduling/mixed-step",
    "fuzz:engine",
    origin="https://github.com/vllm-project/vllm-metal/pull/200",
    at="Scheduler._plan_waiting: budget",
    detector="happened",
)
def _budget_exceeded(seam: Seam) -> None:
    """Prompts are computed whole, whatever the budget of a step."""

    def plan_waiting(self: Scheduler, scheduled: Any, budget: int) -> None:
        seam.fire(budget > 0 and self._waiting)
        genuine(self, scheduled, 10**6 if budget > 0 else budget)

    genuine = seam.set(Scheduler, "_plan_waiting", plan_waiting)


# --- a step that breaks off ----------------------------------------------------------------------


@SCHEDULING.add(
    "broken-step-copies-again",
    "fuzz:engine",
    origin="first principles: what a swap-out reads may be overwritten by the time it is repeated",
    at="Scheduler.break_off: copies that were made",
    detector="fuzz",
)
def _copies_again(seam: Seam) -> None:
    """After a step that breaks off, the copies it had made are made once more."""

    def break_off(self: Scheduler, carried_out: PendingCopies) -> None:
        seam.fire(carried_out != PendingCopies())
        genuine(self, PendingCopies())

    genuine = seam.set(Scheduler, "break_off", break_off)


@SCHEDULING.add(
    "broken-step-keeps-what-copies-held",
    "fuzz:engine",
    origin="first principles: what a copy held is given back where a step is committed, and nowhere else",
    at="Scheduler.break_off: pins and host blocks",
    detector="fuzz",
)
def _keeps_pins(seam: Seam) -> None:
    """What the copies of a broken step held, pins and host blocks, is never given back."""

    def break_off(self: Scheduler, carried_out: PendingCopies) -> None:
        host_blocks, sources = self.block_manager._transfers.done(carried_out)
        seam.fire([*host_blocks, *sources])
        genuine(self, PendingCopies())

    genuine = seam.set(Scheduler, "break_off", break_off)


@SCHEDULING.add(
    "broken-step-keeps-pictures",
    "fuzz:engine",
    origin="first principles: the runner forgets all media when a step breaks off, the scheduler does not",
    at="EncoderCache.forget: what is held",
    detector="fuzz",
)
def _keeps_pictures(seam: Seam) -> None:
    """After a step that breaks off, pictures that are gone are taken for held."""

    def forget(self: EncoderCache) -> None:
        seam.fire(self.held)
        self.begin()

    seam.set(EncoderCache, "forget", forget)


# --- packing a batch -----------------------------------------------------------------------------


@BATCHING.add(
    "chunk-restarts-at-zero",
    "scheduling/mixed-step",
    origin="https://github.com/Blaizzy/mlx-vlm/pull/1741",
    at="runner._positions: chunks of a prompt",
    detector="tokens_match_golden",
)
def _chunk_restarts(seam: Seam) -> None:
    """Every chunk of a prompt has positions from 0 on."""

    def positions(r: Any) -> Any:
        found = genuine(r)
        later = 0 < r.start < r.num_prompt_tokens
        seam.fire(later)
        return found - r.start if later else found

    genuine = seam.set(runner_module, "_positions", positions)


@BATCHING.add(
    "decode-rows-before-prefill-rows",
    "scheduling/mixed-step",
    origin=f"{VLLM}/pull/40766",
    at="ModelRunner._sample: rows of a mixed step",
    detector="tokens_match_golden",
)
def _row_order(seam: Seam) -> None:
    """In a step with several requests the logits of one are read at the row of another."""

    def sample(self: ModelRunner, logits: Any, sampling: Any, failures: Any) -> Any:
        if len(sampling) > 1:
            seam.fire()
            rows = [row for _, row in sampling]
            sampling = [(r, row) for (r, _), row in zip(sampling, [*rows[1:], rows[0]], strict=True)]
        return genuine(self, logits, sampling, failures)

    genuine = seam.set(ModelRunner, "_sample", sample)


@BATCHING.add(
    "positions-of-the-first-request",
    "scheduling/mixed-step",
    origin="https://github.com/unslothai/unsloth/pull/4078",
    at="_Batch.positions: every request",
    detector="tokens_match_golden",
)
def _shared_positions(seam: Seam) -> None:
    """All decoding requests of a step have the position of the first."""

    def init(self: Any, requests: Any, device: Any) -> None:
        genuine(self, requests, device)
        if len(requests) > 1 and all(r.num_tokens == 1 for r in requests) and self.positions.dim() == 1:
            seam.fire(bool((self.positions != self.positions[0]).any()))
            self.positions = self.positions[:1].repeat(len(self.positions))

    genuine = seam.set(runner_module._Batch, "__init__", init)


@BATCHING.add(
    "keys-turned-one-further",
    "scheduling/mixed-step",
    origin="https://github.com/ml-explore/mlx-lm/issues/1699",
    at="Attention.rotate: keys in a batch",
    detector="tokens_match_golden",
)
def _offset_alias(seam: Seam) -> None:
    """In a batch, keys are turned by the position that their cache has after the update."""
    from minivllm.models import decoder

    calls = iter(range(10**9))

    def rotate(self: Any, x: Any, rotation: Any) -> Any:
        keys = next(calls) % 2 == 1
        if keys and len(x) > 1:
            seam.fire()
            rotation = tuple(part.roll(-1, 0) for part in rotation)
        return genuine(self, x, rotation)

    genuine = seam.set(decoder.Attention, "rotate", rotate)


@BATCHING.add(
    "sampling-of-the-neighbour",
    "scheduling/neighbours-sample-differently",
    origin=f"{VLLM}/pull/51890",
    at="Sampler._sample_row: parameters",
    detector="sampled_within_kept_set",
)
def _neighbours_parameters(seam: Seam) -> None:
    """A request samples with the parameters of the request before it in the batch."""
    sampler = sampler_module.Sampler

    def sample(self: Any, logits: Any, rows: Any, sequence_indices: Any = None) -> Any:
        if len({id(row.request) for row in rows}) > 1:
            seam.fire()
            others = [rows[-1], *rows[:-1]]
            rows = [
                replace(row, request=replace(row.request, sampling=other.request.sampling))
                for row, other in zip(rows, others, strict=True)
            ]
        return genuine(self, logits, rows, sequence_indices)

    genuine = seam.set(sampler, "sample", sample)


@BATCHING.add(
    "unmasked-tail-of-the-last-block",
    "scheduling/poisoned-pool[model=tiny-llama, attention_backend=dense]",
    origin=f"{VLLM}/pull/936",
    at="DenseBackend: keys of the last block",
    detector="history",
)
def _unmasked_tail(seam: Seam) -> None:
    """Attention gathers whole blocks and masks what is not written, but zero times NaN is NaN."""

    def padded(self: Any, length: int) -> int:
        size: int = self.cache.block_size
        return -(-length // size) * size

    def group(self: Any, backend: Any, metadata: Any, members: Any) -> None:
        genuine(self, backend, metadata, members)
        size = metadata.block_size
        if isinstance(backend, DenseBackend) and self.size == 1:
            table = metadata.block_tables[members[0]]
            length = metadata.seq_lens[members[0]]
            whole = -(-length // size) * size
            self.slots = torch.from_numpy(kv_cache.slot_numbers(table, 0, whole, size))
            seam.fire(whole > length)

    seam.set(DenseBackend, "padded", padded)
    genuine = seam.set(attention_base._Group, "__init__", group)


@BATCHING.add(
    "bits-depend-on-the-batch",
    "scheduling/batch-composition[model=tiny-llama]",
    origin=f"{VLLM}/issues/51187",
    at="PadOps.linear: order of sums",
    detector="same_under",
)
def _bits_of_the_batch(seam: Seam) -> None:
    """A product of few rows is summed in another order than one of many."""
    from minivllm.layers.ops_pad import PadOps

    def linear(self: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        if len(x) > 1:
            return genuine(self, x, weight, bias)
        seam.fire()
        half = x.shape[-1] // 2
        first = genuine(self, x[:, :half].contiguous(), weight[:, :half].contiguous(), None)
        second = genuine(self, x[:, half:].contiguous(), weight[:, half:].contiguous(), bias)
        return first + second

    genuine = seam.set(PadOps, "linear", linear)
