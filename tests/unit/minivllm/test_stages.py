from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minivllm.request import Request, SamplingParams, ScheduledRequest, StepPlan, StepResult, TokenView
from minivllm.stages import StageStore

PROMPT = 5


def scheduled(start: int, num_tokens: int, *, total: int | None = None) -> ScheduledRequest:
    total = start + num_tokens if total is None else total
    tokens = TokenView(list(range(total)))
    request = Request("r", [0] * PROMPT, PROMPT, SamplingParams())
    return ScheduledRequest(
        "r", start, num_tokens, tokens, PROMPT, (1,), start + num_tokens == total, request
    )


def rows(start: int, end: int, run: int = 0) -> NDArray[np.float32]:
    """Row p holds [p, run]."""
    return np.array([[p, run] for p in range(start, end)], dtype=np.float32).reshape(-1, 2)


def collect(store: StageStore, row: ScheduledRequest, stages: dict[str, NDArray[Any]]) -> None:
    store.collect(StepPlan(0, (row,)), StepResult({}, stages={"r": stages}))


def test_chunks_and_decode_steps_join_by_position() -> None:
    store = StageStore()
    for start, num in ((0, 3), (3, 2), (5, 1)):
        collect(
            store,
            scheduled(start, num),
            {
                "hidden.0": rows(start, start + num),
                "positions": np.arange(start, start + num, dtype=np.int64),
            },
        )
    found = store.get("r")
    np.testing.assert_array_equal(found["hidden.0"], rows(0, 6))
    np.testing.assert_array_equal(found["positions"], np.arange(6))
    assert (found["hidden.0"].dtype, found["positions"].dtype) == (np.float32, np.int64)


def test_recomputed_rows_replace_the_old_ones_and_only_those() -> None:
    store = StageStore()
    collect(store, scheduled(0, 6), {"embeddings": rows(0, 6)})
    collect(store, scheduled(0, 4, total=7), {"embeddings": rows(0, 4, run=1)})
    np.testing.assert_array_equal(
        store.get("r")["embeddings"], np.concatenate([rows(0, 4, run=1), rows(4, 6)])
    )


def test_logits_rows_go_to_their_generated_position() -> None:
    store = StageStore()
    for generated in (0, 1):
        collect(store, scheduled(PROMPT + generated - 1, 1), {"logits": rows(generated, generated + 1)})
    # After a preemption the next sampling step starts at position 0 again.
    collect(store, scheduled(0, PROMPT + 2), {"logits": rows(2, 3)})
    np.testing.assert_array_equal(store.get("r")["logits"], rows(0, 3))


def test_prompt_logits_go_to_their_prompt_position() -> None:
    store = StageStore()
    collect(store, scheduled(0, 2, total=PROMPT), {"prompt_logits": rows(0, 2)})
    collect(store, scheduled(2, 3), {"prompt_logits": rows(2, PROMPT)})
    np.testing.assert_array_equal(store.get("r")["prompt_logits"], rows(0, PROMPT))


def test_keys_and_values_are_replaced_as_a_whole() -> None:
    store = StageStore()
    collect(store, scheduled(0, 4, total=PROMPT), {"k.0": rows(0, 4), "v.11": rows(0, 4)})
    collect(store, scheduled(0, 2, total=PROMPT), {"k.0": rows(0, 2, run=1), "v.11": rows(0, 2, run=1)})
    found = store.get("r")
    np.testing.assert_array_equal(found["k.0"], rows(0, 2, run=1))
    np.testing.assert_array_equal(found["v.11"], rows(0, 2, run=1))


def test_rows_never_computed_are_nan_or_minus_one() -> None:
    store = StageStore()
    collect(store, scheduled(4, 1), {"hidden.0": rows(4, 5), "positions": np.array([4], dtype=np.int64)})
    found = store.get("r")
    assert np.isnan(found["hidden.0"][:4]).all()
    np.testing.assert_array_equal(found["hidden.0"][4:], rows(4, 5))
    assert found["positions"].tolist() == [-1, -1, -1, -1, 4]


