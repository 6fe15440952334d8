"""Selecting, running, judging and waiving."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.fake import FAULTS, fake_engine, minimal_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.archive import read_histories
from conformance.scenario import Scenario, load_scenarios
from conformance.store import RecordStore
from conformance.suite import (
    Outcome,
    Selection,
    SelectionError,
    apply_waivers,
    judge_history,
    run_case,
    select,
    select_matrix,
)
from conformance.verdicts import Verdict
from conformance.waivers import Waiver

HEAD = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: PROFILE
"""
BODY = """requests:
  one: {generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 12}
  two: {generate: {kind: random, length: 10, seed: 2, low: 3, high: 60}, max_tokens: 10, logprobs: 3}
steps: [{submit: [one, two]}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==2"}
"""
#: One scenario that puts an engine through everything the toy can do.
THOROUGH = """engine: {num_kv_blocks: 40, block_size: 4, max_num_batched_tokens: 24, batch_invariant: true}
requests:
  one: {generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 12}
  two: {generate: {kind: random, length: 10, seed: 2, low: 3, high: 60}, max_tokens: 10, logprobs: 3}
steps: [fragment, {submit: [one, two]}, {run: {poison: true}}]
checks:
  - tokens_match_golden
  - logits_within_yardstick
  - logprobs_by_value: two
  - happened: {finished: "==2"}
  - pool_conserved
  - same_under:
      chunk: [3, 8]
      block_size: [1, 3]
      batch: [alone, mixed, late, aborted_neighbour]
      prefix_cache: [on, off, hit]
      preempt: every
      threads: [1, 2]
      poison: [1]
      order: [reversed]
"""


def head(profile: str = "smoke") -> str:
    return HEAD.replace("PROFILE", profile)


@pytest.fixture
def scenarios(tmp_path: Path) -> list[Scenario]:
    matrix = "matrix: {block_size: [1, 4], device: auto}\n"
    root = write_toy_suite(
        tmp_path,
        {"a/quick": head() + matrix + BODY, "a/long": head("full") + BODY, "b/usual": head("default") + BODY},
    )
    return load_scenarios(root / "scenarios")


def labels(scenarios: list[Scenario], **criteria: Any) -> list[str]:
    return [case.label for case in select(scenarios, Selection(**criteria))]


# ---- selecting -----------------------------------------------------------------------------------


def test_a_profile_selects_what_it_includes(scenarios: list[Scenario]) -> None:
    assert labels(scenarios, profile="smoke") == ["a/quick[block_size=1]", "a/quick[block_size=4]"]
    assert len(labels(scenarios, profile="default")) == 3
    assert len(labels(scenarios, profile="full")) == 4


def test_an_id_selects_whatever_its_profile(scenarios: list[Scenario]) -> None:
    assert labels(scenarios, ids=("a/long",), profile="smoke") == ["a/long"]
    assert labels(scenarios, ids=("a/l*", "b/*"), profile="smoke") == ["a/long", "b/usual"]


def test_area_model_and_point_narrow_it_down(scenarios: list[Scenario]) -> None:
    assert labels(scenarios, areas=("b",)) == ["b/usual"]
    assert labels(scenarios, profile="smoke", point={"block_size": "4"}) == ["a/quick[block_size=4]"]
    assert labels(scenarios, profile="smoke", point={"block_size": "4", "model": "toy"})


def test_a_matrix_has_every_case_on_each_device_of_each_engine(scenarios: list[Scenario]) -> None:
    cases = select_matrix(scenarios, Selection(), ["x", "y"], ["cpu", "cuda"])
    assert len(cases) == 3 * 4
    assert [case.label for case in cases if case.point.get("block_size") != 1][:4] == [
        f"a/quick[engine={engine}, device={device}, block_size=4]"
        for engine in ("x", "y")
        for device in ("cpu", "cuda")
    ]
    assert {case.scenario.id for case in cases[:8]} == {"a/quick"}, "what belongs together stands together"
    alone = select_matrix(scenarios, Selection(device="cpu"), ["x"])
    assert [(case.engine, case.device, case.label) for case in alone[-1:]] == [("x", "cpu", "b/usual")]


