"""Each arm of same_under changes what its name says, and only that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineRequest, ModelSource
from conformance.adapters.fake import fake_engine, minimal_engine
from conformance.arms import Arm, PassPlan, expand_arms, plan_arm, why_not_offered
from conformance.checks.arguments import AXES
from conformance.drive import ANCILLARY
from conformance.scenario import Scenario, load_scenario

TEXT = """schema: 1
id: area/name
requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one: {token_ids: [3, 4], max_tokens: 8}
  two: {token_ids: [5, 6], max_tokens: 5, logprobs: 2, prompt_logprobs: 1}
  gone: {token_ids: [7], max_tokens: 5}
  bad: {token_ids: [8], max_tokens: 0}
steps: [{submit: [one, two, gone]}, {expect_error: {bad: any}}, {abort: gone}, run]
checks:
  - happened: {finished: "==2"}
  - same_under: ARMS
"""
OPTIONS: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_kv_blocks": 33}
CAPABILITIES = fake_engine()(ModelSource("toy", Path("x"), "w"), {}).capabilities()


def scenario(tmp_path: Path, arms: str = "{chunk: [1]}") -> Scenario:
    path = tmp_path / "area/name.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.replace("ARMS", arms), encoding="utf-8")
    return load_scenario(path, tmp_path)


def plan(tmp_path: Path, axis: str, value: Any, options: Mapping[str, Any] = OPTIONS) -> PassPlan:
    s = scenario(tmp_path)
    requests = {
        name: EngineRequest(name, r.sampling, tuple(r.prompt["token_ids"]), capture=frozenset({"logits"}))
        for name, r in s.requests.items()
    }
    return plan_arm(Arm(axis, value), s, options, requests)


def kinds(p: PassPlan) -> list[tuple[str, Any]]:
    return [
        (step.kind, step.argument if step.kind in ("submit", "abort", "advance") else None)
        for step in p.steps
    ]


def test_chunk_is_a_token_budget(tmp_path: Path) -> None:
    p = plan(tmp_path, "chunk", 7)
    assert p.name == "chunk=7"
    assert p.options == {**OPTIONS, "max_num_batched_tokens": 7, "enable_chunked_prefill": True}
    assert p.steps == scenario(tmp_path).steps
    assert p.judged is None


@pytest.mark.parametrize(("size", "blocks"), [(1, 1 + 128 + 4), (3, 1 + 43 + 4), (16, 1 + 8 + 4)])
def test_block_size_keeps_the_room_of_the_pool(tmp_path: Path, size: int, blocks: int) -> None:
    assert plan(tmp_path, "block_size", size).options == {
        **OPTIONS,
        "block_size": size,
        "num_kv_blocks": blocks,
    }


def test_block_size_leaves_a_pool_of_unknown_size_alone(tmp_path: Path) -> None:
    assert plan(tmp_path, "block_size", 3, {"dtype": "float32"}).options == {
        "dtype": "float32",
        "block_size": 3,
    }


def test_another_backend_cannot_be_batch_invariant(tmp_path: Path) -> None:
    p = plan(tmp_path, "backend", "sdpa", {**OPTIONS, "batch_invariant": True})
    assert p.options == {**OPTIONS, "attention_backend": "sdpa", "batch_invariant": False}


def test_threads_are_an_option(tmp_path: Path) -> None:
    assert plan(tmp_path, "threads", 2).options == {**OPTIONS, "threads": 2}


def test_preempt_happens_at_its_step(tmp_path: Path) -> None:
    p = plan(tmp_path, "preempt", 5)
    assert (p.preempt_at, p.options) == (5, OPTIONS)


def test_poison_is_before_every_step_of_every_run(tmp_path: Path) -> None:
    p = plan(tmp_path, "poison", 1)
    assert [s.argument["poison"] for s in p.steps if s.kind == "run"] == [True]


def test_order_is_reversed_among_those_that_run_to_their_end(tmp_path: Path) -> None:
    p = plan(tmp_path, "order", "reversed")
    assert kinds(p) == [("submit", ["two", "one"]), ("run", None)]
    assert p.judged == ("two", "one")


@pytest.mark.parametrize(("value", "caching"), [("on", True), ("off", False)])
def test_prefix_cache_on_and_off(tmp_path: Path, value: str, caching: bool) -> None:
    p = plan(tmp_path, "prefix_cache", value)
    assert p.options == {**OPTIONS, "enable_prefix_caching": caching}
    assert not p.extra


def test_prefix_cache_hit_runs_every_prompt_before(tmp_path: Path) -> None:
    p = plan(tmp_path, "prefix_cache", "hit")
    assert kinds(p)[:2] == [("submit", [f"{ANCILLARY}warm.one", f"{ANCILLARY}warm.two"]), ("run", None)]
    assert p.steps[2:] == scenario(tmp_path).steps
    warm = p.extra[f"{ANCILLARY}warm.two"]
    assert warm.prompt_token_ids == (5, 6)
    assert warm.sampling == {"temperature": 0.0, "max_tokens": 1}  # prompt logprobs would skip the cache
    assert warm.capture == frozenset()


def test_alone_runs_one_after_the_other(tmp_path: Path) -> None:
    assert kinds(plan(tmp_path, "batch", "alone")) == [
        ("submit", ["one"]),
        ("run", None),
        ("submit", ["two"]),
        ("run", None),
    ]


def test_mixed_puts_neighbours_between_the_requests(tmp_path: Path) -> None:
    p = plan(tmp_path, "batch", "mixed")
    [(_, names), run] = kinds(p)
    assert run == ("run", None)
    assert [n for n in names if not n.startswith(ANCILLARY)] == ["one", "two"]
    assert set(names) - {"one", "two"} == set(p.extra)
    assert names[0].startswith(ANCILLARY)
    assert names[2].startswith(ANCILLARY)


def test_late_joins_neighbours_that_already_run(tmp_path: Path) -> None:
    p = plan(tmp_path, "batch", "late")
    assert kinds(p) == [("submit", list(p.extra)), ("advance", 2), ("submit", ["one", "two"]), ("run", None)]


def test_aborted_neighbours_leave_while_the_requests_run(tmp_path: Path) -> None:
    p = plan(tmp_path, "batch", "aborted_neighbour")
    first, last = p.extra
    assert kinds(p) == [
        ("submit", [first, "one", "two", last]),
        ("advance", 2),
        ("abort", [first, last]),
        ("run", None),
    ]


@pytest.mark.parametrize("value", ["mixed", "late", "aborted_neighbour"])
@pytest.mark.parametrize("blocks", [4, 9, 33, 2000])
def test_neighbours_fit_the_pool_beside_the_requests(tmp_path: Path, value: str, blocks: int) -> None:
    p = plan(tmp_path, "batch", value, {**OPTIONS, "num_kv_blocks": blocks, "max_model_len": 24})
    for request in p.extra.values():
        total = len(request.prompt_token_ids or ()) + request.sampling["max_tokens"]
        assert total <= min((blocks - 1) * 4, 24)


def test_every_axis_has_a_plan_and_a_name(tmp_path: Path) -> None:
    for axis in AXES:
        special = {"batch": "alone", "prefix_cache": "on", "backend": "sdpa", "preemption": "swap@3"}
        value = special.get(axis, 2)
        p = plan(tmp_path, axis, value)
        assert p.name == f"{axis}={value}"


def test_arms_are_expanded_in_order_and_once(tmp_path: Path) -> None:
    s = scenario(tmp_path, "{chunk: [2, 1], preempt: [2, every]}")
    assert expand_arms(s, [1, 1, 0, 2, 0]) == [
        Arm("chunk", 2),
        Arm("chunk", 1),
        Arm("preempt", 2),
        Arm("preempt", 1),
        Arm("preempt", 4),
    ]


def test_preemption_has_an_arm_per_mode_and_step(tmp_path: Path) -> None:
    s = scenario(tmp_path, "{preemption: [recompute, swap]}")
    assert [arm.name for arm in expand_arms(s, [1, 0, 2])] == [
        "preemption=recompute@1",
        "preemption=recompute@3",
        "preemption=swap@1",
        "preemption=swap@3",
    ]


def test_a_swapping_arm_has_a_host_pool_as_large_as_the_devices_unless_it_is_given(tmp_path: Path) -> None:
    p = plan(tmp_path, "preemption", "swap@5")
    assert p.preempt_at == 5
    assert p.options == {**OPTIONS, "preemption_mode": "swap", "num_host_blocks": 33}
    for given in ({"num_host_blocks": 2}, {"swap_space_bytes": 1000}):
        wanted = {**OPTIONS, **given, "preemption_mode": "swap"}
        assert plan(tmp_path, "preemption", "swap@5", {**OPTIONS, **given}).options == wanted
    assert plan(tmp_path, "preemption", "recompute@5").options == {**OPTIONS, "preemption_mode": "recompute"}


def test_a_warm_up_is_for_one_sequence(tmp_path: Path) -> None:
    s = scenario(tmp_path)
    several = {n: EngineRequest(n, {**r.sampling, "n": 3}, (3, 4)) for n, r in s.requests.items()}
    p = plan_arm(Arm("prefix_cache", "hit"), s, OPTIONS, several)
    assert {request.sampling.get("n") for request in p.extra.values()} == {None}


def test_the_requests_of_a_same_under_check_are_no_axis(tmp_path: Path) -> None:
    s = scenario(tmp_path, "{chunk: [1], requests: [one]}")
    assert expand_arms(s, []) == [Arm("chunk", 1)]


def test_an_engine_with_everything_is_offered_every_arm(tmp_path: Path) -> None:
    s = scenario(tmp_path)
    everything = replace(CAPABILITIES, options=CAPABILITIES.options | {"preemption_mode", "num_host_blocks"})
    for axis in AXES:
        value = {"batch": "late", "preemption": "swap@1"}.get(axis, 1)
        assert why_not_offered(Arm(axis, value), s, everything) is None


def test_swapping_needs_a_host_pool_whose_size_can_be_chosen(tmp_path: Path) -> None:
    s, modes = scenario(tmp_path), replace(CAPABILITIES, options=frozenset({"preemption_mode"}))
    assert why_not_offered(Arm("preemption", "recompute@1"), s, modes) is None
    assert "num_host_blocks" in str(why_not_offered(Arm("preemption", "swap@1"), s, modes))


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (Arm("chunk", 1), "lacks chunked_prefill"),
        (Arm("block_size", 1), "lacks block_size"),
        (Arm("prefix_cache", "on"), "lacks prefix_cache"),
        (Arm("preempt", 1), "lacks preempt"),
        (Arm("poison", 1), "lacks poison"),
        (Arm("batch", "late"), "lacks stepped"),
        (Arm("batch", "aborted_neighbour"), "lacks stepped"),
        (Arm("backend", "sdpa"), "lacks stepped"),  # its steps abort a request
    ],
)
def test_an_engine_with_nothing_is_told_what_it_lacks(tmp_path: Path, arm: Arm, reason: str) -> None:
    capabilities = minimal_engine()(ModelSource("toy", Path("x"), "w"), {}).capabilities()
    assert reason in str(why_not_offered(arm, scenario(tmp_path), capabilities))


def test_alone_and_mixed_need_nothing(tmp_path: Path) -> None:
    capabilities = minimal_engine()(ModelSource("toy", Path("x"), "w"), {}).capabilities()
    for value in ("alone", "mixed"):
        assert why_not_offered(Arm("batch", value), scenario(tmp_path), capabilities) is None


def test_an_option_that_is_not_honoured_is_named(tmp_path: Path) -> None:
    capabilities = replace(CAPABILITIES, options=frozenset())
    reason = why_not_offered(Arm("threads", 2), scenario(tmp_path), capabilities)
    assert reason == "fake does not honour the option threads"
