"""Placeholders become expansions, expanded prompts stay, and every count that is off is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minivllm.errors import BadMedia
from minivllm.multimodal import Expansion, place
from minivllm.request import MediaItem, MediaSpan

IMAGE, VIDEO, OPEN, CLOSE, BREAK = 90, 91, 80, 81, 82
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}


def image(name: str, rows: int, *, framed: bool = False) -> Expansion:
    ids, embed = (IMAGE,) * rows, (True,) * rows
    if framed:
        ids, embed = (OPEN, *ids, CLOSE), (False, *embed, False)
    return Expansion(MediaItem(name, "image", rows, {}), ids, embed)


def video(name: str, frames: int, rows: int) -> Expansion:
    """Frames with a token between them."""
    ids = ((VIDEO,) * rows + (BREAK,)) * frames
    return Expansion(MediaItem(name, "video", frames * rows, {}), ids, ((True,) * rows + (False,)) * frames)


def test_each_placeholder_becomes_the_next_item() -> None:
    placement = place([1, IMAGE, 2, IMAGE, 3], {"image": [image("a", 2), image("b", 3)]}, PLACEHOLDERS)
    assert placement.token_ids == [1, *[IMAGE] * 2, 2, *[IMAGE] * 3, 3]
    assert placement.spans == (MediaSpan(1, 2, "image", "a"), MediaSpan(4, 3, "image", "b"))
    assert list(placement.items) == ["a", "b"]


def test_pictures_may_stand_side_by_side() -> None:
    placement = place([IMAGE, IMAGE], {"image": [image("a", 2), image("b", 2)]}, PLACEHOLDERS)
    assert placement.spans == (MediaSpan(0, 2, "image", "a"), MediaSpan(2, 2, "image", "b"))


def test_tokens_around_the_rows_are_part_of_the_expansion_but_take_no_row() -> None:
    placement = place([1, IMAGE], {"image": [image("a", 2, framed=True)]}, PLACEHOLDERS)
    assert placement.token_ids == [1, OPEN, IMAGE, IMAGE, CLOSE]
    assert placement.spans == (MediaSpan(2, 2, "image", "a"),)


def test_an_item_in_several_runs_takes_each_row_once_in_order() -> None:
    placement = place([VIDEO, 5], {"video": [video("v", 3, 2)]}, PLACEHOLDERS)
    assert placement.spans == (
        MediaSpan(0, 2, "video", "v", 0),
        MediaSpan(3, 2, "video", "v", 2),
        MediaSpan(6, 2, "video", "v", 4),
    )


def test_images_and_videos_mix() -> None:
    placement = place(
        [VIDEO, IMAGE, 7, IMAGE],
        {"image": [image("a", 1), image("b", 2)], "video": [video("v", 1, 2)]},
        PLACEHOLDERS,
    )
    assert [s.content_hash for s in placement.spans] == ["v", "a", "b"]
    assert placement.token_ids == [VIDEO, VIDEO, BREAK, IMAGE, 7, IMAGE, IMAGE]


def test_the_same_picture_twice_has_two_spans_and_one_item() -> None:
    placement = place([IMAGE, IMAGE], {"image": [image("a", 2), image("a", 2)]}, PLACEHOLDERS)
    assert placement.spans == (MediaSpan(0, 2, "image", "a"), MediaSpan(2, 2, "image", "a"))
    assert list(placement.items) == ["a"]


@pytest.mark.parametrize("framed", [False, True])
def test_a_prompt_that_is_expanded_already_is_taken_as_it_is(framed: bool) -> None:
    items = [image("a", 2, framed=framed), image("b", 3, framed=framed)]
    once = place([1, IMAGE, 2, IMAGE, 3], {"image": items}, PLACEHOLDERS)
    again = place(once.token_ids, {"image": items}, PLACEHOLDERS)
    assert (again.token_ids, again.spans) == (once.token_ids, once.spans)


def test_a_picture_of_one_row_is_expanded_only_where_its_frame_is_missing() -> None:
    item = image("a", 1, framed=True)
    assert place([IMAGE], {"image": [item]}, PLACEHOLDERS).token_ids == [OPEN, IMAGE, CLOSE]
    assert place([OPEN, IMAGE, CLOSE], {"image": [item]}, PLACEHOLDERS).token_ids == [OPEN, IMAGE, CLOSE]


def test_a_prompt_without_media_is_left_alone() -> None:
    placement = place([1, 2, 3], {}, PLACEHOLDERS)
    assert (placement.token_ids, placement.spans, placement.items) == ([1, 2, 3], (), {})


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([1, 2], 1, "has 0 image placeholders .* for 1 images; it needs one for each, or .* with 2"),
        ([IMAGE], 2, "has 1 image placeholders .* for 2 images; .* with 5"),
        ([IMAGE, 1, IMAGE, 1, IMAGE], 2, "has 3 image placeholders .* for 2 images"),
        ([IMAGE, IMAGE, 1, IMAGE, IMAGE], 2, "has 4 image placeholders"),
        ([IMAGE], 0, "has 1 image placeholders .* but no image was given: extra placeholders"),
        ([VIDEO, IMAGE], 1, "has 1 video placeholders .* but no video was given"),
    ],
)
def test_more_or_fewer_placeholders_than_items_are_named_with_both_numbers(
    ids: list[int], count: int, message: str
) -> None:
    items = [image("a", 2), image("b", 3)][:count]
    with pytest.raises(BadMedia, match=message):
        place(ids, {"image": items} if items else {}, PLACEHOLDERS)


def test_modalities_may_share_a_token() -> None:
    shared = {"image": IMAGE, "video": IMAGE}
    assert place([IMAGE], {"image": [image("a", 2)]}, shared).token_ids == [IMAGE, IMAGE]


def test_a_run_whose_tokens_see_one_another_says_so() -> None:
    from_family = replace(image("a", 2, framed=True), whole=True)
    assert place([IMAGE], {"image": [from_family]}, PLACEHOLDERS).spans == (
        MediaSpan(1, 2, "image", "a", whole=True),
    )
