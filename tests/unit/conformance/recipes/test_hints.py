"""Hints name what a question looks up, and what an object follows."""

from __future__ import annotations

import pytest

from conformance.recipes.hints import hints_of_objects, hints_of_question, word_id
from conformance.recipes.meaning import make_meaning_tokenizer, row_of
from conformance.recipes.qwen_vl import QWEN_VL_IDS
from conformance.recipes.scenes import Example, scene_of

TOKENIZER = make_meaning_tokenizer()
SCENE = scene_of([["red circle", "none", "blue seven"], ["none", "green square", "none"]])


@pytest.mark.parametrize(
    ("task", "question", "answer", "hints"),
    [
        ("count", "How many are red?", "There are one", [("red", "one")]),
        ("colour", "What colour is the seven?", "It is blue", [("seven", "blue")]),
        ("place", "What is at top right?", "It is blue seven", [("right", "blue"), ("?", "seven")]),
        ("place", "What is at top centre?", "It is nothing", [("centre", "nothing"), ("?", "nothing")]),
        ("caption", "What is shown?", "Shown: red circle blue seven green square", []),
    ],
)
def test_the_words_of_a_question_hint_at_the_answer(
    task: str, question: str, answer: str, hints: list[tuple[str, str]]
) -> None:
    example = Example(task, (SCENE,), question, answer)
    tokens = row_of(example, TOKENIZER).tokens
    found = list(hints_of_question(example, tokens, TOKENIZER))
    words = [(TOKENIZER.decode(tokens[h.place]).strip(), TOKENIZER.decode(h.token).strip()) for h in found]
    assert words == hints


def test_an_object_hints_at_the_one_before_it_in_its_picture() -> None:
    other = scene_of([["none", "black ring", "none"], ["yellow two", "none", "none"]])
    example = Example("two", (SCENE, other), "What is in each?", "First … second …")
    tokens = row_of(example, TOKENIZER).tokens
    first = tokens.index(QWEN_VL_IDS["image_token_id"])
    second = first + 6 + 2  # behind the end of one picture and the beginning of the next
    found = {h.place: TOKENIZER.decode(h.token) for h in hints_of_objects(example.scenes, tokens, TOKENIZER)}
    assert found == {
        first: " nothing",
        first + 2: " circle",
        first + 4: " seven",
        second + 1: " nothing",
        second + 3: " ring",
    }


def test_a_word_of_several_tokens_is_no_hint() -> None:
    with pytest.raises(ValueError, match=r"'Grüße' is \d+ tokens for this tokenizer, not one"):
        word_id(TOKENIZER, "Grüße")
