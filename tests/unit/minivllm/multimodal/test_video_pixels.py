"""Pixels of videos: the arithmetic of pictures, the sizes and the order of Transformers' video processors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import minivllm.multimodal.video_pixels as module
from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.multimodal.frame_choice import FrameChoice
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.load import Video
from minivllm.multimodal.video_pixels import (
    VideoPixels,
    size_for_each_frame,
    size_for_whole_video,
    with_limits,
)

DEFAULTS = {
    "size": {"shortest_edge": 1, "longest_edge": 10**6},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def frame(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make(checkpoints: Path, name: str) -> VideoPixels:
    sizing = size_for_whole_video if name == "tiny-qwen3-vl" else size_for_each_frame
    return VideoPixels(checkpoints / name, ImageProcessor(checkpoints / name, {}), sizing, DEFAULTS)


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl"])
def test_a_still_video_has_the_pixels_of_its_frame(checkpoints: Path, name: str) -> None:
    videos, images = make(checkpoints, name), ImageProcessor(checkpoints / name, {})
    still = frame(100, 75, 0)
    pixels, grid = videos(Video((still,) * 4), videos.settings({}))
    picture = images([still])
    assert grid == (2, *picture["image_grid_thw"][0, 1:].tolist())
    assert torch.equal(pixels, picture["pixel_values"].repeat(2, 1))


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen3-vl"])
def test_patches_have_the_order_of_transformers(
    checkpoints: Path, name: str, genuine: Callable[[str], Any]
) -> None:
    """Its own `patchify` on frames that our pictures' arithmetic made."""
    videos, images = make(checkpoints, name), ImageProcessor(checkpoints / name, {})
    side = 2 * images.hf.patch_size
    frames = tuple(frame(4 * side, 2 * side, seed) for seed in range(5))
    pixels, grid = videos(Video(frames), videos.settings({}))
    plain = torch.stack([torch.from_numpy(np.array(f)).permute(2, 0, 1).float() / 255 for f in frames])
    mean, std = (torch.tensor(getattr(images.hf, key)).view(3, 1, 1) for key in ("image_mean", "image_std"))
    family = "qwen3_vl" if name == "tiny-qwen3-vl" else "qwen2_vl"
    kind = "Qwen3VLVideoProcessor" if name == "tiny-qwen3-vl" else "Qwen2VLVideoProcessor"
    patchify = getattr(genuine(family), kind).patchify
    expected, *expected_grid = patchify(None, ((plain - mean) / std)[None], images.hf.patch_size, 2, 2)
    assert list(grid) == expected_grid == [3, 4, 8]
    torch.testing.assert_close(pixels, expected[0], rtol=0, atol=1e-6)


@given(
    frames=st.integers(2, 40),
    height=st.integers(1, 2000),
    width=st.integers(1, 2000),
    limits=st.sampled_from([(4096, 262144), (131072, 786432), (1, 4096)]),
)
def test_sizes_for_a_whole_video_are_those_of_transformers(
    genuine: Callable[[str], Any], frames: int, height: int, width: int, limits: tuple[int, int]
) -> None:
    smart_resize = genuine("qwen3_vl").smart_resize
    try:
        expected = smart_resize(frames, height, width, 2, 32, *limits)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(BadMedia):
            size_for_whole_video(frames, height, width, 32, *limits)
        return
    assert size_for_whole_video(frames, height, width, 32, *limits) == expected
    assert all(side % 32 == 0 and side >= 32 for side in expected)


def test_sizes_for_each_frame_do_not_depend_on_their_number() -> None:
    assert size_for_each_frame(2, 84, 112, 28, 3136, 50176) == (84, 112)
    assert size_for_each_frame(99, 84, 112, 28, 3136, 50176) == (84, 112)
    with pytest.raises(BadMedia, match=r"a video of 3 frames of 1 × 300.*aspect ratio"):
        size_for_each_frame(3, 300, 1, 28, 3136, 50176)


def test_a_whole_video_needs_two_frames_and_a_sane_shape() -> None:
    with pytest.raises(BadMedia, match="needs at least 2 frames, got 1"):
        size_for_whole_video(1, 64, 64, 32, 1, 10**6)
    with pytest.raises(BadMedia, match="at most 200 times as long as wide, got 32 × 9600"):
        size_for_whole_video(4, 300, 1, 32, 1, 10**6)


