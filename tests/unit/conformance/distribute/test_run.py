"""What is handed to workers, in which order, and what becomes of their answers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.fake import fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.distribute.calls import Call, Lost, Settings, judge_task, look_into
from conformance.distribute.run import Distributed, Here
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, Selection, select_matrix
from conformance.verdicts import Verdict

HEAD = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
"""
TAIL = """steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""
SHORT = f"{HEAD}  one: {{token_ids: [3, 4], max_tokens: 5}}\n{TAIL}"
LONG = f"{HEAD}  one: {{token_ids: [3, 4, 5], max_tokens: 30}}\n{TAIL}"
WRONG = fake_engine(fault="wrong_token")


class Workers:
    """Answers here and at once; every argument and answer goes through a pipe's worth of pickling.

    Args:
        losing: functions whose calls get no answer.
    """

    def __init__(self, *losing: Any) -> None:
        self.losing, self.labels = losing, list[str]()

    def map(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        for index, call in enumerate(calls):
            self.labels.append(f"{call.function.__name__} {call.label}")
            if call.function in self.losing:
                yield index, Lost("it died", 2.5)
            else:
                function, arguments = pickle.loads(pickle.dumps((call.function, call.arguments)))
                yield index, pickle.loads(pickle.dumps(function(*arguments)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    suite = {"toy/a": SHORT, "toy/b": LONG, "toy/c": SHORT}
    return write_toy_suite(tmp_path_factory.mktemp("data"), suite)


@pytest.fixture
def cases(data: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    monkeypatch.setattr("conformance.distribute.calls.find_engine", lambda _: WRONG)
    monkeypatch.setattr("conformance.distribute.calls.explain", explained)
    monkeypatch.setattr("conformance.distribute.run.explain", explained)
    return select_matrix(load_scenarios(data / "scenarios"), Selection(), ["wrong"])


def explained(outcome: Outcome, *_: Any, **__: Any) -> Outcome:
    """In place of a triage, which needs Transformers."""
    findings = [replace(f, detail={**f.detail, "triage": "looked into"}) for f in outcome.judgement.findings]
    return replace(outcome, judgement=replace(outcome.judgement, findings=tuple(findings)))


def looked_into(outcome: Outcome) -> bool:
    return any(finding.detail.get("triage") == "looked into" for finding in outcome.judgement.findings)


def test_costly_cases_start_first_and_the_first_failed_ones_are_looked_into(
    cases: list[Case], data: Path
) -> None:
    workers = Workers()
    settings = Settings(root=data)
    there = list(Distributed(workers).outcomes(cases, settings, triage=2))
    assert workers.labels == [
        "judge_task toy/b",
        "judge_task toy/a",
        "judge_task toy/c",
        "look_into toy/a",
        "look_into toy/b",
    ]
    assert [index for index, _ in there] == [2, 0, 1], "those looked into come when they have been"
    here = dict(Here({"wrong": WRONG}, RecordStore(data)).outcomes(cases, settings, triage=2))
    assert [looked_into(here[index]) for index in range(3)] == [True, True, False]
    for index, outcome in there:
        assert outcome.judgement == here[index].judgement
        assert outcome.case is cases[index]


def test_a_case_without_an_answer_is_an_error(cases: list[Case], data: Path) -> None:
    outcomes = dict(Distributed(Workers(judge_task)).outcomes(cases, Settings(root=data)))
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.ERROR}
    assert outcomes[0].judgement.findings[0].message == "it died"
    assert outcomes[0].seconds == 2.5


def test_a_failure_stands_if_the_worker_that_looks_into_it_dies(cases: list[Case], data: Path) -> None:
    outcomes = dict(Distributed(Workers(look_into)).outcomes(cases, Settings(root=data), triage=1))
    assert {outcome.verdict for outcome in outcomes.values()} == {Verdict.FAIL}
    notes = [
        finding.detail["triage"]["note"]
        for finding in outcomes[0].judgement.findings
        if finding.verdict is Verdict.FAIL and "note" in finding.detail.get("triage", {})
    ]
    assert set(notes) == {"it died"}


def test_what_engines_declare_comes_from_the_workers(cases: list[Case], data: Path) -> None:
    settings = Settings(root=data)
    [(place, found)] = Distributed(Workers()).declared(cases, settings).items()
    assert place == ("wrong", "auto")
    assert found == Here({"wrong": WRONG}, RecordStore(data)).declared(cases, settings)[place]
    assert found is not None
    assert found.engine == "fake"


def test_an_engine_that_a_worker_cannot_import_is_an_error_of_its_cases(
    cases: list[Case], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conformance.engines import find_engine

    monkeypatch.setattr("conformance.distribute.calls.find_engine", find_engine)
    missing = [replace(case, engine="not_here:Engine") for case in cases]
    outcomes = dict(Distributed(Workers()).outcomes(missing, Settings(root=data)))
    messages = {outcome.judgement.findings[0].message for outcome in outcomes.values()}
    told = "cannot be imported from not_here:Engine: ModuleNotFoundError: No module named 'not_here'"
    assert messages == {f"engine 'not_here:Engine' {told}"}
