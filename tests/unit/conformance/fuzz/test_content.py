"""Which blocks could be hit, as the model sees it."""

from __future__ import annotations

import pytest

from conformance.fuzz.content import Content
from conformance.fuzz.kv import Story
from conformance.fuzz.laws import LawBroken

VALUES = Story((1, 2, 1, 2, 1, 2)).values


def published(computed: int = 6, *, tail_first: bool = True, private: int = 0) -> Content:
    content = Content(2, tail_first=tail_first)
    content.publish([5, 6, 7], VALUES, computed, private)
    return content


def test_full_computed_blocks_can_be_hit_up_to_the_last_token() -> None:
    content = published()
    assert len(content) == 3
    assert content.expected(VALUES) == 4, "one token must be left to compute"
    assert content.expected([*VALUES, 0]) == 6
    assert published(computed=3).expected([*VALUES, 0]) == 2
    assert content.expected(Story((2, 2, 1)).values) == 0


def test_a_block_that_is_handed_out_is_hit_no_more() -> None:
    content = published()
    content.take([7])
    assert 7 not in content
    assert content.expected([*VALUES, 0]) == 4


def test_a_block_must_not_go_before_those_reached_through_it() -> None:
    with pytest.raises(LawBroken) as caught:
        published().take([5])
    assert caught.value.law == "eviction order"
    published().take([7, 6, 5])
    published(tail_first=False).take([5])


def test_a_second_copy_of_the_parent_keeps_its_children_reachable() -> None:
    content = published()
    content.publish([9], VALUES, 2)
    content.take([5])
    assert content.expected([*VALUES, 0]) == 6


def test_what_is_forgotten_is_published_again_only_when_handed_out_anew() -> None:
    content = published()
    content.forget([5, 6, 7])
    content.publish([5, 6, 7], VALUES, 6)
    assert len(content) == 0
    assert 5 in content
    content.take([5])
    content.publish([5], VALUES, 2)
    assert content.expected(VALUES) == 2


def test_blocks_that_came_back_from_the_host_need_not_be_published() -> None:
    assert published(private=3).expected([*VALUES, 0]) == 0
    assert len(published(private=3)) == 1


def test_a_cleared_cache_holds_nothing() -> None:
    content = published()
    content.clear()
    assert (len(content), content.expected(VALUES)) == (0, 0)
