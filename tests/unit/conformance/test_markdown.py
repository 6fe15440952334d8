"""Summaries for a CI page: failures come first, whole, and nobody's words become markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from conformance import EDITION, REPORT_SCHEMA
from conformance.compare import compare
from conformance.markdown import compare_markdown, run_markdown, write_markdown
from conformance.saved_report import EngineName, Report, SavedCase, StaleWaiver
from conformance.verdicts import Finding, Power, Verdict

TRIAGE = {
    "stage": "k.0",
    "position": 13,
    "token": 251,
    "size": 1.08e6,
    "text": "k.0: row 13 is off",
    "causes": ["rope positions that skip"],
}
WORST = "<script>alert(1)</script> | `x` *b* [a](javascript:1) \\ \n# head @all ~~s~~ ```"


def case(verdict: Verdict, name: str = "a/one", *, reproduce: str | None = None, **finding: Any) -> SavedCase:
    values = {"request": "red", "message": "position 3 differs", **finding}
    return SavedCase(
        scenario=name,
        label=name,
        area=name.partition("/")[0],
        requirement="It answers.",
        source=(),
        level="must",
        point={"model": "toy"},
        verdict=verdict,
        seconds=1.0,
        waiver=None,
        reproduce=reproduce,
        power=Power(("tokens",), {}),
        findings=(Finding(verdict, "tokens_match_golden", **values),),
        digest=None,
    )


def report(*cases: SavedCase, stale: tuple[StaleWaiver, ...] = ()) -> Report:
    return Report(
        schema=REPORT_SCHEMA,
        suite=EDITION,
        failed=any(c.verdict.fails_run for c in cases),
        engine=EngineName("fake", "1.2"),
        environment={},
        cases=cases,
        stale_waivers=stale,
        power="Power: of 2 cases judged, some.",
        seeded_faults="Seeded faults: 1 of 2 would have shown.",
    )


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


def test_a_failure_is_told_before_the_rest_with_stage_token_size_and_command() -> None:
    failed = case(
        Verdict.FAIL,
        "b/two",
        position=3,
        size=12.5,
        detail={"triage": TRIAGE},
        reproduce="conformance run b/two",
    )
    text = run_markdown(report(case(Verdict.PASS), failed))
    assert text.startswith("# fake 1.2: FAILED\n\nSuite " + EDITION + ", 2 cases: 1 PASS, 1 FAIL; 2 s.\n")
    assert "## FAIL `b/two`\n\nIt answers.\n" in text
    assert "`red`: position 3 differs (generated position 3, 12.5 × the yardstick)" in text
    assert "first wrong stage `k.0`, row 13, token 251, 1.08e+06 × the yardstick: k.0: row 13 is off" in text
    assert "usual causes: rope positions that skip" in text
    assert "```console\nconformance run b/two\n```" in text
    places = [text.index(part) for part in ("## FAIL", "## Areas", "## Power")]
    assert places == sorted(places)
    assert "- Power: of 2 cases judged, some.\n- Seeded faults: 1 of 2 would have shown." in text


def test_areas_are_a_table_of_counts() -> None:
    page = rendered(
        run_markdown(report(case(Verdict.PASS), case(Verdict.PASS, "a/2"), case(Verdict.FAIL, "b/3")))
    )
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in page.split("<tr>")[1:]]
    assert rows == [["area", "PASS", "FAIL", "seconds"], ["a", "2", "", "2.0"], ["b", "", "1", "1.0"]]


def test_skips_are_counted_by_reason_and_stale_waivers_named() -> None:
    skips = [case(Verdict.SKIP, f"a/{i}", message="fake lacks image") for i in range(3)]
    text = run_markdown(report(*skips, stale=(StaleWaiver(4, "a/*", "what it waives passes"),)))
    assert "- 3: fake lacks image" in text
    assert r"- line 4 (a/\*): what it waives passes" in text


def test_words_of_an_engine_are_never_markup() -> None:
    page = rendered(
        run_markdown(report(case(Verdict.FAIL, WORST, message=WORST, request=WORST, reproduce=WORST)))
    )
    assert "<script" not in page
    assert "javascript:" in page
    assert not re.search(r"<(a|em|s|h1|strong)\b[^>]*>[^<]*(javascript|head|alert|\bb\b)", page)
    assert page.count("<h1>") == 1
    compared = compare(
        [report(case(Verdict.PASS, WORST))], [report(case(Verdict.FAIL, WORST, message=WORST))]
    )
    page = rendered(compare_markdown(compared))
    assert "<script" not in page
    assert page.count("<h1>") == 1


def test_a_run_in_which_everything_fails_stays_below_the_limit_of_github() -> None:
    cases = [case(Verdict.FAIL, f"a/{i}", message="x" * 9000, reproduce="r" * 300) for i in range(2000)]
    text = run_markdown(report(*cases))
    assert len(text.encode()) < 2**20 / 4
    assert "- FAIL `a/40`\n" in text
    assert "- and 1460 more\n" in text


def test_a_file_is_written_anew_but_the_summary_of_a_step_is_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write_markdown(path, "one\n")
    assert path.read_text(encoding="utf-8") == "one\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    write_markdown(path, "two\n")
    assert path.read_text(encoding="utf-8") == "one\ntwo\n"
