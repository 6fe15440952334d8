"""Which faults are judged, and in which order rows come."""

from __future__ import annotations

import pytest

from conformance.faults import FAULTS
from conformance.faults.matrix import choose, judge_all
from conformance.kill_matrix import Row


def test_faults_are_chosen_by_area_or_id() -> None:
    assert choose([]) == FAULTS
    assert {fault.area for fault in choose(["text", "logprobs"])} == {"text", "logprobs"}
    assert [fault.id for fault in choose(["text/doubled-bos"])] == ["text/doubled-bos"]


def test_a_word_that_is_neither_is_refused_with_the_areas() -> None:
    with pytest.raises(LookupError, match=r"'txt' is neither .*prefix-cache"):
        choose(["txt"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_come_in_order_of_id_and_each_is_told_once(jobs: int) -> None:
    told: list[Row] = []
    chosen = choose(["prefix-cache/published-then-cancelled", "prefix-cache/publish-before-compute"])
    rows = judge_all(chosen, jobs, told.append)
    assert [row.id for row in rows] == [
        "prefix-cache/publish-before-compute",
        "prefix-cache/published-then-cancelled",
    ]
    assert sorted(told, key=lambda row: row.id) == rows
    assert {row.outcome for row in rows} == {"killed"}
