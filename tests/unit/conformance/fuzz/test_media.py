"""The model of an encoder cache says which law of it a plan breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from conformance.contracts.base import Span
from conformance.fuzz.laws import LawBroken
from conformance.fuzz.media import MediaLedger

A, B = Span(1, 3, "a3"), Span(5, 4, "b4")

Chunk = tuple[Sequence[Span], int, int]


def ledger(budget: int = 7) -> MediaLedger:
    made = MediaLedger(budget, Counter())
    made.know((A, B))
    return made


def step(media: MediaLedger, encode: Sequence[str], evict: Sequence[str], *chunks: Chunk) -> None:
    media.judge(encode, evict, chunks)
    media.carried_out()


def test_a_cache_that_keeps_the_law_is_judged_good_and_counted() -> None:
    seen: Counter[str] = Counter()
    media = MediaLedger(4, seen)
    media.know((A, B))
    step(media, ["a3"], [], ([A, B], 0, 3), ([A], 1, 2))
    step(media, [], [], ([A, B], 3, 5))
    step(media, ["b4"], ["a3"], ([A, B], 5, 9))
    step(media, ["a3"], ["b4"], ([A], 3, 4))
    assert seen == {
        "image encoded": 3,
        "image encoded again": 1,
        "image evicted": 2,
        "image shared in a step": 1,
        "chunk inside an image": 2,
    }


def test_a_plan_that_was_given_up_counts_for_nothing() -> None:
    media = ledger()
    media.judge(["a3"], [], [([A], 0, 4)])
    step(media, ["a3"], [], ([A], 0, 4))


def test_after_a_step_that_broke_off_everything_is_encoded_anew() -> None:
    media = ledger()
    step(media, ["a3"], [], ([A], 0, 4))
    media.judge([], [], [([A], 1, 2)])
    media.forget()
    with pytest.raises(LawBroken, match="neither held nor encoded"):
        media.judge([], [], [([A], 1, 2)])
    step(media, ["a3"], [], ([A], 1, 2))


@pytest.mark.parametrize(
    ("encode", "evict", "chunks", "message"),
    [
        ([], [], [([A], 0, 2)], r"\['a3'\] are needed, but neither held nor encoded"),
        (["a3"], [], [([A], 0, 1)], r"\['a3'\] are encoded, but no row needs them"),
        (["a3", "a3"], [], [([A], 0, 2)], "encoded"),
        ([], ["a3"], [], r"\['a3'\] are evicted, but not held"),
        (["a3", "b4"], [], [([A, B], 0, 9)], "7 rows of .*, at most 6 are allowed"),
    ],
)
def test_each_way_to_break_it_is_named(
    encode: list[str], evict: list[str], chunks: list[Chunk], message: str
) -> None:
    with pytest.raises(LawBroken, match=message):
        ledger(6).judge(encode, evict, chunks)


def test_what_is_held_must_not_be_encoded_and_what_is_pinned_not_evicted() -> None:
    media = ledger()
    step(media, ["a3"], [], ([A], 0, 4))
    with pytest.raises(LawBroken, match=r"\['a3'\] are encoded, \['a3'\] are held already"):
        media.judge(["a3"], [], [([A], 0, 4)])
    with pytest.raises(LawBroken, match="neither held nor encoded"):
        media.judge([], ["a3"], [([A], 0, 4)])
