"""same_under: which arms are due, how they compare, and when agreement is only WEAK."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import FEATURES, EngineOutput
from conformance.checks import judge
from conformance.history import History, Operation, RequestRun
from conformance.testing import (
    M,
    R,
    Spec,
    answer,
    make_events,
    make_history,
    make_pass,
    make_record,
    records_of,
)
from conformance.verdicts import Finding, Verdict

RED = make_record("red", undecided=[10])
OTHER = int(RED.output.top_ids[10, 1])
INVARIANT = {"batch_invariant": True}
CHUNK = Spec("same_under", {"chunk": [3]})


def noisy(seed: int, rms: float = R) -> RequestRun:
    def add(logits: Any) -> Any:
        return logits + np.clip(np.random.default_rng(seed).normal(0, rms, logits.shape), -M, M)

    return answer(RED, undecided=[10], noise=add)


def out(run: RequestRun) -> EngineOutput:
    assert run.output is not None
    return run.output


def pair(
    base: RequestRun,
    other: RequestRun,
    *,
    options: dict[str, Any] | None = None,
    features: frozenset[str] = frozenset(FEATURES),
) -> History:
    given = options or {"batch_invariant": False}
    return make_history(
        [
            make_pass("free", [base], options=given),
            make_pass("chunk=3", [other], options=given, events=make_events([other], chunk=3)),
        ],
        features=features,
    )


def verdict(h: History, spec: Spec = CHUNK) -> Verdict:
    return judge(h, [spec], records_of(RED)).verdict


def first(h: History, spec: Spec = CHUNK) -> Finding:
    return judge(h, [spec], records_of(RED)).findings[0]


def test_equal_bits_pass_with_the_power_to_see_bits() -> None:
    found = judge(pair(noisy(1), noisy(1), options=INVARIANT), [CHUNK], records_of(RED))
    assert found.verdict is Verdict.PASS
    assert found.power.kinds == ("bits",)


def test_rounding_differs_in_bits_and_fails_where_bits_are_promised() -> None:
    finding = first(pair(noisy(1), noisy(2), options=INVARIANT))
    assert finding.verdict is Verdict.FAIL
    assert "bits of the logits differ at position 0" in finding.message


@pytest.mark.parametrize("lost", ["bitwise", "option"])
def test_rounding_passes_within_the_band_where_no_bits_are_promised(lost: str) -> None:
    features = frozenset(FEATURES) - ({"bitwise"} if lost == "bitwise" else set())
    options = INVARIANT if lost == "bitwise" else {}
    h = pair(noisy(1), noisy(2), options=options, features=features)
    found = judge(h, [CHUNK], records_of(RED))
    assert found.verdict is Verdict.PASS
    assert found.power.kinds == ("logits",)


def test_bits_are_not_promised_between_two_backends() -> None:
    base = make_pass("free", [noisy(1)], options=INVARIANT)
    arm = make_pass(
        "backend=sdpa", [noisy(2)], options={"batch_invariant": False, "attention_backend": "sdpa"}
    )
    assert verdict(make_history([base, arm]), Spec("same_under", {"backend": ["sdpa"]})) is Verdict.PASS


def test_a_difference_beyond_the_band_fails() -> None:
    one = noisy(1)
    rows = list(one.output_rows)
    rows[4] = replace(rows[4], values=tuple(v + 5 * M for v in rows[4].values))
    finding = first(pair(noisy(1), replace(one, output_rows=tuple(rows))))
    assert finding.verdict is Verdict.FAIL
    assert finding.position == 4


def test_a_small_difference_everywhere_fails_by_rms() -> None:
    shifted = answer(RED, undecided=[10], noise=lambda x: x + 4.5 * R)
    assert verdict(pair(answer(RED, undecided=[10]), shifted)) is Verdict.FAIL


def test_logprobs_stand_in_for_logits() -> None:
    features = frozenset(FEATURES) - {"stages", "bitwise"}

    def run(by: float) -> RequestRun:
        return answer(RED, undecided=[10], stages=False, noise=lambda x: x * (1 + by))

    assert verdict(pair(run(0), run(1e-7), features=features)) is Verdict.PASS
    assert verdict(pair(run(0), run(1e-3), features=features)) is Verdict.FAIL


def test_tokens_alone_are_weak() -> None:
    run = answer(RED, undecided=[10], stages=False, logprobs=None)
    features = frozenset({"output_ids", "chunked_prefill", "traced"})
    assert verdict(pair(run, run, features=features)) is Verdict.WEAK


def test_without_a_golden_equal_tokens_are_weak_and_others_fail() -> None:
    base = replace(noisy(1), golden_key=None)
    assert verdict(pair(base, replace(noisy(2), golden_key=None))) is Verdict.WEAK
    ids = (*(out(base).token_ids or ())[:-1], 1)
    changed = replace(base, output=replace(out(base), token_ids=ids))
    assert verdict(pair(base, changed)) is Verdict.FAIL


def test_without_a_golden_bits_still_pass() -> None:
    base = replace(noisy(1), golden_key=None)
    assert verdict(pair(base, base, options=INVARIANT)) is Verdict.PASS


def test_promised_bits_without_anything_to_compare_are_weak() -> None:
    run = answer(RED, undecided=[10], stages=False)
    features = frozenset(FEATURES) - {"stages", "kv"}
    assert verdict(pair(run, run, options=INVARIANT, features=features)) is Verdict.WEAK


def test_a_swap_is_legal_only_at_a_near_tie() -> None:
    base = answer(RED, undecided=[10])
    legal = answer(RED, undecided=[10], choices={10: OTHER})
    wrong = answer(RED, undecided=[10], choices={9: int(RED.output.top_ids[9, 1])})
    assert verdict(pair(base, legal)) is Verdict.WEAK
    assert verdict(pair(base, wrong)) is Verdict.FAIL


def test_an_illegal_text_with_equal_ids_fails_within_the_band_too() -> None:
    base = answer(RED, undecided=[10])
    assert verdict(pair(base, replace(base, output=replace(out(base), text="?")))) is Verdict.FAIL


def test_an_early_finish_in_an_arm_fails() -> None:
    base = answer(RED, undecided=[10])
    short = replace(base, output=replace(out(base), token_ids=(out(base).token_ids or ())[:-1]))
    assert verdict(pair(base, short)) is Verdict.FAIL


def test_a_request_that_was_not_served_in_an_arm_fails() -> None:
    base = answer(RED, undecided=[10])
    assert verdict(pair(base, replace(base, output=None))) is Verdict.FAIL


def test_other_prompt_ids_in_an_arm_fail() -> None:
    base = answer(RED, undecided=[10])
    assert (
        verdict(pair(base, replace(base, output=replace(out(base), prompt_token_ids=(1,))))) is Verdict.FAIL
    )


# ---- which arms are due ---------------------------------------------------------------------------


def free(**changes: Any) -> History:
    return make_history([make_pass("free", [answer(RED)], **changes)])


@pytest.mark.parametrize(
    ("axis", "value", "lost"),
    [
        ("chunk", 3, "chunked_prefill"),
        ("block_size", 4, "block_size"),
        ("prefix_cache", "hit", "prefix_cache"),
        ("preempt", 2, "preempt"),
        ("preempt", 2, "stepped"),
        ("batch", "late", "stepped"),
        ("poison", "on", "poison"),
    ],
)
def test_a_missing_arm_is_skipped_only_if_the_engine_cannot_run_it(axis: str, value: Any, lost: str) -> None:
    spec = Spec("same_under", {axis: [value]})
    assert verdict(free(), spec) is Verdict.ERROR
    cannot = replace(free(), capabilities=replace(free().capabilities, features=frozenset(FEATURES) - {lost}))
    assert verdict(cannot, spec) is Verdict.SKIP


@pytest.mark.parametrize(("axis", "value"), [("backend", "sdpa"), ("threads", 2), ("chunk", 3)])
def test_an_option_the_engine_does_not_honour_skips_its_arm(axis: str, value: Any) -> None:
    deaf = replace(free(), capabilities=replace(free().capabilities, options=frozenset()))
    assert verdict(deaf, Spec("same_under", {axis: [value]})) is Verdict.SKIP


def test_an_arm_the_runner_left_out_is_skipped_with_its_reason() -> None:
    note = Operation("arm_not_offered", {"axis": "order", "value": "reversed"}, "it serves one at a time")
    finding = first(free(operations=(note,)), Spec("same_under", {"order": ["reversed"]}))
    assert finding.verdict is Verdict.SKIP
    assert "one at a time" in finding.message


def every(count: int) -> History:
    run = answer(RED, undecided=[10])
    lost = {"event": "preempted", "request_id": "red", "mode": "recompute"}
    arms = [make_pass(f"preempt={k}", [run], events=(*make_events([run]), lost)) for k in range(1, count + 1)]
    return make_history([make_pass("free", [run]), *arms])


def test_preempt_every_needs_an_arm_for_each_step_that_left_a_request_alive() -> None:
    spec = Spec("same_under", {"preempt": "every"})
    # 24 tokens take 24 steps (the prompt's step gives the first); nobody is alive after the last.
    assert verdict(every(23), spec) is Verdict.PASS
    assert verdict(every(22), spec) is Verdict.ERROR
    assert verdict(every(0), spec) is Verdict.ERROR


def test_preempt_every_and_further_steps_may_be_asked_together() -> None:
    assert verdict(every(24), Spec("same_under", {"preempt": ["every", 24]})) is Verdict.PASS
    assert verdict(every(23), Spec("same_under", {"preempt": ["every", 24]})) is Verdict.ERROR


def test_preempt_every_is_skipped_where_nobody_can_be_preempted() -> None:
    h = free()
    cannot = replace(h, capabilities=replace(h.capabilities, features=frozenset(FEATURES) - {"preempt"}))
    assert verdict(cannot, Spec("same_under", {"preempt": "every"})) is Verdict.SKIP


def modes(count: int, mode: str = "swap") -> History:
    run = answer(RED, undecided=[10])
    events = (
        {"event": "preempted", "request_id": "red", "mode": mode},
        {"event": "swapped_in", "request_id": "red"},
    )
    arms = [
        make_pass(
            f"preemption={mode}@{k}",
            [run],
            events=(*make_events([run]), *events),
            options={"preemption_mode": mode},
        )
        for k in range(1, count + 1)
    ]
    return make_history([make_pass("free", [run]), *arms])


def test_preemption_needs_an_arm_per_mode_for_each_step_that_left_a_request_alive() -> None:
    spec = Spec("same_under", {"preemption": ["swap"]})
    assert verdict(modes(23), spec) is Verdict.PASS
    assert verdict(modes(22), spec) is Verdict.ERROR
    assert verdict(modes(23), Spec("same_under", {"preemption": ["swap", "recompute"]})) is Verdict.ERROR
    assert verdict(modes(23, "recompute"), Spec("same_under", {"preemption": ["recompute"]})) is Verdict.PASS


def test_preemption_is_skipped_where_nobody_can_be_preempted() -> None:
    h = free()
    cannot = replace(h, capabilities=replace(h.capabilities, features=frozenset(FEATURES) - {"preempt"}))
    assert verdict(cannot, Spec("same_under", {"preemption": ["swap"]})) is Verdict.SKIP


def test_only_named_requests_are_compared() -> None:
    base, blue = answer(RED, undecided=[10]), answer(RED, name="blue")
    one = make_pass("free", [base, blue])
    arm = make_pass("chunk=3", [base], events=make_events([base], chunk=3))
    both, named = CHUNK, Spec("same_under", {"chunk": [3], "requests": ["red"]})
    assert verdict(make_history([one, arm]), both) is Verdict.ERROR
    assert verdict(make_history([one, arm]), named) is Verdict.PASS


def test_aborted_requests_are_not_compared() -> None:
    base, gone = answer(RED, undecided=[10]), answer(RED, name="gone")
    one = make_pass("free", [base, gone])
    one = replace(one, operations=(*one.operations, Operation("abort", ["gone"])))
    arm = make_pass("chunk=3", [base], events=make_events([base], chunk=3))
    found = judge(make_history([one, arm]), [CHUNK], records_of(RED))
    assert [f.request for f in found.findings] == ["red"]
