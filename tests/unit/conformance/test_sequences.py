"""Requests for several sequences, and swapping, through the harness on the engine in the box."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.fake import fake_engine
from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.checks import judge
from conformance.history import History
from conformance.models import resolve_model
from conformance.paths import data_root
from conformance.runner import Skipped, run_scenario
from conformance.scenario import Scenario, load_scenario
from conformance.store import RecordStore
from conformance.verdicts import Finding, Verdict

TEXT = """schema: 1
id: area/name
requirement: It answers.
level: must
source: [https://example.org]
model: tiny-llama
engine: {num_kv_blocks: 40, block_size: 4, num_host_blocks: 16, max_num_batched_tokens: 16}
profile: smoke
requests:
  one: {token_ids: [3, 4, 5, 6, 7, 8], max_tokens: 6, ignore_eos: true, n: 3, temperature: 1.2, seed: 3}
  two: {token_ids: [5, 6, 7], max_tokens: 5, ignore_eos: true}
steps: STEPS
checks: CHECKS
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[..., Scenario]:
    def make(
        steps: str = "[{submit: [one, two]}, run]", checks: str = "[{happened: {finished: 4}}]"
    ) -> Scenario:
        path = tmp_path / "area" / "name.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TEXT.replace("STEPS", steps).replace("CHECKS", checks))
        return load_scenario(path, tmp_path)

    return make


def run(scenario: Scenario, factory: Any = MiniVLLMAdapter) -> History:
    point = scenario.points()[0]
    source, store = resolve_model(point["model"]), RecordStore(data_root())
    return run_scenario(scenario, point, factory, source, store)


def verdicts(scenario: Scenario, history: History) -> list[Finding]:
    store = RecordStore(data_root())
    return list(judge(history, scenario.checks, store.get, scenario.level).findings)


def test_a_run_ends_when_every_sequence_has_ended_and_each_has_its_evidence(
    scenario: Callable[..., Scenario],
) -> None:
    s = scenario(checks="[sampled_within_kept_set, {happened: {forked: 2, copied: '>=2'}}, pool_conserved]")
    history = run(s)
    [free] = history.passes
    assert free.error is None
    assert list(free.requests) == ["one", "one/1", "one/2", "two"]
    for name in ("one", "one/1", "one/2"):
        one = free.requests[name]
        assert one.output is not None
        assert one.output.finished
        assert len(one.output_rows) == 6
        assert one.texts
    assert [f for f in verdicts(s, history) if f.verdict is not Verdict.PASS] == []


def test_steps_act_on_one_sequence(scenario: Callable[..., Scenario]) -> None:
    steps = "[{submit: [one, two]}, {advance: 2}, {abort: one/1}, {preempt: one/2}, {swap: one}, run]"
    checks = (
        "[{finish_reason: {one: length, one/1: abort, one/2: length}}, "
        "{happened: {aborted: {one/1: 1}, preempted: {one: 1, one/2: 1}, swapped_in: {one: 1}}}, "
        "pool_conserved]"
    )
    s = scenario(steps, checks)
    history = run(s)
    assert history.passes[0].error is None
    assert [o.outcome for o in history.passes[0].operations if o.kind in ("preempt", "swap")] == [
        ["one/2"],
        ["one"],
    ]
    assert [f for f in verdicts(s, history) if f.verdict is not Verdict.PASS] == []


def test_every_sequence_is_compared_in_every_arm_of_both_modes(scenario: Callable[..., Scenario]) -> None:
    s = scenario(
        checks="[{same_under: {preemption: [recompute, swap]}}, {happened: {finished: 4}}, pool_conserved]"
    )
    history = run(s)
    arms = Counter(p.name.partition("@")[0] for p in history.passes)
    assert arms["preemption=swap"] == arms["preemption=recompute"] == 5
    compared = {(f.request, f.verdict) for f in verdicts(s, history) if f.check == "same_under"}
    assert {name for name, _ in compared} == {"one", "one/1", "one/2", "two"}
    assert {verdict for _, verdict in compared} <= {Verdict.PASS, Verdict.WEAK}


def test_aborting_a_request_leaves_none_of_its_sequences_to_compare(
    scenario: Callable[..., Scenario],
) -> None:
    s = scenario(
        "[{submit: [one, two]}, {advance: 2}, {abort: one}, run]",
        "[{same_under: {chunk: [2]}}, {happened: {aborted: 3}}]",
    )
    history = run(s)
    compared = {f.request for f in verdicts(s, history) if f.check == "same_under"}
    assert compared == {"two"}


def test_a_refused_request_has_no_sequences(scenario: Callable[..., Scenario]) -> None:
    s = scenario("[{expect_error: {one: any}}, {submit: two}, run]", "[{error: {one: any}}]")
    history = run(scenario("[{submit: two}, run, {expect_error: {one: any}}]"), _without_room)
    assert list(history.passes[0].requests) == ["one", "two"]
    assert history.passes[0].requests["one"].refused is not None
    assert s.must_fail == {"one"}


def _without_room(source: Any, options: Any) -> MiniVLLMAdapter:
    return MiniVLLMAdapter(source, {**options, "num_kv_blocks": 4})


def test_an_engine_that_serves_one_sequence_only_skips(scenario: Callable[..., Scenario]) -> None:
    with pytest.raises(Skipped, match="lacks parallel_sampling"):
        run(scenario(), fake_engine())


def test_an_engine_that_cannot_swap_skips(scenario: Callable[..., Scenario]) -> None:
    with pytest.raises(Skipped, match=r"lacks (parallel_sampling|swap)"):
        run(scenario("[{submit: [one, two]}, {swap: two}, run]"), fake_engine())