def test_requests_do_not_mix_and_one_without_capture_has_nothing() -> None:
    store = StageStore()
    first = scheduled(0, 2)
    second = ScheduledRequest("s", 0, 2, first.tokens, 2, (2,), True, first.request)
    store.collect(
        StepPlan(0, (first, second)),
        StepResult({}, stages={"r": {"hidden.0": rows(0, 2)}, "s": {"hidden.0": rows(0, 2, run=9)}}),
    )
    np.testing.assert_array_equal(store.get("r")["hidden.0"], rows(0, 2))
    np.testing.assert_array_equal(store.get("s")["hidden.0"], rows(0, 2, run=9))
    assert store.get("t") == {}


def test_dropping_forgets_and_may_be_repeated() -> None:
    store = StageStore()
    collect(store, scheduled(0, 2), {"hidden.0": rows(0, 2)})
    store.drop("r")
    store.drop("r")
    assert store.get("r") == {}


def test_what_was_handed_out_is_the_callers_own() -> None:
    store = StageStore()
    collect(store, scheduled(0, 2), {"hidden.0": rows(0, 2), "k.0": rows(0, 2)})
    for array in store.get("r").values():
        array[...] = 7
    np.testing.assert_array_equal(store.get("r")["hidden.0"], rows(0, 2))
    np.testing.assert_array_equal(store.get("r")["k.0"], rows(0, 2))


@pytest.mark.parametrize("name", ["hidden.3", "embeddings"])
@settings(deadline=None, max_examples=100)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=8))
def test_every_row_is_the_last_one_computed_for_its_position(name: str, steps: list[tuple[int, int]]) -> None:
    store = StageStore()
    expected: dict[int, int] = {}
    for run, (start, num) in enumerate(steps):
        collect(store, scheduled(start, num), {name: rows(start, start + num, run)})
        expected.update(dict.fromkeys(range(start, start + num), run))
    found = store.get("r")[name]
    assert len(found) == max(expected) + 1
    for position, row in enumerate(found):
        if position in expected:
            assert row.tolist() == [position, expected[position]]
        else:
            assert np.isnan(row).all()


def test_sequences_that_fork_begin_with_what_was_captured_before_they_parted() -> None:
    store = StageStore()
    collect(store, scheduled(0, 3, total=5), {"hidden.0": rows(0, 3), "k.0": rows(0, 3)})
    forking = replace(scheduled(3, 2), fork_ids=("r/1", "r/2"))
    collect(store, forking, {"hidden.0": rows(3, 5), "k.0": rows(0, 5), "logits": rows(0, 1)})
    child = replace(scheduled(5, 1), request_id="r/1")
    result = StepResult({}, stages={"r/1": {"hidden.0": rows(5, 6, run=1), "logits": rows(1, 2, run=1)}})
    store.collect(StepPlan(1, (child,)), result)
    np.testing.assert_array_equal(
        store.get("r/1")["hidden.0"], np.concatenate([rows(0, 5), rows(5, 6, run=1)])
    )
    np.testing.assert_array_equal(store.get("r/1")["logits"], np.concatenate([rows(0, 1), rows(1, 2, run=1)]))
    for untouched in ("r", "r/2"):
        np.testing.assert_array_equal(store.get(untouched)["hidden.0"], rows(0, 5))
        np.testing.assert_array_equal(store.get(untouched)["k.0"], rows(0, 5))


def test_dropping_a_request_drops_its_forks() -> None:
    store = StageStore()
    collect(store, replace(scheduled(0, 5), fork_ids=("r/1",)), {"hidden.0": rows(0, 5)})
    assert store.get("r/1")
    store.drop("r")
    assert store.get("r") == store.get("r/1") == {}


def test_forks_of_a_request_that_captured_nothing_have_nothing() -> None:
    store = StageStore()
    store.collect(StepPlan(0, (replace(scheduled(0, 5), fork_ids=("r/1",)),)), StepResult({}))
    assert store.get("r/1") == {}
