"""A failing case runs again with its stages captured; what that shows, and why it may show nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import EngineOutput
from conformance.adapters.fake import FakeEngine, fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.records import ArmError
from conformance.retrace import Examined, Subject, TriageError, examine, explain, subjects_of
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, run_case
from conformance.triage import StageLine, Suspect
from conformance.verdicts import Finding, Judgement, Power, Verdict

TEXT = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
engine: {max_num_batched_tokens: 64}
requests:
  one: {generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 6}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
  - same_under: {chunk: [4]}
"""
ONE = Subject("one")


class Toy:
    """The toy suite of one case, and where it lies."""

    def __init__(self, root: Path) -> None:
        self.root = write_toy_suite(root, {"toy/one": TEXT})
        [scenario] = load_scenarios(root / "scenarios")
        self.case = Case(scenario, scenario.points()[0])
        self.store = RecordStore(root)

    def run(self, factory: Any) -> Outcome:
        return run_case(self.case, factory, self.store, root=self.root)

    def look(self, factory: Any, subject: Subject = ONE, **options: Any) -> Examined:
        [found] = examine(self.case, [subject], factory, self.store, root=self.root, **options)
        return found

    def trace(self, **stages: Any) -> None:
        """Let the golden record hold these stages."""
        [record] = self.store.all()
        bands = {name: ArmError(1e-6, 4e-6) for name in stages}
        self.store.save(replace(record, stages=stages, stage_bands=bands), "traced for a test")
        self.store = RecordStore(self.root)


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def fail(check: str = "tokens_match_golden", request: str | None = "one", **detail: Any) -> Finding:
    return Finding(Verdict.FAIL, check, request, "wrong", detail=detail)


# ---- what to look into ---------------------------------------------------------------------------


def test_failures_about_numbers_are_looked_into_each_request_and_arm_once() -> None:
    findings = [
        fail(),
        fail("logits_within_yardstick"),
        fail("same_under", arm="chunk=4"),
        fail("tokens_match_golden", "two"),
    ]
    assert subjects_of(findings) == [ONE, Subject("one", "chunk=4"), Subject("two")]


@pytest.mark.parametrize(
    "finding",
    [
        replace(fail(), verdict=Verdict.WEAK),
        fail(request=None),
        fail("pool_conserved"),
        fail("history"),
    ],
)
def test_other_findings_are_not(finding: Finding) -> None:
    assert subjects_of([finding]) == []


# ---- running again -------------------------------------------------------------------------------


def test_the_first_wrong_stage_is_named_and_that_it_failed_again(toy: Toy) -> None:
    found = toy.look(fake_engine(fault="noisy_logits"), failed=[ONE])
    assert found.suspect is not None
    assert (found.suspect.stage, found.suspect.position, found.suspect.exact) == ("logits", 0, False)
    assert found.again is False, "a hundredth changes no token, and only tokens are judged here"
    found = toy.look(fake_engine(fault="wrong_token"), failed=[ONE])
    assert found.again is True
    assert found.suspect is not None
    assert found.suspect.stage == "sampling"


def test_what_did_not_fail_has_nothing_to_do_again(toy: Toy) -> None:
    found = toy.look(FakeEngine)
    assert (found.suspect, found.again) == (None, None)
    assert found.sentence == "no stage to compare"


def test_stages_are_compared_with_those_of_the_golden_record(toy: Toy) -> None:
    rows = np.arange(15 * 4, dtype=np.float64).reshape(15, 4)
    toy.trace(**{"embeddings": rows, "hidden.0": rows})

    class Shows(FakeEngine):
        def stages(self, request_id: str) -> Any:
            off = rows + np.where(np.arange(15) == 3, 1.0, 0.0)[:, None]
            return {**super().stages(request_id), "embeddings": rows, "hidden.0": off}

    found = toy.look(Shows)
    assert found.truth == "the golden record"
    assert [(line.stage, line.inside) for line in found.stages] == [("embeddings", True), ("hidden.0", False)]
    assert found.suspect is not None
    assert (found.suspect.stage, found.suspect.position) == ("hidden.0", 3)


def test_without_stages_in_the_record_the_truth_is_computed_or_the_reason_told(toy: Toy) -> None:
    found = toy.look(FakeEngine)
    assert found.truth.startswith("none: the reference cannot be computed here: ")


def test_an_arm_that_differs_is_run_again_and_compared(toy: Toy) -> None:
    broken = fake_engine(fault="chunk_seam")
    subject = Subject("one", "chunk=4")
    assert subjects_of(toy.run(broken).judgement.findings) == [subject]
    found = toy.look(broken, subject, failed=[subject])
    assert found.again is True
    assert found.suspect is not None
    assert found.suspect.stage == "logits"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fake_engine(without=["stages"]), "fake captures no stages: left out for a test"),
        (fake_engine(fault="crash"), "one did not run again in pass 'chunk=9'"),
    ],
)
def test_what_cannot_be_looked_into_says_why(toy: Toy, factory: Any, message: str) -> None:
    with pytest.raises(TriageError, match=message):
        toy.look(factory, Subject("one", "chunk=9"))


def test_a_case_that_cannot_run_here_says_why(toy: Toy) -> None:
    toy.case = replace(toy.case, point={**toy.case.point, "dtype": "bfloat16"})
    with pytest.raises(TriageError, match="fake does not offer bfloat16"):
        toy.look(FakeEngine)
    toy.case = replace(toy.case, point={**toy.case.point, "model": "gone"})
    with pytest.raises(TriageError, match="gone"):
        toy.look(FakeEngine)


