"""The toy's model is a function of the context, and its records are true to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.adapters.fake_model import (
    EOS,
    TOY,
    VOCAB,
    entries,
    replaying,
    toy_logits,
    toy_record,
    write_toy_suite,
)
from conformance.canonical import canonical_request
from conformance.models import resolve_model
from conformance.records import GoldenRecord
from conformance.scenario import load_scenarios
from conformance.store import RecordStore

SCENARIO = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests: {one: {token_ids: [3, 4], max_tokens: 5}}
steps: [{submit: one}, run]
checks: [tokens_match_golden, {happened: {finished: 1}}]
"""


def record(**changes: object) -> GoldenRecord:
    values = {"model": TOY, "prompt": {"token_ids": [3, 9, 27]}, "max_tokens": 12, **changes}
    return toy_record(canonical_request(**values), "w")  # type: ignore[arg-type]  # names are checked there


@settings(max_examples=30)
@given(context=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
def test_logits_depend_on_the_context_alone(context: list[int]) -> None:
    row = toy_logits(context)
    assert row.shape == (VOCAB,)
    assert np.isfinite(row).all()
    assert np.array_equal(row, toy_logits(tuple(context)))
    assert not np.array_equal(row, toy_logits([*context, 1]))
    assert row.argmax() != EOS


def test_a_record_holds_the_greedy_answer() -> None:
    made = record()
    assert len(made.token_ids) == 12
    for i, token in enumerate(made.token_ids):
        row = toy_logits([3, 9, 27, *made.token_ids[:i]])
        assert token == row.argmax() == made.output.top_ids[i, 0]
        assert made.output.logsumexp[i] == pytest.approx(np.log(np.exp(row.astype(np.float64)).sum()))
    assert (made.finish_reason, made.stop_reason, made.prompt) == ("length", None, None)


def test_a_record_ends_at_a_stop_token() -> None:
    stop = record().token_ids[4]
    made = record(stop_token_ids=[stop])
    assert (len(made.token_ids), made.finish_reason, made.stop_reason) == (5, "stop", stop)


def test_prompt_rows_are_there_when_asked() -> None:
    made = record(prompt_logprobs=True)
    assert made.prompt is not None
    assert len(made.prompt) == 2


def test_replaying_gives_back_a_records_tables() -> None:
    made = record()
    logits = replaying([made])
    for i in range(len(made.token_ids)):
        row = logits([3, 9, 27, *made.token_ids[:i]]).astype(np.float64)
        assert row[made.output.top_ids[i]] == pytest.approx(made.output.top_logits[i], abs=1e-5)
        assert np.log(np.exp(row).sum()) == pytest.approx(made.output.logsumexp[i], abs=1e-5)
        assert np.argsort(-row)[0] == made.token_ids[i]


def test_replaying_is_the_toy_where_no_record_speaks() -> None:
    assert np.array_equal(replaying([record()])([1, 2]), toy_logits([1, 2]))


def test_entries_are_the_best_and_the_tokens_own() -> None:
    row = np.array([0.0, 3.0, 1.0, 2.0], np.float32)
    made = entries(row, 0, 2)
    assert [(e.token_id, e.rank) for e in made] == [(1, 1), (3, 2), (0, 4)]
    assert [e.token_id for e in entries(row, 1, 2)] == [1, 3]
    assert len(entries(row, 1, -1)) == 4
    assert sum(np.exp(e.logprob) for e in entries(row, 1, -1)) == pytest.approx(1.0)


def test_a_toy_suite_is_complete(tmp_path: Path) -> None:
    root = write_toy_suite(tmp_path, {"a/one": SCENARIO, "b/two": SCENARIO})
    assert [s.id for s in load_scenarios(root / "scenarios")] == ["a/one", "b/two"]
    [made] = RecordStore(root).all()
    assert made.provenance["weights_sha256"] == resolve_model(TOY, root).sha256
