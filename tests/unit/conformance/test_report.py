"""Reports say what failed, why, how to see it again, and what the run could have seen."""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from conformance import EDITION
from conformance.adapters.base import FEATURES, Capabilities
from conformance.distribute import Declared
from conformance.report import (
    as_json,
    as_junit,
    power_line,
    print_case,
    print_summary,
    run_fails,
    seeded_line,
)
from conformance.scenario import Scenario
from conformance.suite import Case, Outcome
from conformance.verdicts import Finding, Judgement, Power, Verdict
from conformance.waivers import Waiver

ENGINE = Capabilities("fake", "1.2", ("float32",), frozenset())
ALONE: Declared = {("fake", "auto"): ENGINE}
WAIVER = Waiver("a/*", {}, "known [limit]", "https://example.org/1", datetime.date(2999, 1, 1), 4)
SEEN = Power(("tokens", "logits"), {"bits": "off"}, judged=10, decided=9, unjudged=1)


def scenario(name: str = "a/one", level: str = "must") -> Scenario:
    return Scenario(
        id=name,
        path=Path(f"{name}.yaml"),
        requirement="It answers.",
        level=level,
        source=("https://example.org",),
        needs=(),
        models=("toy", "other"),
        dtypes=("float32",),
        engine={},
        matrix={},
        profile="smoke",
        damage=None,
        requests={},
        steps=(),
        checks=(),
    )


def outcome(
    verdict: Verdict, *, name: str = "a/one", level: str = "must", power: Power = SEEN, **finding: Any
) -> Outcome:
    values: Mapping[str, Any] = {"request": "red", "message": "position 3 [differs]", **finding}
    judgement = Judgement(verdict, (Finding(verdict, "tokens_match_golden", **values),), power, level)
    case = Case(scenario(name, level), {"model": "toy", "dtype": "float32"})
    return Outcome(case, judgement, 1.25, WAIVER if verdict is Verdict.WAIVED else None)


def printed(one: Outcome) -> str:
    out = io.StringIO()
    print_case(Console(file=out, width=60, highlight=False), one)
    return out.getvalue()


def summary(outcomes: list[Outcome], stale: Any = (), declared: Declared = ALONE, **options: Any) -> str:
    out = io.StringIO()
    print_summary(Console(file=out, width=200, highlight=False), outcomes, stale, declared, **options)
    return out.getvalue()


def test_a_pass_is_one_line() -> None:
    assert printed(outcome(Verdict.PASS)) == "PASS   a/one[model=toy]  1.2 s\n"


def test_a_failure_tells_why_and_how_to_see_it_again() -> None:
    text = printed(outcome(Verdict.FAIL, reproduce="conformance run a/one --point model=toy"))
    assert "FAIL   a/one[model=toy]" in text
    assert "FAIL tokens_match_golden red: position 3 [differs]" in text
    assert "again: conformance run a/one --point model=toy\n" in text


def test_triage_is_told_below_the_failure() -> None:
    triage = {"stage": "hidden.1", "text": "hidden.1: position 3 is off by 12.5 M"}
    text = printed(outcome(Verdict.FAIL, detail={"triage": triage}))
    assert "triage: hidden.1: position 3 is off by 12.5 M\n" in text
    assert "triage: no stages\n" in printed(outcome(Verdict.FAIL, detail={"triage": "no stages"}))


def test_one_message_is_told_once_and_the_worst_come_first() -> None:
    one = outcome(Verdict.FAIL)
    weak = Finding(Verdict.WEAK, "happened", None, "not traced")
    findings = (weak, *one.judgement.findings, *one.judgement.findings)
    text = printed(Outcome(one.case, Judgement(Verdict.FAIL, findings, SEEN), 0.0))
    assert text.count("position 3") == 1
    assert text.index("FAIL tokens") < text.index("WEAK happened")


def test_a_waived_failure_names_the_reason_and_the_issue() -> None:
    assert "waived: known [limit] (https://example.org/1)" in printed(outcome(Verdict.WAIVED))