@pytest.mark.parametrize(("engines", "devices"), [(["x", "x"], []), (["x"], ["cpu", "cpu"])])
def test_nothing_is_twice_in_a_matrix(
    scenarios: list[Scenario], engines: list[str], devices: list[str]
) -> None:
    with pytest.raises(SelectionError, match="named twice: "):
        select_matrix(scenarios, Selection(), engines, devices)


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ({"ids": ("a/qick",)}, "no scenario matches 'a/qick'"),
        ({"ids": ("a/quick", "z/*")}, "no scenario matches 'z/\\*'"),
        ({"areas": ("c",)}, "no area 'c'; areas are a, b"),
        ({"models": ("toy", "other")}, "no scenario runs model 'other'; models are toy"),
        ({"point": {"block_size": "9"}}, "nothing is selected"),
        ({"areas": ("b",), "profile": "smoke"}, "nothing is selected"),
    ],
)
def test_a_selection_of_nothing_is_an_error_and_not_a_pass(
    scenarios: list[Scenario], criteria: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(SelectionError, match=message):
        select(scenarios, Selection(**criteria))


def test_the_device_is_the_command_lines_where_the_scenario_leaves_it_open(scenarios: list[Scenario]) -> None:
    [case, *_] = select(scenarios, Selection(device="cpu"))
    assert case.point["device"] == "cpu"
    [case, *_] = select(scenarios, Selection())
    assert case.point["device"] == "auto"


def test_another_dtype_replaces_the_scenarios(tmp_path: Path) -> None:
    text = head() + "dtype: [float32, bfloat16]\n" + BODY
    root = write_toy_suite(tmp_path, {"a/both": text})
    cases = select(load_scenarios(root / "scenarios"), Selection(dtype="bfloat16"))
    assert [case.point["dtype"] for case in cases] == ["bfloat16"]


# ---- running and judging -------------------------------------------------------------------------


def run_one(root: Path, text: str, factory: Any, **options: Any) -> Outcome:
    write_toy_suite(root, {"toy/one": text})
    [case] = select(load_scenarios(root / "scenarios"), Selection(profile="full"))
    return run_case(case, factory, RecordStore(root), root=root, **options)


def test_a_right_engine_passes_everything(tmp_path: Path) -> None:
    outcome = run_one(tmp_path, head() + THOROUGH, fake_engine())
    assert [f for f in outcome.judgement.findings if f.verdict is not Verdict.PASS] == []
    assert outcome.verdict is Verdict.PASS


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_fault_is_caught(tmp_path: Path, fault: str) -> None:
    outcome = run_one(tmp_path, head() + THOROUGH, fake_engine(fault=fault))
    assert outcome.verdict in (Verdict.FAIL, Verdict.ERROR), FAULTS[fault]
    assert any(f.verdict is Verdict.FAIL for f in outcome.judgement.findings)


def test_an_engine_that_replays_the_golden_passes_by_the_golden_alone(tmp_path: Path) -> None:
    """Rows rebuilt from a record's tables are all that a golden check looks at."""
    write_toy_suite(tmp_path, {"toy/one": head() + BODY})
    records = list(RecordStore(tmp_path).all())
    outcome = run_one(tmp_path, head() + BODY, fake_engine(records))
    assert outcome.verdict is Verdict.PASS
    broken = run_one(tmp_path, head() + BODY, fake_engine(records, fault="wrong_token"))
    assert broken.verdict is Verdict.FAIL


def test_a_minimal_engine_is_weak_where_it_shows_too_little_and_fails_where_it_is_wrong(
    tmp_path: Path,
) -> None:
    assert run_one(tmp_path, head() + BODY, minimal_engine()).verdict is Verdict.WEAK
    assert run_one(tmp_path, head() + BODY, minimal_engine(fault="wrong_token")).verdict is Verdict.FAIL


def test_a_missing_capability_is_a_skip_with_its_reason(tmp_path: Path) -> None:
    outcome = run_one(tmp_path, head() + "needs: [text]\n" + BODY, fake_engine())
    assert outcome.verdict is Verdict.SKIP
    assert outcome.judgement.findings[0].message == "fake lacks text"


def test_a_missing_model_is_a_skip_with_the_way_to_get_it(tmp_path: Path) -> None:
    outcome = run_one(tmp_path, (head() + BODY).replace("model: toy", "model: absent"), fake_engine())
    assert outcome.verdict is Verdict.SKIP
    assert "unknown model 'absent'" in outcome.judgement.findings[0].message


def test_trouble_of_the_harness_itself_is_an_error_of_that_case(tmp_path: Path) -> None:
    text = head() + "damage: {remove_tensor: nope}\n" + BODY
    outcome = run_one(tmp_path, text, fake_engine())
    assert outcome.verdict is Verdict.ERROR
    assert "DamageError: toy has no tensor 'nope'" in outcome.judgement.findings[0].message


def test_a_saved_history_is_judged_the_same(tmp_path: Path) -> None:
    for fault in (None, "wrong_token", "chunk_seam"):
        directory = tmp_path / f"histories-{fault}"
        outcome = run_one(tmp_path, head() + THOROUGH, fake_engine(fault=fault), histories=directory)
        [history] = read_histories(directory)
        again = judge_history(history, outcome.case.scenario, RecordStore(tmp_path))
        assert again == outcome.judgement


# ---- waivers -------------------------------------------------------------------------------------


def waiver(scenario: str, line: int = 1, **point: Any) -> Waiver:
    return Waiver(scenario, point, "known", "https://example.org/1", datetime.date(2999, 1, 1), line)


@pytest.fixture
def failed(tmp_path: Path) -> Outcome:
    return run_one(tmp_path, head() + BODY, fake_engine(fault="wrong_token"))


@pytest.fixture
def passed(tmp_path: Path) -> Outcome:
    return run_one(tmp_path, head() + BODY, fake_engine())


def test_a_waived_failure_does_not_fail_the_run(failed: Outcome) -> None:
    [outcome], stale = apply_waivers([failed], [waiver("toy/*")], ["toy/one"])
    assert outcome.verdict is Verdict.WAIVED
    assert outcome.waiver is not None
    assert stale == []
    assert not outcome.judgement.fails_run()


def test_a_waiver_of_another_scenario_or_point_waives_nothing(failed: Outcome) -> None:
    for other in (waiver("toy/two"), waiver("toy/one", dtype="bfloat16")):
        [outcome], _ = apply_waivers([failed], [other], ["toy/one", "toy/two"])
        assert outcome.verdict is Verdict.FAIL


def test_a_waiver_whose_scenario_passes_is_stale(passed: Outcome) -> None:
    [outcome], [(stale, why)] = apply_waivers([passed], [waiver("toy/one", 7)], ["toy/one"])
    assert outcome.verdict is Verdict.PASS
    assert (stale.line, why) == (7, "what it waives passes")


def test_a_waiver_of_no_scenario_is_stale(passed: Outcome) -> None:
    _, [(_, why)] = apply_waivers([passed], [waiver("toy/gone")], ["toy/one"])
    assert why == "no scenario has this id"


def test_a_waiver_of_no_point_is_stale(passed: Outcome) -> None:
    _, [(_, why)] = apply_waivers([passed], [waiver("toy/one", block_size=3)], ["toy/one"])
    assert why == "its scenario ran at no point with {'block_size': 3}"


def test_a_waiver_of_what_was_not_selected_is_left_alone(passed: Outcome) -> None:
    assert apply_waivers([passed], [waiver("other/one")], ["toy/one", "other/one"])[1] == []


def test_an_error_cannot_be_waived(tmp_path: Path) -> None:
    broken = run_one(tmp_path, head() + "damage: {remove_tensor: nope}\n" + BODY, fake_engine())
    [outcome], stale = apply_waivers([broken], [waiver("toy/one")], ["toy/one"])
    assert outcome.verdict is Verdict.ERROR
    assert stale == []
