"""A run of several engines is read back whole, and as one report per engine and device."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import EDITION, REPORT_SCHEMA
from conformance.adapters.base import Capabilities
from conformance.adapters.fake import fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.compare import compare
from conformance.html.page import render
from conformance.markdown import run_markdown
from conformance.report import as_json
from conformance.saved_report import JudgedEngine, Report, SavedCase, StaleWaiver, parse_report
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Selection, run_case, select_matrix
from conformance.verdicts import Finding, Power, Verdict

SCENARIO = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
steps: [{submit: one}, run]
checks: [tokens_match_golden, logits_within_yardstick]
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A right and a wrong toy engine, judged in one run."""
    root = write_toy_suite(tmp_path_factory.mktemp("data"), {"toy/one": SCENARIO})
    cases = select_matrix(load_scenarios(root / "scenarios"), Selection(), ["right", "wrong"])
    outcomes = [
        run_case(
            case,
            fake_engine(fault="wrong_token" if case.engine == "wrong" else None),
            RecordStore(root),
            root=root,
        )
        for case in cases
    ]
    fake = Capabilities("fake", "1", ("float32",), frozenset({"output_ids"}))
    declared = {("right", "auto"): fake, ("wrong", "auto"): fake}
    return parse_report(as_json(outcomes, [], declared, {}), "both")


def test_each_engine_has_its_part_with_its_own_cases_verdict_and_power(both: Report) -> None:
    right, wrong = both.by_engine()
    assert (right.title, wrong.title) == ("right 1", "wrong 1"), "both call themselves fake"
    assert (both.failed, right.failed, wrong.failed) == (True, False, True)
    assert [case.verdict for case in right.cases] == [Verdict.PASS]
    assert [case.verdict for case in wrong.cases] == [Verdict.FAIL]
    assert right.power.startswith("Power: of 1 cases judged, ")
    assert right.by_engine() == [right]


def test_two_runs_of_several_engines_are_compared_engine_by_engine(both: Report) -> None:
    right, wrong = both.by_engine()
    assert compare([right, wrong], [right, wrong]).unchanged == 2
    [case] = wrong.cases
    worse = Report(**{**_fields(right), "cases": (case,)})
    found = compare([right, wrong], [worse, wrong])
    assert [(one.kind.value, one.engine) for one in found.differences] == [("REGRESSION", "right")]


def test_the_page_has_a_column_for_each_and_the_summary_a_power_line(both: Report) -> None:
    page = render([both])
    assert '<th scope="col">right 1</th><th scope="col">wrong 1</th>' in page
    assert page.count('class="sq ') == 2 + 2, "two in the legend, one per engine"
    text = run_markdown(both)
    assert "- fake 1 on auto: Seeded faults: " in text


def _fields(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def case(verdict: Verdict, device: str, level: str = "must") -> SavedCase:
    return SavedCase(
        scenario="a/one",
        label=f"a/one[engine=mine, device={device}]",
        area="a",
        requirement="It answers.",
        source=(),
        level=level,
        point={"model": "toy", "device": device},
        verdict=verdict,
        seconds=1.0,
        waiver=None,
        reproduce=None,
        power=Power(("tokens",), {}),
        findings=(Finding(verdict, "tokens_match_golden", None, "it is so"),),
        digest=None,
        engine="mine",
    )


def devices(*cases: SavedCase, failed: bool, stale: tuple[StaleWaiver, ...] = ()) -> list[Report]:
    engines = tuple(JudgedEngine("mine", device, "Mine", "2", None) for device in ("cpu", "cuda"))
    whole = Report(
        REPORT_SCHEMA, EDITION, failed, None, {}, cases, stale, "Power: some.", None, engines=engines
    )
    return whole.by_engine()


def test_one_engine_on_two_devices_is_told_apart_by_device() -> None:
    parts = devices(case(Verdict.PASS, "cpu"), case(Verdict.FAIL, "cuda"), failed=True)
    assert [part.title for part in parts] == ["Mine 2 on cpu", "Mine 2 on cuda"]
    assert [part.failed for part in parts] == [False, True]
    assert [len(part.cases) for part in parts] == [1, 1]


def test_a_part_fails_where_it_makes_the_run_fail_or_judged_nothing() -> None:
    wish = case(Verdict.FAIL, "cuda", "should")
    assert [p.failed for p in devices(case(Verdict.PASS, "cpu"), wish, failed=False)] == [False, False]
    assert [p.failed for p in devices(case(Verdict.PASS, "cpu"), wish, failed=True)] == [False, True]
    assert [p.failed for p in devices(case(Verdict.FAIL, "cpu"), wish, failed=True)] == [True, False]
    skipped = devices(case(Verdict.SKIP, "cpu"), case(Verdict.PASS, "cuda"), failed=False)
    assert [p.failed for p in skipped] == [True, False]


def test_stale_waivers_stay_with_the_first_part() -> None:
    stale = (StaleWaiver(4, "a/*", "what it waives passes"),)
    parts = devices(case(Verdict.PASS, "cpu"), case(Verdict.PASS, "cuda"), failed=True, stale=stale)
    assert [part.stale_waivers for part in parts] == [stale, ()]
