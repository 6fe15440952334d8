"""Requests for several sequences: computed once, then served, preempted and ended one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minivllm.cache import PrefixStats
from minivllm.errors import CapacityError, DuplicateRequest, InvariantError, UnknownRequest
from minivllm.request import FinishReason, Request, RequestStatus, SampledToken, StepResult
from minivllm.trace import Aborted, Copied, Event, Failed, Forked, Preempted, Sampled, Submitted

MakeBench = Callable[..., Any]  # see conftest.py
MakeRequest = Callable[..., Request]


def outputs(bench: Any) -> dict[str, list[int]]:
    return {name: request.output_token_ids for name, request in bench.sequences.items()}


# --- the life of a group -------------------------------------------------------------------------


def test_the_prompt_is_computed_once_and_every_sequence_gets_its_own_first_token(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(parent := make_request("a", 3, n=3))
    plan = bench.plan()
    (scheduled,) = plan.requests
    assert (scheduled.num_tokens, scheduled.fork_ids) == (3, ("a/1", "a/2"))
    changed = bench.commit(plan, bench.run(plan))
    assert [one.request_id for one in changed] == ["a", "a/1", "a/2"]
    assert changed[0] is parent
    assert [(one.parent_id, one.sequence_index) for one in changed] == [(None, 0), ("a", 1), ("a", 2)]
    assert [one.output_token_ids for one in changed] == [[3], [1003], [2003]]
    assert all(one.num_computed_tokens == 3 for one in changed)
    assert bench.step() == {"a": (3, 1), "a/1": (3, 1), "a/2": (3, 1)}
    bench.drain()
    assert outputs(bench) == {
        "a": [3, 4, 5, 6],
        "a/1": [1003, 1004, 1005, 1006],
        "a/2": [2003, 2004, 2005, 2006],
    }


def test_children_keep_all_fixed_facts_of_their_parent(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    parent = make_request("a", 3, n=2, priority=4)
    parent.seed, parent.cache_salt, parent.capture = 11, "s", frozenset({"logits"})
    bench.add(parent)
    bench.step()
    child = bench.sequences["a/1"]
    for name in (
        "sampling",
        "eos_token_ids",
        "seed",
        "cache_salt",
        "capture",
        "priority",
        "arrival",
        "num_prompt_tokens",
        "num_cached_tokens",
    ):
        assert getattr(child, name) == getattr(parent, name)
    assert child.token_ids is not parent.token_ids


def test_a_prompt_in_chunks_forks_in_the_step_that_samples(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=2)
    bench.add(make_request("a", 5, n=2))
    forks = []
    for _ in range(3):
        plan = bench.plan()
        forks.append(plan.requests[0].fork_ids)
        bench.commit(plan, bench.run(plan))
    assert forks == [(), (), ("a/1",)]


def test_a_request_forks_once_even_if_it_is_preempted_and_computed_anew(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(caching=False)
    bench.add(make_request("a", 3, n=2))
    bench.steps(2)
    for name in ("a", "a/1"):
        assert bench.scheduler.preempt(name)
    assert bench.step() == {"a": (0, 5), "a/1": (0, 5)}
    assert len(bench.of(Forked)) == 1
    bench.drain()
    assert outputs(bench) == {"a": [3, 4, 5, 6], "a/1": [1003, 1004, 1005, 1006]}


def test_a_request_preempted_in_the_step_that_would_have_forked_it_forks_later(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=2))
    plan = bench.plan()
    bench.scheduler.preempt("a")
    assert bench.commit(plan, bench.run(plan)) == []
    assert list(bench.scheduler.requests) == ["a"]
    bench.drain()
    assert outputs(bench) == {"a": [3, 4, 5, 6], "a/1": [1003, 1004, 1005, 1006]}


@pytest.mark.parametrize("tokens", [{"a": 99}, {"a_1": 99}, {"a": 99, "a_1": 99}])
def test_a_sequence_may_end_with_its_first_token_and_the_others_go_on(
    tokens: dict[str, int], make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=2))
    named = {name.replace("_", "/"): token for name, token in tokens.items()}
    plan = bench.plan()
    changed = bench.commit(plan, bench.run(plan, named))
    assert {one.request_id for one in changed if one.status.is_final} == set(named)
    assert set(bench.scheduler.requests) == {"a", "a/1"} - set(named)
    bench.drain()
    assert {len(tokens) for name, tokens in outputs(bench).items() if name not in named} <= {4}


def test_one_token_each_needs_only_the_prompt_s_blocks(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=2)
    bench.add(make_request("a", 3, n=4, max_tokens=1))
    assert bench.drain() == 1
    assert outputs(bench) == {"a": [3], "a/1": [1003], "a/2": [2003], "a/3": [3003]}


def test_events_tell_of_forks_and_copies_in_order(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(caching=False)
    bench.add(make_request("a", 3, n=2, max_tokens=2))
    bench.step()
    bench.events.clear()
    bench.scheduler.plan()
    assert bench.events[0] == Copied("a", 2, 3)
    bench = make_bench(caching=False)
    bench.add(make_request("a", 3, n=2, max_tokens=2))
    bench.step()
    assert bench.of(Submitted, Forked, Sampled) == [
        Submitted("a", 3),
        Forked("a/1", "a", (1, 2)),
        Sampled("a", 0, 3),
        Sampled("a/1", 0, 1003),
    ]


# --- sharing -------------------------------------------------------------------------------------


def test_only_the_unfinished_block_is_copied_and_the_last_holder_writes_in_place(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(block_size=4)
    bench.add(make_request("a", 6, n=3))
    bench.step()
    assert {bench.blocks.block_table(name) for name in ("a", "a/1", "a/2")} == {(1, 2)}
    plan = bench.plan()
    assert [(c.source, c.target) for c in plan.copies] == [(2, 3), (2, 4)]
    tables = {s.request_id: s.block_table for s in plan.requests}
    assert tables == {"a": (1, 3), "a/1": (1, 4), "a/2": (1, 2)}
    bench.commit(plan, bench.run(plan))
    assert bench.blocks.pool.references(1) == 3
    assert bench.plan().copies == ()


def test_at_a_block_boundary_nothing_is_copied(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(block_size=2)
    bench.add(make_request("a", 4, n=3))
    bench.drain()
    assert bench.of(Copied) == []


def test_a_sequence_left_alone_with_a_block_does_not_copy_it(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=2))
    bench.step()
    bench.scheduler.abort("a/1")
    bench.drain()
    assert bench.of(Copied) == []


def test_the_prompt_counts_in_the_hit_statistics_once_for_all_sequences(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    prompt = [1, 2, 3, 4, 5]
    bench.add(make_request("first", prompt, max_tokens=1))
    bench.drain()
    bench.add(make_request("a", prompt, n=3))
    bench.steps(2)
    assert [bench.sequences[name].num_cached_tokens for name in ("a", "a/1", "a/2")] == [4, 4, 4]
    bench.scheduler.preempt("a/1")
    bench.drain()
    assert bench.blocks.stats == PrefixStats(num_requests=2, num_queried_tokens=10, num_hit_tokens=4)


def test_a_fork_s_blocks_are_published_under_its_own_tokens(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", [1, 2, 3], n=2, max_tokens=4))
    bench.drain()
    bench.add(again := make_request("b", [1, 2, 3, 1003, 1004, 1005, 7], max_tokens=1))
    bench.step()
    assert again.num_cached_tokens == 6


# --- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("usable", [5, 6, 8])
def test_under_any_pressure_every_sequence_gets_the_tokens_it_would_get_alone(
    usable: int, caching: bool, mode: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=usable, host=3, caching=caching, preemption_mode=mode)
    bench.add(*(make_request(f"r{n}", 1 + n, n=1 + n % 2, max_tokens=5 - n) for n in range(4)))
    bench.drain()
    for name, request in bench.sequences.items():
        start = 1000 * request.sequence_index + request.num_prompt_tokens
        assert request.output_token_ids == list(range(start, start + request.sampling.max_tokens)), name
    assert bench.of(Preempted) or usable == 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("victim", ["a", "a/1", "a/2"])
@pytest.mark.parametrize("when", range(1, 5))
def test_any_sequence_may_be_preempted_before_any_step(
    when: int, victim: str, mode: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=9, preemption_mode=mode)
    bench.add(make_request("a", 3, n=3, max_tokens=5))
    bench.steps(when)
    assert bench.scheduler.preempt(victim)
    bench.drain()
    assert [tokens[-1] for tokens in outputs(bench).values()] == [7, 1007, 2007]
    assert bench.sequences[victim].num_preemptions == 1


def test_a_sequence_swapped_out_before_its_copy_is_made_saves_the_shared_block(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=4, preemption_mode="swap", caching=False)
    bench.add(make_request("a", 3, n=2))
    bench.step()
    bench.plan()  # given up: a's copy of block 2 was never made
    bench.scheduler.preempt("a")
    plan = bench.plan()
    assert [copy.source for copy in plan.swap_out] == [1, 2]
    bench.commit(plan, bench.run(plan))
    bench.drain()
    assert outputs(bench) == {"a": [3, 4, 5, 6], "a/1": [1003, 1004, 1005, 1006]}


def test_a_copy_planned_again_still_finds_its_source(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(caching=False)
    bench.add(make_request("a", 3, n=2), make_request("b", 1, max_tokens=9))
    bench.step()
    first = bench.plan()
    assert [(c.source, c.target) for c in first.copies] == [(2, 4)]
    bench.scheduler.abort("a/1")  # the other holder of the source
    bench.add(make_request("c", 9, max_tokens=1))  # would take the block if it were free
    plan = bench.plan()
    assert plan.copies == first.copies
    assert bench.blocks.pool.references(2) == 1
    bench.commit(plan, bench.run(plan))
    assert bench.blocks.pool.references(2) == 0
    bench.drain()
    assert bench.sequences["a"].output_token_ids == [3, 4, 5, 6]


# --- seats and order -----------------------------------------------------------------------------


def test_a_request_to_be_forked_takes_the_seats_of_all_its_sequences(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_seqs=4, max_num_batched_tokens=3)
    bench.add(make_request("a", 4, n=3), make_request("b", 1), make_request("c", 1))
    assert list(bench.step()) == ["a"]
    assert list(bench.step()) == ["a", "b"]
    assert bench.scheduler.num_running == 4
    assert bench.scheduler.num_waiting == 1
    bench.drain()
    assert all(len(tokens) == 4 for tokens in outputs(bench).values())


def test_more_sequences_than_seats_take_turns(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(max_num_seqs=2)
    bench.add(make_request("a", 3, n=5, max_tokens=3), make_request("b", 1, max_tokens=1))
    assert list(bench.step()) == ["a"]
    assert list(bench.step()) == ["a", "a/1"]
    waiting = [name for name, r in bench.scheduler.requests.items() if r.status is RequestStatus.WAITING]
    assert waiting == ["b", "a/2", "a/3", "a/4"]
    bench.step()
    assert list(bench.step()) == ["a/2", "a/3"]
    bench.drain()
    assert outputs(bench) == {
        "a": [3, 4, 5],
        "b": [1],
        **{f"a/{i}": [1000 * i + 3, 1000 * i + 4, 1000 * i + 5] for i in range(1, 5)},
    }
    assert all(request.num_preemptions == 0 for request in bench.sequences.values())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_sequences_are_served_right_after_their_parent(
    policy: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(policy=policy)
    bench.add(make_request("a", 3, n=2, priority=1), make_request("b", 3, n=2, priority=2))
    bench.step()
    assert list(bench.step()) == ["a", "a/1", "b", "b/1"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_groups_finish_within_the_stated_bound(
    policy: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=9, max_num_batched_tokens=3, max_num_seqs=3, policy=policy)
    requests = [make_request(f"r{n}", 2 + n % 3, n=1 + n % 4, max_tokens=4, priority=n % 2) for n in range(9)]
    bench.add(*requests)
    lengths = [r.num_tokens + 4 for r in requests for _ in range(r.sampling.n)]
    more = (len(lengths) - 1) * max(lengths) if policy == "priority" else 0
    assert bench.drain() <= sum(lengths) + more
    assert len(bench.sequences) == len(lengths)


# --- ending --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "running", "parent ended", "one preempted", "one on the host"])
def test_aborting_the_parent_s_id_aborts_all_live_sequences(
    state: str, make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(host=4)
    bench.add(parent := make_request("a", 3, n=3))
    if state != "waiting":
        bench.step(**({"a": 99} if state == "parent ended" else {}))
        bench.steps(1)
    if state.startswith("one"):
        bench.scheduler.preempt("a/1", "swap" if "host" in state else "recompute")
    live = [*bench.scheduler.requests]
    assert bench.scheduler.abort("a") is parent
    bench.scheduler.check_integrity()
    assert bench.of(Aborted) == [Aborted(name) for name in live]
    assert not bench.scheduler.has_unfinished()
    assert bench.blocks.counts().in_use == bench.blocks.host_counts().in_use == 0
    for name in live:
        assert bench.sequences[name].finish_reason is FinishReason.ABORT
    if state == "parent ended":
        assert parent.finish_reason is FinishReason.STOP
    with pytest.raises(UnknownRequest):
        bench.scheduler.abort("a")


def test_aborting_one_sequence_leaves_the_others(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=3))
    bench.step()
    assert bench.scheduler.abort("a/1").request_id == "a/1"
    with pytest.raises(UnknownRequest, match="'a/1'"):
        bench.scheduler.abort("a/1")
    bench.drain()
    assert [len(tokens) for tokens in outputs(bench).values()] == [4, 1, 4]


def test_a_stop_string_ends_only_the_sequence_it_was_found_in(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=2))
    bench.step()
    bench.scheduler.finish("a", FinishReason.STOP, "x")
    bench.drain()
    assert outputs(bench) == {"a": [3], "a/1": [1003, 1004, 1005, 1006]}


def test_the_ids_of_a_group_are_taken_until_its_last_sequence_has_ended(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=3))
    for name, n in (("a", 1), ("a/2", 1), ("a/1", 2)):
        with pytest.raises(DuplicateRequest, match=f"'{name}' is in use"):
            bench.add(make_request(name, 3, n=n))
    bench.step(a=99)
    bench.scheduler.abort("a/1")
    for name in ("a", "a/1"):
        with pytest.raises(DuplicateRequest):
            bench.add(make_request(name))
    bench.scheduler.abort("a/2")
    bench.add(make_request("a/1"), make_request("a"))
    bench.drain()


def test_a_group_whose_later_id_is_in_use_is_refused(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a/1"))
    with pytest.raises(DuplicateRequest, match="'a/1' is in use"):
        bench.add(make_request("a", n=2))
    assert list(bench.scheduler.requests) == ["a/1"]


def answer(**tokens: int) -> StepResult:
    return StepResult({name: SampledToken(token, token) for name, token in tokens.items()})


def test_a_sequence_that_fails_as_it_is_forked_ends_by_name_and_the_others_go_on(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=2))
    plan = bench.plan()
    ran = bench.run(plan)
    outcome = StepResult({"a": ran.samples["a"]}, failures={"a/1": "nothing to choose"})
    _, child = bench.commit(plan, outcome)
    assert (child.status, child.error) == (RequestStatus.FAILED, "nothing to choose")
    assert bench.of(Failed) == [Failed("a/1", "nothing to choose")]
    bench.drain()
    assert len(bench.sequences["a"].output_token_ids) == 4


def test_a_request_that_fails_before_it_is_forked_ends_all_of_it(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(parent := make_request("a", 3, n=2))
    plan = bench.plan()
    assert bench.commit(plan, StepResult({}, failures={"a": "NaN"})) == [parent]
    assert not bench.scheduler.has_unfinished()
    bench.add(make_request("a/1"))


def test_a_result_without_a_token_for_every_sequence_raises_and_changes_nothing(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    bench.add(make_request("a", 3, n=3))
    plan = bench.plan()
    before: list[Event] = [*bench.events]
    with pytest.raises(InvariantError, match=r"no token for \['a/1', 'a/2'\]"):
        bench.commit(plan, answer(a=1))
    with pytest.raises(InvariantError, match=r"were not to sample: \['a/3'\]"):
        bench.commit(plan, StepResult({**bench.run(plan).samples, "a/3": SampledToken(1, 1)}))
    assert bench.events == before
    bench.commit(plan, bench.run(plan))


# --- capacity ------------------------------------------------------------------------------------


def test_a_group_that_fits_only_because_it_shares_the_prompt_is_taken_and_finishes(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    # 2 shared blocks, and per sequence the third and half a fourth: 2 + 3 * 2.
    bench = make_bench(usable=8)
    bench.add(make_request("a", 5, n=3, max_tokens=4))
    bench.drain()
    assert bench.of(Preempted) == []
    with pytest.raises(CapacityError, match=r"can need 8 KV blocks .* in each of n=3 sequences.* pool has 7"):
        make_bench(usable=7).add(make_request("a", 5, n=3, max_tokens=4))


def test_a_request_to_be_forked_is_let_in_only_if_all_its_sequences_can_go_on(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(usable=6, caching=False)
    bench.add(make_request("a", 3, max_tokens=2), make_request("b", 3, n=4, max_tokens=2))
    assert list(bench.step()) == ["a"]  # b: one shared block, and one for each sequence
    bench.step()
    assert list(bench.step()) == ["b"]
    bench.drain()
    assert bench.of(Preempted) == []
