"""Planning, committing, preempting, ending. The laws under random histories: tests/property."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import pytest

from minivllm.cache import BlockManager, PrefixChain, PrefixIndex, PrefixStats
from minivllm.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequest,
    InvariantError,
    PromptTooLong,
    RequestError,
    UnknownRequest,
)
from minivllm.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    SamplingParams,
    StepPlan,
    StepResult,
)
from minivllm.scheduler import Scheduler
from minivllm.trace import (
    Aborted,
    Allocated,
    Event,
    Failed,
    Finished,
    Planned,
    Preempted,
    PrefixHit,
    Published,
    Sampled,
    Submitted,
)

EOS = 99


def request(name: str, prompt: int | Sequence[int] = 3, *, priority: int = 0, **sampling: Any) -> Request:
    """A request; a number as prompt gives that many tokens nobody else has."""
    if isinstance(prompt, int):
        prompt = [hash_of(name, position) for position in range(prompt)]
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    return Request(name, list(prompt), len(prompt), params, eos_token_ids=(EOS,), priority=priority)


def hash_of(name: str, position: int) -> int:
    return 1000 * (1 + sum(map(ord, name))) + position


class Bench:
    """A scheduler and a runner that samples what it is told to, by default the history's length."""

    def __init__(
        self,
        *,
        usable: int = 20,
        block_size: int = 2,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 32,
        chunked: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        caching: bool = True,
    ) -> None:
        self.events: list[Event] = []
        self.blocks = BlockManager(
            usable + 1,
            block_size,
            enable_prefix_caching=caching,
            prefix_seed=0,
            trace=self.events.append,
        )
        self.scheduler = Scheduler(
            block_manager=self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            policy=policy,
            trace=self.events.append,
        )

    def add(self, *requests: Request) -> None:
        for req in requests:
            self.scheduler.add(req)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, **tokens: int) -> list[Request]:
        changed = self.scheduler.commit(plan, result(plan, **tokens))
        self.scheduler.check_integrity()
        return changed

    def step(self, **tokens: int) -> dict[str, tuple[int, int]]:
        """Run one step; returns request → (start, number of tokens)."""
        plan = self.plan()
        self.commit(plan, **tokens)
        return rows(plan)

    def drain(self) -> int:
        steps = 0
        while self.scheduler.has_unfinished():
            self.step()
            steps += 1
        assert self.scheduler.plan() is None
        assert self.blocks.counts().in_use == 0
        return steps

    def of(self, *kinds: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kinds)]


def rows(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {s.request_id: (s.start, s.num_tokens) for s in plan.requests}


def result(plan: StepPlan, **tokens: int) -> StepResult:
    samples = {}
    for s in plan.requests:
        if s.sample:
            token = tokens.get(s.request_id, len(s.tokens))
            samples[s.request_id] = SampledToken(token, token)
    return StepResult(samples)


# --- adding --------------------------------------------------------------------------------------


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Bench(max_num_seqs=0, budget=-1, max_model_len=0, policy="random")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "max_num_seqs must be at least 1, got 0; max_num_batched_tokens must be at least 1, got -1;"
        " max_model_len must be at least 1, got 0; policy must be fcfs or priority, got 'random'"
    )


def test_an_id_in_use_is_refused_and_free_again_once_its_request_has_ended() -> None:
    bench = Bench()
    bench.add(request("a"))
    with pytest.raises(DuplicateRequest, match="'a' is in use"):
        bench.add(request("a"))
    bench.scheduler.abort("a")
    bench.add(request("a"))
    assert bench.drain() == 4


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        (32, {}, PromptTooLong),
        (0, {}, RequestError),
        (20, {"max_tokens": 12}, CapacityError),
        (2, {"max_tokens": None}, CapacityError),
    ],
)
def test_a_refused_request_leaves_no_trace(
    prompt: int, sampling: dict[str, Any], error: type[Exception]
) -> None:
    bench = Bench(usable=10)
    with pytest.raises(error):
        bench.add(request("a", prompt, **sampling))
    assert not bench.scheduler.has_unfinished()
    assert bench.scheduler.plan() is None
    assert bench.events == []
    bench.scheduler.check_integrity()


def test_a_request_that_never_fits_does_not_block_the_one_behind_it() -> None:
    bench = Bench(usable=4, block_size=4)
    with pytest.raises(CapacityError):
        bench.add(request("long", 20))
    bench.add(short := request("short", 3))
    bench.drain()
    assert short.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "generated"), [(14, 2), (15, 1)])
