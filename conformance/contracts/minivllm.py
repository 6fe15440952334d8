"""minivllm's block manager and scheduler, as the fuzzer sees them. Torch-free unless asked for KV."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from conformance.contracts.base import (
    AllocatorCapabilities,
    AllocatorShape,
    Copy,
    EngineCapabilities,
    EngineShape,
    Moves,
    Plan,
    Rejected,
    Row,
    Span,
    Tags,
)
from minivllm.cache import BlockManager, PendingCopies
from minivllm.errors import CapacityError, PromptTooLong
from minivllm.request import (
    BlockCopy,
    MediaItem,
    MediaSpan,
    Request,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from minivllm.scheduler import Scheduler
from minivllm.trace import Event, PrefixHit

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.attention import KVCache

__all__ = ["MiniVLLMAllocator", "MiniVLLMEngine", "MiniVLLMTensors", "TensorMemory"]

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None)


class MiniVLLMAllocator:
    """`BlockManager` with its `PrefixIndex` and host pool; block 0 comes on top of the shape's."""

    capabilities: ClassVar[AllocatorCapabilities] = AllocatorCapabilities(
        prefix_sharing=True,
        prefix_switch=True,
        publish="commit",
        retains=True,
        evicts="tail-first",
        admits_when_it_fits=True,
        tags=True,
        fork=True,
        swap=True,
        publishes_swapped=True,
        reset=True,
        probe=True,
        snapshot=True,
        white_box=True,
    )

    def __init__(self, shape: AllocatorShape) -> None:
        self._manager = BlockManager(
            shape.num_blocks + 1,
            shape.block_size,
            enable_prefix_caching=shape.prefix_caching,
            prefix_seed=0,
            num_host_blocks=shape.num_host_blocks,
        )
        self._requests: dict[str, Request] = {}

    def grant_new(self, rid: str, tokens: Sequence[int], n: int, tags: Tags = Tags()) -> int | None:  # noqa: B008 # frozen
        request = _request(rid, tokens, tags)
        prefix = self._manager.find_prefix(request)
        end = min(prefix.num_tokens + n, len(tokens))
        if not self._manager.allocate(request, end, prefix):
            self._manager.free(rid)  # what the scheduler does with a waiting request that is withdrawn
            return None
        self._requests[rid] = request
        request.num_computed_tokens = prefix.num_tokens
        return prefix.num_tokens

    def can_grant(self, rid: str, tokens: Sequence[int], n: int) -> bool:
        request = _request(rid, tokens, Tags())
        prefix = self._manager.find_prefix(request)
        fits = self._manager.can_fit(request, min(prefix.num_tokens + n, len(tokens)))
        self._manager.free(rid)
        return fits

    def grant_more(self, rid: str, n: int) -> bool:
        request = self._requests[rid]
        return self._manager.append(request, request.num_computed_tokens + n)

    def append(self, rid: str, token: int) -> None:
        self._requests[rid].token_ids.append(token)

    def commit(self, rid: str, n: int) -> None:
        request = self._requests[rid]
        request.num_computed_tokens += n
        self._manager.publish(request)

    def release(self, rid: str) -> None:
        self._manager.free(rid)

    def table(self, rid: str) -> Sequence[int]:
        return self._manager.block_table(rid)

    def num_free(self) -> int:
        return self._manager.pool.num_available

    def fork(self, rid: str, child: str) -> bool:
        parent = self._requests[rid]
        tokens = parent.token_ids[: parent.num_computed_tokens]
        self._requests[child] = request = replace(parent, request_id=child, token_ids=tokens)
        self._manager.fork(rid, request)
        return True

    def swap_out(self, rid: str) -> bool:
        return self._manager.swap_out(rid)

    def swap_in(self, rid: str, n: int) -> bool:
        request = self._requests[rid]
        return self._manager.swap_in(request, request.num_computed_tokens + n)

    def num_host_free(self) -> int:
        return self._manager.host_pool.num_available

    def moves(self) -> Moves:
        pending = self._manager.pending_copies()
        return Moves(_copies(pending.swap_out), _copies(pending.swap_in), _copies(pending.copies))

    def moved(self) -> None:
        self._manager.copies_done(self._manager.pending_copies())

    def reset(self) -> bool:
        return self._manager.reset_prefix_cache()

    def snapshot(self) -> object:
        manager, pool = self._manager, self._manager.pool
        references = list(map(pool.references, range(pool.num_blocks)))
        lists = [*pool.free_blocks()], [*pool.cached_blocks()], manager.host_pool.num_available
        return (references, lists, manager.pending_copies(), len(manager.index))

    def check(self) -> None:
        self._manager.check_integrity()


