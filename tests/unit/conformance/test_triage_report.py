"""What `conformance triage` looks into, prints, and writes for programs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conformance.adapters.fake import FakeEngine, fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.retrace import Examined, Subject, TriageError
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, run_case
from conformance.triage import StageLine, Suspect
from conformance.triage_report import look_into, plain, print_examined

TEXT = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one: {generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 6}
  two: {generate: {kind: random, length: 7, seed: 2, low: 3, high: 60}, max_tokens: 2}
steps: [{submit: [one, two]}, run]
checks:
"""
GOLDEN = '  - tokens_match_golden\n  - happened: {finished: "==2"}\n'


def outcome(root: Path, factory: Any, checks: str = GOLDEN) -> tuple[Outcome, RecordStore]:
    write_toy_suite(root, {"toy/one": TEXT + checks})
    [scenario] = load_scenarios(root / "scenarios")
    store = RecordStore(root)
    return run_case(Case(scenario, scenario.points()[0]), factory, store, root=root), store


def looked_into(root: Path, factory: Any, checks: str = GOLDEN, **options: Any) -> list[str]:
    found, store = outcome(root, factory, checks)
    return [one.subject.request for one in look_into(found, factory, store, root=root, **options)]


def printed(*found: Examined) -> str:
    text = io.StringIO()
    print_examined(Console(file=text, width=100), found)
    return text.getvalue()


def test_it_looks_into_what_failed(tmp_path: Path) -> None:
    # The fourth token errs, and the other request has two.
    assert looked_into(tmp_path, fake_engine(fault="wrong_token")) == ["one"]


def test_where_nothing_failed_it_looks_into_every_request_with_a_golden(tmp_path: Path) -> None:
    assert looked_into(tmp_path, FakeEngine) == ["one", "two"]


def test_it_looks_into_the_requests_it_is_given_instead(tmp_path: Path) -> None:
    assert looked_into(tmp_path, fake_engine(fault="wrong_token"), requests=["two"]) == ["two"]


def test_an_unknown_request_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(TriageError, match="no request 'three'; the scenario has one, two"):
        looked_into(tmp_path, FakeEngine, requests=["three"])


def test_a_scenario_without_goldens_has_nothing_to_look_into(tmp_path: Path) -> None:
    with pytest.raises(TriageError, match="no request of this scenario is compared with a golden record"):
        looked_into(tmp_path, FakeEngine, '  - happened: {finished: "==2"}\n')


def test_a_block_holds_the_sentence_the_table_and_the_usual_causes() -> None:
    stages = (
        StageLine("positions", None, inside=True),
        StageLine("embeddings", 0.25, inside=True),
        StageLine("k.0", 1234.5, inside=False),
    )
    suspect = Suspect("k.0", 3, 1234.5, exact=True, text="k.0: row 3 [of 9] is off")
    shown = printed(Examined(Subject("one", "chunk=4"), suspect, stages, "the golden record", again=True))
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[:2] == [
        "  one, arm chunk=4: k.0: row 3 [of 9] is off",
        "    truth of the stages: the golden record",
    ]
    assert lines[2].split() == ["stage", "largest", "error", "/", "yardstick", "(the", "band", "is", "4)"]
    assert [line.split() for line in lines[3:6]] == [
        ["positions", "equal"],
        ["embeddings", "0.25"],
        ["k.0", "1.23e+03", "outside"],
    ]
    assert lines[6] == "    usual causes of a wrong k.0:"
    assert all(line.startswith("      - ") for line in lines[7:])
    assert len(lines) > 7


def test_a_stage_that_must_be_equal_and_is_not_differs() -> None:
    stages = (StageLine("positions", None, inside=False),)
    suspect = Suspect("positions", 0, None, exact=True, text="positions: row 0 is 1, not 0")
    shown = printed(Examined(Subject("one"), suspect, stages, "the golden record", again=True))
    assert ["positions", "differs", "outside"] in [line.split() for line in shown.splitlines()]


def test_a_suspect_that_may_not_be_the_first_brings_no_causes() -> None:
    suspect = Suspect("logits", 0, 9.0, exact=False, text="logits or earlier: position 0 is off")
    shown = printed(Examined(Subject("one"), suspect, (), "none: no reference here", again=None))
    assert shown == (
        "  one: logits or earlier: position 0 is off\n    truth of the stages: none: no reference here\n"
    )


def test_for_programs_it_names_the_case_its_verdict_and_every_request(tmp_path: Path) -> None:
    broken = fake_engine(fault="wrong_token")
    found, store = outcome(tmp_path, broken)
    examined = look_into(found, broken, store, root=tmp_path)
    told = plain(found, examined, None, "conformance run toy/one")
    assert told["scenario"] == "toy/one"
    assert told["point"]["model"] == "toy"
    assert told["verdict"] == "FAIL"
    assert told["requests"]["one"]["stage"] == "sampling"
    assert (told["error"], told["reproduce"]) == (None, "conformance run toy/one")
    assert plain(found, [], "no stages", None)["requests"] == {}
