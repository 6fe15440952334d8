"""LLaVA's squares, placeholders and picture parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.errors import BadMedia
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.llava import LlavaProcessor
from minivllm.multimodal.load import load_image
from minivllm.request import PatchRect
from minivllm.tokenizer import load_tokenizer

ASSETS = data_root() / "scenarios" / "assets"


def picture(name: str) -> Image.Image:
    return load_image(ASSETS / name)


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-llava"


@pytest.fixture
def make(directory: Path) -> Any:
    def make(**settings: Any) -> LlavaProcessor:
        family = MULTIMODAL.get("LlavaForConditionalGeneration")
        made = family(directory, load_model_config(directory), load_tokenizer(directory), settings)
        assert isinstance(made, LlavaProcessor)
        return made

    return make


@pytest.mark.parametrize("name", ["noise_112x84", "noise_84x112", "wide_200x40", "small_30x20", "dot_1x1"])
def test_placeholders_are_those_of_transformers_processor(make: Any, directory: Path, name: str) -> None:
    (expansion,) = make().expand("image", [picture(f"sizes/{name}.png")], {})
    assert expansion.token_ids == (444,) * 16
    assert expansion.is_embed == (True,) * 16
    assert expansion.item.num_embeddings == len(expansion.item.patches) == 16
    truth = load_processor(directory)(
        images=[[picture(f"sizes/{name}.png")]], text=["a<image>"], return_tensors="pt"
    )
    assert tuple(truth["input_ids"][0].tolist()) == (441, 64, *expansion.token_ids)
    assert torch.equal(expansion.item.data["pixel_values"], truth["pixel_values"])


def test_only_the_middle_of_a_picture_is_seen(make: Any) -> None:
    (wide,) = make().expand("image", [picture("sizes/wide_200x40.png")], {})
    assert wide.item.patches[0] == PatchRect(0, 0.4, 0.0, pytest.approx(0.05), 0.25)
    assert wide.item.patches[15] == PatchRect(0, pytest.approx(0.55), 0.75, pytest.approx(0.05), 0.25)
    (square,) = make().expand("image", [picture("sizes/dot_1x1.png")], {})
    assert square.item.patches[5] == PatchRect(0, 0.25, 0.25, 0.25, 0.25)


def test_settings_change_pixels_and_hash(make: Any) -> None:
    image = picture("sizes/noise_112x84.png")
    (plain,) = make().expand("image", [image], {})
    (other,) = make().expand("image", [image], {"do_normalize": False})
    assert plain.item.content_hash != other.item.content_hash
    assert not torch.equal(plain.item.data["pixel_values"], other.item.data["pixel_values"])


def test_transparency_and_its_hidden_colours_are_part_of_the_hash(make: Any) -> None:
    hashes = {
        make().expand("image", [picture(f"modes/{name}.png")], {})[0].item.content_hash
        for name in ("l", "la", "p", "p_transparent", "rgba", "1")
    }
    assert len(hashes) == 6


def test_a_size_that_the_model_has_no_positions_for_is_refused(make: Any) -> None:
    with pytest.raises(BadMedia, match=r"made 28 × 28 pixels where the model takes 56 × 56"):
        make().expand("image", [picture("sizes/dot_1x1.png")], {"crop_size": {"height": 28, "width": 28}})


def test_facts_tell_where_pixels_come_from(make: Any) -> None:
    (expansion,) = make().expand("image", [picture("modes/rgba.png")], {})
    assert expansion.item.facts["mode"] == "RGBA"
    assert expansion.item.facts["image_processor"] == "CLIPImageProcessorPil"
    assert expansion.item.facts["backend"] == "pil"


def test_positions_are_counted(make: Any) -> None:
    assert make().positions((1, 2), (), {}) is None
