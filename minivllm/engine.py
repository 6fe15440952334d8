"""The engine: requests in, outputs out, one forward pass per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minivllm.build import EngineParts, build_engine
from minivllm.cache import KVSnapshot, PoolCounts
from minivllm.config import EngineConfig, PreemptionMode, ResolvedConfig
from minivllm.errors import BadParameter, ConfigError, InvariantError, UnknownRequest
from minivllm.models import LanguageModel, replace_weights
from minivllm.processor import Prompt
from minivllm.request import RequestMedia, RequestOutput, SamplingParams
from minivllm.tokenizer import Message, Tokenizer
from minivllm.trace import TraceSink, no_trace

__all__ = ["LLMEngine"]


class LLMEngine:
    """Serves requests step by step. Not thread-safe: one caller drives it.

    Args:
        config: what to run and how.
        trace: receives every event of `minivllm.trace`.
        model: an already loaded model of the same path, dtype and device, to save loading twice.

    Raises:
        ConfigError, UnsupportedError, WeightError: while building, before any request.
    """

    def __init__(
        self, config: EngineConfig, *, trace: TraceSink = no_trace, model: LanguageModel | None = None
    ) -> None:
        parts: EngineParts = build_engine(config, trace=trace, model=model)
        self.resolved: ResolvedConfig = parts.resolved
        self.model: LanguageModel = parts.model
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self._processor, self._scheduler, self._runner = parts.processor, parts.scheduler, parts.runner
        self._output, self._stages = parts.output, parts.stages
        self._arrivals = 0

    # ---- the loop -----------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan, run and commit one forward pass; returns the outputs that changed.

        Whatever ends a step before its commit (an interrupt, memory that ran out) loses nothing: call
        `step` again. An interrupt in the bookkeeping after it, while tokens are appended and turned
        into text, is not made good: outputs may lack them. Abort the live requests then.
        """
        plan = self._scheduler.plan()
        if plan is None:
            if self._scheduler.has_unfinished():
                raise InvariantError("requests are unfinished, yet nothing can be scheduled")
            return []
        try:
            result = self._runner.run(plan)
            self._stages.collect(plan, result)
            changed = self._scheduler.commit(plan, result)
        except BaseException:  # an interrupt, memory that ran out: the next step does it again
            self._scheduler.break_off(self._runner.break_off())
            raise
        return self._output.process(changed, result)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        capture: Iterable[str] = (),
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among live requests.
            prompt: text, or {"prompt": text} or {"prompt_token_ids": ids}, which may have
                {"multi_modal_data": {"image": …, "video": …, "image_embeds": …}} and
                {"mm_processor_kwargs": …}; or {"prompt_embeds": [tokens, hidden]}.
            sampling_params: how to choose tokens and when to stop.
            priority: lower runs first, under the priority policy.
            cache_salt: separates this request's cached blocks from those of other salts.
            capture: stages to capture, of `minivllm.runner.CAPTURES`.

        Raises:
            RequestError (by its kinds), CapacityError, UnsupportedError: nothing was queued.
        """
        request, text = self._processor.process(
            request_id,
            prompt,
            sampling_params,
            arrival=self._arrivals,
            priority=priority,
            cache_salt=cache_salt,
            capture=capture,
        )
        self._scheduler.add(request)
        self._arrivals += 1
        self._stages.drop(request_id)
        self._output.add(request, text)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation, with its media in content parts, as a prompt for `add_request`.

        Args:
            mm_processor_kwargs: settings of the image processor; `add_request` checks them.

        Raises:
            BadParameter, UnsupportedError: the messages are malformed; there is no template, or
                this is a text-only model and they hold media.
        """
        return self._processor.chat_prompt(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def media(self, request_id: str) -> RequestMedia:
        """Processed images and videos of a live request, where they go, and its positions.

        Raises:
            UnknownRequest: no live request or sequence has this id.
        """
        request = self._scheduler.requests.get(_must_be_id(request_id))
        if request is None:
            raise UnknownRequest(f"no live request {request_id!r}")
        return RequestMedia(request.media, request.media_items, request.positions, request.position_delta)

    def abort_request(self, request_id: str) -> RequestOutput:
        """Cancel a live request with all its sequences, and return its last output.

        The id of a sequence other than the first ("a/1", see `minivllm.request.sequence_ids`)
        cancels that sequence alone; the output tells how the others stand.

        Raises:
            UnknownRequest: no live request or sequence has this id.
        """
        self._scheduler.abort(_must_be_id(request_id))
        return self._output.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether another step would do something."""
        return self._scheduler.has_unfinished()

    # ---- what a person or a test wants to see or do between steps ------------------------------

    def preempt_request(self, request_id: str, mode: PreemptionMode | None = None) -> bool:
        """Take a running request's blocks away; it resumes later. False if it holds none.

        Args:
            mode: instead of the configured preemption_mode.

        Raises:
            BadParameter: an unknown mode.
        """
        if mode not in (None, "recompute", "swap", "auto"):
            raise BadParameter(f"the preemption mode must be recompute, swap or auto, got {mode!r}")
        return self._scheduler.preempt(_must_be_id(request_id), mode)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False (and nothing done) while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the model's parameters; forget every cached block and vision embedding.

        Args:
            tensors: name → tensor of the parameter's shape, named as in the checkpoint. Parameters
                that are not named keep their values.

        Raises:
            ConfigError: requests hold KV of the old weights; finish or abort them first.
            WeightError: an unknown name, a wrong shape, or a tensor that is not floating point.
                In either case nothing has changed.
        """
        holding = [name for name, r in self._scheduler.requests.items() if r.num_computed_tokens]
        if holding:
            raise ConfigError(
                f"weights cannot be updated while {len(holding)} requests hold KV of the old ones"
                f" ({', '.join(holding[:5])}); finish or abort them first"
            )
        replace_weights(self.model, tensors)
        if not self._scheduler.reset_prefix_cache():
            raise InvariantError("no request has computed anything, yet blocks are in use")
        self._scheduler.reset_encoder_cache()

    def kv_snapshot(self) -> KVSnapshot:
        """Every block of the KV cache and of the host pool: who holds it, and what is in it."""
        return self._scheduler.kv_snapshot()

    def pool_counts(self) -> PoolCounts:
        """How the block pool stands."""
        return self._scheduler.block_manager.counts()

    def host_pool_counts(self) -> PoolCounts:
        """How the host pool for swapped-out blocks stands."""
        return self._scheduler.block_manager.host_counts()

    def read_kv(self, request_id: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer (k, v), each [num_computed_tokens, kv heads, head_dim], in logical order.

        A swapped-out request's are in host memory; sequences have ids of their own, see
        `minivllm.request.sequence_ids`.

        Raises:
            UnknownRequest: no live request or sequence has this id.
        """
        request = self._scheduler.requests.get(_must_be_id(request_id))
        if request is None:
            raise UnknownRequest(f"no live request {request_id!r}")
        manager, num_tokens = self._scheduler.block_manager, request.num_computed_tokens
        host_table = manager.host_table(request_id)
        if not host_table:
            return self._runner.read_kv(manager.block_table(request_id), num_tokens)
        # Preempted since the last step: the blocks are where they were until the next one.
        leaving = {copy.target: copy.source for copy in manager.pending_copies().swap_out}
        if host_table[0] in leaving:
            return self._runner.read_kv([leaving[block] for block in host_table], num_tokens)
        return self._runner.read_host_kv(host_table, num_tokens)

    def stages(self, request_id: str) -> dict[str, NDArray[np.generic]]:
        """Captured stages so far: name → array. Kept after the end, until the id is used again."""
        return self._stages.get(_must_be_id(request_id))

    def poison(self) -> int:
        """Fill every KV slot that must not matter with NaN; returns how many were filled."""
        manager = self._scheduler.block_manager
        return self._runner.poison(*manager.unused_slots()) + self._runner.poison_host(
            manager.unused_host_blocks()
        )

    def shuffle_free_blocks(self, seed: int) -> None:
        """Hand the free KV blocks out in another order, drawn from `seed`: no answer may change by it."""
        self._scheduler.block_manager.pool.shuffle_free(seed)


def _must_be_id(request_id: object) -> str:
    """Any other object may not even be a key to look up."""
    if not isinstance(request_id, str):
        raise UnknownRequest(f"no live request {request_id!r}: a request id is text")
    return request_id
