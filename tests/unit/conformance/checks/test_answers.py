"""equal and differ: how answers of one pass relate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.adapters.base import FEATURES, EngineError
from conformance.checks import judge
from conformance.history import RequestRun
from conformance.testing import Spec, answer, make_events, make_history, make_pass, make_record, records_of
from conformance.verdicts import Judgement, Verdict

RED = make_record("red")
ALL = frozenset(FEATURES)


def run(name: str, **arguments: Any) -> RequestRun:
    return answer(RED, name=name, **arguments)


def judged(
    check: str, *runs: RequestRun, features: frozenset[str] = ALL, invariant: bool = True
) -> Judgement:
    one = make_pass("free", runs, options={"batch_invariant": invariant}, events=make_events(runs))
    names = [r.request_id for r in runs]
    return judge(make_history([one], features=features), [Spec(check, names)], records_of(RED))


def otherwise(name: str, position: int) -> RequestRun:
    return run(name, choices={position: int(RED.output.top_ids[position, 1])})


def test_equal_bits_pass_with_the_power_to_see_bits() -> None:
    found = judged("equal", run("a"), run("b"), run("c"))
    assert found.verdict is Verdict.PASS
    assert [f.request for f in found.findings] == ["b", "c"]
    assert found.power.kinds == ("bits",)


def test_the_one_that_is_unlike_the_first_is_named() -> None:
    found = judged("equal", run("a"), run("b"), otherwise("c", 2))
    assert [f.verdict for f in found.findings] == [Verdict.PASS, Verdict.FAIL]
    assert found.findings[1].message.startswith("a and c: tokens differ from position 2")
    assert found.findings[1].position == 2


def test_one_bit_of_the_logits_fails() -> None:
    b = run("b")
    rows = (replace(b.output_rows[0], digest="other"), *b.output_rows[1:])
    assert judged("equal", run("a"), replace(b, output_rows=rows)).verdict is Verdict.FAIL


def test_equal_tokens_without_a_bit_to_compare_are_weak() -> None:
    assert judged("equal", run("a", stages=False), run("b", stages=False)).verdict is Verdict.WEAK


@pytest.mark.parametrize(
    ("features", "invariant", "reason"),
    [(ALL, False, "batch_invariant is off"), (ALL - {"bitwise"}, True, "does not declare 'bitwise'")],
)
def test_equality_is_not_asked_where_no_bits_are_promised(
    features: frozenset[str], invariant: bool, reason: str
) -> None:
    found = judged("equal", run("a"), otherwise("b", 2), features=features, invariant=invariant)
    assert found.verdict is Verdict.SKIP
    assert reason in found.findings[0].message


def test_each_pair_must_differ() -> None:
    found = judged("differ", run("a"), otherwise("b", 1), otherwise("c", 2))
    assert found.verdict is Verdict.PASS
    assert [f.message for f in found.findings] == ["a and b differ", "a and c differ", "b and c differ"]


def test_two_alike_of_three_fail() -> None:
    found = judged("differ", run("a"), otherwise("b", 1), run("c"))
    assert [f.verdict for f in found.findings] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert found.findings[1].message.startswith("a and c answer the same as far as both go")


def test_a_shorter_answer_is_no_different_one() -> None:
    a, b = run("a"), run("b")
    assert b.output is not None
    assert b.output.token_ids is not None
    short = replace(b, output=replace(b.output, token_ids=b.output.token_ids[:2]))
    assert judged("differ", a, short).verdict is Verdict.FAIL


def test_an_engine_that_tells_only_text_is_judged_by_it() -> None:
    texts = []
    for name, text in (("a", "one"), ("b", "two"), ("c", "one more")):
        made = run(name)
        assert made.output is not None
        texts.append(replace(made, output=replace(made.output, token_ids=None, text=text)))
    found = judged("differ", *texts)
    assert [f.verdict for f in found.findings] == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]


@pytest.mark.parametrize("check", ["equal", "differ"])
def test_a_request_that_was_not_served_fails(check: str) -> None:
    refused = replace(run("b"), output=None, refused=EngineError("Full", "no room"))
    found = judged(check, run("a"), refused)
    assert any(f.check == check and f.verdict is Verdict.FAIL for f in found.findings)
