"""Errors against the yardstick: single values, rms, pooling, and what is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.checks import judge
from conformance.checks.case import CheckInputError
from conformance.checks.logits import logprob_band, row_errors
from conformance.history import RequestRun
from conformance.records import ArmError, Yardstick
from conformance.testing import (
    EAGER,
    M,
    R,
    Spec,
    answer,
    logit_row,
    make_history,
    make_pass,
    make_record,
    records_of,
    truth_logits,
)
from conformance.verdicts import Finding, Judgement, Verdict

RED = make_record("red")
LOGITS = Spec("logits_within_yardstick")


def judged(*runs: RequestRun, spec: Spec = LOGITS) -> Judgement:
    records = [RED, *(make_record(n, positions=6) for n in ("one", "two", "three"))]
    return judge(make_history([make_pass("free", runs)]), [spec], records_of(*records))


def alternating(rms: float) -> RequestRun:
    """Errors of ±rms: their rms is exactly that."""
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)
    return answer(RED, noise=lambda x: x + rms * signs, logprobs=None)


def only(found: Judgement) -> Finding:
    [finding] = found.findings
    return finding


def test_errors_are_engine_minus_truth_by_id_with_logsumexp_last() -> None:
    logits = truth_logits("red", 24)[3]
    ids = RED.output.top_ids[3][::-1].tolist()  # any order will do
    errors = row_errors(logit_row(logits + 1e-3, ids), RED.output, 3)
    assert errors.shape == (21,)
    assert errors == pytest.approx(1e-3)


def test_a_row_reduced_to_other_ids_is_an_error_of_the_harness() -> None:
    row = logit_row(truth_logits("red", 24)[3], RED.output.top_ids[3][1:].tolist())
    with pytest.raises(CheckInputError, match="lacks the golden's top ids"):
        row_errors(row, RED.output, 3)


@pytest.mark.parametrize(
    ("rms", "verdict"), [(0.0, Verdict.PASS), (3.9 * R, Verdict.PASS), (4.1 * R, Verdict.FAIL)]
)
def test_rms_may_be_four_r(rms: float, verdict: Verdict) -> None:
    assert judged(alternating(rms)).verdict is verdict


def test_the_report_tells_ratios_to_the_yardstick_and_to_eager_cached() -> None:
    detail = only(judged(alternating(2 * R))).detail
    assert detail["rms_in_R"] == pytest.approx(2, rel=1e-3)
    assert detail["max_in_M"] == pytest.approx(2 * R / M, rel=1e-3)
    assert detail["rms_to_eager_cached"] == pytest.approx(2 * R / EAGER.rms, rel=1e-3)
    assert detail["max_to_eager_cached"] == pytest.approx(2 * R / EAGER.max, rel=1e-3)
    assert (detail["positions"], detail["source"]) == (24, "logits")


def test_many_wrong_positions_are_one_finding_with_a_count() -> None:
    finding, by_rms = judged(answer(RED, noise=lambda x: x * 1.01, logprobs=None)).findings
    assert "rms error" in by_rms.message
    assert "23 more positions" in finding.message
    assert finding.detail["failed_positions"] == 24


def test_short_cases_are_pooled_in_units_of_their_own_r() -> None:
    def off(times: float) -> tuple[RequestRun, ...]:
        signs = np.where(np.arange(64) % 2, 1.0, -1.0)
        return tuple(
            answer(make_record(n, positions=6), noise=lambda x: x + times * R * signs)
            for n in ("one", "two", "three")
        )

    assert judged(*off(3.9)).verdict is Verdict.PASS
    found = judged(*off(4.1))
    assert found.verdict is Verdict.FAIL
    assert "pooled over 18 positions" in found.findings[0].message


def test_a_pool_that_is_off_blames_only_the_requests_that_are() -> None:
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)

    def off(name: str, times: float) -> RequestRun:
        return answer(make_record(name, positions=6), noise=lambda x: x + times * R * signs)

    found = judged(off("one", 0.5), off("two", 40.0), off("three", 0.5))
    assert {f.request for f in found.findings if f.verdict is Verdict.FAIL} == {"two"}


def test_a_short_case_borrows_long_ones_only_when_short_ones_are_too_few() -> None:
    short = answer(make_record("one", positions=6))
    found = judged(alternating(0.0), short)
    assert found.verdict is Verdict.PASS
    assert not any("too few" in f.message for f in found.findings)


def test_strict_without_an_eager_cached_arm_is_an_error() -> None:
    record = replace(RED, yardstick=Yardstick({"sdpa": ArmError(R, M)}))
    h = make_history([make_pass("free", [alternating(0.0)])])
    spec = Spec("logits_within_yardstick", {"strict": True})
    assert judge(h, [spec], records_of(record)).verdict is Verdict.ERROR
    assert judge(h, [LOGITS], records_of(record)).verdict is Verdict.PASS


def test_strict_does_not_judge_short_cases() -> None:
    signs = np.where(np.arange(64) % 2, 1.0, -1.0)
    run = answer(make_record("one", positions=6), noise=lambda x: x + 3 * R * signs)
    assert judged(run, spec=Spec("logits_within_yardstick", {"strict": True})).verdict is Verdict.PASS


def test_a_yardstick_of_zero_accepts_only_exact_logits() -> None:
    record = replace(RED, yardstick=Yardstick({"eager_cached": ArmError(0.0, 0.0)}))

    def exact(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return logits

    for noise, verdict in ((exact, Verdict.PASS), (lambda x: x + 1e-9, Verdict.FAIL)):
        h = make_history([make_pass("free", [answer(record, noise=noise)])])
        assert judge(h, [LOGITS], records_of(record)).verdict is verdict


def test_the_band_of_a_logprob_grows_with_its_own_rounding() -> None:
    assert logprob_band(RED, 0.0) == pytest.approx(4 * M + 4 * R, rel=0.01)
    assert logprob_band(RED, 1000.0) > 4 * M + 4 * R + 1e-4


def renormalised(run: RequestRun, by: float) -> RequestRun:
    """The same tokens and logits, every log-probability larger by a constant."""
    assert run.output is not None
    assert run.output.logprobs is not None
    moved = tuple(tuple(replace(e, logprob=e.logprob + by) for e in row) for row in run.output.logprobs)
    return replace(run, output=replace(run.output, logprobs=moved))


def test_right_logits_with_another_normaliser_fail() -> None:
    right = judged(answer(RED, logprobs=20))
    assert right.verdict is Verdict.PASS
    assert [f.saw for f in right.findings] == ["logits", "logprobs"]
    by_logits, by_logprobs = judged(renormalised(answer(RED, logprobs=20), 0.01)).findings
    assert (by_logits.verdict, by_logits.saw) == (Verdict.PASS, "logits")
    assert (by_logprobs.verdict, by_logprobs.saw, by_logprobs.position) == (Verdict.FAIL, "logprobs", 0)
    assert "off by +0.01" in by_logprobs.message
    assert "; 23 more positions are off" in by_logprobs.message


def test_logprobs_that_were_asked_and_did_not_come_fail_beside_right_logits() -> None:
    run = answer(RED, logprobs=20)
    assert run.output is not None
    by_logits, missing = judged(replace(run, output=replace(run.output, logprobs=None))).findings
    assert by_logits.verdict is Verdict.PASS
    assert missing.verdict is Verdict.FAIL
    assert "0 lists of logprobs, none for position 0" in missing.message


def test_listed_logprobs_below_the_top_twenty_are_not_judged() -> None:
    run = answer(RED, stages=False, logprobs=30)
    h = make_history([make_pass("free", [run])], features=frozenset({"logprobs", "output_ids"}))
    assert judge(h, [LOGITS], records_of(RED)).verdict is Verdict.PASS
