"""Power: what a judgement could have seen, and that there is no PASS without it."""

from __future__ import annotations

from conformance.adapters.base import FEATURES
from conformance.checks import judge
from conformance.checks.case import Case
from conformance.history import History
from conformance.power import KINDS, power_of
from conformance.testing import Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Finding, Verdict

RED = make_record("red")
RECORDS = records_of(RED)


def history(features: frozenset[str] = frozenset(FEATURES)) -> History:
    return make_history([make_pass("free", [answer(RED)])], features=features)


def test_every_kind_is_either_seen_or_blind_with_a_reason() -> None:
    found = judge(history(), [Spec("tokens_match_golden")], RECORDS).power
    assert set(found.kinds) | set(found.blind) == set(KINDS)
    assert set(found.kinds) & set(found.blind) == set()
    assert found.kinds == ("tokens",)
    assert "no check of this scenario" in found.blind["logits"]


def test_a_missing_capability_is_the_reason() -> None:
    found = judge(history(frozenset({"output_ids"})), [Spec("tokens_match_golden")], RECORDS).power
    assert "'stages'" in found.blind["logits"]
    assert "'bitwise'" in found.blind["bits"]


def test_tokens_that_decide_little_have_no_power() -> None:
    finding = Finding(
        Verdict.WEAK, "tokens_match_golden", "red", "", saw="tokens", detail={"judged": 10, "decided": 4}
    )
    found = power_of(Case(history(), RECORDS), [finding])
    assert found.kinds == ()
    assert "4 of 10" in found.blind["tokens"]


def test_bfloat16_logits_of_a_real_model_have_no_power() -> None:
    record = make_record("red", dtype="bfloat16")
    h = make_history([make_pass("free", [answer(record)])], dtype="bfloat16")
    found = judge(h, [Spec("logits_within_yardstick")], records_of(record))
    assert found.verdict is Verdict.WEAK
    assert "bfloat16" in found.power.blind["logits"]


def test_skipped_and_crashed_findings_give_no_power() -> None:
    findings = [Finding(v, "c", None, "", saw="logits") for v in (Verdict.SKIP, Verdict.ERROR)]
    assert power_of(Case(history(), RECORDS), findings).kinds == ()


def test_counts_add_up_over_requests() -> None:
    blue = make_record("blue", positions=8)
    h = make_history([make_pass("free", [answer(RED), answer(blue)])])
    found = judge(h, [Spec("tokens_match_golden")], records_of(RED, blue)).power
    assert (found.judged, found.decided, found.unjudged) == (32, 32, 0)
