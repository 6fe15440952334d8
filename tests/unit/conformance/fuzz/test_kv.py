"""Fake KV: values chained over the prefix, and copies carried out in one order."""

from __future__ import annotations

import pytest

from conformance.contracts.base import Copy, Moves, Span, Tags
from conformance.fuzz.kv import ListMemory, Story, move, move_some
from conformance.fuzz.laws import LawBroken


def test_a_value_depends_on_every_token_before_it() -> None:
    one, other = Story((1, 2, 3)), Story((0, 2, 3))
    assert one.values == Story((1, 2, 3)).values
    assert not set(one.values) & set(other.values)


@pytest.mark.parametrize(
    "tags", [Tags("salt"), Tags(None, (Span(1, 1, "a"),)), Tags(None, (Span(1, 1, "b"),))]
)
def test_a_value_depends_on_salt_and_images(tags: Tags) -> None:
    assert Story((1, 2), tags).values[-1] != Story((1, 2)).values[-1]


def test_rows_of_an_image_count_from_its_start() -> None:
    whole, later = (
        Story((1, 1, 1), Tags(None, (Span(0, 3, "a"),))),
        Story((1, 1), Tags(None, (Span(0, 2, "a"),))),
    )
    assert whole.values[:2] == later.values
    assert whole.values[2] != whole.values[1]


def test_a_branch_shares_its_beginning_and_draws_for_itself() -> None:
    story = Story((1, 2, 3))
    branch = story.branch(2, 1)
    branch.append(3)
    assert branch.values == story.values
    assert {story.branch(3, i).next_token(100) for i in range(3)} == {
        (story.next_token(100) + 7 * i) % 100 for i in range(3)
    }


def test_memory_reads_what_was_written_and_nothing_where_nothing_is() -> None:
    memory = ListMemory(2)
    memory.write([2, 3, 5], [7, None, 9])
    assert memory.read([2, 3, 4, 5]) == [7, None, None, 9]
    memory.poison([2])
    assert memory.read([2, 5]) == [7, None]


def test_moves_go_out_then_in_then_across() -> None:
    memory = ListMemory(1)
    memory.write([1, 2], [10, 20])
    move(memory, Moves(swap_out=(Copy(1, 0),), swap_in=(Copy(0, 2),), copies=(Copy(2, 3),)))
    assert memory.read([1, 2, 3]) == [10, 10, 10]


@pytest.mark.parametrize(
    ("most", "done", "found"),
    [
        (0, 0, [10, 20, 30, 40]),
        (1, 0, [10, 20, 30, 40]),
        (2, 1, [10, 20, 30, 40]),
        (3, 2, [10, 20, 10, 40]),
        (4, 3, [10, 20, 10, 10]),
        (9, 3, [10, 20, 10, 10]),
    ],
)
def test_only_the_first_copies_are_made_and_whole_lists_counted(
    most: int, done: int, found: list[int]
) -> None:
    memory = ListMemory(1)
    memory.write([1, 2, 3, 4], [10, 20, 30, 40])
    moves = Moves(swap_out=(Copy(1, 0), Copy(2, 1)), swap_in=(Copy(0, 3),), copies=(Copy(3, 4),))
    assert move_some(memory, moves, most) == done
    assert memory.read([1, 2, 3, 4]) == found


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ((Copy(1, 3), Copy(2, 3)), "writes a block twice"),
        ((Copy(1, 2), Copy(2, 3)), "source is also a target"),
    ],
)
def test_copies_whose_order_matters_break_a_law(copies: tuple[Copy, ...], words: str) -> None:
    with pytest.raises(LawBroken, match=words):
        move(ListMemory(1), Moves(copies=copies))
