"""The recall task has one answer per prompt, in text and in ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.recipes.recall import (
    AGAIN,
    ALPHABET,
    BOS,
    CONFIG,
    EOS,
    SEP,
    answer_ids,
    make_recall_tokenizer,
    prompt_ids,
    word_id,
)

lists = st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=ALPHABET, unique=True)


def test_a_prompt_is_bos_words_sep() -> None:
    assert prompt_ids([5, 0]) == [BOS, word_id(0, 5), word_id(0, 0), SEP]


def test_an_answer_says_the_list_in_two_more_alphabets() -> None:
    assert answer_ids([5, 0]) == [word_id(1, 5), word_id(1, 0), AGAIN, word_id(2, 5), word_id(2, 0), EOS]


@given(words=lists)
def test_every_id_but_the_last_stands_once(words: list[int]) -> None:
    sequence = prompt_ids(words) + answer_ids(words)
    assert len(set(sequence)) == len(sequence)
    assert max(sequence) < CONFIG["vocab_size"]
    assert len(sequence) <= CONFIG["max_position_embeddings"]


@pytest.mark.parametrize("words", [[], [3, 3], [ALPHABET], [-1]])
def test_a_list_without_one_answer_is_refused(words: list[int]) -> None:
    with pytest.raises(ValueError, match="all distinct and in 0…61"):
        prompt_ids(words)


def test_the_vocabulary_is_full() -> None:
    assert word_id(2, ALPHABET - 1) == CONFIG["vocab_size"] - 1


@given(words=lists)
def test_the_tokenizer_writes_prompts_as_words(words: list[int]) -> None:
    tokenizer = make_recall_tokenizer()
    text = " ".join(f"w{w}" for w in words) + " <sep>"
    assert tokenizer.encode(text) == prompt_ids(words)
    answer = " ".join([*(f"x{w}" for w in words), *(f"y{w}" for w in words)])
    assert tokenizer.decode(answer_ids(words), skip_special_tokens=True) == answer


def test_the_chat_template_gives_the_same_prompt() -> None:
    tokenizer = make_recall_tokenizer()
    chat = [{"role": "user", "content": "w4 w2 w61"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_ids([4, 2, 61])
