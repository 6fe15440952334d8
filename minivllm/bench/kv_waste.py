"""How many of the allocated KV slots hold a token: in pages, and reserved in one piece."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.bench.workload import FakeRunner, Workload
from minivllm.cache import BlockManager
from minivllm.request import RequestStatus
from minivllm.scheduler import Scheduler

__all__ = ["Waste", "measure"]


@dataclass(frozen=True, slots=True)
class Waste:
    """Slots summed over the steps of one workload.

    Attributes:
        steps: forward passes.
        used: slots that hold a computed token at the end of a pass.
        paged: slots of the blocks that were allocated to requests.
        contiguous: slots if each running request had reserved max_model_len, as before paging.
        running: running requests, summed over the steps.
        preemptions: how often a request lost its blocks.
    """

    steps: int
    used: int
    paged: int
    contiguous: int
    running: int
    preemptions: int

    @property
    def paged_waste(self) -> float:
        """Share of the allocated slots that hold nothing."""
        return 1 - self.used / self.paged

    @property
    def contiguous_waste(self) -> float:
        """The same for contiguous reservation."""
        return 1 - self.used / self.contiguous


def measure(
    workload: Workload,
    *,
    seed: int = 0,
    block_size: int = 16,
    num_blocks: int = 2049,
    max_model_len: int = 2048,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
) -> Waste:
    """Replay a workload, all requests queued at once, and count slots in every step.

    The prefix cache is off: blocks that nobody holds any more would count for neither side.
    """
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=False)
    scheduler = Scheduler(
        block_manager=manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    requests = workload.requests(seed)
    for request in requests:
        scheduler.add(request)
    runner = FakeRunner()
    steps = used = paged = running_sum = 0
    while (plan := scheduler.plan()) is not None:
        ends = {scheduled.request_id: scheduled.end for scheduled in plan.requests}
        running = [r for r in scheduler.requests.values() if r.status is RequestStatus.RUNNING]
        steps += 1
        used += sum(ends.get(r.request_id, r.num_computed_tokens) for r in running)
        paged += manager.counts().in_use * block_size
        running_sum += len(running)
        scheduler.commit(plan, runner.run(plan))
    return Waste(
        steps=steps,
        used=used,
        paged=paged,
        contiguous=running_sum * max_model_len,
        running=running_sum,
        preemptions=sum(r.num_preemptions for r in requests),
    )
