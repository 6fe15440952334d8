"""What a result must answer; how requests, queues, tickets and blocks must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from minivllm.cache import BlockManager
from minivllm.errors import InvariantError
from minivllm.integrity import check_result, check_schedule
from minivllm.request import (
    Request,
    RequestStatus,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenView,
)
from minivllm.waiting import Ticket, WaitingQueue

TOKEN = SampledToken(1, 1)


def request(name: str, num_tokens: int = 3, n: int = 1) -> Request:
    return Request(name, [1] * num_tokens, num_tokens, SamplingParams(n=n))


def scheduled(name: str, *, sample: bool = True, fork_ids: tuple[str, ...] = ()) -> ScheduledRequest:
    req = request(name)
    return ScheduledRequest(name, 0, 3, TokenView(req.token_ids), 3, (1, 2), sample, req, fork_ids)


PLAN = StepPlan(4, (scheduled("a", fork_ids=("a/1",)), scheduled("b"), scheduled("part", sample=False)))
WHOLE = {"a": TOKEN, "a/1": TOKEN, "b": TOKEN}


@pytest.mark.parametrize(
    "result",
    [
        StepResult(WHOLE),
        StepResult({"b": TOKEN}, failures={"a": "NaN"}),
        StepResult({"a": TOKEN, "b": TOKEN}, failures={"a/1": "no token"}),
        StepResult(WHOLE, failures={"part": "NaN"}),
    ],
)
def test_a_result_with_a_token_or_a_failure_for_everyone_passes(result: StepResult) -> None:
    check_result(PLAN, PLAN.requests, result)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (StepResult({"a": TOKEN}), r"no token for \['a/1', 'b'\]"),
        (StepResult({**WHOLE, "part": TOKEN}), r"tokens for requests that were not to sample: \['part'\]"),
        (StepResult({**WHOLE, "a/2": TOKEN}), r"not to sample: \['a/2'\]"),
        (StepResult(WHOLE, failures={"x": "?"}), r"failures of requests that were not scheduled: \['x'\]"),
        (StepResult({"x": TOKEN}), r"step 4 .*not to sample: \['x'\]; no token for \['a', 'a/1', 'b'\]"),
    ],
)
def test_a_result_with_too_much_or_too_little_is_told_what(result: StepResult, problem: str) -> None:
    with pytest.raises(InvariantError, match=problem):
        check_result(PLAN, PLAN.requests, result)


def test_nobody_waits_for_the_tokens_of_requests_that_ended_since_the_plan() -> None:
    check_result(PLAN, PLAN.requests[1:], StepResult({"b": TOKEN}))


@dataclass
class Schedule:
    """One running, one waiting and one swapped-out request, all in order."""

    requests: dict[str, Request] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    max_num_seqs: int = 2
    blocks: BlockManager = field(
        default_factory=lambda: BlockManager(9, 2, enable_prefix_caching=False, num_host_blocks=4)
    )

    def __post_init__(self) -> None:
        for number, name in enumerate(("runs", "runs too", "waits", "swapped")):
            self.requests[name] = request(name)
            self.tickets[name] = (number,)
        for name in ("runs", "runs too"):
            self.blocks.allocate(self.requests[name], 3)
            self.requests[name].status = RequestStatus.RUNNING
            self.running.append(self.requests[name])
        swapped = self.requests["swapped"]
        self.blocks.allocate(swapped, 3)
        swapped.num_computed_tokens = 2
        self.blocks.publish(swapped)
        self.blocks.swap_out("swapped")
        swapped.status = RequestStatus.PREEMPTED
        self.waiting.push((2,), "waits")
        self.waiting.push((3,), "swapped")

    def check(self) -> None:
        check_schedule(
            self.requests, self.tickets, self.running, self.waiting, self.max_num_seqs, self.blocks
        )


def test_a_schedule_in_order_passes() -> None:
    Schedule().check()


def _lose_a_waiting_request(schedule: Schedule) -> None:
    schedule.waiting.remove("waits")


def _queue_a_stranger(schedule: Schedule) -> None:
    schedule.waiting.push((9,), "stranger")


def _lose_a_ticket(schedule: Schedule) -> None:
    del schedule.tickets["waits"]


def _run_too_many(schedule: Schedule) -> None:
    schedule.max_num_seqs = 1


def _run_one_that_is_to_fork(schedule: Schedule) -> None:
    schedule.requests["runs"].sampling = SamplingParams(n=2)


def _run_out_of_order(schedule: Schedule) -> None:
    schedule.running.reverse()


def _claim_to_wait(schedule: Schedule) -> None:
    schedule.requests["runs"].status = RequestStatus.PREEMPTED


def _compute_everything(schedule: Schedule) -> None:
    schedule.requests["runs"].num_computed_tokens = 3


def _compute_without_blocks(schedule: Schedule) -> None:
    schedule.requests["waits"].num_computed_tokens = 1


def _compute_more_than_was_saved(schedule: Schedule) -> None:
    schedule.requests["swapped"].token_ids.append(1)
    schedule.requests["swapped"].num_computed_tokens = 3


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (_lose_a_waiting_request, "either runs or waits"),
        (_queue_a_stranger, "either runs or waits"),
        (_lose_a_ticket, "has one ticket"),
        (_run_too_many, "at most 1 run"),
        (_run_one_that_is_to_fork, "at most 2 run' is broken: 3 run or are to be forked"),
        (_run_out_of_order, "running requests are in order"),
        (_claim_to_wait, "exactly running requests hold device blocks"),
        (_compute_everything, "has a token to compute"),
        (_compute_without_blocks, "computed tokens have blocks"),
        (_compute_more_than_was_saved, "computed tokens have blocks"),
    ],
)
def test_each_broken_law_is_named(damage: Callable[[Schedule], None], law: str) -> None:
    schedule = Schedule()
    damage(schedule)
    with pytest.raises(InvariantError, match=law):
        schedule.check()