class MiniVLLMEngine:
    """`Scheduler` over a `BlockManager`: `plan` and `commit` as the engine loop calls them."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(
        options=frozenset({"salt", "spans", "priority", "min_tokens", "stop_ids", "n", "prompt_logprobs"}),
        prefix_sharing=True,
        prefix_switch=True,
        publish="commit",
        retains=True,
        evicts="tail-first",
        never_fit="refused",
        order="fcfs",
        chunked_prefill=True,
        priority_policy=True,
        replan=True,
        abort=True,
        abort_inside_step=True,
        preempt=True,
        fail=True,
        break_off=True,
        ship=True,
        swap=True,
        publishes_swapped=True,
        encoder=True,
        reset=True,
        pool=True,
        unused=True,
        white_box=True,
        bound=True,
    )

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._first_hits = self._num_added = 0
        self._manager = BlockManager(
            shape.num_blocks + 1,
            shape.block_size,
            enable_prefix_caching=shape.prefix_caching,
            prefix_seed=0,
            num_host_blocks=shape.num_host_blocks,
            trace=self._note,
        )
        self._scheduler = Scheduler(
            block_manager=self._manager,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_model_len,
            max_encoder_embeddings=shape.encoder_budget or shape.max_model_len,
            enable_chunked_prefill=shape.chunked_prefill,
            policy=shape.policy,
            preemption_mode=shape.preemption,
        )
        self._requests: dict[str, Request] = {}  # ended ones too, and forked sequences
        self._preempted: Counter[str] = Counter()  # by `preempt`, not for want of room
        self._plan: StepPlan | None = None

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        ignore_eos: bool,
        *,
        salt: str | None = None,
        spans: tuple[Span, ...] = (),
        priority: int = 0,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        n: int = 1,
        prompt_logprobs: bool = False,
    ) -> str | Rejected:
        number = self._num_added
        self._num_added += 1
        sampling = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            stop_token_ids=stop_ids,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        request = _request(f"q{number}", tokens, Tags(salt, spans), sampling)
        request.eos_token_ids = (self._shape.eos,)
        request.arrival, request.priority = number, priority
        self._requests[request.request_id] = request
        try:
            self._scheduler.add(request)
        except (CapacityError, PromptTooLong) as error:
            return Rejected(str(error))
        return request.request_id

    def plan(self) -> Plan | None:
        self._plan = self._scheduler.plan()
        return None if self._plan is None else _plan(self._plan, self._shape.block_size)

    def ship(self) -> Plan:
        plan: StepPlan = pickle.loads(pickle.dumps(self._plan))
        return _plan(plan, self._shape.block_size)

    def commit(self, sampled: Mapping[str, int], failed: Mapping[str, str] | None = None) -> None:
        assert self._plan is not None
        samples = {rid: SampledToken(token, token) for rid, token in sampled.items()}
        changed = self._scheduler.commit(self._plan, StepResult(samples, failures=failed or {}))
        self._requests.update((request.request_id, request) for request in changed)

    def break_off(self, done: int) -> None:
        assert self._plan is not None
        lists = (self._plan.swap_out, self._plan.swap_in, self._plan.copies)
        self._scheduler.break_off(PendingCopies(*lists[:done]))

    def output(self, rid: str) -> Sequence[int]:
        return self._requests[rid].output_token_ids

    def finished(self, rid: str) -> str | None:
        reason = self._requests[rid].finish_reason
        return None if reason is None else reason.value

    def idle(self) -> bool:
        return not self._scheduler.has_unfinished()

    def abort(self, rid: str) -> None:
        self._scheduler.abort(rid)

    def preempt(self, rid: str) -> bool:
        done = self._scheduler.preempt(rid)
        self._preempted[rid] += done
        return done

    def reset(self) -> bool:
        return self._scheduler.reset_prefix_cache()

    def num_free(self) -> int:
        return self._manager.pool.num_available

    def num_host_free(self) -> int:
        return self._manager.host_pool.num_available

    def unused_slots(self) -> Iterator[int]:
        size = self._shape.block_size
        blocks, partly = self._manager.unused_slots()
        for block in blocks:
            yield from range(block * size, (block + 1) * size)
        for block, first in partly.items():
            yield from range(block * size + first, (block + 1) * size)

    def bound(self, lengths: Sequence[int]) -> int:
        """Steps to empty, as the docstring of `Scheduler` promises."""
        steps = sum(lengths)
        if self._shape.policy == "priority":
            steps += max(len(lengths) - 1, 0) * max(lengths, default=0)
        return steps

    def check(self) -> None:
        self._scheduler.check_integrity()
        own = [request for request in self._requests.values() if request.parent_id is None]
        cached = sum(max(0, request.num_cached_tokens) for request in own)
        if not self._manager.stats.num_hit_tokens == self._first_hits == cached:
            raise AssertionError(
                f"hits of first admissions: {self._first_hits} traced, {cached} on the requests,"
                f" {self._manager.stats.num_hit_tokens} in the statistics"
            )

        for rid, request in self._requests.items():
            if request.num_preemptions - self._preempted[rid] > self._scheduler.max_preemptions:
                raise AssertionError(
                    f"{rid} lost its blocks {request.num_preemptions} times for want of room"
                )

    def _note(self, event: Event) -> None:
        if isinstance(event, PrefixHit) and not event.resumed:
            self._first_hits += event.num_tokens


class MiniVLLMTensors(MiniVLLMEngine):
    """The same over a real `KVCache`, so that its block copies are judged too. Needs torch."""

    capabilities: ClassVar[EngineCapabilities] = replace(MiniVLLMEngine.capabilities, memory=True)

    def memory(self) -> TensorMemory:
        return TensorMemory(self._shape)


class TensorMemory:
    """Values in the tensors of a `KVCache` of two layers: K, V and each layer hold them in another
    form, so that a copy that leaves one of them out is seen. A `conformance.fuzz.kv.KVMemory`."""

    _FORMS = (0, 0x5A5A, 0xC3C3C3, 0x0F0F0F0F)  # K and V of layer 0, K and V of layer 1
    _NOTHING = -1

    def __init__(self, shape: EngineShape) -> None:
        import torch

        from minivllm.attention import KVCache

        model = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=1, head_dim=1)
        self._torch = torch
        self._cache: KVCache = KVCache(
            cast("Any", model),
            num_blocks=shape.num_blocks + 1,
            block_size=shape.block_size,
            dtype=torch.int64,
            device=torch.device("cpu"),
            num_host_blocks=shape.num_host_blocks,
        )
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.fill_(self._NOTHING)

    def write(self, slots: Sequence[int], values: Sequence[int | None]) -> None:
        where = self._torch.tensor(slots, dtype=self._torch.int64)
        for layer in range(2):
            self._cache.write(layer, where, *(self._form(values, 2 * layer + part) for part in range(2)))

    def read(self, slots: Sequence[int]) -> list[int | None]:
        where = self._torch.tensor(slots, dtype=self._torch.int64)
        rows = [
            tensor.flatten().tolist() for layer in range(2) for tensor in self._cache.gather(layer, where)
        ]
        return [self._value(forms) for forms in zip(*rows, strict=True)]

    def poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for tensor in (*self._cache.keys, *self._cache.values):
                tensor[block] = self._NOTHING

    def swap_out(self, copies: Sequence[Copy]) -> None:
        self._cache.swap_out([BlockCopy(**asdict(copy)) for copy in copies])

    def swap_in(self, copies: Sequence[Copy]) -> None:
        self._cache.swap_in([BlockCopy(**asdict(copy)) for copy in copies])

    def copy(self, copies: Sequence[Copy]) -> None:
        self._cache.copy([BlockCopy(**asdict(copy)) for copy in copies])

    def _form(self, values: Sequence[int | None], part: int) -> Tensor:
        stored = [self._NOTHING if value is None else value ^ self._FORMS[part] for value in values]
        return self._torch.tensor(stored, dtype=self._torch.int64).reshape(-1, 1, 1)

    def _value(self, stored: tuple[int, ...]) -> int | None:
        """The value, None if there is nothing, or -2 if the four do not agree."""
        if all(one == self._NOTHING for one in stored):
            return None
        values = {one ^ form for one, form in zip(stored, self._FORMS, strict=True)}
        return values.pop() if len(values) == 1 else -2


def _plan(plan: StepPlan, block_size: int) -> Plan:
    return Plan(
        tuple([_row(scheduled, block_size) for scheduled in plan.requests]),
        Moves(_copies(plan.swap_out), _copies(plan.swap_in), _copies(plan.copies)),
        evict=plan.evict_media,
        encode=tuple([item.content_hash for item in plan.encode]),
    )


def _row(scheduled: ScheduledRequest, size: int) -> Row:
    start, end, table = scheduled.start, scheduled.end, scheduled.block_table
    context = tuple([table[i // size] * size + i % size for i in range(end)])
    return Row(
        rid=scheduled.request_id,
        ids=tuple(scheduled.tokens[start:end]),
        positions=tuple(range(start, end)),
        slots=context[start:],
        kv_len=end,
        context=context,
        table=table,
        forks=scheduled.fork_ids,
    )


def _copies(copies: Sequence[BlockCopy]) -> tuple[Copy, ...]:
    return tuple([Copy(c.source, c.target) for c in copies])


def _request(rid: str, tokens: Sequence[int], tags: Tags, sampling: SamplingParams = _PARAMS) -> Request:
    return Request(
        rid,
        list(tokens),
        len(tokens),
        sampling,
        cache_salt=tags.salt,
        media=tuple(MediaSpan(s.start, s.length, "image", s.content) for s in tags.spans),
        media_items={s.content: MediaItem(s.content, "image", s.length, {}) for s in tags.spans},
    )