def test_a_prompt_just_below_the_model_length_generates_up_to_it(prompt: int, generated: int) -> None:
    bench = Bench(max_model_len=16)
    bench.add(req := request("a", prompt, max_tokens=9))
    bench.drain()
    assert req.num_output_tokens == generated
    assert req.finish_reason is FinishReason.LENGTH


# --- planning ------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan() -> None:
    assert Bench().scheduler.plan() is None


def test_a_plan_tells_all_that_a_forward_pass_needs() -> None:
    bench = Bench()
    bench.add(req := request("a", 3))
    (first,) = bench.plan().requests
    assert (first.request_id, first.start, first.num_tokens, first.sample) == ("a", 0, 3, True)
    assert list(first.tokens) == req.token_ids
    assert first.num_prompt_tokens == 3
    assert first.block_table == (1, 2)
    assert first.request is req


def test_a_plan_keeps_showing_the_history_it_was_made_for() -> None:
    bench = Bench()
    bench.add(request("a", 3))
    plan = bench.plan()
    bench.commit(plan)
    assert len(plan.requests[0].tokens) == 3


def test_chunks_of_a_prompt_mix_with_decoding_in_one_step() -> None:
    bench = Bench(budget=5)
    bench.add(request("a", 3))
    assert bench.step() == {"a": (0, 3)}
    bench.add(request("b", 10))
    assert bench.step() == {"a": (3, 1), "b": (0, 4)}
    assert bench.step() == {"a": (4, 1), "b": (4, 4)}
    assert bench.step() == {"a": (5, 1), "b": (8, 2)}


def test_a_step_spends_its_budget_to_the_last_token() -> None:
    bench = Bench(budget=3)
    bench.add(request("a", 1), request("b", 1))
    bench.step()
    bench.add(request("c", 2))
    assert bench.step() == {"a": (1, 1), "b": (1, 1), "c": (0, 1)}
    assert bench.step() == {"a": (2, 1), "b": (2, 1), "c": (1, 1)}


def test_an_unfinished_prompt_samples_nothing() -> None:
    bench = Bench(budget=4)
    bench.add(req := request("a", 6))
    plan = bench.plan()
    assert [s.sample for s in plan.requests] == [False]
    assert bench.commit(plan) == []
    assert req.num_output_tokens == 0
    assert bench.commit(bench.plan()) == [req]


def test_requests_are_served_in_order_of_arrival() -> None:
    bench = Bench(budget=7)
    bench.add(*(request(name, 3) for name in "cab"))
    assert list(bench.step()) == ["c", "a", "b"]


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(*(request(name, 1, max_tokens=2) for name in "abc"))
    assert list(bench.step()) == ["a", "b"]
    assert list(bench.step()) == ["a", "b"]
    assert list(bench.step()) == ["c"]


def test_the_first_waiting_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    bench = Bench(usable=4, block_size=2)
    bench.add(request("a", 4, max_tokens=3), request("b", 6, max_tokens=1), request("c", 1, max_tokens=1))
    assert list(bench.step()) == ["a"]
    assert bench.scheduler.num_waiting == 2


def test_a_long_prompt_is_admitted_only_if_all_of_it_fits_now() -> None:
    bench = Bench(usable=6, block_size=2, budget=4)
    bench.add(request("a", 4, max_tokens=5), request("b", 9, max_tokens=1))
    for _ in range(3):
        assert list(bench.step()) == ["a"]
    assert bench.of(Preempted) == []


def test_planning_again_gives_up_the_earlier_plan() -> None:
    bench = Bench()
    bench.add(req := request("a", 3))
    first = bench.plan()
    second = bench.plan()
    assert rows(first) == rows(second)
    with pytest.raises(InvariantError, match="step 0 is committed, but it is not the latest plan"):
        bench.commit(first)
    bench.commit(second)
    assert req.num_output_tokens == 1


def test_a_plan_is_committed_once() -> None:
    bench = Bench()
    bench.add(request("a", 3))
    plan = bench.plan()
    bench.commit(plan)
    with pytest.raises(InvariantError, match="not the latest plan"):
        bench.commit(plan)


# --- chunked prefill off -------------------------------------------------------------------------


