"""Synthetic prompts are exact in length, deterministic, and what their kind says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from conformance.prompts import Piece, filler_prompt, generate_prompt

_PIECES = TypeAdapter(list[Piece])


def prompt(*pieces: dict[str, Any]) -> tuple[int, ...]:
    return generate_prompt(_PIECES.validate_python(list(pieces)))


@settings(max_examples=40)
@given(length=st.integers(1, 300), seed=st.integers(-5, 5), low=st.integers(0, 50), span=st.integers(1, 90))
def test_random_has_its_length_and_stays_in_its_range(length: int, seed: int, low: int, span: int) -> None:
    ids = prompt({"kind": "random", "length": length, "seed": seed, "low": low, "high": low + span})
    assert len(ids) == length
    assert all(low <= i < low + span for i in ids)


@settings(max_examples=40)
@given(length=st.integers(1, 60), seed=st.integers(0, 9))
def test_distinct_never_repeats(length: int, seed: int) -> None:
    ids = prompt({"kind": "distinct", "length": length, "seed": seed, "low": 5, "high": 65})
    assert len(set(ids)) == len(ids) == length
    assert all(5 <= i < 65 for i in ids)


def test_the_ids_are_the_same_on_every_machine() -> None:
    # Golden records are found by these ids, so they may never change.
    drawn = prompt({"kind": "random", "length": 6, "seed": 1, "low": 3, "high": 400})
    assert drawn == (248, 57, 175, 27, 268, 125)
    assert prompt({"kind": "distinct", "length": 5, "seed": 2, "low": 3, "high": 100}) == (17, 78, 70, 82, 20)
    assert filler_prompt(0, 4) == (6, 9, 26, 23)


def test_another_seed_gives_another_prompt() -> None:
    one = {"kind": "random", "length": 30, "seed": 1, "low": 3, "high": 400}
    assert prompt(one) != prompt({**one, "seed": 2})


def test_a_longer_prompt_of_one_seed_begins_with_the_shorter_one() -> None:
    one = {"kind": "random", "length": 30, "seed": 1, "low": 3, "high": 400}
    assert prompt({**one, "length": 50})[:30] == prompt(one)


def test_repeat_is_cut_at_its_length() -> None:
    assert prompt({"kind": "repeat", "ids": [7, 8, 9], "length": 5}) == (7, 8, 9, 7, 8)


def test_pieces_are_joined_in_order() -> None:
    assert prompt({"kind": "ids", "ids": [1]}, {"kind": "repeat", "ids": [4], "length": 2}) == (1, 4, 4)


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        ({"kind": "random", "length": 3, "seed": 0, "low": 5, "high": 5}, "high must exceed low"),
        ({"kind": "distinct", "length": 9, "seed": 0, "low": 5, "high": 10}, "no 9 distinct ids"),
        ({"kind": "random", "length": 0, "seed": 0, "low": 5, "high": 9}, "greater than or equal to 1"),
        ({"kind": "random", "length": 3, "low": 5, "high": 9}, "seed"),
        ({"kind": "ids", "ids": []}, "at least 1 item"),
        ({"kind": "ids", "ids": [1], "length": 4}, "Extra inputs"),
        ({"kind": "shuffled", "ids": [1]}, "does not match any of the expected tags"),
        ({"kind": "ids", "ids": [True]}, "valid integer"),
    ],
)
def test_a_piece_that_makes_no_sense_is_refused(piece: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        prompt(piece)


@settings(max_examples=40)
@given(number=st.integers(0, 200), length=st.integers(1, 80))
def test_neighbours_use_ids_that_every_vocabulary_has(number: int, length: int) -> None:
    ids = filler_prompt(number, length)
    assert len(ids) == length
    assert all(3 <= i <= 31 for i in ids)


def test_neighbours_differ_from_each_other() -> None:
    assert len({filler_prompt(n, 16) for n in range(50)}) == 50
