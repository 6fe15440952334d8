"""The steps of a scenario do to an engine what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineRequest, ModelSource
from conformance.adapters.fake import fake_engine, minimal_engine
from conformance.drive import ANCILLARY, Drive, NoProgress, StepFailed, filler, step_features
from conformance.scenario import Step

SOURCE = ModelSource("toy", Path("nowhere"), "w")
RUN: dict[str, Any] = {"preempt": None, "period": 1, "poison": False}


def request(name: str, length: int = 6, max_tokens: int = 5) -> EngineRequest:
    prompt = tuple(3 + (i * 7 + len(name)) % 50 for i in range(length))
    return EngineRequest(name, {"temperature": 0.0, "max_tokens": max_tokens}, prompt_token_ids=prompt)


def drive(
    *requests: EngineRequest,
    factory: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    preempt_at: int | None = None,
) -> Drive:
    options = {"block_size": 4, **(options or {})}
    adapter = (factory or fake_engine())(SOURCE, options)
    adapter.__enter__()
    return Drive(adapter, adapter.capabilities(), {r.request_id: r for r in requests}, options, preempt_at)


def submit(*names: str) -> Step:
    return Step("submit", list(names), 1)


def run(**changes: Any) -> Step:
    return Step("run", {**RUN, **changes}, 1)


def count(d: Drive, event: str) -> int:
    return sum(e["event"] == event for e in d.events)


def test_submit_and_run_bring_every_request_to_its_end() -> None:
    d = drive(request("one"), request("two", 9, 3))
    d.execute([submit("one", "two"), run()])
    assert {n: (o.finished, len(o.token_ids or ())) for n, o in d.outputs().items()} == {
        "one": (True, 5),
        "two": (True, 3),
    }
    assert [o.kind for o in d.operations] == ["submit", "run"]
    assert d.operations[1].outcome == {"steps": 5, "preempted": 0, "poisoned": 0}


def test_live_after_counts_unfinished_requests_step_by_step() -> None:
    d = drive(request("one"), request("two", 9, 3))
    d.execute([submit("one", "two"), run()])
    assert d.live_after == [2, 2, 1, 1, 0]


def test_advance_stops_after_its_number_of_steps() -> None:
    d = drive(request("one"))
    d.execute([submit("one"), Step("advance", 2, 1)])
    assert len(d.outputs()["one"].token_ids or ()) == 2
    assert not d.outputs()["one"].finished


def test_advance_past_the_end_fails_because_the_scenario_meant_something_else() -> None:
    d = drive(request("one"))
    with pytest.raises(StepFailed, match="advance 9: everything had finished after 5 steps"):
        d.execute([submit("one"), Step("advance", 9, 1)])


def test_abort_ends_a_request_and_frees_its_blocks() -> None:
    d = drive(request("one"))
    d.execute([submit("one"), Step("advance", 2, 1), Step("abort", ["one"], 1)])
    assert d.outputs()["one"].finish_reason == "abort"
    assert d.adapter.pool().in_use == 0  # type: ignore[attr-defined]  # the toy has a pool


def test_abort_of_what_has_ended_fails() -> None:
    d = drive(request("one"))
    with pytest.raises(StepFailed, match="'one' had already ended"):
        d.execute([submit("one"), run(), Step("abort", ["one"], 1)])


def test_preempt_tells_who_really_lost_blocks() -> None:
    d = drive(request("one"), request("two"))
    d.execute(
        [submit("one"), Step("preempt", ["one"], 1), Step("advance", 1, 1), Step("preempt", ["every"], 1)]
    )
    assert [o.outcome for o in d.operations if o.kind == "preempt"] == [[], ["one"]]
    assert count(d, "preempted") == 1


def test_run_preempts_before_every_period_th_step() -> None:
    d = drive(request("one", 6, 7))
    d.execute([submit("one"), run(preempt=["every"], period=2)])
    assert d.operations[1].outcome["preempted"] == 3
    assert d.outputs()["one"].num_preemptions == 3


def test_preempt_at_a_step_happens_once_after_that_step() -> None:
    d = drive(request("one"), preempt_at=2)
    d.execute([submit("one"), run()])
    at = [i for i, e in enumerate(d.events) if e["event"] == "preempted"]
    assert len(at) == 1
    assert sum(e["event"] == "planned" for e in d.events[: at[0]]) == 2


def test_poison_is_counted_in_its_step_and_in_a_run() -> None:
    d = drive(request("one"))
    d.execute([Step("poison", None, 1), submit("one"), run(poison=True)])
    assert d.operations[0].outcome["poisoned"] > 0
    assert d.operations[2].outcome["poisoned"] > 0


def test_reset_cache_tells_whether_it_was_done() -> None:
    d = drive(request("one"))
    d.execute(
        [
            submit("one"),
            Step("advance", 1, 1),
            Step("reset_cache", None, 1),
            run(),
            Step("reset_cache", None, 1),
        ]
    )
    assert [o.outcome for o in d.operations if o.kind == "reset_cache"] == [{"reset": False}, {"reset": True}]


def test_a_refusal_is_noted_and_never_raised() -> None:
    d = drive(request("big", 3000), request("one"))
    d.execute([submit("big", "one"), run()])
    assert d.operations[0].outcome == {"big": "CapacityError"}
    assert d.refused["big"].type == "CapacityError"
    assert set(d.outputs()) == {"one"}


def test_expect_error_tells_the_type_or_that_nothing_was_refused() -> None:
    d = drive(request("big", 3000), request("one"))
    d.execute([Step("expect_error", ["big", "one"], 1), run()])
    assert d.operations[0].outcome == {"big": "CapacityError", "one": None}


def test_a_schedule_that_gets_nowhere_is_no_progress() -> None:
    d = drive(request("one"), factory=fake_engine(fault="hang"))
    with pytest.raises(NoProgress, match=r"still unfinished after \d+ steps: \['one'\]"):
        d.execute([submit("one"), run()])


def test_what_the_engine_raises_is_passed_on_with_the_steps_before_it_noted() -> None:
    d = drive(request("one"), factory=fake_engine(fault="crash"))
    with pytest.raises(RuntimeError, match="the toy crashed"):
        d.execute([submit("one"), run()])
    assert [o.kind for o in d.operations] == ["submit"]


def test_fragment_leaves_the_pool_empty_and_its_order_irregular() -> None:
    d = drive(request("one", 30), options={"num_kv_blocks": 40})
    d.execute([Step("fragment", None, 1)])
    assert d.operations[0].outcome["aborted"] == 4
    assert d.adapter.pool().in_use == 0  # type: ignore[attr-defined]  # the toy has a pool
    assert d.adapter._free != sorted(d.adapter._free)  # type: ignore[attr-defined]
    d.execute([submit("one"), run()])
    assert d.outputs()["one"].finished


@pytest.mark.parametrize("budget", [1, 3, 64, 4096])
@pytest.mark.parametrize("blocks", [5, 6, 9, 64])
def test_fragment_works_in_any_small_pool_with_any_budget(budget: int, blocks: int) -> None:
    d = drive(options={"num_kv_blocks": blocks, "max_num_batched_tokens": budget})
    d.execute([Step("fragment", None, 1)])
    assert d.operations[0].outcome["aborted"] >= 2


def test_fragment_of_a_huge_pool_says_to_make_it_smaller() -> None:
    d = drive(options={"num_kv_blocks": 4096})
    with pytest.raises(StepFailed, match="give num_kv_blocks, for at most 4096 tokens"):
        d.execute([Step("fragment", None, 1)])


def test_neighbours_are_not_named_in_operations() -> None:
    d = drive(request("one"))
    d.execute([submit("one", d.add_filler(5, 3)), run()])
    assert d.operations[0].argument == ["one"]
    assert f"{ANCILLARY}filler0" in d.outputs()


def test_neighbours_never_share_cached_blocks_with_judged_requests() -> None:
    assert filler(0, 4, 2).cache_salt is not None
    assert filler(0, 4, 2).sampling["ignore_eos"] is True


def test_events_are_plain_data() -> None:
    d = drive(request("one"))
    d.execute([submit("one"), run()])
    planned = next(e for e in d.events if e["event"] == "planned")
    assert planned["scheduled"] == [["one", 0, 6]]


# ---- engines with generate alone -----------------------------------------------------------------


def test_run_becomes_generate_where_there_are_no_steps() -> None:
    d = drive(request("one"), request("two"), factory=minimal_engine())
    d.execute([submit("one"), run(), submit("two"), run()])
    assert {n: len(o.token_ids or ()) for n, o in d.outputs().items()} == {"one": 5, "two": 5}
    assert [o.outcome for o in d.operations if o.kind == "run"] == [{"generated": 1}, {"generated": 1}]


def test_an_error_of_generate_is_a_refusal() -> None:
    d = drive(request("big", 9000), factory=minimal_engine())
    d.execute([Step("expect_error", ["big"], 1)])
    assert d.operations[0].outcome == {"big": "CapacityError"}


@pytest.mark.parametrize(
    ("steps", "features"),
    [
        ([submit("a"), run()], set()),
        ([Step("advance", 1, 1)], {"stepped"}),
        ([Step("fragment", None, 1)], {"stepped"}),
        ([Step("preempt", ["a"], 1)], {"stepped", "preempt"}),
        ([run(poison=True)], {"stepped", "poison"}),
        ([run(preempt=["a"])], {"stepped", "preempt"}),
        ([Step("reset_cache", None, 1)], {"stepped", "prefix_cache"}),
        ([Step("swap_weights", ["a", "b"], 1)], {"stepped", "update_weights"}),
        ([Step("expect_error", ["a"], 1)], set()),
    ],
)
def test_steps_tell_the_features_they_need(steps: list[Step], features: set[str]) -> None:
    assert step_features(steps) == features