def test_without_chunking_a_prompt_waits_for_a_step_that_takes_all_of_it() -> None:
    bench = Bench(chunked=False, budget=6)
    bench.add(request("a", 3, max_tokens=2), request("b", 6))
    assert bench.step() == {"a": (0, 3)}
    assert bench.step() == {"a": (3, 1)}
    assert bench.step() == {"b": (0, 6)}


def test_without_chunking_a_prompt_over_the_budget_is_refused_by_name() -> None:
    with pytest.raises(PromptTooLong, match="enable_chunked_prefill is off"):
        Bench(chunked=False, budget=8).add(request("a", 9))


def test_without_chunking_a_preempted_request_that_outgrew_the_budget_still_finishes() -> None:
    bench = Bench(chunked=False, budget=4, caching=False)
    bench.add(req := request("a", 4, max_tokens=4))
    bench.step()
    bench.step()
    bench.scheduler.preempt("a")
    assert bench.step() == {"a": (0, 4)}
    assert bench.step() == {"a": (4, 2)}
    bench.drain()
    assert req.num_output_tokens == 4


# --- preemption ----------------------------------------------------------------------------------


def test_the_last_one_admitted_is_preempted_and_resumes_with_its_outputs() -> None:
    bench = Bench(usable=4, block_size=2, caching=False)
    bench.add(a := request("a", 3, max_tokens=4), b := request("b", 3, max_tokens=4))
    bench.step(a=1, b=2)  # three tokens fill two blocks each; a fourth fits
    bench.step(a=3, b=4)  # the fifth does not
    assert bench.step(a=5) == {"a": (4, 1)}
    assert b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.num_preemptions) == (0, 1)
    assert b.output_token_ids == [2, 4]
    assert bench.of(Preempted) == [Preempted("b", "recompute", 4)]
    assert bench.step(a=6) == {"a": (5, 1)}
    assert a.finish_reason is FinishReason.LENGTH
    assert bench.step(b=7) == {"b": (0, 5)}
    bench.step(b=8)
    assert b.output_token_ids == [2, 4, 7, 8]


def test_nobody_is_admitted_in_a_step_with_a_preemption() -> None:
    bench = Bench(usable=4, block_size=2, caching=False)
    bench.add(request("a", 3), request("b", 3))
    bench.step()
    bench.step()
    bench.add(request("c", 1, max_tokens=1))
    assert list(bench.step()) == ["a"]
    assert list(bench.scheduler.requests) == ["a", "b", "c"]


def test_not_even_one_that_is_better_than_the_victim_is_admitted_in_a_step_with_a_preemption() -> None:
    bench = Bench(usable=5, block_size=2, policy="priority", caching=False)
    bench.add(request("high", 3, priority=1), request("low", 3, priority=5))
    bench.step()
    bench.add(request("middle", 3, priority=3))  # one block is left, it needs two
    assert list(bench.step()) == ["high", "low"]
    assert list(bench.step()) == ["high"]  # takes that one; low gives two back
    assert list(bench.step()) == ["high", "middle"]


def test_preempted_requests_go_before_those_that_never_ran() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(*(request(name, 3) for name in "abcd"))
    bench.step()
    assert bench.scheduler.preempt("b")
    assert bench.scheduler.preempt("a")
    assert list(bench.step()) == ["a", "b"]


def test_a_request_that_cannot_grow_and_is_last_gives_way_itself() -> None:
    bench = Bench(usable=4, block_size=2, caching=False)
    bench.add(request("a", 2, max_tokens=6), request("b", 3, max_tokens=4))
    bench.step()  # a: 1 block, b: 2
    assert bench.step() == {"a": (2, 1), "b": (3, 1)}  # a takes the last one
    assert bench.step() == {"a": (3, 1)}
    assert bench.of(Preempted) == [Preempted("b", "recompute", 4)]


def test_a_resumed_request_finds_its_own_blocks_in_the_cache() -> None:
    bench = Bench()
    bench.add(req := request("a", 4))
    bench.step()
    bench.step()
    assert bench.scheduler.preempt("a")
    assert bench.step() == {"a": (4, 2)}
    assert bench.of(PrefixHit) == [PrefixHit("a", 4, (1, 2), resumed=True)]
    assert req.num_cached_tokens == 0
    assert bench.blocks.stats == PrefixStats(num_requests=1, num_queried_tokens=4, num_hit_tokens=0)


