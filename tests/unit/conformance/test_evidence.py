"""A history is seen as an engine that shows less would have left it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.adapters.base import FEATURES
from conformance.evidence import EVIDENCE, only
from conformance.history import History
from conformance.testing import answer, make_history, make_pass, make_record

RED = make_record("red")


def history() -> History:
    run = replace(answer(RED), kv_digests=("a",), stages={"embeddings": [[1.0]]})
    return make_history([make_pass("free", [run])])


def test_all_evidence_is_the_history_itself() -> None:
    assert only(history(), "all") == history()


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_only_known_features_are_taken_away_and_each_with_a_reason(evidence: str) -> None:
    assert frozenset(FEATURES) >= EVIDENCE[evidence]
    capabilities = only(history(), evidence).capabilities
    assert not capabilities.features & EVIDENCE[evidence]
    assert set(capabilities.missing) >= EVIDENCE[evidence]


def test_tokens_are_kept_and_numbers_are_not() -> None:
    run = only(history(), "tokens").passes[0].requests["red"]
    assert run.output is not None
    assert run.output.token_ids == RED.token_ids
    assert run.output.logprobs is None
    assert (run.output_rows, run.prompt_rows, run.kv_digests, run.stages) == ((), (), (), {})


def test_logprobs_come_before_stages() -> None:
    full, seen = history().passes[0].requests["red"], only(history(), "logprobs").passes[0].requests["red"]
    assert full.output is not None
    assert seen.output is not None
    assert seen.output.logprobs == full.output.logprobs
    assert full.output_rows
    assert not seen.output_rows
    assert only(history(), "stages").passes[0].requests["red"].output_rows == full.output_rows


def test_events_and_pool_are_the_trace() -> None:
    one = replace(history().passes[0], events=({"event": "planned", "scheduled": []},))
    whole = replace(history(), passes=(one,))
    assert only(whole, "trace").passes[0].events == one.events
    assert only(whole, "bits").passes[0].events == ()
    assert only(whole, "bits").passes[0].pool_after is None
