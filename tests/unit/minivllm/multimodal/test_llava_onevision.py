"""LLaVA-OneVision's tiles, placeholders and picture parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.errors import BadMedia, BadParameter, ConfigError
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.llava_onevision import LlavaOnevisionProcessor
from minivllm.multimodal.load import load_image
from minivllm.request import PatchRect
from minivllm.tokenizer import load_tokenizer

ASSETS = data_root() / "scenarios" / "assets"
IMAGE = 443


def picture(name: str) -> Image.Image:
    if name == "sizes/nearly_square.png":
        return picture("sizes/large_640x360.png").resize((333, 300))
    return load_image(ASSETS / name)


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-llava-onevision"


@pytest.fixture
def make(directory: Path) -> Any:
    def make(place: Path = directory, **settings: Any) -> LlavaOnevisionProcessor:
        family = MULTIMODAL.get("LlavaOnevisionForConditionalGeneration")
        made = family(place, load_model_config(directory), load_tokenizer(directory), settings)
        assert isinstance(made, LlavaOnevisionProcessor)
        return made

    return make


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["noise_112x84"], [16 + 6 * (8 + 1)]),  # 2 × 2 tiles without their padding
        (["noise_84x112"], [16 + 8 * (6 + 1)]),
        (["small_30x20"], [16 + 2 * (4 + 1)]),
        (["wide_200x40"], [16 + 2 * (12 + 1)]),
        (["large_640x360"], [16 + 6 * (12 + 1)]),
        (["thin_2010x10"], [16]),  # no line is left of its tiles
        (["nearly_square"], [16 + 7 * (8 + 1)]),  # 10 × 12 of 3 × 3 tiles, shrunk to 4 squares' worth
        (["noise_112x84", "wide_200x40"], [17, 17]),  # two pictures are not tiled
        (["wide_200x40", "noise_112x84", "dot_1x1"], [17, 17, 17]),
    ],
)
def test_placeholders_are_those_of_transformers_processor(
    make: Any, directory: Path, names: list[str], rows: list[int]
) -> None:
    pictures = [picture(f"sizes/{name}.png") for name in names]
    expansions = make().expand("image", pictures, {})
    assert [e.item.num_embeddings for e in expansions] == rows
    assert [len(e.item.patches) for e in expansions] == rows
    ids = [token for e in expansions for token in (*e.token_ids, 65)]
    assert all(all(e.is_embed) for e in expansions)
    truth = load_processor(directory)(images=[pictures], text=["<image>b" * len(names)], return_tensors="pt")
    assert truth["input_ids"][0].tolist() == ids
    pixels = torch.cat([e.item.data["pixel_values"] for e in expansions])
    assert torch.equal(pixels, truth["pixel_values"])
    sizes = torch.cat([e.item.data["image_sizes"] for e in expansions])
    assert torch.equal(sizes, truth["image_sizes"])


def test_a_picture_alone_and_among_others_are_two_things(make: Any) -> None:
    image = picture("sizes/noise_112x84.png")
    (alone,) = make().expand("image", [image], {})
    twice = make().expand("image", [image, image], {})
    assert twice[0].item.content_hash == twice[1].item.content_hash != alone.item.content_hash


def test_lines_end_at_the_right_edge(make: Any) -> None:
    (expansion,) = make().expand("image", [picture("sizes/noise_112x84.png")], {})
    patches = expansion.item.patches
    assert patches[0] == PatchRect(0, 0.0, 0.0, 0.25, 0.25)
    assert patches[16] == PatchRect(0, 0.0, 0.0, 0.125, pytest.approx(1 / 6))
    assert patches[24] == PatchRect(0, 1.0, 0.0, 0.0, pytest.approx(1 / 6))
    assert patches[25] == PatchRect(0, 0.0, pytest.approx(1 / 6), 0.125, pytest.approx(1 / 6))


def test_padding_of_a_squared_picture_stands_for_nothing(make: Any) -> None:
    wide = make().expand("image", [picture("sizes/wide_200x40.png")] * 2, {})[0].item.patches
    assert wide[0] == PatchRect(0, 0.0, 0.0, 0.25, 0.0)
    assert wide[4] == PatchRect(0, 0.0, 0.0, 0.25, 0.5)  # 40 of 200 lines, in the two middle rows
    assert wide[8] == PatchRect(0, 0.0, 0.5, 0.25, 0.5)
    assert wide[16] == PatchRect(0, 1.0, 1.0, 0.0, 0.0)


def test_what_the_model_reads_of_its_own_config_cannot_be_changed(make: Any) -> None:
    with pytest.raises(BadParameter, match="'image_grid_pinpoints' cannot be changed: the model reads it"):
        make().expand("image", [picture("sizes/dot_1x1.png")], {"image_grid_pinpoints": [[56, 56]]})


def test_a_size_that_the_model_has_no_positions_for_is_refused(make: Any) -> None:
    with pytest.raises(BadMedia, match=r"made 28 × 28 pixels where the model takes 56 × 56"):
        make().expand("image", [picture("sizes/dot_1x1.png")], {"size": {"height": 28, "width": 28}})


def test_pinpoints_that_differ_from_the_model_s_are_refused(
    make: Any, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path / "copy")
    path = tmp_path / "copy" / "processor_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["image_processor"]["image_grid_pinpoints"] = [[56, 56], [112, 56]]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"image_grid_pinpoints of the image processor \(\(56, 56\)"):
        make(tmp_path / "copy")


def test_positions_are_counted(make: Any) -> None:
    assert make().positions((1, 2), (), {}) is None