def test_preempting_what_holds_no_blocks_does_nothing() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request("a"), request("b"))
    bench.step()
    assert bench.scheduler.preempt("b") is False
    assert bench.scheduler.preempt("nobody") is False
    assert bench.scheduler.preempt("a") is True
    assert bench.scheduler.preempt("a") is False


def test_a_batch_of_only_resumed_requests_computes_their_whole_histories() -> None:
    bench = Bench(caching=False)
    bench.add(request("a", 3), request("b", 4))
    bench.step()
    bench.step()
    for name in "ab":
        bench.scheduler.preempt(name)
    assert bench.step() == {"a": (0, 5), "b": (0, 6)}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_any_workload_whose_requests_fit_alone_finishes_within_the_stated_bound(
    policy: Literal["fcfs", "priority"],
) -> None:
    bench = Bench(usable=5, block_size=2, budget=4, policy=policy)
    requests = [request(f"r{n}", 3 + n % 3, max_tokens=5, priority=n % 2) for n in range(8)]
    bench.add(*requests)
    limits = [r.num_prompt_tokens + 5 for r in requests]
    assert bench.drain() <= sum(limits) + (7 * max(limits) if policy == "priority" else 0)
    assert all(r.num_output_tokens == 5 for r in requests)
    assert bench.of(Preempted)


# --- priority ------------------------------------------------------------------------------------


def test_a_lower_number_is_served_first_and_arrival_breaks_ties() -> None:
    bench = Bench(policy="priority")
    bench.add(request("late", priority=2), request("b", priority=1), request("c", priority=1))
    assert list(bench.step()) == ["b", "c", "late"]


def test_the_worst_priority_is_preempted_even_if_it_was_admitted_first() -> None:
    bench = Bench(usable=5, block_size=2, policy="priority", caching=False)
    bench.add(request("low", 3, priority=5))
    bench.step()
    bench.add(request("high", 3, priority=1))
    assert list(bench.step()) == ["low", "high"]
    assert list(bench.step()) == ["high", "low"]
    assert bench.step() == {"high": (4, 1)}
    assert bench.of(Preempted) == [Preempted("low", "recompute", 5)]


def test_among_equal_priorities_the_last_arrival_is_preempted() -> None:
    bench = Bench(usable=4, block_size=2, policy="priority", caching=False)
    first, second = request("x", 3), request("y", 3)
    first.arrival, second.arrival = 2, 1
    bench.add(first, second)
    bench.step()
    bench.step()
    assert bench.step() == {"y": (4, 1)}


def test_priorities_are_ignored_under_fcfs() -> None:
    bench = Bench()
    bench.add(request("a", priority=5), request("b", priority=-1))
    assert list(bench.step()) == ["a", "b"]


# --- prefix cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_sent_twice_computes_at_least_one_token_even_at_a_block_boundary(length: int) -> None:
    bench = Bench(block_size=4)
    prompt = list(range(length))
    bench.add(request("a", prompt, max_tokens=1))
    bench.drain()
    bench.add(again := request("b", prompt, max_tokens=1))
    assert bench.step() == {"b": (length - 4, 4)}
    assert again.num_cached_tokens == length - 4


def test_requests_that_arrive_together_do_not_share_blocks_that_are_not_computed_yet() -> None:
    bench = Bench(budget=6)
    prompt = [1, 2, 3, 4, 5]
    bench.add(request("a", prompt), request("b", prompt))
    first = bench.plan()
    assert rows(first) == {"a": (0, 5), "b": (0, 1)}
    tables = [set(s.block_table) for s in first.requests]
    assert not tables[0] & tables[1]
    bench.commit(first)
    assert bench.of(PrefixHit) == []


def test_a_block_is_published_in_the_commit_that_fills_it() -> None:
    bench = Bench(budget=3)
    bench.add(request("a", 4, max_tokens=3))
    published = []
    for _ in range(4):
        bench.step()
        published.append(len(bench.of(Published)))
    assert published == [1, 2, 2, 3]


def test_cached_tokens_are_told_once_and_statistics_count_each_request_once() -> None:
    bench = Bench()
    prompt = list(range(6))
    bench.add(request("a", prompt, max_tokens=1))
    bench.drain()
    bench.add(req := request("b", prompt))
    bench.step()
    assert req.num_cached_tokens == 4
    bench.scheduler.preempt("b")
    bench.step()
    assert req.num_cached_tokens == 4
    assert bench.blocks.stats == PrefixStats(num_requests=2, num_queried_tokens=12, num_hit_tokens=4)


