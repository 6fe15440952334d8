"""What users write for media comes out in one form, in order, or is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from minivllm.errors import BadMedia, BadParameter
from minivllm.multimodal import Video, read_media, split_conversation

PICTURE = np.zeros((2, 3, 3), np.uint8)
ROWS = torch.ones(4, 8)


def read(data: Any, **limits: int) -> dict[str, list[Any]]:
    return read_media(data, 8, limits)


def test_one_picture_needs_no_list() -> None:
    for data in ({"image": PICTURE}, {"image": [PICTURE]}, {"image": (PICTURE,), "video": None}):
        media = read(data)
        assert list(media) == ["image"]
        assert isinstance(media["image"][0], Image.Image)


def test_pictures_keep_their_order() -> None:
    media = read({"image": [PICTURE, PICTURE[:1], PICTURE[:, :1]]})
    assert [image.size for image in media["image"]] == [(3, 2), (3, 1), (1, 2)]


@pytest.mark.parametrize(
    ("videos", "frames"),
    [
        (np.stack([PICTURE] * 3), [3]),
        ([PICTURE] * 3, [3]),
        ([[PICTURE] * 3, [PICTURE] * 2], [3, 2]),
        ([np.stack([PICTURE] * 3), {"frames": [PICTURE], "fps": 1.0}], [3, 1]),
        ([Video((Image.fromarray(PICTURE),))], [1]),
        ({"frames": [PICTURE] * 2}, [2]),
    ],
)
def test_a_list_of_frames_is_one_video_and_a_list_of_videos_several(videos: Any, frames: list[int]) -> None:
    assert [len(video.frames) for video in read({"video": videos})["video"]] == frames


def test_supplied_embeddings_are_checked_and_copied() -> None:
    [tensor] = read({"image_embeds": ROWS})["image"]
    assert torch.equal(tensor, ROWS)
    assert tensor.data_ptr() != ROWS.data_ptr()
    given = {"image_embeds": ROWS, "image_grid_thw": [1, 2, 2], "deepstack": torch.ones(2, 4, 8)}
    [mapping] = read({"image_embeds": given})["image"]
    assert mapping["image_grid_thw"] == [1, 2, 2]
    assert [part.shape for part in mapping["deepstack"]] == [(4, 8), (4, 8)]
    assert list(read({"video_embeds": {"video_embeds": ROWS}})) == ["video"]


def test_embeddings_may_stand_among_pictures() -> None:
    image, mapping = read({"image": [PICTURE, {"image_embeds": ROWS}]})["image"]
    assert isinstance(image, Image.Image)
    assert torch.equal(mapping["image_embeds"], ROWS)


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (ROWS[0], r"shape \[rows, 8\], got \[8\]"),
        (ROWS[:, :7], r"shape \[rows, 8\], got \[4, 7\]"),
        (ROWS[:0], r"got \[0, 8\]"),
        (ROWS.long(), "floating point, got torch.int64"),
        (ROWS * float("nan"), "must be finite"),
        (ROWS.numpy(), "must be a tensor"),
        (ROWS.to("meta"), "must be dense .* on meta"),
        (ROWS.to_sparse(), "must be dense .* layout torch.sparse_coo"),
        (ROWS.to(torch.float8_e4m3fn), "at least float16, got torch.float8"),
        ({"rows": 4}, "must be a tensor"),
        ({"image_embeds": ROWS, "deepstack": 3}, "deepstack must be tensors"),
        ({"image_embeds": ROWS, "deepstack": [ROWS[:, :1]]}, r"deepstack must have the shape \[rows, 8\]"),
    ],
)
def test_bad_embeddings_are_refused(embeds: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        read({"image_embeds": embeds})


def test_too_many_items_are_refused_with_the_limit() -> None:
    read({"image": [PICTURE] * 2}, image=2)
    with pytest.raises(BadMedia, match="at most 2 images per prompt are allowed, got 3; raise limit_mm"):
        read({"image": [PICTURE] * 3}, image=2)
    with pytest.raises(BadMedia, match="at most 0 images"):
        read({"image_embeds": ROWS}, image=0)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([PICTURE], BadParameter, "multi_modal_data is a mapping"),
        ({"audio": 1}, BadParameter, r"unknown multi_modal_data \['audio'\]; known: image"),
        ({"image": PICTURE, "image_embeds": ROWS}, BadMedia, "not both"),
        ({"image": [PICTURE, b"junk"]}, BadMedia, "no image format"),
    ],
)
def test_what_is_no_media_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(data)


def test_parts_are_split_into_messages_and_media_in_order() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": "data:b"}},
                {"type": "image_url", "image_url": "data:c"},
                {"type": "video", "video": ["f"]},
                {"type": "image_embeds", "image_embeds": ROWS},
            ],
        },
    ]
    plain, media = split_conversation(messages, text_only=False)
    assert plain[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert [p["type"] for p in plain[1]["content"]] == ["image", "text", "image", "image", "video", "image"]
    assert media == {"image": ["a.png", "data:b", "data:c", {"image_embeds": ROWS}], "video": [["f"]]}


def test_for_a_text_only_model_texts_are_joined_and_texts_stay_texts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain, media = split_conversation(
        [{"role": "user", "content": parts}, {"role": "user", "content": "three"}], text_only=True
    )
    assert [m["content"] for m in plain] == ["one\ntwo", "three"]
    assert media == {}


@pytest.mark.parametrize(
    "content",
    [
        5,
        [5],
        [{"type": ["image"], "image": 1}],
        [{"type": "sound", "sound": 1}],
        [{"type": "image"}],
        [{"type": "text", "text": 5}],
        [{}],
    ],
)
def test_parts_of_another_form_are_refused(content: Any) -> None:
    with pytest.raises(BadParameter, match=r"part of a message|content of a message"):
        split_conversation([{"role": "user", "content": content}], text_only=False)
