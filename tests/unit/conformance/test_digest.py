"""What a report keeps of a history: numbers beside the band, steps, pictures; and never an exception."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.adapters.fake import fake_engine, minimal_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.archive import read_histories
from conformance.digest import Digest, digest_of
from conformance.report import as_json
from conformance.runner import EngineFactory
from conformance.saved_report import parse_report
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Outcome, Selection, run_case, select
from conformance.verdicts import Verdict

SCENARIO = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
engine: {num_kv_blocks: 40, block_size: 4, max_num_batched_tokens: 24}
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
  two: {token_ids: [3, 4, 6], max_tokens: 4}
steps: [fragment, {submit: [one, two]}, {run: {poison: true}}]
checks:
  - tokens_match_golden
  - logits_within_yardstick: one
  - same_under: {chunk: [2]}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_suite(tmp_path_factory.mktemp("data"), {"toy/one": SCENARIO})


def run(root: Path, engine: EngineFactory, histories: Path | None = None) -> Outcome:
    [case] = select(load_scenarios(root / "scenarios"), Selection())
    return run_case(case, engine, RecordStore(root), root=root, histories=histories)


def digest(root: Path, engine: EngineFactory) -> Digest:
    found = run(root, engine).digest
    assert found is not None
    assert found.trouble == ()
    return found


def test_a_right_engine_lies_inside_the_band_at_every_position(root: Path) -> None:
    gap, _ = digest(root, fake_engine()).gaps
    assert (gap.request, gap.source, gap.num_positions, gap.other) == ("one", "logits", 9, ())
    assert len(gap.errors) == len(gap.margins) == 9
    assert all(error is not None and error <= gap.M for error in gap.errors)
    assert min(gap.margins) > 8 * gap.M


def test_a_wrong_engine_shows_where_and_by_how_much(root: Path) -> None:
    gap, _ = digest(root, fake_engine(fault="noisy_logits")).gaps
    assert all(error is not None and 0.009 < error < 0.011 for error in gap.errors)
    assert digest(root, fake_engine(fault="wrong_token")).gaps[0].other == (3,)
    broken = digest(root, fake_engine(fault="nan_logits")).gaps[0].errors
    assert [i for i, error in enumerate(broken) if error == float("inf")] == [2]


def test_an_engine_of_two_methods_has_no_steps_and_is_measured_by_its_logprobs(tmp_path: Path) -> None:
    text = SCENARIO.replace("fragment, ", "").replace("{run: {poison: true}}", "run")
    asked = text.replace("max_tokens: 4}", "max_tokens: 4, logprobs: 3}")
    found = digest(write_toy_suite(tmp_path / "plain", {"toy/one": asked}), minimal_engine())
    assert found.timelines == ()
    assert [gap.source for gap in found.gaps] == ["logprobs", "logprobs"]
    assert all(error is not None and error < 1e-5 for gap in found.gaps for error in gap.errors)


def test_steps_are_those_of_the_free_pass_and_of_arms_that_failed(root: Path) -> None:
    found = digest(root, fake_engine())
    assert [timeline.of for timeline in found.timelines] == ["free"]
    assert found.operations[0].startswith("fragment → steps ")
    assert found.operations[1] == "submit one, two"
    assert found.operations[2].startswith("run poison true → steps 9, poisoned ")
    arms = [timeline.of for timeline in digest(root, fake_engine(fault="chunk_seam")).timelines]
    assert arms == ["free", "chunk=2"]


def test_a_case_that_did_not_run_has_no_digest(root: Path) -> None:
    skipped = run(root, minimal_engine())
    assert skipped.verdict is Verdict.SKIP
    assert skipped.digest is None


def test_a_digest_goes_through_pickle_and_through_the_json_report(root: Path) -> None:
    outcome = run(root, fake_engine(fault="nan_logits"))
    assert pickle.loads(pickle.dumps(outcome.digest)) == outcome.digest
    text = as_json([outcome], [], {("", ""): None}, {"torch": "2"})
    [case] = parse_report(text, "r.json").cases
    assert case.digest == outcome.digest
    assert case.verdict is outcome.verdict
    assert [(f.check, f.message) for f in case.findings] == [
        (f.check, f.message) for f in outcome.judgement.findings
    ]
    # A line per case, so that two reports can be told apart line by line.
    assert next(line for line in text.splitlines() if json.dumps("toy/one") in line).startswith("{")


def test_what_an_engine_tells_wrongly_is_told_as_trouble_and_costs_the_rest_nothing(
    root: Path, tmp_path: Path
) -> None:
    outcome = run(root, fake_engine(), tmp_path)
    [history] = read_histories(tmp_path)
    events = ({"event": "planned", "scheduled": [["one", "soon", None]]},)
    broken = replace(history, passes=(replace(history.passes[0], events=events),))
    found = digest_of(broken, outcome.case.scenario, outcome.judgement, RecordStore(root).get)
    [trouble] = found.trouble
    assert trouble.startswith("no timeline: ValueError: ")
    assert found.timelines == ()
    assert found.gaps == (outcome.digest.gaps if outcome.digest else ())