def test_a_request_that_waits_for_room_is_counted_once_however_often_it_is_looked_at() -> None:
    bench = Bench(usable=4, block_size=2)
    bench.add(request("a", 4, max_tokens=4), request("b", 6, max_tokens=1))
    for _ in range(3):
        bench.step()
    assert bench.blocks.stats.num_requests == 1
    bench.drain()
    assert bench.blocks.stats.num_requests == 2


def test_admitting_a_request_looks_for_its_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    match = PrefixIndex.match

    def counted(self: PrefixIndex, chain: PrefixChain, limit: int) -> tuple[int, ...]:
        limits.append(limit)
        return match(self, chain, limit)

    monkeypatch.setattr(PrefixIndex, "match", counted)
    bench = Bench()
    bench.add(request("a", [1, 2, 3, 4, 5]), request("b", [1, 2, 3]))
    bench.drain()
    assert limits == [2, 1]


def test_after_a_reset_nothing_is_hit() -> None:
    bench = Bench()
    bench.add(request("a", [1, 2, 3, 4]))
    bench.step()
    assert bench.scheduler.reset_prefix_cache() is False
    bench.drain()
    assert bench.scheduler.reset_prefix_cache() is True
    bench.add(request("b", [1, 2, 3, 4]))
    assert bench.step() == {"b": (0, 4)}