def test_small_frames_that_are_made_too_large_together_are_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are small, and so are their frames: it is the fewest pixels of a model that take the memory."""
    videos = make(checkpoints, "tiny-qwen2-vl")
    monkeypatch.setattr(module, "MAX_VIDEO_PIXELS", 4 * 56 * 56)
    still, settings = frame(28, 28, 0), videos.settings({"min_pixels": 56 * 56})
    assert videos(Video((still,) * 4), settings)[1] == (2, 4, 4)
    with pytest.raises(BadMedia, match=r"6 frames of 28 × 28 .* as 56 × 56, .* 12544 pixels together"):
        videos(Video((still,) * 6), settings)


def test_transparent_frames_are_put_on_white(checkpoints: Path) -> None:
    videos = make(checkpoints, "tiny-qwen2-vl")
    clear = Image.new("RGBA", (56, 56), (255, 0, 0, 0))
    white = Image.new("RGB", (56, 56), (255, 255, 255))
    settings = videos.settings({})
    assert torch.equal(videos(Video((clear,)), settings)[0], videos(Video((white,)), settings)[0])


def test_one_frame_fills_its_group_and_settings_of_a_request_count(checkpoints: Path) -> None:
    videos = make(checkpoints, "tiny-qwen2-vl")
    still = Video((frame(112, 112, 0),))
    assert videos(still, videos.settings({}))[1] == (1, 8, 8)
    assert videos(still, videos.settings({"max_pixels": 84 * 84}))[1] == (1, 6, 6)
    raw, _ = videos(still, videos.settings({"do_normalize": False, "do_rescale": False}))
    assert raw.max() > 200
    with pytest.raises(BadMedia, match="cannot be processed"):
        videos(Video((frame(50, 50, 0),)), videos.settings({"do_resize": False}))


@pytest.mark.parametrize(
    "file", ["processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"]
)
def test_settings_are_found_where_published_models_have_them(
    checkpoints: Path, tmp_path: Path, file: str
) -> None:
    values = {"min_pixels": 5, "max_pixels": 6, "image_mean": [0.1, 0.2, 0.3]}
    nested = {"video_processor": values} if file == "processor_config.json" else values
    (tmp_path / file).write_text(json.dumps(nested), encoding="utf-8")
    images = ImageProcessor(checkpoints / "tiny-qwen2-vl", {})
    found = VideoPixels(tmp_path, images, size_for_each_frame, DEFAULTS).settings({})
    assert found["size"] == {"shortest_edge": 5, "longest_edge": 6}
    assert (found["image_mean"], found["image_std"]) == ([0.1, 0.2, 0.3], [0.5] * 3)


def test_a_directory_that_says_nothing_has_the_family_s_defaults(checkpoints: Path, tmp_path: Path) -> None:
    images = ImageProcessor(checkpoints / "tiny-qwen2-vl", {})
    found = VideoPixels(tmp_path, images, size_for_each_frame, DEFAULTS).settings({})
    assert found["size"] == DEFAULTS["size"]


@pytest.mark.parametrize(
    "values",
    [
        {"size": {"height": 56, "width": 56}},
        {"size": {"longest_edge": 9}},
        {"size": {"shortest_edge": 9, "longest_edge": 8}},
        {"size": 56},
        {"min_pixels": 10**6 + 1},
    ],
)
def test_limits_that_leave_no_size_are_refused_when_made(
    checkpoints: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    images = ImageProcessor(checkpoints / "tiny-qwen2-vl", {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="size of videos must have shortest_edge"):
        VideoPixels(tmp_path, images, size_for_each_frame, DEFAULTS)


def test_frames_that_are_to_be_chosen_null_are_not_chosen(checkpoints: Path, tmp_path: Path) -> None:
    images = ImageProcessor(checkpoints / "tiny-qwen2-vl", {})
    (tmp_path / "preprocessor_config.json").write_text('{"do_sample_frames": null}', encoding="utf-8")
    found = VideoPixels(tmp_path, images, size_for_each_frame, DEFAULTS, FrameChoice(do_sample_frames=True))
    assert found.choice.do_sample_frames is False


def test_patches_unlike_those_of_pictures_and_capped_pixels_are_refused(
    checkpoints: Path, tmp_path: Path
) -> None:
    images = ImageProcessor(checkpoints / "tiny-qwen2-vl", {})
    for values, error, message in (
        ({"patch_size": 16}, ConfigError, "patch_size is 16 for videos and 14 for pictures"),
        ({"cap_pixels_per_frame": True}, UnsupportedError, "cap_pixels_per_frame is not implemented"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(error, match=message):
            VideoPixels(tmp_path, images, size_for_each_frame, DEFAULTS)


def test_limits_in_pixels_count_over_those_of_the_size() -> None:
    size = {"shortest_edge": 3, "longest_edge": 9, "height": None}
    assert with_limits({"size": size}) == {"shortest_edge": 3, "longest_edge": 9}
    assert with_limits({"size": size, "max_pixels": 7}) == {"shortest_edge": 3, "longest_edge": 7}
    assert with_limits({"min_pixels": 2, "max_pixels": None}) == {"shortest_edge": 2}
