from __future__ import annotations

from typing import Any

import pytest

from minivllm.errors import BadParameter
from minivllm.request import SamplingParams
from minivllm.sampling import bad_word_token_ids, check_sampling


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {3: 1.0, 10: 1.0}},
        {"forced_token_ids": [0, 10]},
        {"stop_token_ids": [10]},
        {"logprobs": 11},
        {"prompt_logprobs": 11},
    ],
)
def test_a_parameter_beyond_the_vocabulary_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=next(iter(params))):
        check_sampling(SamplingParams(**params), 10)


def test_everything_wrong_is_named_at_once() -> None:
    params = SamplingParams(logit_bias={10: 1.0}, forced_token_ids=[12, 11], logprobs=99)
    with pytest.raises(BadParameter) as raised:
        check_sampling(params, 10)
    assert str(raised.value) == (
        "logit_bias holds [10], and token ids end at 9; forced_token_ids holds [11, 12], and token ids end "
        "at 9; logprobs is 99, and the vocabulary has 10 tokens (-1 returns all)"
    )


def test_the_last_token_and_the_whole_vocabulary_are_accepted() -> None:
    check_sampling(
        SamplingParams(
            logit_bias={9: 1.0}, forced_token_ids=[9], stop_token_ids=[9], logprobs=10, prompt_logprobs=-1
        ),
        10,
    )


class Letters:
    """One token per letter; " a" is a token of its own, and so is "ab"."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        whole = {" ab": [500], "ab": [97, 98], " a": [400], "": []}
        return whole.get(text, [ord(c) for c in text])


def test_a_bad_word_is_banned_without_and_with_a_leading_space() -> None:
    assert bad_word_token_ids(["ab", "a"], Letters()) == ((97, 98), (500,), (97,), (400,))


def test_leading_spaces_of_a_bad_word_do_not_matter_and_spellings_are_not_repeated() -> None:
    assert bad_word_token_ids(["  a", "a"], Letters()) == ((97,), (400,))


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    assert bad_word_token_ids([], None) == ()
    with pytest.raises(BadParameter, match="tokenizer"):
        bad_word_token_ids(["a"], None)


def test_a_bad_word_that_encodes_to_nothing_is_refused() -> None:
    class Nothing:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002  (protocol)
            return []

    with pytest.raises(BadParameter, match="no tokens"):
        bad_word_token_ids(["x"], Nothing())
