"""The made-up goldens and histories are what they claim, so that tests of the oracle mean something."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.testing import (
    TOP,
    M,
    R,
    answer,
    make_events,
    make_history,
    make_pass,
    make_record,
    records_of,
    replace_run,
    truth_logits,
)


def test_the_truth_depends_on_its_key_alone() -> None:
    assert np.array_equal(truth_logits("red", 5), truth_logits("red", 5))
    assert not np.array_equal(truth_logits("red", 5), truth_logits("blue", 5))


def test_margins_are_wide_except_where_told_otherwise() -> None:
    margins = make_record("red", undecided=[3]).output.margins
    assert margins[3] == pytest.approx(M)
    assert np.delete(margins, 3).min() > 0.29


def test_a_record_is_consistent_with_itself() -> None:
    record = make_record("red", positions=9)
    assert record.output.top_ids.shape == record.output.top_logits.shape == (9, TOP)
    assert record.output.top_ids[:, 0].tolist() == list(record.token_ids)
    assert np.all(np.diff(record.output.top_logits, axis=1) <= 0)
    assert np.all(record.output.logsumexp > record.output.top_logits[:, 0])
    assert (record.yardstick.R, record.yardstick.M) == (R, M)
    assert record.prompt is not None
    assert len(record.prompt) == len(record.prompt_token_ids) - 1


def test_a_sound_answer_is_the_truth() -> None:
    record = make_record("red")
    run = answer(record)
    assert run.output is not None
    assert run.output.token_ids == record.token_ids
    assert run.output.text == record.text
    assert run.output_rows[2].values == tuple(record.output.top_logits[2])
    assert run.output_rows[2].logsumexp == pytest.approx(record.output.logsumexp[2])


def test_after_a_choice_of_its_own_a_free_run_leaves_the_truth_and_a_forced_one_does_not() -> None:
    record = make_record("red")
    free, forced = answer(record, choices={5: 1}), answer(record, choices={5: 1}, forced=True)
    assert free.output is not None
    assert forced.output is not None
    assert free.output.token_ids is not None
    assert free.output.token_ids[:5] == record.token_ids[:5]
    assert free.output.token_ids[6:] != record.token_ids[6:]
    assert forced.output.token_ids == record.token_ids
    assert forced.output.choice_token_ids == (*record.token_ids[:5], 1, *record.token_ids[6:])


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_events_compute_every_position_once_and_keep_the_budget(chunk: int | None) -> None:
    runs = [answer(make_record("red")), answer(make_record("blue", positions=4), name="blue")]
    events = make_events(runs, chunk)
    done = {"red": 0, "blue": 0}
    for event in (e for e in events if e["event"] == "planned"):
        assert chunk is None or sum(size for *_, size in event["scheduled"]) <= chunk
        for name, start, size in event["scheduled"]:
            assert start == done[name]
            done[name] += size
    assert done == {"red": 7 + 23, "blue": 7 + 3}
    assert sorted(e["request_id"] for e in events if e["event"] == "finished") == ["blue", "red"]


def test_one_run_of_one_pass_is_replaced_and_nothing_else() -> None:
    red, blue = answer(make_record("red")), answer(make_record("blue"))
    history = make_history([make_pass("free", [red, blue]), make_pass("chunk=3", [red])])
    gone = replace_run(history, lambda _: None, of="free")
    assert list(gone.passes[0].requests) == ["blue"]
    assert gone.passes[1] == history.passes[1]


def test_a_store_of_records_knows_no_other_key() -> None:
    with pytest.raises(KeyError):
        records_of(make_record("red"))("key-blue")
