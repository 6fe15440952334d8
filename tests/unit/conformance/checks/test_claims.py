"""Did an arm do what its name claims?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.adapters.base import FEATURES
from conformance.checks.case import Case
from conformance.checks.claims import not_fired
from conformance.history import Operation, Pass, RequestRun
from conformance.testing import answer, make_events, make_history, make_pass, make_record, records_of

RED = answer(make_record("red"))
BLUE = answer(make_record("blue"), name="blue")
SUBMITTED = [
    {"event": "submitted", "request_id": "red", "num_prompt_tokens": 7},
    {"event": "submitted", "request_id": "blue", "num_prompt_tokens": 7},
]


def problem(
    one: Pass, features: frozenset[str] = frozenset(FEATURES), names: tuple[str, ...] = ("red",)
) -> Any:
    axis, _, value = one.name.partition("=")
    return not_fired(Case(make_history([one], features=features), records_of()), one, axis, value, names)


def arm(name: str, *events: dict[str, Any], runs: tuple[RequestRun, ...] = (RED,), **options: Any) -> Pass:
    return make_pass(name, runs, events=(*SUBMITTED, *events), options=options)


def planned(*rows: tuple[str, int, int]) -> dict[str, Any]:
    return {"event": "planned", "step": 0, "scheduled": rows}


def counting(**changes: Any) -> RequestRun:
    assert RED.output is not None
    return replace(RED, output=replace(RED.output, **changes))


def test_a_preempted_arm_needs_a_preemption_of_a_compared_request() -> None:
    lost = {"event": "preempted", "request_id": "red"}
    assert problem(arm("preempt=2", lost)) is None
    assert "was preempted" in problem(arm("preempt=2", {**lost, "request_id": "blue"}))
    assert "was preempted" in problem(arm("preempt=2"))


def test_an_arm_of_a_preemption_mode_needs_a_preemption_of_that_mode() -> None:
    out = {"event": "preempted", "request_id": "red", "mode": "swap"}
    back = {"event": "swapped_in", "request_id": "red"}
    swap = {"preemption_mode": "swap"}
    assert problem(arm("preemption=swap@2", out, back, **swap)) is None
    assert "swapped in again" in problem(arm("preemption=swap@2", out, **swap))
    assert "swapped in again" in problem(
        arm("preemption=swap@2", out, {**back, "request_id": "blue"}, **swap)
    )
    fallback = {**out, "mode": "recompute"}
    assert "by swap" in problem(arm("preemption=swap@2", fallback, **swap)), "the host pool was full"
    assert "was preempted" in problem(arm("preemption=swap@2", {**out, "request_id": "blue"}, **swap))
    assert "preemption_mode" in problem(arm("preemption=swap@2", out, back, preemption_mode="auto"))
    assert problem(arm("preemption=recompute@2", fallback, preemption_mode="recompute")) is None


def test_an_untraced_arm_of_a_mode_is_taken_by_its_option_and_its_count() -> None:
    blind = frozenset(FEATURES) - {"traced"}
    one = arm("preemption=swap@2", runs=(counting(num_preemptions=1),), preemption_mode="swap")
    assert problem(one, blind) is None
    assert problem(arm("preemption=swap@2", preemption_mode="swap"), blind) is not None


def test_sequences_of_one_request_are_alone_together() -> None:
    together = planned(("red", 0, 7), ("red/1", 0, 7))
    assert problem(arm("batch=alone", together)) is None
    assert problem(arm("batch=mixed", together)) is not None
    assert problem(arm("batch=alone", planned(("red", 0, 7), ("blue", 0, 7)))) is not None


def test_without_a_trace_the_outputs_own_count_tells_of_preemptions() -> None:
    blind = frozenset(FEATURES) - {"traced"}
    assert problem(arm("preempt=2", runs=(counting(num_preemptions=1),)), blind) is None
    assert problem(arm("preempt=2", runs=(counting(num_preemptions=0),)), blind) is not None


def test_a_chunked_arm_splits_every_longer_prompt_and_keeps_its_budget() -> None:
    assert problem(arm("chunk=4", planned(("red", 0, 4)), planned(("red", 4, 3)))) is None
    assert "not split" in problem(arm("chunk=4", planned(("red", 3, 4)))), "a chunk that ends the prompt"
    assert "budget" in problem(arm("chunk=4", planned(("red", 0, 3), ("blue", 0, 2))))


def test_a_prompt_that_fits_or_was_partly_cached_need_not_be_split() -> None:
    assert problem(arm("chunk=7", planned(("red", 0, 7)))) is None
    hit = {"event": "prefix_hit", "request_id": "red", "num_tokens": 4, "resumed": False}
    assert problem(arm("chunk=4", hit, planned(("red", 3, 4)))) is None


@pytest.mark.parametrize(
    ("name", "option", "right", "wrong"),
    [
        ("block_size=4", "block_size", 4, 16),
        ("backend=sdpa", "attention_backend", "sdpa", "dense"),
        ("threads=2", "threads", 2, None),
    ],
)
def test_an_option_arm_ran_with_its_option(name: str, option: str, right: Any, wrong: Any) -> None:
    assert problem(arm(name, **{option: right})) is None
    assert option in problem(arm(name, **{option: wrong}))


def test_a_chunked_arm_without_a_trace_is_known_by_its_option() -> None:
    blind = frozenset(FEATURES) - {"traced"}
    assert problem(arm("chunk=4", max_num_batched_tokens=4), blind) is None
    assert problem(arm("chunk=4"), blind) is not None


@pytest.mark.parametrize(
    ("value", "cached", "enabled", "fired"),
    [
        ("hit", 4, True, True),
        ("hit", 0, True, False),
        ("hit", 4, False, False),
        ("off", 0, False, True),
        ("off", 4, False, False),
        ("off", 0, True, False),
        ("on", 0, True, True),
        ("on", 4, True, True),
        ("on", 0, False, False),
    ],
)
def test_a_cache_arm_is_known_by_reused_tokens_and_option(
    value: str, cached: int, enabled: bool, fired: bool
) -> None:
    one = arm(
        f"prefix_cache={value}", runs=(counting(num_cached_tokens=cached),), enable_prefix_caching=enabled
    )
    assert (problem(one) is None) is fired


def test_a_batched_arm_computes_a_compared_request_beside_another() -> None:
    alone, beside = planned(("red", 0, 7)), planned(("red", 0, 7), ("~filler0", 0, 5))
    assert problem(arm("batch=mixed", beside)) is None
    assert problem(arm("batch=mixed", alone)) is not None
    assert problem(arm("batch=mixed", planned(("blue", 0, 7), ("~filler0", 0, 5)))) is not None
    assert problem(arm("batch=alone", alone)) is None
    assert problem(arm("batch=alone", beside)) is not None


def test_a_poisoned_arm_filled_some_slot() -> None:
    one = make_pass("poison=on", [RED], events=make_events([RED]))
    assert problem(one) is not None
    ran = Operation("run", None, {"steps": 4, "poisoned": 9})
    assert problem(replace(one, operations=(ran,))) is None


def test_a_budget_that_never_mattered_is_no_chunked_arm() -> None:
    assert "never mattered" in problem(arm("chunk=64", planned(("red", 0, 7)), planned(("red", 7, 1))))


@pytest.mark.parametrize(
    ("order", "fired"),
    [(["blue", "red"], True), (["red", "blue"], False), (["red"], False), (["blue", "red", "red"], False)],
)
def test_a_reordered_arm_submits_the_same_requests_in_another_order(order: list[str], fired: bool) -> None:
    free = make_pass("free", [RED, BLUE])
    one = make_pass("order=reversed", [RED, BLUE], operations=(Operation("submit", order), Operation("run")))
    case = Case(make_history([free, one]), records_of())
    assert (not_fired(case, one, "order", "reversed", ("red", "blue")) is None) is fired


def test_a_single_request_has_no_order_to_change() -> None:
    free, one = make_pass("free", [RED]), make_pass("order=reversed", [RED])
    case = Case(make_history([free, one]), records_of())
    assert not_fired(case, one, "order", "reversed", ("red",)) is not None
