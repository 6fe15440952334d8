"""Verdicts: their order, and what fails a run."""

from __future__ import annotations

import itertools

import pytest

from conformance.verdicts import Judgement, Power, Verdict


def test_verdicts_are_ordered_from_pass_to_error() -> None:
    names = ["PASS", "NOISE", "WEAK", "SKIP", "WAIVED", "STALE", "FAIL", "ERROR"]
    assert [v.name for v in sorted(Verdict, key=lambda v: v.severity)] == names


@pytest.mark.parametrize("pair", list(itertools.product(Verdict, Verdict)))
def test_the_worst_of_two_is_the_more_severe(pair: tuple[Verdict, Verdict]) -> None:
    assert Verdict.worst(pair).severity == max(v.severity for v in pair)


def test_the_worst_of_nothing_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        Verdict.worst([])


def test_only_stale_fail_and_error_fail_a_run() -> None:
    assert {v.name for v in Verdict if v.fails_run} == {"STALE", "FAIL", "ERROR"}


def test_pass_noise_and_weak_are_one_class() -> None:
    assert {v.name for v in Verdict if v.is_agreement} == {"PASS", "NOISE", "WEAK"}


@pytest.mark.parametrize(
    ("verdict", "level", "strict", "fails"),
    [
        (Verdict.FAIL, "must", False, True),
        (Verdict.FAIL, "should", False, False),
        (Verdict.FAIL, "should", True, True),
        (Verdict.ERROR, "should", False, True),
        (Verdict.PASS, "must", True, False),
        (Verdict.SKIP, "must", True, False),
    ],
)
def test_a_failed_should_counts_only_when_asked(
    verdict: Verdict, level: str, strict: bool, fails: bool
) -> None:
    assert Judgement(verdict, (), Power((), {}), level).fails_run(strict_should=strict) is fails
