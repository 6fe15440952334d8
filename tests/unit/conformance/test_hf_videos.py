"""Frames to patches: what the image processor does to each, and how they are put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conformance.hf_processors import load_image_processor
from conformance.hf_prompts import open_picture
from conformance.hf_videos import FrameProcessor

ASSETS = Path(__file__).parents[3] / "scenarios" / "assets"


def frames(count: int) -> list[Image.Image]:
    return [open_picture(ASSETS / f"video/frame_{n}.png") for n in range(count)]


def processor(checkpoints: Path, name: str) -> tuple[FrameProcessor, Any]:
    values = json.loads((checkpoints / name / "processor_config.json").read_text(encoding="utf-8"))
    images = load_image_processor(checkpoints / name)
    return FrameProcessor(images, values["video_processor"]), images


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen2-5-vl"])
def test_two_equal_frames_are_a_picture(checkpoints: Path, name: str) -> None:
    videos, images = processor(checkpoints, name)
    one = frames(1)[0]
    videos.rates = [1.0]
    made = videos([[one, one]])
    wanted = images([one], return_tensors="pt")
    assert made["video_grid_thw"].tolist() == wanted["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert torch.equal(made["pixel_values_videos"], wanted["pixel_values"])


def test_frames_of_a_temporal_patch_stand_side_by_side_and_the_last_is_repeated(checkpoints: Path) -> None:
    videos, images = processor(checkpoints, "tiny-qwen2-vl")
    videos.rates = [None]
    made = videos([frames(3)])
    assert made["video_grid_thw"].tolist() == [[2, 4, 6]]
    patches = made["pixel_values_videos"].reshape(2, 24, 3, 2, 14, 14)
    for frame, (time, place) in {0: (0, 0), 1: (0, 1), 2: (1, 0)}.items():
        single = images([frames(3)[frame]], return_tensors="pt")["pixel_values"].reshape(24, 3, 2, 14, 14)
        assert torch.equal(patches[time, :, :, place], single[:, :, 0])
    assert torch.equal(patches[1, :, :, 0], patches[1, :, :, 1])


def test_several_videos_follow_each_other(checkpoints: Path) -> None:
    videos, _ = processor(checkpoints, "tiny-qwen2-vl")
    videos.rates = [1.0, 4.0]
    made = videos([frames(2), frames(5)])
    assert made["video_grid_thw"].tolist() == [[1, 4, 6], [3, 4, 6]]
    assert made["pixel_values_videos"].shape == (24 + 72, 1176)
    assert [m.fps for m in made["video_metadata"]] == [1.0, 4.0]
    assert [list(m.frames_indices) for m in made["video_metadata"]] == [[0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("count", "least", "most", "size"),
    [
        (2, 1, 10**6, (64, 96)),
        # 6 × 64 × 96 pixels are over the budget over time: beta = sqrt(6 · 56 · 84 / 20000).
        (6, 1, 20000, (32, 64)),
        # 2 × 64 × 96 are under it: beta = sqrt(40000 / (2 · 56 · 84)).
        (2, 40000, 10**6, (128, 192)),
    ],
)
def test_the_budget_of_qwen3_vl_counts_all_frames(
    checkpoints: Path, count: int, least: int, most: int, size: tuple[int, int]
) -> None:
    videos, _ = processor(checkpoints, "tiny-qwen3-vl")
    videos._settings = {**videos._settings, "size": {"shortest_edge": least, "longest_edge": most}}
    assert videos._size(count, 56, 84) == size
