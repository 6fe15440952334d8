"""Probes: the relation that breaks is named, for engines that show nothing but their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineError, EngineRequest
from conformance.adapters.fake import FakeEngine, fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.probes import ALONE, probe
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case
from conformance.verdicts import Verdict

TEXT = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one: {generate: {kind: random, length: 19, seed: 1, low: 3, high: 60}, max_tokens: 8}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""


def probed(tmp_path: Path, fault: str | None, kind: type[FakeEngine] | None = None) -> Any:
    root = write_toy_suite(tmp_path, {"toy/one": TEXT})
    [scenario] = load_scenarios(root / "scenarios")
    engine = kind or fake_engine(fault=fault, without=("stages", "kv", "bitwise"))
    return probe(Case(scenario, scenario.points()[0]), "one", engine, RecordStore(root), root)


@pytest.mark.parametrize(
    ("fault", "arm", "words"),
    [("batch_leak", "batch=mixed", "in a batch"), ("chunk_seam", "chunk=5", "prompt in chunks")],
)
def test_the_relation_that_breaks_is_named(tmp_path: Path, fault: str, arm: str, words: str) -> None:
    found = probed(tmp_path, fault)
    assert found.relations[arm] is Verdict.FAIL
    assert found.relations[ALONE].is_agreement
    assert found.text.startswith(f"right {ALONE}; breaks {words}")


def test_a_fault_of_the_model_shows_alone(tmp_path: Path) -> None:
    found = probed(tmp_path, "wrong_token")
    assert found.relations[ALONE] is Verdict.FAIL
    assert "the model's own computation" in found.text


def test_a_right_engine_breaks_no_relation(tmp_path: Path) -> None:
    found = probed(tmp_path, None)
    assert not any(verdict.fails_run for verdict in found.relations.values())
    assert "look at the scenario's own steps (submit, run)" in found.text


def test_an_arm_that_is_refused_by_name_breaks_nothing(tmp_path: Path) -> None:
    class Whole(FakeEngine):
        """Splits no prompt."""

        def submit(self, request: EngineRequest) -> EngineError | None:
            if len(request.prompt_token_ids or ()) > self._options["max_num_batched_tokens"]:
                return EngineError("CapacityError", "a prompt is computed in one step")
            return super().submit(request)

    found = probed(tmp_path, None, Whole)
    assert found.relations["chunk=5"] is Verdict.SKIP
    assert found.relations[ALONE].is_agreement
    assert "right alone, cold and whole and under batch=mixed, prefix_cache=hit: look at" in found.text
