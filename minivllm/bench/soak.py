"""Many requests through the scheduler, cancelled and preempted at random: nothing may be left over."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.bench.workload import FakeRunner
from minivllm.cache import BlockManager
from minivllm.errors import InvariantError
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler
from minivllm.trace import Event

__all__ = ["SoakReport", "Wave", "soak"]

#: Few tokens and prompts that begin alike, so that the prefix cache has work.
_VOCABULARY = 50


@dataclass(frozen=True, slots=True)
class Wave:
    """One part of the soak, at whose end nothing is live.

    Attributes:
        memory: bytes that Python objects made since the start take (tracemalloc); 0 if not traced.
    """

    requests: int
    steps: int
    memory: int


@dataclass(slots=True)
class SoakReport:
    """What happened.

    Attributes:
        events: how often each event of `minivllm.trace` came, by class name.
        waves: one per tenth of the requests.
    """

    events: dict[str, int] = field(default_factory=dict)
    waves: list[Wave] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """Bytes by which memory grew from the end of the second wave to the end of the last.

        The first waves fill what is bounded: the pool's lists and the prefix index.
        """
        return self.waves[-1].memory - self.waves[1].memory


def soak(
    num_requests: int = 10_000,
    *,
    seed: int = 0,
    trace_memory: bool = True,
    num_blocks: int = 257,
    block_size: int = 4,
    num_host_blocks: int = 64,
    progress: Callable[[int], None] = lambda _done: None,
) -> SoakReport:
    """Run requests in ten waves; each ends with an empty engine.

    About one request in five is cancelled, in any state, and one in ten preempted by hand, beside
    the preemptions that a small pool forces; some have several sequences, salts and priorities.

    Raises:
        InvariantError: something was left over, or a law between pool, tables and index broke.
    """
    report = SoakReport()

    def count(event: Event) -> None:
        name = type(event).__name__
        report.events[name] = report.events.get(name, 0) + 1

    manager = BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=True,
        prefix_seed=0,
        num_host_blocks=num_host_blocks,
        trace=count,
    )
    scheduler = Scheduler(
        block_manager=manager,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        max_model_len=160,
        policy="priority",
        preemption_mode="auto",
        trace=count,
    )
    numbers = random.Random(seed)
    gc.freeze()  # what was there before is not searched for garbage ten times
    if trace_memory:
        tracemalloc.start()
    try:
        done = 0
        for wave in range(10):
            size = num_requests * (wave + 1) // 10 - done
            steps = _run_wave(scheduler, numbers, done, size, progress)
            done += size
            _must_be_empty(scheduler)
            gc.collect()  # what only cycles hold is no leak
            memory = tracemalloc.get_traced_memory()[0] if trace_memory else 0
            report.waves.append(Wave(size, steps, memory))
    finally:
        gc.unfreeze()
        if trace_memory:
            tracemalloc.stop()
    return report


def _run_wave(
    scheduler: Scheduler, numbers: random.Random, first: int, size: int, progress: Callable[[int], None]
) -> int:
    runner, added, steps = FakeRunner(), 0, 0
    while added < size or scheduler.has_unfinished():
        while added < size and numbers.random() < 0.6:
            scheduler.add(_request(f"r{first + added}", first + added, numbers))
            added += 1
            progress(first + added)
        plan = scheduler.plan()
        if plan is None:
            continue
        _disturb(scheduler, numbers)  # between plan and commit, as when a client goes away
        scheduler.commit(plan, runner.run(plan))
        _disturb(scheduler, numbers)
        steps += 1
    return steps


def _disturb(scheduler: Scheduler, numbers: random.Random) -> None:
    live = list(scheduler.requests)
    if live and numbers.random() < 0.08:
        scheduler.abort(numbers.choice(live))
    elif live and numbers.random() < 0.05:
        scheduler.preempt(numbers.choice(live))


def _request(name: str, number: int, numbers: random.Random) -> Request:
    prefix = [numbers.randrange(3)] * numbers.choice((0, 8, 24))
    prompt = prefix + [numbers.randrange(_VOCABULARY) for _ in range(numbers.randint(1, 40))]
    several = numbers.random() < 0.1
    sampling = SamplingParams(
        n=numbers.randint(2, 4) if several else 1,
        max_tokens=numbers.randint(1, 30),
        stop_token_ids=[numbers.randrange(1000) for _ in range(20)],
        prompt_logprobs=0 if numbers.random() < 0.05 else None,
    )
    return Request(
        name,
        prompt,
        len(prompt),
        sampling,
        seed=number,
        arrival=number,
        priority=numbers.randrange(3),
        cache_salt=numbers.choice((None, None, "one", "two")),
    )


def _must_be_empty(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    counts = scheduler.block_manager.counts()
    if scheduler.requests or counts.in_use or counts.free + counts.cached != counts.total:
        raise InvariantError(
            f"law 'an empty engine holds nothing' is broken: {len(scheduler.requests)} requests, {counts}"
        )
