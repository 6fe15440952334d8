"""The tokenizers round-trip text, are reproducible, and put special tokens where recipes say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from conformance.recipes.tokenizer import (
    NUM_BPE_TOKENS,
    SpecialTokens,
    text_tokenizer,
    training_sentences,
    word_tokenizer,
    wrap,
)

PLAIN = SpecialTokens(tokens=("<s>", "</s>"), pad="</s>", bos="<s>")
QWEN = SpecialTokens(tokens=("<|endoftext|>", "<|im_end|>"), pad="<|endoftext|>", qwen=True)


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return wrap(text_tokenizer(PLAIN), chat_template="", max_length=64, bos_token="<s>", eos_token="</s>")


def test_training_twice_gives_equal_bytes() -> None:
    assert text_tokenizer(PLAIN).to_str() == text_tokenizer(PLAIN).to_str()


def test_training_sentences_hold_no_randomness() -> None:
    assert list(training_sentences()) == list(training_sentences())


def test_every_byte_is_in_the_vocabulary_and_special_tokens_follow_it() -> None:
    tokenizer = text_tokenizer(PLAIN)
    assert tokenizer.get_vocab_size() == NUM_BPE_TOKENS + 2
    assert [tokenizer.token_to_id(t) for t in PLAIN.tokens] == list(PLAIN.ids.values())
    assert sum(len(token) == 1 for token in tokenizer.get_vocab()) == 256


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(plain: PreTrainedTokenizerFast, text: str) -> None:
    ids = plain.encode(text, add_special_tokens=False)
    assert plain.decode(ids) == text


@pytest.mark.parametrize("text", ["👨‍👩‍👧 emoji 🌍", "漢字とかな", "a\u0301 not composed", " \n\t  "])
def test_text_beyond_the_training_sentences_round_trips(plain: PreTrainedTokenizerFast, text: str) -> None:
    assert plain.decode(plain.encode(text), skip_special_tokens=True) == text


def test_some_tokens_are_less_than_a_character(plain: PreTrainedTokenizerFast) -> None:
    ids = plain.encode("🌍", add_special_tokens=False)
    assert len(ids) == 4
    assert "\N{REPLACEMENT CHARACTER}" in plain.decode(ids[:3])


def test_some_tokens_are_whole_words(plain: PreTrainedTokenizerFast) -> None:
    assert len(plain.encode("the engine", add_special_tokens=False)) <= 4


def test_bos_is_added_to_plain_text_once_asked_for(plain: PreTrainedTokenizerFast) -> None:
    assert plain.encode("x")[0] == PLAIN.ids["<s>"]
    assert PLAIN.ids["<s>"] not in plain.encode("x", add_special_tokens=False)


def test_without_bos_nothing_is_added() -> None:
    assert (
        text_tokenizer(QWEN).encode("x").ids == text_tokenizer(QWEN).encode("x", add_special_tokens=False).ids
    )


def test_qwen_composes_characters_and_llama_does_not() -> None:
    decomposed = "e\u0301"
    qwen, plain = text_tokenizer(QWEN), text_tokenizer(PLAIN)
    assert qwen.decode(qwen.encode(decomposed).ids) == "\xe9"
    assert plain.decode(plain.encode(decomposed).ids) == decomposed


def test_words_get_ids_after_the_special_tokens() -> None:
    tokenizer = word_tokenizer(["w0", "w1"], ["<unk>", "<s>", "<sep>"], unk="<unk>", bos="<s>")
    assert tokenizer.encode("w1 <sep>  w0").ids == [1, 4, 2, 3]


def test_an_unknown_word_becomes_the_unknown_token() -> None:
    tokenizer = word_tokenizer(["w0"], ["<unk>", "<s>"], unk="<unk>", bos="<s>")
    assert tokenizer.encode("w0w0").ids == [1, 0]


def test_word_tokenizer_text_round_trips_with_single_spaces() -> None:
    tokenizer = word_tokenizer(["w0", "w1"], ["<unk>", "<s>"], unk="<unk>", bos="<s>")
    wrapped = wrap(tokenizer, chat_template="", max_length=8, bos_token="<s>", unk_token="<unk>")
    assert wrapped.decode(wrapped.encode("w1 w0 w1"), skip_special_tokens=True) == "w1 w0 w1"


def test_a_token_given_as_none_is_left_out() -> None:
    wrapped = wrap(
        text_tokenizer(QWEN), chat_template="", max_length=8, bos_token=None, eos_token="<|im_end|>"
    )
    assert wrapped.bos_token is None
    assert wrapped.eos_token_id == QWEN.ids["<|im_end|>"]
