"""Waivers: closed format, scope, staleness, expiry."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from conformance.history import History
from conformance.testing import make_history, make_pass
from conformance.verdicts import Finding, Judgement, Power, Verdict
from conformance.waivers import Waiver, WaiverError, apply_waivers, load_waivers

TODAY = date(2026, 6, 1)
GOOD = """
- scenario: made/up
  reason: known
  issue: https://example.org/1
  expiry: 2027-01-31
  scope: {device: cpu, block_size: 16}
"""


def waiver(**changes: Any) -> Waiver:
    fields: dict[str, Any] = {
        "scenario": "made/up",
        "reason": "known",
        "issue": "#1",
        "expiry": date(2027, 1, 31),
        "scope": {},
    }
    return Waiver(**{**fields, **changes})


def result(verdict: Verdict) -> tuple[History, Judgement]:
    finding = Finding(verdict, "tokens_match_golden", "red", "differs")
    sound = Finding(Verdict.PASS, "pool_conserved", None, "no block lost")
    return make_history([make_pass("free", [])]), Judgement(verdict, (finding, sound), Power((), {}))


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text(GOOD, encoding="utf-8")
    [one] = load_waivers(path)
    assert one == Waiver(
        "made/up", "known", "https://example.org/1", date(2027, 1, 31), {"device": "cpu", "block_size": 16}
    )


def test_an_empty_file_waives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text("# none\n", encoding="utf-8")
    assert load_waivers(path) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{a: 1}", "expected a list"),
        ("- made/up", "expected a mapping"),
        (GOOD.replace("reason", "reson"), "unknown field 'reson'"),
        (GOOD.replace("  issue: https://example.org/1\n", ""), "issue is missing"),
        (GOOD.replace("2027-01-31", "soon"), "expiry must be a day"),
        (GOOD.replace("2027-01-31", "2027-01-31 10:00:00"), "expiry must be a day"),
        (GOOD.replace("reason: known", "reason: ''"), "reason must be text"),
        (GOOD.replace("{device: cpu, block_size: 16}", "cpu"), "scope must be a mapping"),
        (GOOD + GOOD, "waived twice"),
        ("- [", "waivers.yaml"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WaiverError, match=words):
        load_waivers(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WaiverError, match="none"):
        load_waivers(tmp_path / "none.yaml")


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text("- {scenario: a}\n- 3\n", encoding="utf-8")
    with pytest.raises(WaiverError) as caught:
        load_waivers(path)
    assert len(str(caught.value).splitlines()) == 4


def test_a_waived_failure_is_waived_and_names_its_issue() -> None:
    [judgement], about = apply_waivers([waiver()], [result(Verdict.FAIL)], TODAY)
    assert judgement.verdict is Verdict.WAIVED
    assert not judgement.fails_run()
    assert [f.verdict for f in judgement.findings] == [Verdict.WAIVED, Verdict.PASS]
    assert "#1" in judgement.findings[0].message
    assert about == []


def test_an_error_is_never_waived() -> None:
    [judgement], _ = apply_waivers([waiver()], [result(Verdict.ERROR)], TODAY)
    assert judgement.verdict is Verdict.ERROR


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.NOISE, Verdict.WEAK])
def test_a_waiver_of_a_scenario_that_agrees_is_stale(verdict: Verdict) -> None:
    [judgement], [finding] = apply_waivers([waiver()], [result(verdict)], TODAY)
    assert judgement.verdict is verdict
    assert finding.verdict is Verdict.STALE


def test_a_waiver_that_matches_nothing_is_stale() -> None:
    _, [finding] = apply_waivers([waiver(scenario="made/upp")], [result(Verdict.FAIL)], TODAY)
    assert finding.verdict is Verdict.STALE
    assert "matches nothing" in finding.message


def test_a_waiver_of_a_skipped_scenario_is_not_stale() -> None:
    _, about = apply_waivers([waiver()], [result(Verdict.SKIP)], TODAY)
    assert about == []


def test_one_failing_point_keeps_a_waiver_alive() -> None:
    judgements, about = apply_waivers([waiver()], [result(Verdict.PASS), result(Verdict.FAIL)], TODAY)
    assert [j.verdict for j in judgements] == [Verdict.PASS, Verdict.WAIVED]
    assert about == []


@pytest.mark.parametrize(
    "scope", [{"device": "cuda"}, {"dtype": "bfloat16"}, {"block_size": 4}, {"nothing": 1}]
)
def test_a_run_outside_of_the_scope_is_not_waived(scope: dict[str, Any]) -> None:
    [judgement], [finding] = apply_waivers([waiver(scope=scope)], [result(Verdict.FAIL)], TODAY)
    assert judgement.verdict is Verdict.FAIL
    assert finding.verdict is Verdict.STALE


def test_a_run_within_the_scope_is_waived() -> None:
    scope = {"device": "cpu", "engine": "made-up", "version": "1", "block_size": 16}
    [judgement], _ = apply_waivers([waiver(scope=scope)], [result(Verdict.FAIL)], TODAY)
    assert judgement.verdict is Verdict.WAIVED


def test_an_expired_waiver_waives_nothing_and_is_an_error() -> None:
    [judgement], [finding] = apply_waivers([waiver(expiry=date(2026, 5, 31))], [result(Verdict.FAIL)], TODAY)
    assert judgement.verdict is Verdict.FAIL
    assert finding.verdict is Verdict.ERROR
    assert "expired" in finding.message


def test_the_last_day_still_counts() -> None:
    [judgement], _ = apply_waivers([waiver(expiry=TODAY)], [result(Verdict.FAIL)], TODAY)
    assert judgement.verdict is Verdict.WAIVED
