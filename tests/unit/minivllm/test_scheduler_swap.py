"""Preemption that keeps the KV in host memory, and falls back when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minivllm.cache import PendingCopies
from minivllm.errors import ConfigError
from minivllm.request import BlockCopy, FinishReason, Request, RequestStatus
from minivllm.trace import Allocated, Finished, Preempted, PrefixHit, SwappedIn, SwappedOut

MakeBench = Callable[..., Any]  # see conftest.py
MakeRequest = Callable[..., Request]


def test_an_unknown_mode_and_a_negative_bound_are_refused_by_name(make_bench: MakeBench) -> None:
    with pytest.raises(ConfigError, match="max_preemptions must not be negative, got -1; preemption_mode"):
        make_bench(preemption_mode="drop", max_preemptions=-1)


def test_a_preempted_request_moves_to_the_host_and_goes_on_where_it_was(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, host=2, caching=False, preemption_mode="swap")
    bench.add(make_request("a"), b := make_request("b"))
    bench.steps(2)
    plan = bench.plan()  # a's fifth token needs a block of b's
    assert [s.request_id for s in plan.requests] == ["a"]
    assert plan.swap_out == (BlockCopy(3, 0), BlockCopy(4, 1))
    assert plan.requests[0].block_table[2] in (3, 4)  # reused in the very step that saves it
    bench.commit(plan, bench.run(plan))
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 4, 1)
    assert bench.of(SwappedOut, Preempted) == [SwappedOut("b", 2), Preempted("b", "swap", 4)]
    assert bench.blocks.host_table("b") == (0, 1)
    bench.step()
    plan = bench.plan()
    assert [copy.source for copy in plan.swap_in] == [0, 1]
    assert [(s.request_id, s.start, s.num_tokens) for s in plan.requests] == [("b", 4, 1)]
    assert bench.blocks.host_counts().in_use == 2  # kept until the copies are done
    bench.commit(plan, bench.run(plan))
    assert bench.blocks.host_counts().free == 2
    assert bench.of(SwappedIn) == [SwappedIn("b", 2)]
    assert bench.events.index(SwappedIn("b", 2)) - 1 == bench.events.index(
        Allocated("b", plan.requests[0].block_table)
    )
    bench.drain()
    assert b.output_token_ids == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("mode", "host", "expected"),
    [
        ("recompute", 9, Preempted("a", "recompute", 4)),
        ("swap", 9, Preempted("a", "swap", 4)),
        ("swap", 2, Preempted("a", "swap", 4)),
        ("swap", 1, Preempted("a", "recompute", 4, fallback=True)),
        ("swap", 0, Preempted("a", "recompute", 4, fallback=True)),
        ("auto", 2, Preempted("a", "swap", 4)),
        ("auto", 1, Preempted("a", "recompute", 4, fallback=True)),
    ],
)
def test_the_trace_tells_what_was_done_and_whether_the_host_pool_was_too_full(
    mode: str, host: int, expected: Preempted, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=host, preemption_mode=mode)
    bench.add(req := make_request("a"))
    bench.steps(2)
    assert bench.scheduler.preempt("a")
    bench.scheduler.check_integrity()
    assert bench.of(Preempted) == [expected]
    assert req.num_computed_tokens == (4 if expected.mode == "swap" else 0)
    bench.drain()
    assert req.output_token_ids == [3, 4, 5, 6]


def test_auto_recomputes_what_is_not_more_than_one_block(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(block_size=4, host=9, preemption_mode="auto")
    bench.add(make_request("a", 4))
    bench.step()
    bench.scheduler.preempt("a")
    bench.step()
    bench.scheduler.preempt("a")
    assert [(e.mode, e.fallback) for e in bench.of(Preempted)] == [("recompute", False), ("swap", False)]


def test_swap_saves_even_a_single_token(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(block_size=4, host=1, preemption_mode="swap")
    bench.add(make_request("a", 1))
    bench.step()
    bench.scheduler.preempt("a")
    assert bench.of(Preempted) == [Preempted("a", "swap", 1)]


def test_nothing_computed_is_nothing_to_swap_and_no_fallback(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=0, preemption_mode="swap")
    bench.add(make_request("a"))
    bench.plan()
    bench.scheduler.preempt("a")
    assert bench.of(Preempted) == [Preempted("a", "recompute", 0)]


def test_a_call_may_choose_the_mode(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(host=4)
    bench.add(make_request("a"))
    bench.step()
    bench.scheduler.preempt("a", "swap")
    bench.step()
    bench.scheduler.preempt("a")
    assert [e.mode for e in bench.of(Preempted)] == ["swap", "recompute"]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("budget", [2, 64])
@pytest.mark.parametrize("when", range(9))
def test_preempting_before_any_step_changes_no_output(
    when: int, budget: int, mode: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=8, preemption_mode=mode, max_num_batched_tokens=budget)
    bench.add(req := make_request("a", 5))
    for step in range(20):
        if step == when:
            bench.scheduler.preempt("a")
            bench.scheduler.check_integrity()
        if bench.scheduler.has_unfinished():
            bench.step()
    assert req.output_token_ids == [5, 6, 7, 8]
    assert bench.of(Finished) == [Finished("a", "length", 4)]
    assert bench.blocks.host_counts().in_use == 0


def test_a_swapped_out_request_is_let_in_only_with_room_for_its_next_step(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    # Swapped out at a block boundary, it needs one block more than it had (vLLM pull request 8824).
    bench = make_bench(usable=4, host=2, caching=False, preemption_mode="swap")
    bench.add(b := make_request("b", 3))
    bench.steps(2)
    bench.scheduler.preempt("b")
    bench.add(make_request("c", 3, max_tokens=2, priority=-1))
    assert b.num_computed_tokens == 4
    assert bench.step() == {"b": (4, 1)}  # takes three; two more for c would not do
    bench.scheduler.preempt("b")
    bench.scheduler.preempt("c")
    bench.drain()
    assert len(bench.of(Preempted)) == 2


def test_the_content_swapped_in_is_its_own_although_the_cache_has_it_too(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=4, preemption_mode="swap")
    bench.add(req := make_request("a", 4))
    bench.steps(2)
    bench.scheduler.preempt("a")
    bench.step()
    assert bench.of(PrefixHit) == []
    assert req.num_computed_tokens == 6
    bench.add(again := make_request("a2", req.token_ids[:5]))
    bench.step()
    assert again.num_cached_tokens == 4


def test_planning_again_plans_the_copies_again(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(host=4, preemption_mode="swap")
    bench.add(make_request("a"))
    bench.steps(2)
    bench.scheduler.preempt("a")
    first, second = bench.plan(), bench.plan()
    assert (first.swap_out, first.swap_in) == (second.swap_out, second.swap_in)
    assert len(second.swap_out) == len(second.swap_in) == 2  # out and in again within one step
    bench.commit(second, bench.run(second))
    assert bench.plan().swap_in == ()


def test_what_is_still_to_be_swapped_out_is_not_poisoned_although_its_block_has_a_new_owner(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, host=2, caching=False, preemption_mode="swap")
    bench.add(make_request("a"), b := make_request("b"))
    bench.steps(2)
    plan = bench.plan()  # given up; a has got a block of b's
    (reused,) = {c.source for c in plan.swap_out} & set(plan.requests[0].block_table)
    free, partly = bench.blocks.unused_slots()
    assert reused not in partly
    assert not {c.source for c in plan.swap_out} & set(free)
    bench.drain()
    assert b.output_token_ids == [3, 4, 5, 6]


def test_a_request_preempted_while_it_is_swapped_in_keeps_its_host_blocks(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=2, preemption_mode="swap")
    bench.add(req := make_request("a"))
    bench.steps(2)
    bench.scheduler.preempt("a")
    plan = bench.plan()
    bench.scheduler.preempt("a")  # its blocks may not have been copied yet
    bench.scheduler.check_integrity()
    assert bench.blocks.host_table("a") == tuple(copy.source for copy in plan.swap_in)
    assert bench.blocks.counts().in_use == 0
    assert bench.commit(plan, bench.run(plan)) == []
    assert bench.step() == {"a": (4, 1)}
    bench.drain()
    assert req.output_token_ids == [3, 4, 5, 6]
    assert [e.mode for e in bench.of(Preempted)] == ["swap", "swap"]


def test_a_request_swapped_out_during_its_step_saves_what_it_had_before(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=4, preemption_mode="swap")
    bench.add(req := make_request("a"))
    bench.steps(1)
    plan = bench.plan()
    bench.scheduler.preempt("a")
    assert bench.commit(plan, bench.run(plan)) == []
    assert (req.num_computed_tokens, req.num_output_tokens) == (3, 1)
    assert bench.step() == {"a": (3, 1)}


@pytest.mark.parametrize("inside", ["out", "outside", "in"])
def test_aborting_a_swapped_request_gives_back_both_kinds_of_blocks_in_any_state(
    inside: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, host=2, caching=False, preemption_mode="swap")
    bench.add(make_request("a", max_tokens=5), b := make_request("b"))
    bench.steps(2)
    plan = bench.plan()  # swaps b out
    assert plan.swap_out
    if inside != "out":
        bench.commit(plan, bench.run(plan))
    if inside == "in":
        while not (plan := bench.plan()).swap_in:
            bench.commit(plan, bench.run(plan))
    bench.scheduler.abort("b")
    bench.scheduler.check_integrity()
    assert bench.blocks.host_counts().in_use == 0
    if inside != "outside":
        bench.commit(plan, bench.run(plan))
    bench.drain()
    assert b.finish_reason is FinishReason.ABORT


def test_host_blocks_freed_by_an_abort_before_their_copy_are_not_written_twice_in_one_plan(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=2, preemption_mode="swap", caching=False)
    bench.add(make_request("a"), b := make_request("b"))
    bench.steps(2)
    bench.scheduler.preempt("a")
    bench.scheduler.abort("a")
    bench.scheduler.preempt("b")
    plan = bench.plan()
    assert sorted(copy.target for copy in plan.swap_out) == [0, 1]
    bench.commit(plan, bench.run(plan))
    bench.drain()
    assert b.output_token_ids == [3, 4, 5, 6]


def test_the_cache_is_not_reset_while_a_request_holds_host_blocks(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=2)
    bench.add(make_request("a"))
    bench.step()
    bench.scheduler.preempt("a", "swap")
    assert bench.scheduler.reset_prefix_cache() is False
    bench.scheduler.abort("a")
    assert bench.scheduler.reset_prefix_cache() is True


# --- how often -----------------------------------------------------------------------------------


def preemptions(bench: Any) -> dict[str, int]:
    return {name: request.num_preemptions for name, request in bench.sequences.items()}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_no_request_is_preempted_more_often_than_the_bound(
    most: int, mode: str, policy: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(
        usable=6,
        block_size=1,
        host=6,
        caching=False,
        preemption_mode=mode,
        policy=policy,
        max_preemptions=most,
    )
    requests = [
        make_request(f"r{n}", 1, max_tokens=1 + n % 5, priority=n % 3, ignore_eos=True) for n in range(40)
    ]
    bench.add(*requests)
    lengths = [1 + (r.sampling.max_tokens or 0) for r in requests]
    assert bench.drain() <= sum(lengths) + (39 * max(lengths) if policy == "priority" else 0)
    assert max(preemptions(bench).values()) <= most
    assert all(r.num_output_tokens == r.sampling.max_tokens for r in requests)


def test_without_the_bound_one_request_would_be_preempted_again_and_again(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    """The victim of a stream of better requests: each fits at first, and throws it out as it grows."""

    def worst(**bound: int) -> int:
        options = {"usable": 60, "block_size": 1, "caching": False, "policy": "priority", "max_model_len": 60}
        bench = make_bench(**options, **bound)
        bench.add(victim := make_request("victim", 4, max_tokens=56, priority=9))
        while not victim.status.is_final:
            if bench.scheduler.num_running == len(bench.scheduler.requests) == 1:
                bench.add(make_request(f"r{len(bench.sequences)}", 1, max_tokens=59, priority=1))
            bench.step()
        bench.drain()
        return int(victim.num_preemptions)

    assert worst(max_preemptions=99) > 3
    assert [worst(max_preemptions=most) for most in range(3)] == [0, 1, 2]
    assert worst() == 3, "the default"


def test_a_request_preempted_to_the_bound_runs_to_its_end_once_it_is_let_in(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=6, caching=False, max_preemptions=1)
    bench.add(make_request("a", 3, max_tokens=5), b := make_request("b", 3, max_tokens=5))
    bench.step()
    bench.scheduler.preempt("b")
    # It would fit now, and for a step more; but both to their ends would take 4 + 4 blocks.
    while "a" in bench.scheduler.requests:
        assert list(bench.step()) == ["a"]
    assert list(bench.step()) == ["b"]
    bench.drain()
    assert b.num_preemptions == 1


def test_while_such_a_request_runs_nobody_is_let_in_who_might_have_to_be_thrown_out(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=6, caching=False, max_preemptions=1)
    bench.add(make_request("a", 3, max_tokens=5))
    bench.step()
    bench.scheduler.preempt("a")
    bench.add(make_request("b", 3, max_tokens=5), make_request("c", 1, max_tokens=1))
    while "a" in bench.scheduler.requests:
        assert list(bench.step()) == ["a"]
    assert list(bench.step()) == ["b", "c"]


# --- admission -----------------------------------------------------------------------------------


def test_a_request_is_let_in_only_if_it_can_also_store_the_token_it_will_sample(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, caching=False)
    bench.add(make_request("a", 3, max_tokens=2), make_request("b", 4, max_tokens=2))
    assert list(bench.step()) == ["a"]  # b needs two blocks now, but three in the step after
    bench.step()
    assert list(bench.step()) == ["b"]
    bench.drain()
    assert bench.of(Preempted) == []


def test_the_last_token_needs_no_room_so_a_prompt_for_one_token_is_let_in(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, caching=False)
    bench.add(make_request("a", 3, max_tokens=2), make_request("b", 4, max_tokens=1))
    assert list(bench.step()) == ["a", "b"]


def test_what_running_requests_need_in_the_step_after_is_not_given_away(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=3, caching=False)
    bench.add(make_request("a", 2, max_tokens=3), make_request("b", 3, max_tokens=2))
    assert list(bench.step()) == ["a"]  # a's next token needs a second block
    bench.drain()
    assert bench.of(Preempted) == []


def test_a_prompt_computed_in_part_keeps_its_claim_to_the_rest(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=7, max_num_batched_tokens=5, caching=False)
    bench.add(make_request("a", 2, max_tokens=2), make_request("b", 8, max_tokens=1))
    assert bench.step() == {"a": (0, 2), "b": (0, 3)}
    bench.add(make_request("c", 1, max_tokens=1), make_request("d", 3, max_tokens=2))
    bench.drain()
    assert bench.of(Preempted) == []


def test_a_step_that_breaks_off_repeats_only_the_copies_it_had_not_made(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=4, host=2, caching=False, preemption_mode="swap")
    bench.add(make_request("a"), make_request("b"))
    bench.steps(2)
    first = bench.plan()
    assert first.swap_out
    bench.scheduler.break_off(PendingCopies())
    again = bench.plan()
    assert (again.swap_out, again.requests[0].start) == (first.swap_out, first.requests[0].start)
    bench.scheduler.break_off(PendingCopies(again.swap_out))
    assert bench.plan().swap_out == ()
    bench.scheduler.check_integrity()
