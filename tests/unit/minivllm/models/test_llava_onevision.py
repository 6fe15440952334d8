"""LLaVA-OneVision: sizes of tiled pictures, and what `encode` gives."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image

from minivllm.errors import ConfigError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model, load_model_config
from minivllm.models.llava_onevision import best_resolution, feature_size, unpadded_size
from minivllm.request import MediaItem

PINPOINTS = tuple((56 * high, 56 * wide) for high in (1, 2, 3) for wide in (1, 2, 3))
SIZES = [
    (47, 188),
    (188, 47),
    *product((1, 20, 37, 56, 84, 112, 200, 333), (1, 30, 55, 84, 112, 168, 300, 640)),
]


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-llava-onevision"


def load(path: Path) -> VisionLanguageModel:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    return model


def test_a_picture_is_tiled_to_the_size_that_transformers_takes() -> None:
    compared = 0
    for size in SIZES:
        truth = select_best_resolution(size, [list(point) for point in PINPOINTS])
        if truth is not None:  # a picture so thin that no size keeps a pixel of it
            assert best_resolution(size, PINPOINTS) == truth, size
            compared += 1
    assert compared > 50


def test_padding_is_cut_off_as_transformers_does() -> None:
    for size in SIZES:
        for grid in ((4, 8), (12, 4), (8, 8)):
            cut = unpad_image(torch.zeros(1, *grid), size).shape[1:]
            assert unpadded_size(size, grid) == tuple(cut), (size, grid)


@pytest.mark.parametrize(
    ("size", "grid", "left"),
    [
        ((84, 112), (8, 8), (6, 8)),
        ((112, 84), (8, 8), (8, 6)),
        ((100, 112), (8, 8), (8, 8)),  # 7 of 8 lines: one line of padding cannot be cut on both sides
        ((3, 7), (12, 12), (6, 12)),  # 3 × (12 / 7) is 5.14
        ((49, 99), (8, 8), (4, 8)),  # 3.96 is 3: cut, not rounded, so one odd line stays
        ((47, 188), (4, 12), (4, 12)),  # 47 × (12 / 188) is 2.9999999999999996: rounded first, 3 of 4 lines
    ],
)
def test_unpadded_sizes_are_these(
    size: tuple[int, int], grid: tuple[int, int], left: tuple[int, int]
) -> None:
    assert unpadded_size(size, grid) == left


@pytest.mark.parametrize(
    ("size", "lines"),
    [
        ((84, 112), (6, 8)),
        ((120, 84), (9, 6)),
        ((360, 640), (6, 12)),
        ((333, 333), (8, 8)),
        ((200, 40), (12, 2)),
    ],
)
def test_features_beyond_the_limit_are_shrunk(
    directory: Path, size: tuple[int, int], lines: tuple[int, int]
) -> None:
    assert feature_size(size, load_model_config(directory).vision) == lines


@pytest.mark.parametrize("size", [(84, 112), (112, 84), (333, 333), (360, 640), (20, 200), (56, 56)])
@torch.inference_mode()
def test_embeddings_of_a_tiled_picture_are_those_of_transformers(
    directory: Path, size: tuple[int, int]
) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    high, wide = best_resolution(size, PINPOINTS)
    tiles = 1 + high // 56 * (wide // 56)
    pixels = torch.randn(1, tiles, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    data = {"pixel_values": pixels, "image_sizes": torch.tensor([size])}
    (truth,) = hf.model.get_image_features(**data, batch_num_images=torch.tensor([1])).pooler_output
    model = load(directory)
    rows = model.encode(MediaItem("h", "image", 0, data)).rows
    lines, columns = feature_size(size, model.config.vision)
    assert rows.shape == (16 + lines * (columns + 1), 64)
    torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_embeddings_of_pictures_among_several_are_those_of_transformers(directory: Path) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    pixels = torch.randn(2, 1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([[84, 112], [112, 84]])
    truth = hf.model.get_image_features(pixels, sizes, batch_num_images=torch.tensor([2])).pooler_output
    model = load(directory)
    for number in range(2):
        part = slice(number, number + 1)
        data = {"pixel_values": pixels[part], "image_sizes": sizes[part]}
        rows = model.encode(MediaItem("h", "image", 17, data)).rows
        assert rows.shape == (17, 64)
        torch.testing.assert_close(rows, truth[number], rtol=1e-4, atol=1e-4)
        assert torch.equal(rows[16], model.image_newline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_aspect_ratio": "pad"}, "vision_aspect_ratio must be anyres_max_ and a number, got 'pad'"),
        ({"image_grid_pinpoints": [[56, 60]]}, r"must be multiples of 56, got \[\(56, 60\)\]"),
        ({"image_grid_pinpoints": []}, "must be multiples of 56, got none"),
        ({"vision_feature_select_strategy": "default"}, "15 features where tiles need one per patch, 16"),
    ],
)
def test_a_config_that_makes_no_grid_is_refused(
    directory: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")
    shutil.copy(directory / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
