"""What one step of the control plane costs, by the size of the pool and the length of the queue.

CPU time of this thread, the median of many repetitions: other processes do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from minivllm.bench.workload import FakeRunner
from minivllm.cache import BlockManager
from minivllm.request import Request, SamplingParams
from minivllm.scheduler import Scheduler

__all__ = ["PoolCost", "QueueCost", "pool_cost", "queue_cost"]

_T = TypeVar("_T")

BLOCK_SIZE = 16
RUNNING = 32
REQUEST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class PoolCost:
    """Microseconds, at one size of the pool.

    Attributes:
        num_cached: blocks that nobody held but that could be hit, before measuring.
        plan: `plan()` of 32 decoding requests.
        commit: `commit()` of the same.
        allocate: giving a request 64 blocks.
        free: taking them back.
    """

    num_blocks: int
    num_cached: int
    plan: float
    commit: float
    allocate: float
    free: float


@dataclass(frozen=True, slots=True)
class QueueCost:
    """Microseconds, at one number of waiting requests.

    Attributes:
        plan: `plan()` of 32 decoding requests while nobody can be admitted.
        admit: `plan()` that admits one waiting request as well.
        abort: cancelling a waiting request in the middle of the queue.
    """

    num_waiting: int
    plan: float
    admit: float
    abort: float


def pool_cost(num_blocks: int, *, repetitions: int = 200) -> PoolCost:
    """Measure at one size of the pool, at most half of which (and 20,000 blocks) is cached before."""
    manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True, prefix_seed=0)
    cached = min(num_blocks // 2, 20_000) // REQUEST_BLOCKS
    for i in range(cached):
        request = _request(f"old{i}", REQUEST_BLOCKS * BLOCK_SIZE, 1, first_token=i + 1)
        manager.allocate(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.publish(request)
        manager.free(request.request_id)
    scheduler = _scheduler(manager)
    # Each of them grows by a block now and then, as decoding requests do.
    for i in range(RUNNING):
        scheduler.add(_request(f"run{i}", 40, min(repetitions + 8, 8 * num_blocks // RUNNING)))
    num_cached = manager.counts().cached
    runner, plans, commits = FakeRunner(), [], []
    for step in range(min(repetitions, 6 * num_blocks // RUNNING)):
        plan_time, plan = _timed(scheduler.plan)
        assert plan is not None
        result = runner.run(plan)
        commit_time, _ = _timed(lambda plan=plan, result=result: scheduler.commit(plan, result))  # type: ignore[misc]  # default arguments bind the values of this step
        if step >= 3:  # the first steps compute the prompts
            plans.append(plan_time)
            commits.append(commit_time)
    allocations, releases = [], []
    for i in range(repetitions):
        request = _request(f"new{i}", REQUEST_BLOCKS * BLOCK_SIZE, 1, first_token=-1 - i)
        spent, done = _timed(lambda request=request: manager.allocate(request, request.num_tokens))  # type: ignore[misc]  # the same
        assert done
        allocations.append(spent)
        releases.append(_timed(lambda request=request: manager.free(request.request_id))[0])  # type: ignore[misc]  # the same
    return PoolCost(
        num_blocks, num_cached, median(plans), median(commits), median(allocations), median(releases)
    )


def queue_cost(num_waiting: int, *, repetitions: int = 200) -> QueueCost:
    """Measure with a full set of running requests and `num_waiting` requests behind them."""
    scheduler = _scheduler(BlockManager(20_000, BLOCK_SIZE, enable_prefix_caching=True, prefix_seed=0))
    for i in range(RUNNING + num_waiting):
        scheduler.add(_request(f"r{i}", 40, 4 * repetitions))
    runner = FakeRunner()

    def step() -> float:
        spent, plan = _timed(scheduler.plan)
        assert plan is not None
        scheduler.commit(plan, runner.run(plan))
        return spent

    for _ in range(3):
        step()
    plans = [step() for _ in range(repetitions)]
    admits = []
    rounds = min(repetitions, num_waiting // 2)
    for i in range(rounds):
        scheduler.abort(f"r{i}")
        admits.append(step())
    aborts = []
    for i in range(min(repetitions, num_waiting // 4)):
        name = f"r{RUNNING + rounds + (num_waiting - rounds) // 2 + i}"
        aborts.append(_timed(lambda name=name: scheduler.abort(name))[0])  # type: ignore[misc]  # default arguments bind the value
    return QueueCost(num_waiting, median(plans), median(admits), median(aborts))


def _scheduler(manager: BlockManager) -> Scheduler:
    return Scheduler(
        block_manager=manager, max_num_seqs=RUNNING, max_num_batched_tokens=2048, max_model_len=100_000
    )


def _request(name: str, length: int, max_tokens: int, first_token: int = 0) -> Request:
    tokens = [first_token, *range(1, length)]
    return Request(name, tokens, length, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def _timed(call: Callable[[], _T]) -> tuple[float, _T]:
    """Microseconds of this thread's CPU time, and what the call returned."""
    began = time.thread_time_ns()
    answer = call()
    return (time.thread_time_ns() - began) / 1000, answer
