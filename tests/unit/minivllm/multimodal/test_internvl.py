"""InternVL's tiles, placeholders and picture parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.errors import BadMedia, BadParameter, ConfigError
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.internvl import InternVLProcessor, tile_grid
from minivllm.multimodal.load import load_image
from minivllm.request import PatchRect
from minivllm.tokenizer import load_tokenizer

ASSETS = data_root() / "scenarios" / "assets"


def picture(name: str) -> Image.Image:
    return load_image(ASSETS / name)


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-internvl"


@pytest.fixture
def make(directory: Path) -> Any:
    def make(**settings: Any) -> InternVLProcessor:
        family = MULTIMODAL.get("InternVLForConditionalGeneration")
        made = family(directory, load_model_config(directory), load_tokenizer(directory), settings)
        assert isinstance(made, InternVLProcessor)
        return made

    return make


def test_the_grid_of_tiles_is_that_of_transformers() -> None:
    sizes = [
        (w, h) for w in (1, 30, 56, 57, 112, 113, 168, 300, 2010) for h in (1, 20, 56, 84, 112, 200, 500)
    ]
    for width, height in sizes:
        for least, most in ((1, 4), (1, 12), (3, 6)):
            truth = get_optimal_tiled_canvas((height, width), (56, 56), least, most)
            assert tile_grid((width, height), 56, least, most) == truth, (width, height, least, most)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("sizes/noise_112x84.png", 5 * 4),  # 2 × 2 tiles and the overview
        ("sizes/noise_84x112.png", 5 * 4),
        ("sizes/wide_200x40.png", 5 * 4),  # 4 × 1
        ("sizes/small_30x20.png", 4),  # 1 × 1 and 2 × 1 are equally near: more tiles only for more pixels
        ("sizes/dot_1x1.png", 4),  # no overview of a single tile
    ],
)
def test_placeholders_are_those_of_transformers_processor(
    make: Any, directory: Path, name: str, rows: int
) -> None:
    (expansion,) = make().expand("image", [picture(name)], {})
    assert expansion.token_ids == (443, *[445] * rows, 444)
    assert expansion.is_embed == (False, *[True] * rows, False)
    assert expansion.item.num_embeddings == len(expansion.item.patches) == rows
    truth = load_processor(directory)(images=[[picture(name)]], text=["a<IMG_CONTEXT>"], return_tensors="pt")
    assert tuple(truth["input_ids"][0].tolist()) == (64, *expansion.token_ids)
    assert torch.equal(expansion.item.data["pixel_values"], truth["pixel_values"])


def test_tiles_come_line_by_line_and_the_overview_last(make: Any) -> None:
    (expansion,) = make().expand("image", [picture("sizes/wide_200x40.png")], {})
    patches = expansion.item.patches
    assert patches[0] == PatchRect(0, 0.0, 0.0, 0.125, 0.5)
    assert patches[4] == PatchRect(0, 0.25, 0.0, 0.125, 0.5)
    assert patches[16:] == tuple(PatchRect(0, x, y, 0.5, 0.5) for y in (0.0, 0.5) for x in (0.0, 0.5))
    assert expansion.item.facts["grid"] == (4, 1)
    assert expansion.item.facts["size"] == (200, 40)


def test_settings_change_the_tiles_and_the_hash(make: Any) -> None:
    processor, image = make(), picture("sizes/noise_112x84.png")
    (whole,) = processor.expand("image", [image], {})
    (one,) = processor.expand("image", [image], {"crop_to_patches": False})
    (two,) = processor.expand("image", [image], {"max_patches": 2})
    assert [e.item.num_embeddings for e in (whole, one, two)] == [20, 4, 4]
    assert len({e.item.content_hash for e in (whole, one, two)}) == 3
    assert make(max_patches=2).expand("image", [image], {})[0].item.content_hash == two.item.content_hash
    assert processor.expand("image", [image], {})[0].item.content_hash == whole.item.content_hash


def test_pictures_of_one_prompt_are_independent(make: Any) -> None:
    images = [picture("sizes/noise_112x84.png"), picture("sizes/small_30x20.png")]
    together = make().expand("image", images, {})
    for expansion, image in zip(together, images, strict=True):
        (alone,) = make().expand("image", [image], {})
        assert alone.item.content_hash == expansion.item.content_hash
        assert torch.equal(alone.item.data["pixel_values"], expansion.item.data["pixel_values"])


def test_a_size_that_the_model_has_no_positions_for_is_refused(make: Any) -> None:
    with pytest.raises(BadMedia, match=r"made 28 × 28 pixels where the model takes 56 × 56: leave out"):
        make().expand("image", [picture("sizes/dot_1x1.png")], {"size": {"height": 28, "width": 28}})


def test_an_unknown_setting_is_refused(make: Any) -> None:
    with pytest.raises(BadParameter, match=r"unknown image processor settings \['max_tiles'\]; known: crop_"):
        make(max_tiles=3)


def test_a_tokenizer_without_the_brackets_is_refused(directory: Path, checkpoints: Path) -> None:
    family = MULTIMODAL.get("InternVLForConditionalGeneration")
    tokenizer = load_tokenizer(checkpoints / "tiny-llama")
    with pytest.raises(ConfigError, match="the tokenizer has no token '<img>'"):
        family(directory, load_model_config(directory), tokenizer, {})


def test_positions_are_counted(make: Any) -> None:
    assert make().positions((1, 2), (), {}) is None
