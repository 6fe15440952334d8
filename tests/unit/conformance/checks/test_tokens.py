"""Decided positions, gaps, and what is accepted where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.checks import judge
from conformance.checks.tokens import band, gap, is_decided, judge_id
from conformance.history import History, RequestRun
from conformance.records import GoldenRecord, LogitTable
from conformance.testing import M, Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Verdict

TOKENS = Spec("tokens_match_golden")


def with_margin(margin: float, ties: int = 1) -> GoldenRecord:
    """The record "red" whose position 0 has `ties` ids below the best by `margin`."""
    record = make_record("red")
    logits = record.output.top_logits.copy()
    logits[0, 1 : 1 + ties] = logits[0, 0] - margin
    table = LogitTable(record.output.top_ids, logits, record.output.logsumexp)
    return replace(record, output=table)


def test_the_band_is_four_m() -> None:
    assert band(make_record("red")) == pytest.approx(4 * M)


@pytest.mark.parametrize(("margin", "decided"), [(8.1 * M, True), (7.9 * M, False), (0.0, False)])
def test_a_position_is_decided_beyond_twice_the_band(margin: float, decided: bool) -> None:
    assert is_decided(with_margin(margin), 0) is decided


def test_the_gap_is_exact_for_recorded_ids_and_a_lower_bound_beyond() -> None:
    record = make_record("red")
    ids, logits = record.output.top_ids[2], record.output.top_logits[2]
    assert gap(record, 2, int(ids[3])) == (float(logits[0] - logits[3]), True)
    unlisted = next(i for i in range(64) if i not in ids.tolist())
    assert gap(record, 2, unlisted) == (float(logits[0] - logits[-1]), False)


@pytest.mark.parametrize(
    ("margin", "verdict"), [(9 * M, Verdict.FAIL), (7 * M, Verdict.NOISE), (0.0, Verdict.NOISE)]
)
def test_the_second_best_id_is_noise_only_where_undecided(margin: float, verdict: Verdict) -> None:
    record = with_margin(margin)
    assert judge_id(record, 0, int(record.output.top_ids[0, 1])) is verdict
    assert judge_id(record, 0, record.token_ids[0]) is Verdict.PASS


def test_a_third_id_far_below_an_undecided_pair_fails() -> None:
    record = with_margin(M)
    assert judge_id(record, 0, int(record.output.top_ids[0, 2])) is Verdict.FAIL


def test_an_unrecorded_id_is_unknown_where_all_recorded_ones_tie() -> None:
    record = with_margin(M, ties=19)
    unlisted = next(i for i in range(64) if i not in record.output.top_ids[0].tolist())
    assert judge_id(record, 0, unlisted) is Verdict.WEAK


def history(*runs: RequestRun) -> History:
    return make_history([make_pass("free", runs)])


def test_a_wrong_id_tells_position_truth_and_size() -> None:
    record = make_record("red")
    wrong = int(record.output.top_ids[5, 4])
    found = judge(history(answer(record, choices={5: wrong})), [TOKENS], records_of(record))
    [failure] = [f for f in found.findings if f.verdict is Verdict.FAIL]
    distance = record.output.top_logits[5, 0] - record.output.top_logits[5, 4]
    assert failure.position == 5
    assert failure.size == pytest.approx(distance / M)
    assert failure.detail["truth"] == record.token_ids[5]
    assert failure.detail["triage"]["stage"] == "sampling"


def test_nothing_after_wrong_prompt_ids_is_judged() -> None:
    record = make_record("red")
    run = replace(answer(record, choices={5: 1}), prompt_token_ids=(1,))
    found = judge(history(run), [TOKENS], records_of(record))
    assert len(found.findings) == 1
    assert "prompt ids" in found.findings[0].message


def test_undecided_positions_beyond_a_tenth_fail_a_float32_case() -> None:
    record = make_record("red", undecided=[1, 4, 7])
    run = answer(record, undecided=[1, 4, 7])
    found = judge(history(run), [TOKENS], records_of(record))
    assert found.verdict is Verdict.FAIL
    assert "21 of 24" in found.findings[0].message


def test_in_bfloat16_many_undecided_positions_are_only_weak() -> None:
    record = make_record("red", undecided=[1, 4, 7], dtype="bfloat16")
    h = make_history([make_pass("free", [answer(record, undecided=[1, 4, 7])])], dtype="bfloat16")
    assert judge(h, [TOKENS], records_of(record)).verdict is Verdict.WEAK


def test_requests_without_plain_greedy_decoding_are_left_out() -> None:
    record = make_record("red")
    other = replace(answer(record, name="other"), sampling={"temperature": 0.8}, golden_key=None)
    found = judge(history(answer(record), other), [TOKENS], records_of(record))
    assert [f.request for f in found.findings] == ["red"]


@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"temperature": 0.0, "logit_bias": {3: 1.0}}])
def test_naming_a_request_no_golden_can_judge_is_an_error(sampling: dict[str, object]) -> None:
    record = make_record("red")
    run = replace(answer(record), sampling=sampling)
    found = judge(history(run), [Spec("tokens_match_golden", ["red"])], records_of(record))
    assert found.verdict is Verdict.ERROR


def test_a_scenario_with_nothing_to_compare_is_an_error_not_a_pass() -> None:
    run = replace(answer(make_record("red")), sampling={"temperature": 1.0})
    assert judge(history(run), [TOKENS], records_of()).verdict is Verdict.ERROR


def test_default_valued_penalties_are_still_plain_greedy() -> None:
    record = make_record("red")
    sampling = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": []}
    run = answer(record, sampling=sampling)
    assert judge(history(run), [TOKENS], records_of(record)).verdict is Verdict.PASS


def test_an_unknown_id_leaves_the_case_weak() -> None:
    record = with_margin(M, ties=19)
    unlisted = next(i for i in range(64) if i not in record.output.top_ids[0].tolist())
    run = answer(record, choices={0: unlisted})
    forced = answer(record, choices={0: unlisted}, forced=True)
    h = make_history([make_pass("free", [run]), make_pass("forced", [forced])])
    found = judge(h, [TOKENS], records_of(record))
    assert found.verdict is Verdict.WEAK
    assert found.power.unjudged == 1
