"""The laws of the scheduler: what a result must answer, and how requests, queues and blocks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm.admission import seats
from minivllm.cache import BlockManager
from minivllm.errors import InvariantError
from minivllm.request import Request, RequestStatus, ScheduledRequest, StepPlan, StepResult
from minivllm.waiting import Ticket, WaitingQueue

__all__ = ["check_result", "check_schedule"]


def check_result(plan: StepPlan, current: Sequence[ScheduledRequest], result: StepResult) -> None:
    """Check that a result answers its plan.

    Args:
        current: the scheduled requests that still wait for their result.

    Raises:
        InvariantError: naming every request with too much or too little.
    """
    to_sample = {name for s in plan.requests if s.sample for name in (s.request_id, *s.fork_ids)}
    problems = []
    if extra := sorted(result.samples.keys() - to_sample):
        problems.append(f"tokens for requests that were not to sample: {extra}")
    if extra := sorted(result.failures.keys() - {s.request_id for s in plan.requests} - to_sample):
        problems.append(f"failures of requests that were not scheduled: {extra}")
    answered = result.samples.keys() | result.failures.keys()
    missing = [
        name
        for s in current
        if s.sample and s.request_id not in result.failures  # which ends its forks too
        for name in (s.request_id, *s.fork_ids)
        if name not in answered
    ]
    if missing:
        problems.append(f"no token for {sorted(missing)}")
    if problems:
        raise InvariantError(f"the result of step {plan.step} does not fit its plan: {'; '.join(problems)}")


def check_schedule(
    requests: Mapping[str, Request],
    tickets: Mapping[str, Ticket],
    running: Sequence[Request],
    waiting: WaitingQueue,
    max_num_seqs: int,
    block_manager: BlockManager,
) -> None:
    """Check that live requests, tickets, queues and blocks agree.

    Raises:
        InvariantError: naming the broken law.
    """
    names = [request.request_id for request in running]
    queued = [request_id for request_id in requests if request_id in waiting]
    if sorted(names + queued) != sorted(requests) or len(queued) != len(waiting):
        raise InvariantError("law 'a live request either runs or waits' is broken")
    if tickets.keys() != requests.keys():
        raise InvariantError("law 'each live request has one ticket' is broken")
    taken = sum(seats(request, max_num_seqs) for request in running)
    if taken > max_num_seqs:
        raise InvariantError(f"law 'at most {max_num_seqs} run' is broken: {taken} run or are to be forked")
    if names != sorted(names, key=tickets.__getitem__):
        raise InvariantError(f"law 'running requests are in order' is broken: {names}")
    for request in requests.values():
        _check_request(request, waiting, block_manager)


def _check_request(request: Request, waiting: WaitingQueue, block_manager: BlockManager) -> None:
    name = request.request_id
    holds = block_manager.has_table(name)
    if (request.status is RequestStatus.RUNNING) != holds or (name in waiting) == holds:
        raise InvariantError(f"law 'exactly running requests hold device blocks' is broken: {name!r}")
    if not 0 <= request.num_computed_tokens < request.num_tokens:
        raise InvariantError(
            f"law 'a live request has a token to compute' is broken: {name!r} computed"
            f" {request.num_computed_tokens} of {request.num_tokens}"
        )
    num_blocks = len(block_manager.block_table(name)) or len(block_manager.host_table(name))
    if block_manager.num_blocks_for(request.num_computed_tokens) > num_blocks:
        raise InvariantError(f"law 'computed tokens have blocks' is broken: {name!r}")
