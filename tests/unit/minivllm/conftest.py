"""A scheduler with a fake runner whose KV memory is checked, for tests of swapping and forking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from minivllm.cache import BlockManager
from minivllm.request import Request, SampledToken, SamplingParams, ScheduledRequest, StepPlan, StepResult
from minivllm.scheduler import Scheduler
from minivllm.trace import Event

EOS = 99


class MemoryBench:
    """Plans, runs and commits steps; what is stored for a token is its whole history.

    So a read of anything but the right content fails at once. A sequence's next token is what it
    is told to be; by default 1000 * its index + the length of its history.
    """

    def __init__(
        self, *, usable: int = 20, block_size: int = 2, caching: bool = True, **options: Any
    ) -> None:
        self.events: list[Event] = []
        self.blocks = BlockManager(
            usable + 1,
            block_size,
            enable_prefix_caching=caching,
            prefix_seed=0,
            num_host_blocks=options.pop("host", 0),
            trace=self.events.append,
        )
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 32, **options}
        self.scheduler = Scheduler(block_manager=self.blocks, trace=self.events.append, **settings)
        self.device: dict[int, tuple[int, ...] | None] = {}
        self.host: dict[int, tuple[int, ...] | None] = {}
        self.sequences: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.sequences[request.request_id] = request

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        assert plan is not None
        return plan

    def run(self, plan: StepPlan, tokens: Mapping[str, int] | None = None) -> StepResult:
        size = self.blocks.block_size
        for copies, source, target in (
            (plan.swap_out, self.device, self.host),
            (plan.swap_in, self.host, self.device),
            (plan.copies, self.device, self.device),
        ):
            for copy in copies:
                for offset in range(size):
                    target[copy.target * size + offset] = source.get(copy.source * size + offset)
        for s in plan.requests:
            for position in range(s.start, s.end):
                self.device[self.slot(s, position)] = tuple(s.tokens[: position + 1])
        samples = {}
        for s in plan.requests:
            for position in range(s.end):
                read = self.device.get(self.slot(s, position))
                assert read == tuple(s.tokens[: position + 1]), f"{s.request_id} reads {read} at {position}"
            for index, name in enumerate((s.request_id, *s.fork_ids), s.request.sequence_index):
                if s.sample:
                    token = (tokens or {}).get(name, 1000 * index + len(s.tokens))
                    samples[name] = SampledToken(token, token)
        return StepResult(samples)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        changed = self.scheduler.commit(plan, result)
        self.scheduler.check_integrity()
        self.sequences.update((request.request_id, request) for request in changed)
        return changed

    def step(self, **tokens: int) -> dict[str, tuple[int, int]]:
        """Run one step; returns request → (start, number of tokens)."""
        plan = self.plan()
        self.commit(plan, self.run(plan, tokens))
        return {s.request_id: (s.start, s.num_tokens) for s in plan.requests}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> int:
        """Steps until nothing is live; then both pools must be unused."""
        count = 0
        while self.scheduler.has_unfinished():
            self.step()
            count += 1
        assert self.blocks.counts().in_use == self.blocks.host_counts().in_use == 0
        return count

    def of(self, *kinds: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kinds)]

    def slot(self, s: ScheduledRequest, position: int) -> int:
        size = self.blocks.block_size
        return s.block_table[position // size] * size + position % size


MakeBench = Callable[..., MemoryBench]
MakeRequest = Callable[..., Request]


@pytest.fixture
def make_bench() -> MakeBench:
    """Makes a `MemoryBench`; takes usable, block_size, host, caching and the scheduler's options."""
    return MemoryBench


@pytest.fixture
def make_request() -> MakeRequest:
    """Makes a request; a number as prompt gives that many tokens nobody else has."""

    def make(name: str, prompt: int | Sequence[int] = 3, *, priority: int = 0, **sampling: Any) -> Request:
        if isinstance(prompt, int):
            first = 10_000 * (1 + sum(map(ord, name)))
            prompt = range(first, first + prompt)
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        return Request(name, list(prompt), len(prompt), params, eos_token_ids=(EOS,), priority=priority)

    return make
