"""Pixels, placeholders and positions of the Qwen line, against literals and against Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from conformance.hf_processors import load_processor
from minivllm.errors import BadMedia, BadParameter, ConfigError, InvariantError
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.load import Video
from minivllm.multimodal.qwen_vl import Qwen2VLProcessor
from minivllm.request import MediaItem, MediaSpan, PatchRect
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, picture, place

NAMES = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")
VISION_START, VISION_END, IMAGE, VIDEO = 443, 444, 445, 446


def make(checkpoints: Path, name: str, settings: Mapping[str, Any] | None = None) -> Qwen2VLProcessor:
    path = checkpoints / name
    config = load_model_config(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    made = MULTIMODAL.get(config.architecture)(path, config, tokenizer, settings or {})
    assert isinstance(made, Qwen2VLProcessor)
    return made


@cache
def hf_model(path: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path).model


def rope_index(checkpoints: Path, name: str, placed: Placed) -> tuple[np.ndarray[Any, Any], int]:
    """Positions and delta by Transformers."""
    ids = torch.tensor([placed.token_ids])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    grids: dict[str, list[Any]] = {"image_grid_thw": [], "video_grid_thw": [], "second_per_grid_ts": []}
    seen: list[str] = []
    for span in placed.spans:
        if span.first_row == 0 or span.content_hash not in seen:
            seen.append(span.content_hash)
            for key, found in grids.items():
                if key in placed.items[span.content_hash].data:
                    found.append(placed.items[span.content_hash].data[key])
    given = {key: torch.cat(found) for key, found in grids.items() if found}
    positions, delta = hf_model(checkpoints / name).get_rope_index(
        input_ids=ids, mm_token_type_ids=kinds, **given
    )
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_are_those_of_transformers_and_pixels_too(checkpoints: Path, name: str) -> None:
    processor, hf = make(checkpoints, name), load_processor(checkpoints / name)
    wide, high = picture(112, 84), picture(84, 120, 1)
    text = "a<|vision_start|><|image_pad|><|vision_end|> b <|vision_start|><|image_pad|><|vision_end|>c"
    for images in ([wide, high], [high, wide]):
        truth = hf(text=[text], images=[images], return_tensors="pt")
        first, second = processor.expand("image", images, {})
        placed = place(
            [
                hf.tokenizer.encode("a<|vision_start|>"),
                first,
                hf.tokenizer.encode("<|vision_end|> b <|vision_start|>"),
                second,
                hf.tokenizer.encode("<|vision_end|>c"),
            ]
        )
        assert placed.token_ids == truth["input_ids"][0].tolist()
        assert [span.start for span in placed.spans] == [2, 2 + first.item.num_embeddings + 4]
        for key in ("pixel_values", "image_grid_thw"):
            assert torch.equal(torch.cat([e.item.data[key] for e in (first, second)]), truth[key])


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        ("tiny-qwen2-vl", (112, 84), (1, 6, 8)),
        ("tiny-qwen2-vl", (84, 120), (1, 8, 6)),  # 120 / 28 is 4.29
        ("tiny-qwen2-vl", (98, 70), (1, 4, 8)),  # 98 / 28 is 3.5, 70 / 28 is 2.5: halves go to even
        ("tiny-qwen2-vl", (1, 1), (1, 4, 4)),  # up to min_pixels
        ("tiny-qwen2-vl", (3, 3), (1, 4, 4)),  # three rows are not three channels
        ("tiny-qwen2-vl", (224, 224), (1, 16, 16)),  # exactly max_pixels
        ("tiny-qwen2-vl", (224, 238), (1, 16, 16)),  # 238 / 28 is 8.5: 8 rows, within max_pixels
        ("tiny-qwen2-vl", (224, 252), (1, 16, 14)),  # over max_pixels, so rounded down
        ("tiny-qwen2-vl", (5600, 28), (1, 2, 226)),  # no thinner than a block, over max_pixels
        ("tiny-qwen3-vl", (112, 84), (1, 6, 8)),
        ("tiny-qwen3-vl", (70, 50), (1, 4, 4)),
    ],
)
def test_a_picture_is_fitted_to_whole_blocks(
    checkpoints: Path, name: str, size: tuple[int, int], grid: tuple[int, int, int]
) -> None:
    processor = make(checkpoints, name)
    image = picture(*size)
    (expansion,) = processor.expand("image", [image], {})
    truth = load_processor(checkpoints / name).image_processor([image], return_tensors="pt")
    assert tuple(truth["image_grid_thw"][0].tolist()) == expansion.item.facts["grid"]
    assert torch.equal(expansion.item.data["pixel_values"], truth["pixel_values"])
    assert expansion.item.facts["grid"] == grid
    assert expansion.token_ids == (IMAGE,) * (grid[1] * grid[2] // 4)
    assert expansion.item.num_embeddings == len(expansion.token_ids) == len(expansion.item.patches)


def test_a_picture_too_long_for_the_family_is_refused(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    with pytest.raises(BadMedia, match=r"1 × 10000 pixels cannot be processed.*aspect ratio must be smaller"):
        processor.expand("image", [picture(1, 10000)], {})


def test_each_row_knows_its_part_of_the_picture(checkpoints: Path) -> None:
    (expansion,) = make(checkpoints, "tiny-qwen2-vl").expand("image", [picture(112, 56)], {})
    assert expansion.item.facts["grid"] == (1, 4, 8)
    assert expansion.item.patches[0] == PatchRect(0, 0.0, 0.0, 0.25, 0.5)
    assert expansion.item.patches[5] == PatchRect(0, 0.25, 0.5, 0.25, 0.5)
    facts = expansion.item.facts
    assert (facts["size"], facts["mode"], facts["backend"]) == ((112, 56), "RGB", "pil")
    assert facts["image_processor"] == "Qwen2VLImageProcessorPil"


def test_settings_of_the_engine_and_of_the_request(checkpoints: Path) -> None:
    image = picture(112, 112)
    plain = make(checkpoints, "tiny-qwen2-vl")
    small = make(checkpoints, "tiny-qwen2-vl", {"max_pixels": 56 * 56})
    grids = [
        plain.expand("image", [image], {})[0].item,
        plain.expand("image", [image], {"max_pixels": 84 * 84})[0].item,
        small.expand("image", [image], {})[0].item,
        small.expand("image", [image], {"max_pixels": 84 * 84})[0].item,
        plain.expand("image", [image], {"size": {"shortest_edge": 3136, "longest_edge": 84 * 84}})[0].item,
        plain.expand("image", [image], {"min_pixels": 140 * 140})[0].item,
    ]
    assert [item.facts["grid"][1] for item in grids] == [8, 6, 4, 6, 6, 10]
    hashes = [item.content_hash for item in grids]
    assert hashes[1] == hashes[3] == hashes[4]
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 16}, "'patch_size' cannot be changed: the vision tower is built for it"),
        ({"crop_size": 16}, "'crop_size' cannot be changed: the image processor of this family does nothing"),
        ({"max_pixel": 1}, r"unknown image processor settings \['max_pixel'\]; known: .*max_pixels"),
        ({"max_pixels": 100}, r"must be 1 … longest_edge \(the most, 100\), got 3136"),
        ({"min_pixels": 0}, "min_pixels must be a positive whole number, got 0"),
        ({"max_pixels": "many"}, "max_pixels"),
    ],
)
def test_impossible_settings_are_refused(checkpoints: Path, settings: dict[str, Any], message: str) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    with pytest.raises(BadParameter, match=message):
        processor.expand("image", [picture(56, 56)], settings)
    with pytest.raises(BadParameter, match=message):
        processor.expand("video", [Video((picture(56, 56),) * 2)], settings)


def test_patches_of_another_size_than_the_tower_s_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    config = load_model_config(checkpoints / "tiny-qwen2-vl")
    written = (checkpoints / "tiny-qwen2-vl" / "processor_config.json").read_text(encoding="utf-8")
    (tmp_path / "processor_config.json").write_text(written.replace('"patch_size": 14', '"patch_size": 16'))
    tokenizer = load_tokenizer(checkpoints / "tiny-qwen2-vl")
    assert tokenizer is not None
    with pytest.raises(ConfigError, match=r"patch_size is 16 in the .* and 14 in the model's"):
        Qwen2VLProcessor(tmp_path, config, tokenizer, {})


def test_what_differs_in_the_answer_differs_in_the_hash(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-5-vl")
    one, other = picture(56, 84), picture(56, 84, 1)
    video = Video((one, other), fps=2.0)
    items = [
        *(e.item for e in processor.expand("image", [one, other, one.resize((84, 56))], {})),
        *(e.item for e in processor.expand("video", [video, Video((one, other), fps=4.0)], {})),
        *(e.item for e in processor.expand("video", [Video((other, one), fps=2.0)], {})),
    ]
    assert len({item.content_hash for item in items}) == 6
    again = processor.expand("image", [one.copy()], {})[0].item
    assert again.content_hash == items[0].content_hash


@pytest.mark.parametrize("name", NAMES)
def test_positions_are_those_of_transformers(checkpoints: Path, name: str) -> None:
    processor = make(checkpoints, name)
    wide, high, tiny = processor.expand("image", [picture(112, 84), picture(84, 140), picture(5, 5)], {})
    (video,) = processor.expand("video", [Video((picture(112, 84),) * 5, fps=2.0)], {})
    for parts in (
        [[5, 6], wide, [7]],
        [wide, [7], high, [8, 9], tiny],
        [[1], high, [VISION_END, VISION_START], wide, [2] * 7, high, [3]],
        [[1], video, [2] * 9],
        [[1], video, [2], wide, [3]],
        [[1, 2], wide, [2], video, [4], high, [3] * 9],
    ):
        placed = place(parts)
        found = processor.positions(*placed)
        assert found is not None
        positions, delta = found
        expected, expected_delta = rope_index(checkpoints, name, placed)
        assert positions.dtype == np.int64
        np.testing.assert_array_equal(positions, expected)
        # Text that follows goes on from the last text; Transformers' own delta is from the maximum.
        after = placed._replace(token_ids=[*placed.token_ids, 5])
        continued, _ = rope_index(checkpoints, name, after)
        assert delta + len(placed.token_ids) == continued[0, -1]
        if expected[:, -1].max() == expected.max():
            assert delta == expected_delta


def test_positions_of_a_picture_by_hand(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    (image,) = processor.expand("image", [picture(84, 56)], {})
    found = processor.positions(*place([[5, 6], image, [7, 8]]))
    assert found is not None
    positions, delta = found
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == 7 - 10


def test_pictures_side_by_side_have_positions_too(checkpoints: Path) -> None:
    """Transformers cannot place them: it takes neighbours for one picture."""
    processor = make(checkpoints, "tiny-qwen2-vl")
    wide, tall = processor.expand("image", [picture(84, 56), picture(56, 112)], {})
    found = processor.positions(*place([[5], wide, tall, [6]]))
    assert found is not None
    assert found[0][:, 7].tolist() == [4, 4, 4]
    assert found[0][:, -1].tolist() == [8, 8, 8]


def test_text_alone_needs_no_positions(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    assert processor.positions([1, 2, IMAGE], [], {}) is None
    embeds = MediaItem("e", "embeds", 3, {"embeddings": torch.zeros(3, 64)})
    assert processor.positions([1, 2, 3], [MediaSpan(0, 3, "embeds", "e")], {"e": embeds}) is None


def test_a_span_that_cuts_a_frame_is_a_fault_of_the_engine(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    placed = place([[5], *processor.expand("image", [picture(84, 56)], {})])
    cut = [MediaSpan(1, 5, "image", placed.spans[0].content_hash)]
    with pytest.raises(InvariantError, match="does not hold whole frames of 2 × 3 rows"):
        processor.positions(placed.token_ids, cut, placed.items)


def test_a_second_of_video_takes_tokens_per_second_positions(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-5-vl")
    frames = (picture(56, 56),) * 6
    times = {}
    for fps in (1.0, 2.0, 3.0, 30.0, None):
        (video,) = processor.expand("video", [Video(frames, fps=fps)], {})
        found = processor.positions(*place([[5], video, [6]]))
        assert found is not None
        times[fps] = found[0][0, 1:13:4].tolist()
    # 2 frames in a group, 2 positions a second; 24 frames a second where nothing is said
    assert times == {
        1.0: [1, 5, 9],
        2.0: [1, 3, 5],
        3.0: [1, 2, 3],
        30.0: [1, 1, 1],
        None: [1, 1, 1],
    }
    (even,) = processor.expand("video", [Video(frames, timestamps=(0, 0.5, 1, 1.5, 2, 2.5))], {})
    assert even.item.data["second_per_grid_ts"].tolist() == [1.0]
    with pytest.raises(BadMedia, match="this model knows only evenly spaced frames"):
        processor.expand("video", [Video(frames, timestamps=(0, 0.5, 1, 1.5, 2, 9))], {})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9, 1e300, [1.0, 2.0], [], "soon"])
def test_times_without_positions_are_refused_before_the_model_sees_them(
    checkpoints: Path, seconds: Any
) -> None:
    """Of a position far off, a table of all before it would be made, and the whole step would fail."""
    processor = make(checkpoints, "tiny-qwen2-5-vl")
    given = {"video_embeds": torch.zeros(3, 64), "video_grid_thw": [3, 2, 2]}
    (fine,) = processor.expand("video", [{**given, "second_per_grid_ts": [1.5]}], {})
    assert fine.item.data["second_per_grid_ts"].tolist() == [1.5]
    with pytest.raises(BadMedia, match=r"second_per_grid_ts must be one number|3 groups of frames"):
        processor.expand("video", [{**given, "second_per_grid_ts": seconds}], {})


def test_frames_too_far_apart_for_positions_are_refused(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-5-vl")
    with pytest.raises(BadMedia, match=r"2 groups of frames, each of \[2000000.0\] seconds"):
        processor.expand("video", [Video((picture(56, 56),) * 4, fps=1e-6)], {})


def test_seconds_are_refused_where_positions_do_not_go_by_them(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen2-vl")
    given = {"video_embeds": torch.zeros(3, 64), "video_grid_thw": [3, 2, 2], "second_per_grid_ts": [1.0]}
    with pytest.raises(BadMedia, match="supplied embeddings of this model are"):
        processor.expand("video", [given], {})


@pytest.mark.parametrize("fps", [1.0, 30.0, None])
@pytest.mark.parametrize("frames", [2, 5])
def test_timestamps_stand_before_the_frames_of_qwen3_as_in_transformers(
    checkpoints: Path, frames: int, fps: float | None
) -> None:
    processor, hf = make(checkpoints, "tiny-qwen3-vl"), load_processor(checkpoints / "tiny-qwen3-vl")
    (video,) = processor.expand("video", [Video((picture(64, 96),) * frames, fps=fps)], {})
    hf.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    inputs = {
        "video_grid_thw": video.item.data["video_grid_thw"].numpy(),
        "video_metadata": [
            VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)))
        ],
    }
    text = hf.replace_video_token(inputs, 0)
    assert list(video.token_ids) == hf.tokenizer.encode(text)
    assert [t == VIDEO for t in video.token_ids] == list(video.is_embed)


def test_timestamps_by_hand(checkpoints: Path) -> None:
    processor = make(checkpoints, "tiny-qwen3-vl")
    frames = (picture(64, 64),) * 4
    tokenizer = load_tokenizer(checkpoints / "tiny-qwen3-vl")
    assert tokenizer is not None
    for video, seconds in (
        (Video(frames, fps=2.0), ("0.2", "1.2")),  # the middle of 0 and 0.5; of 1 and 1.5
        (Video(frames, timestamps=(3.0, 4.0, 7.0, 9.0)), ("3.5", "8.0")),
    ):
        (expansion,) = processor.expand("video", [video], {})
        text = tokenizer.decode(expansion.token_ids, skip_special_tokens=False)
        pads = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
        assert text == f"<{seconds[0]} seconds>{pads}<{seconds[1]} seconds>{pads}"
        placed = place([[5], expansion])
        assert [span.first_row for span in placed.spans] == [0, 4]


@pytest.mark.parametrize(
    "times", [{"fps": 1e-320}, {"timestamps": (0.0, 0.0, 1.7e308, 1.7e308)}], ids=["fps", "timestamps"]
)
def test_times_that_are_not_finite_are_refused(checkpoints: Path, times: dict[str, Any]) -> None:
    processor = make(checkpoints, "tiny-qwen3-vl")
    with pytest.raises(BadMedia, match="4 frames have no finite times in seconds"):
        processor.expand("video", [Video((picture(64, 64),) * 4, **times)], {})


@pytest.mark.parametrize("name", NAMES)
def test_supplied_embeddings_take_the_place_of_pixels(checkpoints: Path, name: str) -> None:
    processor = make(checkpoints, name)
    rows, grid = torch.randn(12, 64), torch.tensor([[1, 6, 8]])
    more = {"deepstack": torch.randn(2, 12, 64)} if name == "tiny-qwen3-vl" else {}
    given = {"image_embeds": rows, "image_grid_thw": grid, **more}
    (supplied,) = processor.expand("image", [given], {})
    (seen,) = processor.expand("image", [picture(112, 84)], {})
    assert (supplied.token_ids, supplied.is_embed) == (seen.token_ids, seen.is_embed)
    assert supplied.item.patches == seen.item.patches
    assert torch.equal(supplied.item.data["embeddings"], rows)
    assert len(supplied.item.data.get("deepstack", ())) == (2 if more else 0)
    for ours in (supplied, seen):
        found = processor.positions(*place([[5], ours, [6]]))
        assert found is not None
        assert found[1] == 6 - 14
    other = processor.expand("image", [{**given, "image_grid_thw": torch.tensor([[1, 8, 6]])}], {})[0]
    assert other.item.content_hash != supplied.item.content_hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_grid_thw": None},
            "'image_embeds', 'image_grid_thw'}, of which image_embeds and image_grid_thw",
        ),
        (
            {"image_embeds": torch.zeros(11, 64)},
            r"shape \[12, 64\] for the grid \[1, 6, 8\], got .* of \[11, 64\]",
        ),
        (
            {"image_embeds": torch.zeros(12, 64, dtype=torch.int64)},
            "must be floating point .* got torch.int64",
        ),
        ({"image_grid_thw": torch.tensor([1, 3, 16])}, r"\[1, 3, 16\] is not one of whole 2 × 2 blocks"),
        ({"image_grid_thw": torch.tensor([1, 0, 16])}, "must be three positive integers"),
        ({"image_grid_thw": "1, 6, 8"}, "must be three positive integers, got '1, 6, 8'"),
        ({"image_grid_thw": [[1], [6, 8]]}, "must be three positive integers"),
        ({"image_grid_thw": [2**70, 6, 8]}, "must be three positive integers"),
        (
            {"deepstack": torch.zeros(1, 12, 64)},
            r"deepstack must be 2 tensors of the shape \[12, 64\], got \[\[",
        ),
        ({"extra": 1}, "got \\['deepstack', 'extra', 'image_embeds', 'image_grid_thw'\\]"),
    ],
)
def test_supplied_embeddings_that_do_not_fit_are_refused(
    checkpoints: Path, changes: dict[str, Any], message: str
) -> None:
    processor = make(checkpoints, "tiny-qwen3-vl")
    given = {
        "image_embeds": torch.zeros(12, 64),
        "image_grid_thw": torch.tensor([1, 6, 8]),
        "deepstack": torch.zeros(2, 12, 64),
        **changes,
    }
    with pytest.raises(BadMedia, match=message):
        processor.expand("image", [{k: v for k, v in given.items() if v is not None}], {})
    with pytest.raises(BadMedia, match="supplied embeddings of this model are"):
        processor.expand("image", [torch.zeros(12, 64)], {})
