"""Prompts with pictures, as Hugging Face's own processor makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.hf_models import NoTruth, load_config
from conformance.hf_prompts import OpenedMedia, Prompt, PromptMaker, open_picture
from conformance.records import SpanRecord

ASSETS = Path(__file__).parents[3] / "scenarios" / "assets"
IMAGE, VIDEO = 445, 446  # placeholder ids of tiny-qwen2-vl


def picture(name: str) -> OpenedMedia:
    return OpenedMedia("image", (open_picture(ASSETS / name),), facts={"names": [name]})


def video(count: int, fps: float | None = None) -> OpenedMedia:
    return OpenedMedia(
        "video", tuple(open_picture(ASSETS / f"video/frame_{n}.png") for n in range(count)), fps
    )


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


RED = {"image": "sha256:…"}
TYPED = {"type": "image"}
MOVES = {"video": {"frames": ["sha256:…"]}}


@pytest.fixture(scope="module")
def make(checkpoints: Path) -> PromptMaker:
    path = checkpoints / "tiny-qwen2-vl"
    return PromptMaker(path, load_config(path))


def test_a_text_has_ids_and_nothing_else(make: PromptMaker) -> None:
    prompt = make(chat({"text": "hi"}))
    assert prompt.media is None
    assert dict(prompt.inputs) == {}
    assert prompt.token_ids == make(chat({"type": "text", "text": "hi"})).token_ids
    assert make({"token_ids": [5, 6]}).token_ids == (5, 6)


def test_placeholders_are_expanded_where_the_picture_stands(make: PromptMaker) -> None:
    prompt = make(chat(RED, {"text": "What is this?"}), [picture("shapes/red_circle.png")])
    assert prompt.media is not None
    [span] = prompt.media.spans
    assert (span.length, span.item, span.first_row) == (12, 0, 0)
    assert prompt.token_ids[span.start : span.start + 12] == (IMAGE,) * 12
    assert prompt.token_ids.count(IMAGE) == 12
    [item] = prompt.media.items
    assert item == {
        "modality": "image",
        "names": ["shapes/red_circle.png"],
        "rows": 12,
        "size": [112, 84],
        "grid_thw": [1, 6, 8],
    }
    assert prompt.inputs["pixel_values"].shape == (48, 1176)
    assert (prompt.media.processor, prompt.media.image_processor) == (
        "Qwen2VLProcessor",
        "Qwen2VLImageProcessorPil",
    )


def test_canonical_and_typed_parts_are_the_same_prompt(make: PromptMaker) -> None:
    media = [picture("shapes/red_circle.png")]
    assert (
        make(chat(RED, {"text": "a"}), media).token_ids
        == make(chat(TYPED, {"type": "text", "text": "a"}), media).token_ids
    )


def test_unequal_pictures_keep_their_order(make: PromptMaker) -> None:
    names = ("shapes/yellow_seven.png", "shapes/green_triangle.png")
    first = make(chat(RED, {"text": "and"}, RED), [picture(n) for n in names])
    assert first.media is not None
    assert [item["rows"] for item in first.media.items] == [6, 12]
    assert [(s.length, s.item) for s in first.media.spans] == [(6, 0), (12, 1)]
    second = make(chat(RED, {"text": "and"}, RED), [picture(n) for n in names[::-1]])
    assert second.media is not None
    assert [item["rows"] for item in second.media.items] == [12, 6]
    pixels = first.inputs["pixel_values"]
    assert torch.equal(torch.cat([pixels[24:], pixels[:24]]), second.inputs["pixel_values"])


def test_settings_change_the_size(make: PromptMaker) -> None:
    media = [picture("shapes/red_circle.png")]
    small = make(chat(RED, {"text": "a"}), media, {"max_pixels": 56 * 56})
    assert small.media is not None
    assert small.media.items[0]["grid_thw"] == [1, 2, 4]
    assert small.media.items[0]["rows"] == 2


def test_a_video_and_a_picture_keep_their_places(make: PromptMaker) -> None:
    prompt = make(chat(RED, {"text": "then"}, MOVES), [picture("shapes/yellow_seven.png"), video(5, 2.0)])
    assert prompt.media is not None
    assert [(s.length, s.item) for s in prompt.media.spans] == [(6, 0), (18, 1)]
    assert [item["modality"] for item in prompt.media.items] == ["image", "video"]
    assert prompt.media.items[1]["grid_thw"] == [3, 4, 6]
    assert prompt.media.items[1]["fps"] == 2.0
    assert prompt.token_ids.count(VIDEO) == 18


def test_frames_with_timestamps_between_them_are_several_spans_of_one_item(checkpoints: Path) -> None:
    path = checkpoints / "tiny-qwen3-vl"
    prompt = PromptMaker(path, load_config(path))(chat(MOVES, {"text": "a"}), [video(6, 2.0)])
    assert prompt.media is not None
    rows = [(s.length, s.item, s.first_row) for s in prompt.media.spans]
    assert rows == [(6, 0, 0), (6, 0, 6), (6, 0, 12)]


def test_inputs_per_token_go_on_with_zeros_and_pixels_take_the_models_type(make: PromptMaker) -> None:
    prompt = make(chat(RED, {"text": "a"}), [picture("shapes/red_circle.png")])
    length = len(prompt.token_ids)
    made = prompt.inputs_for(length + 3, torch.float64)
    assert made["mm_token_type_ids"].shape == (1, length + 3)
    assert made["mm_token_type_ids"][0, -3:].tolist() == [0, 0, 0]
    assert made["pixel_values"].dtype is torch.float64
    assert made["image_grid_thw"].dtype is torch.int64


def test_a_picture_is_turned_as_its_file_says_and_keeps_its_mode() -> None:
    upright = open_picture(ASSETS / "exif/orientation_1.jpg")
    turned = open_picture(ASSETS / "exif/orientation_6.jpg")
    assert (upright.size, turned.size) == ((112, 84), (84, 112))
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(np.asarray(upright), -1))
    assert open_picture(ASSETS / "modes/rgba.png").mode == "RGBA"


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        (chat({"text": "no place for it"}), 1, "Qwen2VLProcessor refuses the prompt: ValueError"),
        (chat(RED, {"text": "a"}, RED), 1, "Qwen2VLProcessor refuses the prompt: ValueError"),
        ({"token_ids": [5, IMAGE]}, 1, "needs a text or a chat"),
    ],
)
def test_what_the_processor_refuses_has_no_truth(
    make: PromptMaker, prompt: dict[str, Any], count: int, message: str
) -> None:
    with pytest.raises(NoTruth, match=message):
        make(prompt, [picture("shapes/red_circle.png")] * count)


def test_a_model_that_cannot_see_has_no_truth(checkpoints: Path) -> None:
    path = checkpoints / "tiny-qwen2"
    with pytest.raises(NoTruth, match="tiny-qwen2 has no processor for pictures"):
        PromptMaker(path, load_config(path))(chat(RED), [picture("shapes/red_circle.png")])


def test_spans_split_a_run_that_two_pictures_share() -> None:
    """Pictures without a token between them, as some families allow."""
    from conformance.hf_prompts import _spans

    media = [OpenedMedia("image", ()), OpenedMedia("image", ())]
    spans = list(_spans([1, 9, 9, 9, 9, 9, 2], media, [2, 3], {9: "image"}))
    assert spans == [SpanRecord(1, 2, 0, 0), SpanRecord(3, 3, 1, 0)]


def test_a_placeholder_that_a_user_spells_is_text(make: PromptMaker) -> None:
    spelled = {"text": "What does <|image_pad|> mean?"}
    alone = make(chat(spelled))
    assert IMAGE not in alone.token_ids
    assert make.tokenizer.decode(alone.token_ids).count("<|image_pad|>") == 1
    beside = make(chat(RED, spelled), [picture("shapes/square_four.png")])
    assert beside.token_ids.count(IMAGE) == 4
    assert beside.media is not None
    assert [s.length for s in beside.media.spans] == [4]
    with pytest.raises(NoTruth, match="a spelled placeholder beside a video or settings"):
        make(chat(RED, spelled), [picture("shapes/square_four.png")], {"max_pixels": 3136})


def test_a_plain_prompt_needs_nothing_but_ids() -> None:
    assert Prompt((1, 2)).inputs_for(2, torch.float32) == {}