def test_the_table_counts_by_area() -> None:
    text = summary([outcome(Verdict.PASS), outcome(Verdict.FAIL), outcome(Verdict.PASS, name="b/two")])
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["area"] == ["PASS", "FAIL", "seconds"]
    assert rows["a"] == ["1", "1", "2.5"]
    assert rows["b"] == ["1", "1.2"]
    assert rows["all"] == ["2", "1", "3.8"]


def test_the_last_line_is_the_answer() -> None:
    assert summary([outcome(Verdict.PASS)]).splitlines()[-1] == f"fake 1.2, suite {EDITION}: passed"
    assert summary([outcome(Verdict.FAIL)]).splitlines()[-1] == f"fake 1.2, suite {EDITION}: FAILED"


def test_a_stale_waiver_is_told_and_fails_the_run() -> None:
    text = summary([outcome(Verdict.PASS)], [(WAIVER, "what it waives passes")])
    assert "STALE  waiver on line 4 (a/*): what it waives passes" in text
    assert text.splitlines()[-1].endswith("FAILED")


def test_what_fails_a_run() -> None:
    for verdict in Verdict:
        wanted = verdict in (Verdict.FAIL, Verdict.ERROR, Verdict.STALE)
        assert run_fails([outcome(Verdict.PASS), outcome(verdict)], []) is wanted, verdict
    assert run_fails([outcome(Verdict.PASS)], [(WAIVER, "x")])
    assert run_fails([outcome(Verdict.SKIP), outcome(Verdict.SKIP)], [])
    assert run_fails([], [])


def test_a_failed_should_fails_the_run_only_when_asked() -> None:
    wish = [outcome(Verdict.FAIL, level="should")]
    assert not run_fails(wish, [])
    assert run_fails(wish, [], strict_should=True)


def test_the_power_line_adds_up_what_the_cases_could_have_seen() -> None:
    blind = Power((), {"tokens": "bfloat16 decides too little"})
    text = power_line([outcome(Verdict.PASS), outcome(Verdict.PASS), outcome(Verdict.WEAK, power=blind)])
    assert text == (
        "Power: of 3 cases judged, a fault would have shown by tokens in 2, logits in 2; "
        "18 of 20 positions had one right answer, 2 were not judged; blind: bfloat16 decides too little."
    )


def test_skipped_cases_are_counted_by_reason_the_commonest_first() -> None:
    skips = [outcome(Verdict.SKIP, message=f"no {what} [yet]") for what in ("swap", "image", "image")]
    text = summary([outcome(Verdict.PASS), *skips])
    assert "Skipped (3 cases; --json FILE or --html FILE names each):\n" in text
    assert "\n      2  no image [yet]\n      1  no swap [yet]\n" in text
    assert "other reasons" not in text
    assert "Skipped" not in summary([outcome(Verdict.PASS)])


def test_of_very_many_reasons_the_rest_is_counted() -> None:
    skips = [outcome(Verdict.SKIP, message=f"no {number}") for number in (0, *range(23))]
    assert "\n      4  3 other reasons\n" not in (text := summary(skips))
    assert "\n      3  3 other reasons\n" in text
    assert text.count("      1  no ") == 19


def test_skipped_cases_have_no_power() -> None:
    text = power_line([outcome(Verdict.SKIP, power=Power((), {}))])
    assert text == "Power: of 0 cases judged, a fault would have shown by nothing."


def test_a_case_that_ended_before_its_checks_has_no_power() -> None:
    name, engine = (
        "scheduling/batch-composition",
        Capabilities("mine", "1", ("float32",), frozenset(FEATURES)),
    )
    seen, lost = outcome(Verdict.PASS, name=name), outcome(Verdict.ERROR, name=name, power=Power((), {}))
    assert power_line([seen, lost]) == power_line([seen])
    assert seeded_line([seen, lost], engine) == seeded_line([seen], engine)
    assert "Seeded faults: 0 of " not in seeded_line([seen], engine)
    assert "Seeded faults: 0 of " in seeded_line([lost], engine)


def test_evidence_that_was_seen_counts_though_the_engine_offers_it_only_under_an_option() -> None:
    engine = Capabilities("mine", "1", ("float32",), frozenset(FEATURES) - {"bitwise"})
    name = "scheduling/batch-composition"
    plain = seeded_line([outcome(Verdict.PASS, name=name)], engine)
    seen = seeded_line([outcome(Verdict.PASS, name=name, power=Power(("bits",), {}))], engine)
    assert "mine lacks bitwise" in plain
    assert "mine lacks bitwise" not in seen


