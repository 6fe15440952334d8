"""The value objects refuse nonsense and never change under their readers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadParameter
from minivllm.request import MAX_SEQUENCES, RequestStatus, SamplingParams, TokenView


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 0}, "n must"),
        ({"n": 2, "temperature": 0.0}, "n must be 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "exceeds"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": ["x"], "detokenize": False}, "detokenize"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"forced_token_ids": [1.5]}, "forced_token_ids"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": 10**400}, "temperature"),
        ({"min_p": None}, "min_p"),
        ({"min_p": "x"}, "min_p"),
        ({"min_tokens": "a"}, "min_tokens"),
        ({"min_tokens": None}, "min_tokens"),
        ({"n": "two", "temperature": 0.0}, "n must"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"detokenize": None}, "detokenize"),
        ({"stop": 5}, "stop"),
        ({"stop": b"x"}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": {5: 1}}, "stop_token_ids"),
        ({"forced_token_ids": 5}, "forced_token_ids"),
        ({"bad_words": 5}, "bad_words"),
        ({"bad_words": "abc"}, "bad_words"),
        ({"n": MAX_SEQUENCES + 1}, "n must be at most 65536, got 65537"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {1: "x"}}, "logit_bias"),
        ({"logit_bias": {1: None}}, "logit_bias"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(values: dict[str, object], word: str) -> None:
    with pytest.raises(BadParameter, match=word):
        SamplingParams(**values)  # type: ignore[arg-type]  # wrong on purpose


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(BadParameter) as refusal:
        SamplingParams(temperature=-1, top_p=0, n=0)
    assert all(word in str(refusal.value) for word in ("temperature", "top_p", "n must"))


def test_an_unknown_name_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(BadParameter, match="'temprature' \\(did you mean 'temperature'\\?\\)"):
        SamplingParams.from_dict({"temprature": 1.0})


def test_parameters_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(BadParameter, match="a mapping from name to value, got None"):
        SamplingParams.from_dict(None)  # type: ignore[arg-type]  # wrong on purpose


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_lists_may_come_as_arrays_and_be_none() -> None:
    assert SamplingParams(stop=np.array(["a", "b"])).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()  # type: ignore[arg-type]  # callers do


def test_only_finished_and_failed_are_final() -> None:
    assert {s for s in RequestStatus if s.is_final} == {RequestStatus.FINISHED, RequestStatus.FAILED}


@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_view_reads_like_the_list_it_was_taken_from(tokens: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(tokens)))
    source = list(tokens)
    view, expected = TokenView(source, length), tokens[:length]
    source.append(99)
    assert view == expected
    assert list(view) == expected
    index = data.draw(st.slices(length + 3))
    assert view[index] == expected[index]
    if length:
        i = data.draw(st.integers(-length, length - 1))
        assert view[i] == expected[i]
    with pytest.raises(IndexError):
        view[length]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-12, 12), st.integers(-12, 12))
def test_a_view_slices_like_a_list_at_any_bounds(tokens: list[int], start: int, stop: int) -> None:
    view = TokenView([*tokens, 7, 7], len(tokens))
    assert view[start:stop] == tokens[start:stop]
    assert view[start:] == tokens[start:]
    assert view[:stop] == tokens[:stop]
    assert view[::-1] == tokens[::-1]
