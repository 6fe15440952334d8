"""judge: what holds of every history, how verdicts combine, and that nothing passes by accident."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.adapters.base import FEATURES, EngineError
from conformance.checks import judge
from conformance.history import History, Operation, RequestRun
from conformance.testing import Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Judgement, Verdict

RED = make_record("red")
TOKENS, POOL = Spec("tokens_match_golden"), Spec("pool_conserved")


def judged(h: History, *specs: Spec, **kwargs: Any) -> Judgement:
    return judge(h, specs, records_of(RED), **kwargs)


def history(*runs: RequestRun, **changes: Any) -> History:
    return make_history([make_pass("free", runs or (answer(RED),), **changes)])


def test_a_scenario_without_checks_is_an_error() -> None:
    assert judged(history()).verdict is Verdict.ERROR


def test_an_unknown_check_is_an_error() -> None:
    found = judged(history(), TOKENS, Spec("tokens_match_goldn"))
    assert found.verdict is Verdict.ERROR
    assert "unknown check" in found.findings[-1].message


def test_wrong_arguments_are_an_error_even_if_nobody_linted_them() -> None:
    assert judged(history(), Spec("happened", {"nonsense": ">=1"})).verdict is Verdict.ERROR


def test_the_worst_finding_decides() -> None:
    leak = make_pass("free", [answer(RED)])
    assert leak.pool_after is not None
    leak = replace(leak, pool_after=replace(leak.pool_after, free=0))
    assert judged(make_history([leak]), TOKENS, POOL).verdict is Verdict.FAIL


def test_a_skipped_check_beside_a_judged_one_makes_it_weak() -> None:
    h = make_history([make_pass("free", [answer(RED)])], features=frozenset(FEATURES) - {"pool"})
    assert judged(h, TOKENS, POOL).verdict is Verdict.WEAK
    assert judged(h, POOL).verdict is Verdict.SKIP


def test_level_travels_with_the_judgement() -> None:
    broken = history(answer(RED, choices={3: 1}))
    assert judged(broken, TOKENS).fails_run()
    assert not judged(broken, TOKENS, level="should").fails_run()
    assert judged(broken, TOKENS, level="should").fails_run(strict_should=True)


def test_an_unexpected_refusal_fails_whatever_is_checked() -> None:
    refused = RequestRun("bad", {"temperature": 0.0}, None, refused=EngineError("X", "too large"))
    found = judged(history(answer(RED), refused), POOL)
    assert found.verdict is Verdict.FAIL
    assert "too large" in found.findings[0].message


@pytest.mark.parametrize(("kind", "verdict"), [("NotImplementedError", Verdict.WEAK), ("X", Verdict.FAIL)])
def test_an_answer_that_cannot_be_forced_is_skipped_not_failed(kind: str, verdict: Verdict) -> None:
    free = answer(RED)
    refused = replace(free, output=None, forced=True, refused=EngineError(kind, "pictures"))
    found = judged(make_history([make_pass("free", [free]), make_pass("forced", [refused])]), TOKENS)
    assert found.verdict is verdict
    assert "pictures" in found.findings[0].message


def test_a_request_that_failed_in_an_arm_fails_too() -> None:
    run = answer(RED)
    assert run.output is not None
    broken = replace(run, output=replace(run.output, error=EngineError("NaN", "logits are NaN")))
    h = make_history([make_pass("free", [run]), make_pass("chunk=3", [broken])])
    assert judged(h, POOL).verdict is Verdict.FAIL


def test_a_failed_engine_is_not_also_blamed_for_what_it_never_answered() -> None:
    found = judged(history(error=EngineError("RuntimeError", "boom")), Spec("error", {"engine": "any"}))
    assert found.verdict is Verdict.PASS


def test_an_engine_that_failed_midway_fails_and_is_no_error_of_the_judge() -> None:
    run = replace(answer(RED), output=None)
    free = replace(make_pass("free", [run], error=EngineError("RuntimeError", "boom")), pool_after=None)
    found = judged(make_history([free]), POOL)
    assert [finding.verdict for finding in found.findings] == [Verdict.FAIL, Verdict.SKIP]
    assert found.verdict is Verdict.FAIL


def test_an_engine_that_cannot_load_fails_once_and_is_no_error_of_the_judge() -> None:
    free = make_pass("free", [], error=EngineError("NotImplementedError", "rope kind linear"))
    found = judged(make_history([free]), TOKENS, POOL)
    assert [finding.verdict for finding in found.findings] == [Verdict.FAIL, Verdict.SKIP, Verdict.SKIP]
    assert "rope kind linear" in found.findings[0].message
    assert "before it took any request" in found.findings[1].message
    assert found.verdict is Verdict.FAIL


def test_a_submitted_request_must_be_in_the_pass() -> None:
    h = history(operations=(Operation("submit", ["red", "blue"]),))
    found = judged(h, POOL)
    assert (found.findings[0].verdict, found.findings[0].request) == (Verdict.FAIL, "blue")


def test_two_passes_of_one_name_are_an_error() -> None:
    h = make_history([make_pass("free", [answer(RED)])] * 2)
    assert judged(h, POOL).verdict is Verdict.ERROR


def test_records_that_cannot_be_read_are_an_error_with_their_message() -> None:
    def broken(key: str) -> Any:
        raise RuntimeError(f"corrupted record {key}")

    found = judge(history(), [TOKENS], broken)
    assert found.verdict is Verdict.ERROR
    assert "corrupted record key-red" in found.findings[0].message


def test_judging_twice_gives_the_same() -> None:
    broken = history(answer(RED, choices={3: 1}))
    assert judged(broken, TOKENS) == judged(broken, TOKENS)


@pytest.mark.parametrize("strict", [False, True])
def test_strict_is_passed_to_the_checks(strict: bool) -> None:
    run = answer(RED, noise=lambda x: x + 3e-5 * (1 - 2 * (x.argsort(axis=1) % 2)))
    verdict = judged(history(run), Spec("logits_within_yardstick"), strict=strict).verdict
    assert verdict is (Verdict.FAIL if strict else Verdict.PASS)