# --- stopping ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 2}, [5, 6], FinishReason.LENGTH, None),
        ({}, [5, EOS], FinishReason.STOP, None),
        ({}, [98], FinishReason.STOP, None),
        ({"ignore_eos": True}, [EOS, 98, EOS, 98], FinishReason.LENGTH, None),
        ({"stop_token_ids": [7]}, [5, 7], FinishReason.STOP, 7),
        ({"stop_token_ids": [7, EOS]}, [EOS], FinishReason.STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [98, EOS], FinishReason.STOP, EOS),
        ({"min_tokens": 3}, [EOS, EOS, EOS], FinishReason.STOP, None),
        ({"min_tokens": 3, "stop_token_ids": [7]}, [7, 7, 7], FinishReason.STOP, 7),
        ({"min_tokens": 4}, [EOS, EOS, EOS, 5], FinishReason.LENGTH, None),
        ({"max_tokens": 2}, [5, EOS], FinishReason.STOP, None),
        ({"max_tokens": 1}, [5], FinishReason.LENGTH, None),
    ],
)
def test_a_request_ends_exactly_where_its_parameters_say(
    sampling: dict[str, Any], tokens: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    bench = Bench()
    bench.add(req := request("a", **sampling))
    req.eos_token_ids = (EOS, 98)
    for number, token in enumerate(tokens):
        assert not req.status.is_final, f"ended before token {number}"
        bench.step(a=token)
    assert req.status is RequestStatus.FINISHED
    assert (req.finish_reason, req.stop_reason) == (reason, stop_reason)
    assert req.output_token_ids == tokens
    assert bench.events[-1] == Finished("a", reason.value, len(tokens))
    assert not bench.scheduler.has_unfinished()


def test_the_total_limit_of_a_request_ends_it() -> None:
    bench = Bench()
    bench.add(req := request("a", 3, max_tokens=None))
    req.max_total_tokens = 5
    bench.drain()
    assert req.num_tokens == 5


def test_a_stop_found_outside_ends_a_request_and_frees_its_blocks() -> None:
    bench = Bench()
    bench.add(req := request("a"))
    bench.step()
    bench.scheduler.finish("a", FinishReason.STOP, "\n\n")
    assert (req.status, req.finish_reason, req.stop_reason) == (
        RequestStatus.FINISHED,
        FinishReason.STOP,
        "\n\n",
    )
    assert bench.blocks.counts().in_use == 0
    with pytest.raises(UnknownRequest, match="'a'"):
        bench.scheduler.finish("a", FinishReason.STOP, "again")


def test_finishing_on_the_first_token_frees_the_place_for_the_next() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(request("long", max_tokens=20, prompt=1))
    for number in range(5):
        bench.add(request(f"r{number}", 2, max_tokens=1))
        assert f"r{number}" in bench.step()


# --- aborts and failures -------------------------------------------------------------------------


def test_aborting_a_stranger_raises() -> None:
    with pytest.raises(UnknownRequest, match="no live request has the id 'x'"):
        Bench().scheduler.abort("x")


@pytest.mark.parametrize("state", ["waiting", "in its first chunk", "running", "preempted"])
def test_a_request_is_aborted_in_any_state_and_the_engine_goes_on(state: str) -> None:
    bench = Bench(budget=4)
    bench.add(req := request("a", 6))
    for _ in range({"waiting": 0, "in its first chunk": 1}.get(state, 3)):
        bench.step()
    if state == "preempted":
        bench.scheduler.preempt("a")
    assert bench.scheduler.abort("a") is req
    bench.scheduler.check_integrity()
    assert (req.status, req.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    assert bench.events[-1] == Aborted("a")
    assert bench.blocks.counts().in_use == 0
    with pytest.raises(UnknownRequest):
        bench.scheduler.abort("a")
    bench.add(other := request("b"))
    bench.drain()
    assert other.num_output_tokens == 4


def test_the_result_of_a_request_aborted_during_its_step_is_ignored() -> None:
    bench = Bench()
    bench.add(a := request("a"), b := request("b"))
    plan = bench.plan()
    bench.scheduler.abort("a")
    assert bench.commit(plan) == [b]
    assert a.num_output_tokens == 0
    assert not [event for event in bench.of(Published) if event.request_id == "a"]  # type: ignore[union-attr]


def test_an_id_reused_during_the_step_does_not_get_the_old_result() -> None:
    bench = Bench()
    bench.add(request("a"))
    plan = bench.plan()
    bench.scheduler.abort("a")
    bench.add(new := request("a"))
    assert bench.commit(plan) == []
    assert new.num_output_tokens == 0


def test_the_result_of_a_request_preempted_during_its_step_is_ignored() -> None:
    bench = Bench()
    bench.add(req := request("a"))
    plan = bench.plan()
    bench.scheduler.preempt("a")
    assert bench.commit(plan) == []
    assert bench.step() == {"a": (0, 3)}
    assert req.num_output_tokens == 1


def test_a_failed_request_ends_by_name_and_its_blocks_are_never_hit() -> None:
    bench = Bench(budget=4)
    bench.add(bad := request("bad", [1, 2, 3, 4, 5]), good := request("good", 1))
    bench.step()
    plan = bench.plan()
    outcome = StepResult({"good": SampledToken(5, 5)}, failures={"bad": "NaN logits"})
    assert bench.scheduler.commit(plan, outcome) == [bad, good]
    bench.scheduler.check_integrity()
    assert (bad.status, bad.finish_reason, bad.error) == (
        RequestStatus.FAILED,
        FinishReason.ERROR,
        "NaN logits",
    )
    assert bad.num_output_tokens == 0
    assert Failed("bad", "NaN logits") in bench.events
    bench.drain()
    bench.add(request("again", [1, 2, 3, 4, 5]))
    assert bench.step() == {"again": (0, 4)}


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (StepResult({}), "no token for \\['a'\\]"),
        (
            StepResult({"a": SampledToken(1, 1), "part": SampledToken(1, 1)}),
            "were not to sample: \\['part'\\]",
        ),
        (
            StepResult({"a": SampledToken(1, 1)}, failures={"x": "?"}),
            "failures of requests that were not scheduled: \\['x'\\]",
        ),
    ],
)
def test_a_result_that_does_not_fit_its_plan_raises_and_changes_nothing(
    outcome: StepResult, message: str
) -> None:
    bench = Bench(budget=5)
    bench.add(a := request("a"), part := request("part", 6))
    plan = bench.plan()
    before = list(bench.events)
    with pytest.raises(InvariantError, match=message):
        bench.scheduler.commit(plan, outcome)
    assert (a.num_computed_tokens, part.num_computed_tokens, bench.events) == (0, 0, before)
    bench.commit(plan)


# --- what it tells -------------------------------------------------------------------------------


def test_events_tell_the_life_of_a_request_in_order() -> None:
    bench = Bench()
    bench.add(request("a", 3, max_tokens=2))
    bench.step(a=7)
    bench.step(a=8)
    assert bench.events == [
        Submitted("a", 3),
        Allocated("a", (1, 2)),
        Planned(0, (("a", 0, 3),)),
        Published("a", 1),
        Sampled("a", 0, 7),
        Planned(1, (("a", 3, 1),)),
        Published("a", 2),
        Sampled("a", 1, 8),
        Finished("a", "length", 2),
    ]


