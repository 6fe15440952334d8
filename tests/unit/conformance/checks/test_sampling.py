"""The independent sampler: bounded, and never contradicting a full one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from conformance.checks import judge
from conformance.checks.sampling import kept
from conformance.history import RequestRun
from conformance.testing import Spec, answer, logit_row, make_history, make_pass, make_record, records_of
from conformance.verdicts import Verdict

VOCAB, TOP = 60, 20
RED = make_record("red")


def row_of(logits: NDArray[np.float64]) -> Any:
    return logit_row(logits, np.argsort(-logits, kind="stable")[:TOP].tolist())


def full_sampler(
    logits: NDArray[np.float64], sampling: dict[str, Any], prompt: list[int], history: list[int]
) -> set[int]:
    """The kept set over the whole vocabulary, written as plainly as possible."""
    x = logits.copy()
    for token, bias in (sampling.get("logit_bias") or {}).items():
        x[token] += bias
    repetition = sampling.get("repetition_penalty", 1.0)
    for token in {*prompt, *history}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(history):
        x[token] -= sampling.get("frequency_penalty", 0.0) * history.count(token)
        x[token] -= sampling.get("presence_penalty", 0.0)
    temperature = sampling["temperature"]
    if temperature == 0:
        return {int(x.argmax())}
    x = x / temperature
    p = np.exp(x - x.max())
    alive = p >= sampling.get("min_p", 0.0)
    if sampling.get("top_k", 0) > 0:
        order = np.argsort(-np.where(alive, x, -np.inf), kind="stable")
        alive[order[sampling["top_k"] :]] = False
    if sampling.get("top_p", 1.0) < 1:
        share = np.where(alive, p, 0)
        share = share / share.sum()
        order = np.argsort(-share, kind="stable")
        before = np.cumsum(share[order]) - share[order]
        alive[order[before >= sampling["top_p"]]] = False
    return set(np.flatnonzero(alive).tolist())


SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5])},
    optional={
        "top_k": st.sampled_from([0, 1, 3, 19, 40]),
        "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 4.0]), max_size=3),
    },
)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    sampling=SAMPLING,
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    history=st.lists(st.integers(0, VOCAB - 1), max_size=5),
)
def test_it_never_contradicts_a_full_sampler(
    seed: int, scale: float, sampling: dict[str, Any], prompt: list[int], history: list[int]
) -> None:
    logits = np.random.default_rng(seed).normal(0, scale, VOCAB)
    allowed = full_sampler(logits, sampling, prompt, history)
    row = row_of(logits)
    for token in range(VOCAB):
        answered = kept(row, token, sampling, prompt, history)
        assert answered in (None, token in allowed)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.4, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.1},
    ],
)
def test_common_settings_are_decided_for_every_listed_id(sampling: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 3, VOCAB)
    row = row_of(logits)
    allowed = full_sampler(logits, sampling, [], [])
    assert {t for t in row.ids if kept(row, t, sampling, (), ())} == allowed


def test_equal_largest_logits_go_to_the_lowest_id() -> None:
    logits = np.zeros(VOCAB)
    logits[[7, 9]] = 5.0
    row = row_of(logits)
    assert kept(row, 7, {"temperature": 0.0}, (), ()) is True
    assert kept(row, 9, {"temperature": 0.0}, (), ()) is False


@pytest.mark.parametrize("sampling", [{"bad_words": ["x"]}, {"min_tokens": 5}])
def test_masks_that_only_the_tokenizer_knows_are_not_guessed(sampling: dict[str, Any]) -> None:
    row = row_of(np.arange(VOCAB, dtype=np.float64))
    assert kept(row, 3, {"temperature": 0.0, **sampling}, (), (1, 2)) is None


def test_a_bias_that_raises_an_unlisted_id_leaves_the_answer_open() -> None:
    row = row_of(np.arange(VOCAB, dtype=np.float64))
    assert kept(row, VOCAB - 1, {"temperature": 0.0, "logit_bias": {0: 100.0}}, (), ()) is None


def sampled(tokens: dict[int, int], **sampling: Any) -> RequestRun:
    """A run at temperature 1, whose ids at some positions are replaced."""
    run = answer(RED, logprobs=None, sampling={"temperature": 1.0, **sampling})
    assert run.output is not None
    ids = tuple(tokens.get(i, t) for i, t in enumerate(run.output.token_ids or ()))
    return replace(run, golden_key=None, output=replace(run.output, token_ids=ids))


def verdict(run: RequestRun) -> Verdict:
    h = make_history([make_pass("free", [run])])
    return judge(h, [Spec("sampled_within_kept_set")], records_of()).verdict


def test_ids_of_the_kept_set_pass() -> None:
    second = int(RED.output.top_ids[4, 1])
    assert verdict(sampled({4: second}, top_k=2)) is Verdict.PASS


def test_an_id_outside_of_the_kept_set_fails() -> None:
    third = int(RED.output.top_ids[4, 2])
    assert verdict(sampled({4: third}, top_k=2)) is Verdict.FAIL


def test_an_unlisted_id_leaves_the_scenario_weak() -> None:
    unlisted = next(i for i in range(64) if i not in RED.output.top_ids[4].tolist())
    assert verdict(sampled({4: unlisted})) is Verdict.WEAK


def test_the_engines_own_choice_is_judged_under_forcing() -> None:
    forced = answer(RED, forced=True, choices={3: int(RED.output.top_ids[3, 5])})
    assert verdict(replace(forced, golden_key=None)) is Verdict.FAIL


def test_no_row_per_token_fails() -> None:
    run = sampled({})
    assert verdict(replace(run, output_rows=run.output_rows[:-1])) is Verdict.FAIL
