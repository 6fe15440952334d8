"""Two runs side by side: a case is named by what became of it, and only a new failure is a regression."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance import EDITION, REPORT_SCHEMA
from conformance.compare import Kind, compare, read_side
from conformance.compare_cli import main
from conformance.saved_report import Report, ReportError, parse_report
from conformance.verdicts import Verdict


def case(verdict: str, name: str = "a/one", **changes: Any) -> dict[str, Any]:
    finding = {
        "verdict": verdict,
        "check": "tokens_match_golden",
        "request": "red",
        "message": "position [3]",
    }
    return {
        "scenario": name,
        "label": name,
        "area": name.partition("/")[0],
        "requirement": "It answers.",
        "source": ["https://example.org"],
        "level": "must",
        "point": {"model": "toy", "dtype": "float32", "device": "auto"},
        "verdict": verdict,
        "seconds": 1.0,
        "waiver": None,
        "reproduce": f"conformance run {name}" if verdict == "FAIL" else None,
        "power": {"kinds": ["tokens"], "blind": {}},
        "findings": [finding],
        "digest": None,
        **changes,
    }


def text(cases: list[dict[str, Any]], engine: str = "fake", **changes: Any) -> str:
    report = {
        "schema": REPORT_SCHEMA,
        "suite": EDITION,
        "failed": False,
        "engine": {"name": engine, "version": "1"},
        "environment": {"torch": "2"},
        "cases": cases,
        "stale_waivers": [],
        "power": "Power: some.",
        "seeded_faults": None,
        **changes,
    }
    return json.dumps(report)


def report(*cases: dict[str, Any], **changes: Any) -> Report:
    return parse_report(text(list(cases), **changes), "r.json", other_editions=True)


WANTED: Mapping[tuple[str, str], Kind | None] = {
    ("PASS", "FAIL"): Kind.REGRESSION,
    ("WEAK", "ERROR"): Kind.REGRESSION,
    ("SKIP", "FAIL"): Kind.REGRESSION,
    ("WAIVED", "FAIL"): Kind.REGRESSION,
    ("FAIL", "PASS"): Kind.FIX,
    ("ERROR", "WEAK"): Kind.FIX,
    ("WAIVED", "NOISE"): Kind.FIX,
    ("FAIL", "SKIP"): Kind.CHANGE,
    ("FAIL", "WAIVED"): Kind.CHANGE,
    ("FAIL", "ERROR"): Kind.CHANGE,
    ("PASS", "SKIP"): Kind.CHANGE,
    ("SKIP", "PASS"): Kind.CHANGE,
    ("PASS", "NOISE"): None,
    ("NOISE", "WEAK"): None,
    ("WEAK", "PASS"): None,
    ("FAIL", "FAIL"): None,
    ("SKIP", "SKIP"): None,
}


@pytest.mark.parametrize(("verdicts", "kind"), WANTED.items(), ids=str)
def test_what_becomes_of_a_case_has_a_name(verdicts: tuple[str, str], kind: Kind | None) -> None:
    found = compare([report(case(verdicts[0]))], [report(case(verdicts[1]))])
    assert [one.kind for one in found.differences] == ([] if kind is None else [kind])
    assert found.unchanged == (kind is None)
    assert found.status == (kind is Kind.REGRESSION)


def test_every_pair_of_verdicts_is_a_regression_exactly_where_the_new_one_alone_fails_a_run() -> None:
    for old in Verdict:
        for new in Verdict:
            found = compare([report(case(old.value))], [report(case(new.value))])
            assert (found.status == 1) is (new.fails_run and not old.fails_run), (old, new)


def test_a_new_case_fails_the_comparison_exactly_where_it_fails_a_run() -> None:
    for verdict in Verdict:
        found = compare([report(case("PASS"))], [report(case("PASS"), case(verdict.value, "a/new"))])
        assert [one.kind for one in found.differences] == [Kind.NEW]
        assert found.status == int(verdict.fails_run), verdict


def test_cases_of_one_run_only_are_new_or_gone_and_no_regression() -> None:
    old, new = report(case("PASS"), case("FAIL", "a/old")), report(case("PASS"), case("FAIL", "a/new"))
    found = compare([old], [new])
    assert [(one.kind, one.label, one.verdicts) for one in found.differences] == [
        (Kind.NEW, "a/new", "- → FAIL"),
        (Kind.GONE, "a/old", "FAIL → -"),
    ]
    assert found.summary == "0 REGRESSION, 0 FIX, 0 CHANGE, 1 NEW, 1 GONE, 1 as before"


def test_runs_without_a_common_case_prove_nothing() -> None:
    assert compare([report(case("PASS"))], [report(case("PASS", "b/two"))]).status == 3
    assert compare([report()], [report()]).status == 3


def test_one_scenario_at_two_points_is_two_cases() -> None:
    points = [{"model": "toy", "block_size": size} for size in (1, 4)]
    old = report(*(case("PASS", point=point) for point in points))
    new = report(case("PASS", point=points[0]), case("FAIL", point=points[1], label="a/one[4]"))
    assert [one.label for one in compare([old], [new]).of(Kind.REGRESSION)] == ["a/one[4]"]


def test_an_ignored_option_may_differ_and_must_not_mix_two_cases() -> None:
    cpu, cuda = ({"model": "toy", "device": device} for device in ("cpu", "cuda"))
    old, new = report(case("PASS", point=cpu)), report(case("FAIL", point=cuda))
    assert compare([old], [new]).status == 3
    assert compare([old], [new], ignore=["device"]).status == 1
    both = report(case("PASS", point=cpu), case("PASS", point=cuda))
    with pytest.raises(ReportError, match="is there twice without device"):
        compare([both], [new], ignore=["device"])


def test_several_engines_are_matched_by_name() -> None:
    old = [report(case("PASS"), engine="hf"), report(case("FAIL"), engine="mine")]
    new = [report(case("PASS"), engine="mine"), report(case("FAIL"), engine="hf")]
    found = compare(old, new)
    assert [(one.kind, one.name) for one in found.differences] == [
        (Kind.REGRESSION, "hf: a/one"),
        (Kind.FIX, "mine: a/one"),
    ]


def test_what_else_differs_is_told() -> None:
    old = report(case("PASS"), suite="0.0.9", environment={"torch": "1", "suite": "0.0.9"})
    new = report(case("PASS"), engine="other", environment={"torch": "2", "MKL_CBWR": "AVX2"})
    assert compare([old], [new]).remarks == (
        f"the editions of the suite differ, so verdicts may too: 0.0.9 and {EDITION}",
        "engine: fake 1 → other 1",
        "torch: 1 → 2",
        "MKL_CBWR: not set → AVX2",
    )


# ---- command ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two passes, and one in which the first case fails."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(text([case("PASS"), case("PASS", "b/two")]), encoding="utf-8")
    new.write_text(text([case("FAIL"), case("PASS", "b/two")]), encoding="utf-8")
    return old, new


def test_a_regression_is_named_with_its_reason_and_its_command_and_exits_with_1(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differences, summary = tmp_path / "d.json", tmp_path / "d.md"
    assert main([*map(str, files), "--json", str(differences), "--markdown", str(summary)]) == 1
    out = capsys.readouterr().out
    assert "REGRESSION a/one  PASS → FAIL\n" in out
    assert "tokens_match_golden: position [3]\n" in out
    assert "again: conformance run a/one\n" in out
    assert "b/two" not in out
    data = json.loads(differences.read_text(encoding="utf-8"))
    assert data["regressed"] is True
    assert data["counts"]["REGRESSION"] == data["unchanged"] == 1
    assert data["differences"][0] == {
        "kind": "REGRESSION",
        "case": "a/one",
        "engine": None,
        "old": "PASS",
        "new": "FAIL",
        "why": "tokens_match_golden: position [3]",
        "reproduce": "conformance run a/one",
    }
    assert summary.read_text(encoding="utf-8").startswith("# Compared: regressed\n")


def test_a_new_case_that_fails_is_told_with_its_command_and_exits_with_1(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    new.write_text(text([case("PASS"), case("FAIL", "c/three")]), encoding="utf-8")
    differences, summary = tmp_path / "d.json", tmp_path / "d.md"
    assert main([str(old), str(new), "--json", str(differences), "--markdown", str(summary)]) == 1
    assert "again: conformance run c/three\n" in capsys.readouterr().out
    data = json.loads(differences.read_text(encoding="utf-8"))
    assert (data["failed"], data["regressed"]) == (True, False)
    told = summary.read_text(encoding="utf-8")
    assert told.startswith("# Compared: a new case fails\n")
    assert "conformance run c/three" in told


def test_a_difference_is_not_written_over_a_run_or_another_file(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, files)
    before = files[0].read_bytes()
    assert main([old, new, "--json", old]) == 2
    assert "would be written over a file that this command reads" in capsys.readouterr().err
    assert files[0].read_bytes() == before
    both = str(tmp_path / "both")
    assert main([old, new, "--json", both, "--markdown", both]) == 2
    assert f"--json and --markdown are both {both}" in capsys.readouterr().err.replace("\n", " ")


def test_a_fix_exits_with_0_and_a_run_beside_itself_has_no_difference(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = map(str, files)
    assert main([new, old]) == 0
    assert "FIX        a/one  FAIL → PASS" in capsys.readouterr().out
    assert main([new, new]) == 0
    assert capsys.readouterr().out == "0 REGRESSION, 0 FIX, 0 CHANGE, 0 NEW, 0 GONE, 2 as before\n"


def test_directories_hold_one_report_per_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, verdict in (("old", "PASS"), ("new", "FAIL")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "a.json").write_text(text([case("PASS")], engine="hf"), encoding="utf-8")
        (tmp_path / side / "b.json").write_text(text([case(verdict)], engine="mine"), encoding="utf-8")
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert "REGRESSION mine: a/one  PASS → FAIL" in capsys.readouterr().out
    (tmp_path / "old" / "c.json").write_text(text([case("PASS")], engine="hf"), encoding="utf-8")
    with pytest.raises(ReportError, match="2 reports of hf; keep one per engine"):
        read_side(tmp_path / "old")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="no reports here"):
        read_side(tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a report; conformance run --json FILE writes one"),
        ('{"suite": "0.1.0", "cases": []}', "a report without a schema number; this suite reads"),
        (text([], schema=99), "report schema 99; this suite reads"),
        (text([], schema=True), "report schema True; this suite reads"),
        (text([], schema=float(REPORT_SCHEMA)), f"report schema {REPORT_SCHEMA}.0; this suite reads"),
        (text([], failed="no"), "not a report: failed: Input should be a valid boolean"),
        (text([case("PASS", seconds=float("nan"))]), "not a report: cases.0.seconds: Input should be a fin"),
        (text([case("PASS", seconds=float("inf"))]), "not a report: cases.0.seconds: Input should be a fin"),
        (text([case("PASS", seconds=-1.0)]), "not a report: cases.0.seconds: Input should be greater than"),
        (text([case("PASS", seconds="1")]), "not a report: cases.0.seconds: Input should be a valid number"),
        (
            text([case("PASS", power={"kinds": [], "blind": {}, "judged": True})]),
            "not a report: cases.0.power.judged: Input should be a valid integer",
        ),
        (text([], suite="9.9.9"), f"of suite 9.9.9, and this is {EDITION}"),
        (text([case("MAYBE")]), "not a report: cases.0.verdict"),
    ],
)
def test_a_file_that_cannot_be_compared_exits_with_2_and_its_name(
    files: tuple[Path, Path], content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    old.write_text(content, encoding="utf-8")
    assert main([str(old), str(new)]) == 2
    assert f"{old}: {message}" in capsys.readouterr().err
    assert main([str(old.with_name("none.json")), str(new)]) == 2
    assert "No such file" in capsys.readouterr().err


def test_another_edition_is_compared_when_asked_and_told(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    old.write_text(text([case("PASS")], suite="9.9.9"), encoding="utf-8")
    assert main([str(old), str(new), "--across-editions"]) == 1
    assert (
        f"the editions of the suite differ, so verdicts may too: 9.9.9 and {EDITION}\n"
        in capsys.readouterr().out
    )


def test_runs_with_nothing_in_common_exit_with_3(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = files
    old.write_text(text([case("PASS", "c/three")]), encoding="utf-8")
    assert main([str(old), str(new)]) == 3
    assert "no case is in both runs: nothing was compared" in capsys.readouterr().out