def test_json_holds_everything() -> None:
    failed = outcome(Verdict.FAIL, position=3, size=7.5, reproduce="conformance run a/one")
    data = json.loads(as_json([failed, outcome(Verdict.WAIVED)], [(WAIVER, "why")], ALONE, {"python": "3"}))
    assert data["failed"] is True
    assert data["engine"] == {"name": "fake", "version": "1.2"}
    assert data["stale_waivers"] == [{"line": 4, "scenario": "a/*", "why": "why"}]
    first, second = data["cases"]
    assert (first["scenario"], first["area"], first["verdict"]) == ("a/one", "a", "FAIL")
    assert first["point"] == {"model": "toy", "dtype": "float32"}
    assert first["findings"][0]["verdict"] == "FAIL"
    assert first["findings"][0]["position"] == 3
    assert first["reproduce"] == "conformance run a/one"
    assert first["power"]["decided"] == 9
    assert second["waiver"]["expiry"] == "2999-01-01"


def twin(one: Outcome, engine: str, device: str) -> Outcome:
    point = {**one.case.point, "device": device}
    return replace(one, case=replace(one.case, point=point, engine=engine, has_twins=True))


def test_several_engines_are_told_apart() -> None:
    outcomes = [
        twin(outcome(Verdict.PASS), "mine", "cuda"),
        twin(outcome(Verdict.FAIL), "theirs", "cpu"),
        twin(outcome(Verdict.PASS), "theirs", "cpu"),
    ]
    declared: Declared = {
        ("mine", "cuda"): Capabilities("mine", "3", ("float32",), frozenset()),
        ("theirs", "cpu"): None,
    }
    told = summary(outcomes, declared=declared)
    assert "mine on cuda: 1 PASS.\nSeeded faults: " in told
    assert "theirs on cpu: 1 PASS, 1 FAIL.\n" in told
    assert told.splitlines()[-1].startswith("mine 3, theirs, suite ")
    assert printed(outcomes[0]) == "PASS   a/one[engine=mine, device=cuda, model=toy]  1.2 s\n"
    data = json.loads(as_json(outcomes, [], declared, {}))
    assert [(c["engine"], c["point"]["device"]) for c in data["cases"]] == [
        ("mine", "cuda"),
        ("theirs", "cpu"),
        ("theirs", "cpu"),
    ]
    assert data["engine"] is None
    assert [(e["asked_for"], e["device"], e["name"], e["version"]) for e in data["engines"]] == [
        ("mine", "cuda", "mine", "3"),
        ("theirs", "cpu", None, None),
    ]


def test_json_survives_numbers_of_numpy() -> None:
    import numpy as np

    data = json.loads(as_json([outcome(Verdict.PASS, detail={"n": np.int64(3)})], [], {("", ""): None}, {}))
    assert data["cases"][0]["findings"][0]["detail"] == {"n": 3}
    assert data["engine"] is None


def test_junit_has_a_suite_per_area_and_a_case_per_point() -> None:
    outcomes = [
        outcome(Verdict.PASS),
        outcome(Verdict.FAIL),
        outcome(Verdict.ERROR, name="b/two"),
        outcome(Verdict.SKIP, name="b/two"),
        outcome(Verdict.WAIVED, name="b/two"),
        outcome(Verdict.WEAK, name="b/two"),
    ]
    root = ElementTree.fromstring(as_junit(outcomes, [(WAIVER, "why")]))
    assert [(s.get("name"), s.get("tests")) for s in root] == [("a", "2"), ("b", "4"), ("waivers", "1")]
    marks = [[child.tag for child in case] for suite in root for case in suite]
    assert marks == [[], ["failure"], ["error"], ["skipped"], ["skipped"], ["system-out"], ["failure"]]
    case = root[0][1]
    assert (case.get("classname"), case.get("name"), case.get("time")) == (
        "a.one",
        "a/one[model=toy]",
        "1.250",
    )
    assert case[0].text == "FAIL tokens_match_golden red: position 3 [differs]"
