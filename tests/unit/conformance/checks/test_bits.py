"""Where two runs first differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.checks.bits import answer_difference, bit_difference, first_difference, row_difference
from conformance.history import RequestRun
from conformance.testing import answer, make_record

RED = make_record("red")


def changed(run: RequestRun, **fields: Any) -> RequestRun:
    assert run.output is not None
    return replace(run, output=replace(run.output, **fields))


def test_equal_runs_have_no_difference_and_tell_how_much_was_compared() -> None:
    run = answer(RED)
    assert answer_difference(run, run) is None
    assert bit_difference(run, run) == (None, len(run.output_rows) + len(run.kv_digests))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "other"}, "text differs: "),
        ({"finish_reason": "stop"}, "finish_reason differs: 'length' and 'stop'"),
        ({"stop_reason": "END"}, "stop_reason differs: None and 'END'"),
    ],
)
def test_what_the_user_sees_is_named(fields: dict[str, Any], message: str) -> None:
    run = answer(RED)
    found = answer_difference(run, changed(run, **fields))
    assert found is not None
    assert found.message.startswith(message)
    assert bit_difference(run, changed(run, **fields)) == (found, 0)


def test_a_token_is_told_with_its_position() -> None:
    run = answer(RED)
    other = answer(RED, choices={3: int(RED.output.top_ids[3, 1])})
    found = answer_difference(run, other)
    assert found is not None
    assert (found.position, found.message.partition(":")[0]) == (3, "tokens differ from position 3")


def test_one_bit_of_a_logit_is_told_with_its_size() -> None:
    run = answer(RED)
    rows = list(run.output_rows)
    rows[2] = replace(rows[2], digest="other", values=(rows[2].values[0] + 0.5, *rows[2].values[1:]))
    found, compared = bit_difference(run, replace(run, output_rows=tuple(rows)))
    assert found is not None
    assert (
        found.message == "bits of the logits differ at position 2 (largest difference of a listed logit 0.5)"
    )
    assert (found.position, found.detail, compared) == (2, {"what": "logits", "at": 2}, 0)


def test_the_cache_is_told_by_layer_and_kind() -> None:
    run = answer(RED)
    found, compared = bit_difference(run, replace(run, kv_digests=("k0", "other")))
    assert found is not None
    assert found.message == "bits of the KV cache differ at layer 0 V"
    assert (found.position, compared) == (None, len(run.output_rows))


def test_logprobs_are_compared_by_every_bit() -> None:
    run = answer(RED)
    assert run.output is not None
    assert run.output.logprobs is not None
    first, *others = run.output.logprobs[0]
    nudged = (replace(first, logprob=float(np.nextafter(first.logprob, 0.0))), *others)
    found, _ = bit_difference(run, changed(run, logprobs=(nudged, *run.output.logprobs[1:])))
    assert found is not None
    assert found.message == "logprobs differ"


def test_rows_are_compared_where_both_list_an_id() -> None:
    row = answer(RED).output_rows[0]
    shifted = replace(row, ids=(*row.ids[1:], 10_000), values=(*(v - 1.0 for v in row.values[1:]), 9.0))
    assert row_difference(row, shifted) == pytest.approx(np.ones(len(row.ids) - 1))


@pytest.mark.parametrize(("a", "b", "at"), [("abc", "abd", 2), ("ab", "abc", 2), ("", "a", 0)])
def test_the_first_difference_may_be_the_end_of_the_shorter(a: str, b: str, at: int) -> None:
    assert first_difference(a, b) == at
