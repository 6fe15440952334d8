"""What correct engines do is accepted: rounding, near ties, other orders of equal entries.

And by property: any change of a single judged number beyond the band is caught, any noise within
the yardstick is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.adapters.base import FEATURES, EngineError, TokenLogprob
from conformance.checks import judge
from conformance.history import History, Operation, RequestRun
from conformance.testing import (
    EAGER,
    M,
    R,
    Spec,
    answer,
    make_events,
    make_history,
    make_pass,
    make_record,
    records_of,
    replace_run,
    text_of,
)
from conformance.verdicts import Verdict

TOKENS, LOGITS, LOGPROBS = (
    Spec(name) for name in ("tokens_match_golden", "logits_within_yardstick", "logprobs_by_value")
)
RED = make_record("red")
BLUE = make_record("blue")
SHORT = [make_record(name, positions=6) for name in ("one", "two", "three")]
SWAP = make_record("swap", undecided=[10])
OTHER = int(SWAP.output.top_ids[10, 1])
RECORDS = records_of(RED, BLUE, SWAP, *SHORT)


def rounding(seed: int, rms: float = R) -> Any:
    """Noise as large as the yardstick itself: rms R, none beyond M."""

    def add(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        noise = np.random.default_rng(seed).normal(0, rms, logits.shape)
        return logits + np.clip(noise, -M, M)

    return add


def history(*runs: RequestRun, **kwargs: Any) -> History:
    return make_history([make_pass("free", runs)], **kwargs)


def verdict(h: History, *specs: Spec) -> Verdict:
    return judge(h, specs, RECORDS).verdict


@pytest.mark.parametrize("seed", range(5))
def test_rounding_of_the_yardsticks_own_size_passes(seed: int) -> None:
    run = answer(RED, noise=rounding(seed), prompt_logprobs=3)
    assert verdict(history(run), TOKENS, LOGITS, LOGPROBS, Spec("sampled_within_kept_set")) is Verdict.PASS


def test_rounding_twice_the_yardstick_passes() -> None:
    run = answer(RED, noise=lambda x: rounding(1)(rounding(2)(rounding(3)(x))))
    assert verdict(history(run), TOKENS, LOGITS, LOGPROBS) is Verdict.PASS


def test_one_logit_off_by_just_under_four_m_passes() -> None:
    def one(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        logits = logits.copy()
        logits[3, int(RED.output.top_ids[3, 2])] += 3.9 * M
        return logits

    assert verdict(history(answer(RED, noise=one, prompt_logprobs=None)), TOKENS, LOGITS) is Verdict.PASS


def test_a_swap_at_an_undecided_position_then_the_forced_pass_is_noise() -> None:
    free = answer(SWAP, undecided=[10], choices={10: OTHER})
    forced = answer(SWAP, undecided=[10], choices={10: OTHER}, forced=True)
    h = make_history([make_pass("free", [free]), make_pass("forced", [forced])])
    found = judge(h, (TOKENS, LOGITS), RECORDS)
    assert found.verdict is Verdict.NOISE
    assert (found.power.judged, found.power.decided, found.power.unjudged) == (24, 23, 0)


def test_the_forced_pass_may_choose_either_way_at_the_near_tie() -> None:
    free = answer(SWAP, undecided=[10], choices={10: OTHER})
    forced = answer(SWAP, undecided=[10], forced=True)
    h = make_history([make_pass("free", [free]), make_pass("forced", [forced])])
    assert verdict(h, TOKENS, LOGITS) is Verdict.NOISE


def test_without_a_forced_pass_the_rest_is_unjudged_and_never_passes() -> None:
    run = answer(SWAP, undecided=[10], choices={10: OTHER})
    found = judge(history(run), (TOKENS, LOGITS), RECORDS)
    assert found.verdict is Verdict.WEAK
    assert found.power.unjudged == 13


def test_after_a_legal_swap_another_length_and_ending_are_legal() -> None:
    run = answer(SWAP, undecided=[10], choices={10: OTHER})
    assert run.output is not None
    assert run.output.token_ids is not None
    ids = run.output.token_ids[:15]
    stopped = replace(
        run,
        output=replace(run.output, token_ids=ids, text=text_of(ids), finish_reason="stop"),
        output_rows=run.output_rows[:15],
    )
    assert verdict(history(stopped), TOKENS, LOGITS) is Verdict.WEAK


@pytest.mark.parametrize("way", [-1, 1])
def test_ties_of_logprobs_may_stand_in_either_order(way: int) -> None:
    def tie(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return logits

    run = answer(SWAP, undecided=[10], noise=tie)
    assert run.output is not None
    assert run.output.logprobs is not None
    lists = list(run.output.logprobs)
    first, second, *rest = lists[10]
    equal = [replace(first, rank=1), replace(second, logprob=first.logprob, rank=2)]
    if way < 0:
        equal = [replace(equal[1], rank=1), replace(equal[0], rank=2)]
    lists[10] = (*equal, *rest)
    tied = replace(run, output=replace(run.output, logprobs=tuple(lists)))
    assert verdict(history(tied), LOGPROBS) is Verdict.PASS


def test_equal_ranks_of_equal_logprobs_are_legal() -> None:
    run = answer(SWAP, undecided=[10])
    assert run.output is not None
    assert run.output.logprobs is not None
    lists = list(run.output.logprobs)
    first, second, *rest = lists[10]
    lists[10] = (replace(first, rank=2), replace(second, logprob=first.logprob, rank=2), *rest)
    assert (
        verdict(history(replace(run, output=replace(run.output, logprobs=tuple(lists)))), LOGPROBS)
        is Verdict.PASS
    )


def test_logprobs_without_ranks_are_legal() -> None:
    run = answer(RED)
    assert run.output is not None
    lists = tuple(tuple(replace(e, rank=None) for e in es) for es in run.output.logprobs or ())
    assert (
        verdict(history(replace(run, output=replace(run.output, logprobs=lists))), LOGPROBS) is Verdict.PASS
    )


@pytest.mark.parametrize("count", [0, 1, 20, 25])
def test_any_asked_number_of_logprobs_is_judged(count: int) -> None:
    assert verdict(history(answer(RED, logprobs=count, prompt_logprobs=count)), LOGPROBS) is Verdict.PASS


def test_a_logprob_rounded_a_hair_above_zero_is_legal() -> None:
    run = answer(RED, sampling={"temperature": 1.0}, logprobs=1)
    assert run.output is not None
    lists = tuple((TokenLogprob(es[0].token_id, 1e-7, 1),) for es in run.output.logprobs or ())
    h = history(replace(run, golden_key=None, output=replace(run.output, logprobs=lists)))
    assert verdict(h, LOGPROBS) is Verdict.WEAK  # form only: a sampled request has no golden


def test_short_cases_are_pooled_and_pass() -> None:
    found = judge(history(*(answer(r, noise=rounding(4)) for r in SHORT)), (LOGITS,), RECORDS)
    assert found.verdict is Verdict.PASS
    assert not any("too few" in f.message for f in found.findings)


def test_a_single_short_case_is_judged_by_its_largest_error_and_says_so() -> None:
    found = judge(history(answer(SHORT[0], noise=rounding(4, 3 * R))), (LOGITS,), RECORDS)
    assert found.verdict is Verdict.PASS
    assert "too few to judge by rms (6 positions)" in found.findings[0].message


def test_a_bias_is_caught_in_the_pool_of_short_cases() -> None:
    runs = [answer(r, noise=lambda x: x + 3.5 * M * np.sign(np.sin(x * 1e3))) for r in SHORT]
    assert verdict(history(*runs), LOGITS) is Verdict.FAIL


@pytest.mark.parametrize("as_text_only", [False, True])
def test_the_first_words_leading_space_may_be_shown_or_not_but_nothing_more(as_text_only: bool) -> None:
    run = answer(RED, logprobs=None)
    assert run.output is not None
    bare = RED.text.removeprefix(" ")

    def judged(text: str) -> Verdict:
        assert run.output is not None
        changed = replace(run.output, text=text)
        if as_text_only:
            changed = replace(changed, token_ids=None, choice_token_ids=None)
        return verdict(history(replace(run, output=changed)), TOKENS)

    right = Verdict.WEAK if as_text_only else Verdict.PASS
    assert judged(bare) is right
    assert judged(" " + bare) is right
    assert judged("  " + bare) is Verdict.FAIL
    assert judged(bare + " ") is Verdict.FAIL


def test_an_aborted_request_may_hold_any_prefix_of_the_truth() -> None:
    run = answer(RED, logprobs=None)
    assert run.output is not None
    ids = RED.token_ids[:9]
    cut = replace(
        run,
        output=replace(run.output, token_ids=ids, text=text_of(ids[:8]), finish_reason="abort"),
        output_rows=run.output_rows[:9],
    )
    one = make_pass("free", [cut])
    one = replace(one, operations=(*one.operations, Operation("abort", ["red"])))
    assert verdict(make_history([one]), TOKENS, LOGITS) is Verdict.PASS
    assert verdict(history(cut), TOKENS) is Verdict.FAIL  # without the abort it stopped early


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_cuts_the_truth_where_it_first_appears(included: bool) -> None:
    stop = f" w{RED.token_ids[5]} w{RED.token_ids[6]}"
    text = RED.text[: RED.text.index(stop)] + (stop if included else "")
    run = answer(
        RED, logprobs=None, sampling={"stop": [stop, "never"], "include_stop_str_in_output": included}
    )
    assert run.output is not None
    cut = replace(
        run,
        output=replace(
            run.output, token_ids=RED.token_ids[:7], text=text, finish_reason="stop", stop_reason=stop
        ),
        output_rows=run.output_rows[:7],
    )
    assert verdict(history(cut), TOKENS, Spec("text_equals", {"red": {"golden": True}})) is Verdict.PASS
    assert cut.output is not None
    late = replace(cut, output=replace(cut.output, text=text + " w"))
    assert verdict(history(late), TOKENS) is Verdict.FAIL


def test_bits_may_differ_where_no_bits_are_promised() -> None:
    base = answer(RED, noise=rounding(1))
    other = replace(answer(RED, noise=rounding(2)), kv_digests=("other", "bits"))
    arm = make_pass("chunk=3", [other], events=make_events([other], chunk=3))
    h = make_history([make_pass("free", [base]), arm])
    assert verdict(h, Spec("same_under", {"chunk": [3]})) is Verdict.PASS


def test_a_legal_swap_in_an_arm_is_weak_not_wrong() -> None:
    base = answer(SWAP, undecided=[10])
    other = answer(SWAP, undecided=[10], choices={10: OTHER})
    arm = make_pass("chunk=3", [other], events=make_events([other], chunk=3))
    assert (
        verdict(make_history([make_pass("free", [base]), arm]), Spec("same_under", {"chunk": [3]}))
        is Verdict.WEAK
    )


def test_a_request_that_is_expected_to_fail_is_not_judged_by_its_golden() -> None:
    bad = RequestRun("bad", {"temperature": 0.0}, None, refused=EngineError("CapacityError", "too large"))
    error = Spec("error", {"bad": "CapacityError"})
    assert verdict(history(answer(RED), bad), TOKENS, error) is Verdict.PASS
    assert verdict(history(answer(RED), bad), TOKENS) is not Verdict.PASS


# ---- engines that show less ----------------------------------------------------------------------


def less(*lost: str) -> frozenset[str]:
    return frozenset(FEATURES) - set(lost)


def test_an_engine_with_logprobs_only_is_judged_by_them() -> None:
    run = answer(RED, stages=False, logprobs=20, noise=rounding(1))
    found = judge(history(run, features=less("stages", "bitwise")), (LOGITS,), RECORDS)
    assert found.verdict is Verdict.PASS
    assert "logprobs" in found.power.kinds
    assert "logits" in found.power.blind


def test_a_biased_logprob_is_caught_without_logits() -> None:
    run = answer(RED, stages=False, logprobs=20, noise=lambda x: x * (1 + 1e-4))
    assert verdict(history(run, features=less("stages", "bitwise")), LOGITS) is Verdict.FAIL


def test_an_engine_with_no_numbers_is_skipped_with_the_reason_not_passed() -> None:
    run = answer(RED, stages=False, logprobs=None)
    found = judge(history(run, features=less("stages", "logprobs")), (LOGITS,), RECORDS)
    assert found.verdict is Verdict.SKIP
    assert "'stages'" in found.findings[0].message
    assert "'logprobs'" in found.findings[0].message


def test_tokens_pass_beside_a_skipped_check_make_a_scenario_weak() -> None:
    run = answer(RED, stages=False, logprobs=None)
    assert verdict(history(run, features=less("stages", "logprobs")), TOKENS, LOGITS) is Verdict.WEAK


def text_only(text: str) -> History:
    run = answer(RED, stages=False, logprobs=None)
    assert run.output is not None
    output = replace(run.output, token_ids=None, choice_token_ids=None, prompt_token_ids=None, text=text)
    return history(replace(run, output=output, prompt_token_ids=None), features=less("output_ids", "stages"))


def test_an_engine_with_text_only_is_weak_at_best() -> None:
    assert verdict(text_only(RED.text), TOKENS) is Verdict.WEAK


@pytest.mark.parametrize("text", ["", RED.text[:-1], RED.text + " w1", "garbage"])
def test_wrong_text_is_caught_where_every_position_is_decided(text: str) -> None:
    assert verdict(text_only(text), TOKENS) is Verdict.FAIL


def test_an_engine_that_tells_no_prompt_ids_is_weak() -> None:
    run = answer(RED)
    assert run.output is not None
    blind = replace(run, prompt_token_ids=None, output=replace(run.output, prompt_token_ids=None))
    assert verdict(history(blind), TOKENS) is Verdict.WEAK


def test_bfloat16_is_weak_on_a_real_model_and_strong_on_a_recall_checkpoint() -> None:
    for model, expected in (("smollm2-135m-instruct", Verdict.WEAK), ("recall-llama", Verdict.PASS)):
        record = make_record("red", dtype="bfloat16", model=model)
        h = history(answer(record), dtype="bfloat16", model=model)
        assert judge(h, (TOKENS, LOGITS, LOGPROBS), records_of(record)).verdict is expected


def test_strict_holds_long_cases_to_twice_the_eager_cached_arm() -> None:
    def off(rms: float) -> History:
        return history(answer(RED, noise=lambda x: x + rms * np.where(np.arange(x.shape[-1]) % 2, 1, -1)))

    strict = Spec("logits_within_yardstick", {"strict": True})
    assert verdict(off(1.9 * EAGER.rms), strict) is Verdict.PASS
    assert verdict(off(2.1 * EAGER.rms), strict) is Verdict.FAIL
    assert verdict(off(2.1 * EAGER.rms), LOGITS) is Verdict.PASS
    assert judge(off(2.1 * EAGER.rms), (LOGITS,), RECORDS, strict=True).verdict is Verdict.FAIL


# ---- properties ----------------------------------------------------------------------------------

POSITIONS = st.integers(0, 23)


@settings(max_examples=60, deadline=None)
@given(
    position=POSITIONS,
    index=st.integers(0, 19),
    times=st.floats(4.05, 1e7),
    sign=st.sampled_from([-1, 1]),
    noise=st.integers(0, 50),
)
def test_any_logit_beyond_four_m_at_a_judged_id_is_caught(
    position: int, index: int, times: float, sign: int, noise: int
) -> None:
    def change(run: RequestRun) -> RequestRun:
        rows = list(run.output_rows)
        values = list(rows[position].values)
        values[index] = float(RED.output.top_logits[position, index]) + sign * times * M
        rows[position] = replace(rows[position], values=tuple(values))
        return replace(run, output_rows=tuple(rows))

    h = replace_run(history(answer(RED, noise=rounding(noise))), change)
    found = judge(h, (LOGITS,), RECORDS)
    assert found.verdict is Verdict.FAIL
    assert found.findings[0].position == position


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rms=st.floats(0, 2.5 * R),
    shape=st.sampled_from(["normal", "uniform", "sign"]),
)
def test_any_noise_within_the_band_is_accepted(seed: int, rms: float, shape: str) -> None:
    def add(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        rng = np.random.default_rng(seed)
        raw = {
            "normal": rng.normal(0, 1, logits.shape),
            "uniform": rng.uniform(-(3**0.5), 3**0.5, logits.shape),
            "sign": rng.choice([-1.0, 1.0], logits.shape),
        }[shape]
        return logits + np.clip(rms * raw, -3.9 * M, 3.9 * M)

    run = answer(RED, noise=add, prompt_logprobs=4)
    assert verdict(history(run), TOKENS, LOGITS, LOGPROBS) is Verdict.PASS


@settings(max_examples=60, deadline=None)
@given(position=POSITIONS, token=st.integers(0, 63))
def test_any_other_id_at_a_decided_position_is_caught_there(position: int, token: int) -> None:
    if token == RED.token_ids[position]:
        return
    found = judge(history(answer(RED, choices={position: token}, logprobs=None)), (TOKENS,), RECORDS)
    assert found.verdict is Verdict.FAIL
    assert found.findings[0].position == position


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 40).filter(lambda n: n != 24))
def test_any_other_length_is_caught(length: int) -> None:
    run = answer(RED, logprobs=None)
    assert run.output is not None
    ids = (RED.token_ids * 2)[:length]
    output = replace(run.output, token_ids=ids, text=text_of(ids))
    rows = (run.output_rows * 2)[:length]
    assert verdict(history(replace(run, output=output, output_rows=rows)), TOKENS) is Verdict.FAIL


@settings(max_examples=60, deadline=None)
@given(position=POSITIONS, index=st.integers(0, 4), off=st.floats(5.5, 1e6), sign=st.sampled_from([-1, 1]))
def test_any_logprob_beyond_its_band_is_caught(position: int, index: int, off: float, sign: int) -> None:
    def change(run: RequestRun) -> RequestRun:
        assert run.output is not None
        lists = list(run.output.logprobs or ())
        entries = list(lists[position])
        entries[index] = replace(entries[index], logprob=entries[index].logprob + sign * off * M)
        lists[position] = tuple(entries)
        return replace(run, output=replace(run.output, logprobs=tuple(lists)))

    assert verdict(replace_run(history(answer(RED)), change), LOGPROBS) is Verdict.FAIL


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 23), bit=st.sampled_from(["logits", "kv"]))
def test_any_bit_that_differs_in_an_invariant_arm_is_caught(position: int, bit: str) -> None:
    base = answer(RED)
    if bit == "logits":
        rows = list(base.output_rows)
        rows[position] = replace(rows[position], digest="different")
        other = replace(base, output_rows=tuple(rows))
    else:
        other = replace(base, kv_digests=("k0", "different"))
    options = {"batch_invariant": True}
    arm = make_pass("chunk=3", [other], options=options, events=make_events([other], chunk=3))
    h = make_history([make_pass("free", [base], options=options), arm])
    assert verdict(h, Spec("same_under", {"chunk": [3]})) is Verdict.FAIL