def test_an_engine_that_cannot_be_made_says_why(toy: Toy) -> None:
    def broken(*_: object) -> Any:
        raise OSError("no licence")

    with pytest.raises(TriageError, match="cannot tell its capabilities: OSError: no licence"):
        toy.look(broken, Subject("one"))


# ---- what it says --------------------------------------------------------------------------------

INSIDE = (StageLine("embeddings", 0.5, inside=True), StageLine("k.0", 1.0, inside=True))


@pytest.mark.parametrize(
    ("stages", "again", "sentence"),
    [
        (INSIDE, True, "all 2 stages are inside their bands"),
        ((), None, "no stage to compare"),
        (
            INSIDE,
            False,
            "all 2 stages are inside their bands, and it did not fail again: the engine is not deterministic",
        ),
    ],
)
def test_without_a_suspect_the_sentence_says_what_was_compared(
    stages: tuple[StageLine, ...], again: bool | None, sentence: str
) -> None:
    one = Examined(ONE, None, stages, "the golden record", again)
    assert one.sentence == sentence
    assert one.as_dict()["text"] == sentence


def test_as_plain_data_a_suspect_brings_its_causes() -> None:
    suspect = Suspect("k.0", 3, 9.0, exact=True, text="k.0: row 3 is off")
    plain = Examined(ONE, suspect, INSIDE, "the golden record", again=True).as_dict()
    assert (plain["text"], plain["stage"], plain["arm"]) == ("k.0: row 3 is off", "k.0", "free")
    assert plain["causes"]
    assert plain["stages"][1] == {"stage": "k.0", "size": 1.0, "inside": True}


# ---- into the outcome ----------------------------------------------------------------------------


def note(toy: Toy, factory: Any, outcome: Outcome | None = None) -> str:
    """What the first failure's triage says of why there is no more; the whole of it without a stage."""
    told = explain(outcome or toy.run(factory), factory, toy.store, root=toy.root)
    [first, *_] = [f.detail["triage"] for f in told.judgement.findings if f.verdict is Verdict.FAIL]
    return str(first.get("note", first["text"]))


def test_an_outcome_without_failures_stays_as_it_is(toy: Toy) -> None:
    outcome = toy.run(FakeEngine)
    assert explain(outcome, FakeEngine, toy.store, root=toy.root) is outcome


def test_each_failure_about_numbers_gets_its_triage_and_the_verdict_stays(toy: Toy) -> None:
    broken = fake_engine(fault="wrong_token")
    outcome = toy.run(broken)
    explained = explain(outcome, broken, toy.store, root=toy.root)
    assert explained.verdict is outcome.verdict is Verdict.FAIL
    [first, *_] = [f for f in explained.judgement.findings if f.verdict is Verdict.FAIL]
    assert first.detail["triage"]["stage"] == "sampling"
    assert first.detail["triage"]["again"] is True


def test_an_engine_without_stages_gets_probes(toy: Toy) -> None:
    told = note(toy, fake_engine(fault="wrong_token", without=["stages", "bitwise"]))
    assert "fake captures no stages: left out for a test; probes: one: alone, cold and whole" in told


def test_where_only_the_text_is_wrong_nothing_is_probed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Garbled(FakeEngine):
        def outputs(self) -> list[EngineOutput]:
            return [replace(output, text=f"?{output.text}") for output in super().outputs()]

    def garbled(model: Any, options: Any) -> FakeEngine:
        return Garbled(model, options, without=frozenset({"stages", "bitwise"}))

    monkeypatch.setattr("conformance.retrace.probe", None)  # a call would be told as trouble
    outcome = toy.run(garbled)
    assert outcome.verdict is Verdict.FAIL
    assert note(toy, garbled, outcome).startswith("text: not what the ids spell: '?")


def test_an_engine_that_cannot_be_asked_again_leaves_the_failure_standing(toy: Toy) -> None:
    outcome = toy.run(fake_engine(fault="wrong_token"))

    def gone(*_: Any) -> Any:
        raise ConnectionError("the server has gone")

    told = note(toy, gone, outcome)
    assert "the adapter cannot tell its capabilities: ConnectionError: " in told
    assert "the server has gone" in told


def test_probes_that_break_are_told_too(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr("conformance.retrace.probe", broken)
    told = note(toy, fake_engine(fault="wrong_token", without=["stages", "bitwise"]))
    assert told.endswith("no probes: RuntimeError: no luck")


def test_an_engine_that_fails_once_is_called_not_deterministic(toy: Toy) -> None:
    entered = count()

    class Flaky(FakeEngine):
        def __enter__(self) -> FakeEngine:
            self._fault = "wrong_token" if next(entered) == 0 else None
            return super().__enter__()

    outcome = toy.run(Flaky)
    assert outcome.verdict is Verdict.FAIL
    found = toy.look(Flaky, failed=[ONE])
    assert (found.again, found.suspect) == (False, None)
    assert found.sentence.endswith("did not fail again: the engine is not deterministic")


def test_findings_that_are_not_about_numbers_are_left_alone(toy: Toy) -> None:
    other = fail("pool_conserved")
    outcome = Outcome(toy.case, Judgement(Verdict.FAIL, (fail(), other), Power((), {})), 0.0)
    told = explain(outcome, fake_engine(fault="wrong_token"), toy.store, root=toy.root)
    assert told.judgement.findings[1] is other
    assert told.judgement.findings[0].detail["triage"]["stage"] == "sampling"
