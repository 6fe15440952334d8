"""Power: what a judgement could have seen, and that there is no PASS without it."""

from __future__ import annotations

from dataclasses import replace

from conformance.adapters.base import FEATURES, Capabilities
from conformance.checks import judge
from conformance.checks.case import Case
from conformance.history import History
from conformance.kill_matrix import Row
from conformance.power import KINDS, SeededPower, power_of, seeded_power
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


# --- what the kill matrix says of a run --------------------------------------------------------------


def row(fault: str, evidence: str, *needs: str, shown_by: str = "a/b[model=x]") -> Row:
    return Row(fault, "x.", "o", "p: q", "killed", 1, ("c",), shown_by, evidence, "float32", needs)


def seeded(features: set[str], *rows: Row, judged: tuple[str, str] = ("a/b", "float32")) -> SeededPower:
    engine = Capabilities("mine", "1", ("float32",), frozenset(features))
    return seeded_power(engine, {judged}, rows)


def test_a_fault_would_have_shown_if_its_scenario_was_judged_with_its_evidence() -> None:
    found = seeded({"output_ids", "stepped"}, row("x/t", "tokens", "stepped"), row("x/l", "logprobs"))
    assert found.shown == ("x/t",)
    assert found.blind == {"x/l": "mine lacks logprobs"}


def test_a_scenario_that_was_not_judged_or_in_another_dtype_shows_nothing() -> None:
    features = {"output_ids"}
    assert seeded(features, row("x/t", "tokens"), judged=("a/c", "float32")).blind == {
        "x/t": "its scenario was not judged"
    }
    assert seeded(features, row("x/t", "tokens"), judged=("a/b", "bfloat16")).blind == {
        "x/t": "it shows in float32"
    }


def test_what_a_scenario_needs_counts_too() -> None:
    assert seeded({"output_ids"}, row("x/t", "tokens", "swap")).blind == {"x/t": "mine lacks swap"}


def test_faults_that_no_run_can_show_do_not_count() -> None:
    equivalent = replace(row("x/e", ""), outcome="equivalent")
    assert seeded(set(), row("x/f", "contract", shown_by="fuzz:engine"), equivalent) == SeededPower((), {})


def test_the_committed_matrix_is_asked_by_default() -> None:
    engine = Capabilities("mine", "1", ("float32",), frozenset())
    found = seeded_power(engine, set())
    assert found.shown == ()
    assert len(found.blind) > 50