def test_steps_are_numbered_as_they_are_planned() -> None:
    bench = Bench()
    bench.add(request("a", max_tokens=3))
    bench.plan()
    bench.drain()
    assert [event.step for event in bench.of(Planned)] == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_a_snapshot_of_the_blocks_says_which_request_holds_what() -> None:
    bench = Bench()
    bench.add(req := request("a", 3), request("b", 2))
    bench.step()
    blocks = bench.scheduler.kv_snapshot().blocks
    assert [[owner.request_id for owner in block.owners] for block in blocks[:5]] == [
        [],
        ["a"],
        ["a"],
        ["b"],
        [],
    ]
    assert blocks[1].token_ids == tuple(req.token_ids[:2])


def test_live_requests_can_be_read_but_not_changed() -> None:
    bench = Bench()
    bench.add(req := request("a"))
    assert dict(bench.scheduler.requests) == {"a": req}
    with pytest.raises(TypeError):
        bench.scheduler.requests["b"] = req  # type: ignore[index]


# --- cost ----------------------------------------------------------------------------------------


@contextmanager
def counting_calls() -> Iterator[list[str]]:
    """Every call made, of Python and of C functions alike."""
    calls: list[str] = []

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    gc.collect()
    gc.disable()  # a collection in between would call finalizers of other tests' leftovers
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def calls_of_three_steps(bench: Bench, num_waiting: int) -> int:
    bench.add(*(request(f"r{number}", 2, max_tokens=2) for number in range(num_waiting)))
    with counting_calls() as calls:
        for _ in range(3):
            plan = bench.scheduler.plan()
            assert plan is not None
            bench.scheduler.commit(plan, result(plan))
    return len(calls)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_makes_the_same_calls_however_many_requests_wait(policy: Literal["fcfs", "priority"]) -> None:
    few, many = (calls_of_three_steps(Bench(max_num_seqs=4, policy=policy), n) for n in (20, 3000))
    assert few == many


def test_a_step_makes_the_same_calls_however_large_the_pool_is() -> None:
    small, large = (calls_of_three_steps(Bench(usable=n, max_num_seqs=4), 6) for n in (30, 30_000))
    assert small == large


# --- damage --------------------------------------------------------------------------------------


def _lose_a_waiting_request(scheduler: Scheduler) -> None:
    scheduler._waiting.remove("waits")


def _lose_a_ticket(scheduler: Scheduler) -> None:
    del scheduler._tickets["waits"]


def _run_too_many(scheduler: Scheduler) -> None:
    scheduler.max_num_seqs = 1


def _run_out_of_order(scheduler: Scheduler) -> None:
    scheduler.policy = "priority"
    scheduler._running.reverse()


def _claim_to_wait(scheduler: Scheduler) -> None:
    scheduler.requests["runs"].status = RequestStatus.PREEMPTED


def _compute_everything(scheduler: Scheduler) -> None:
    req = scheduler.requests["runs"]
    req.num_computed_tokens = req.num_tokens


def _compute_without_blocks(scheduler: Scheduler) -> None:
    scheduler.requests["waits"].num_computed_tokens = 1


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (_lose_a_waiting_request, "either runs or waits"),
        (_lose_a_ticket, "has one ticket"),
        (_run_too_many, "at most 1 run"),
        (_run_out_of_order, "running requests are in order"),
        (_claim_to_wait, "exactly running requests hold device blocks"),
        (_compute_everything, "has a token to compute"),
        (_compute_without_blocks, "computed tokens have blocks"),
    ],
)
def test_the_integrity_check_names_the_broken_law(damage: Callable[[Scheduler], None], law: str) -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(request("runs"), request("runs too"), request("waits"))
    bench.step()
    damage(bench.scheduler)
    with pytest.raises(InvariantError, match=law):
        bench.scheduler.check_integrity()


def test_a_plan_that_could_not_go_on_raises_instead_of_hanging() -> None:
    bench = Bench(usable=3)
    bench.blocks.pool.take(2)  # a leak
    bench.add(request("a"))
    with pytest.raises(InvariantError, match=r"every step makes progress.*0 running and 1 waiting"):
        bench.scheduler.plan()


def test_a_request_refused_the_room_it_was_found_to_have_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add(request("a"))
    monkeypatch.setattr(bench.blocks, "allocate", lambda *_: False)
    with pytest.raises(InvariantError, match="'a' fits the pool but was not allocated"):
        bench.scheduler.plan()
