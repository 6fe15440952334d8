"""BLIP-2's pixels are those of Transformers' processor; every picture is as many tokens as queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.hf_processors import load_processor
from minivllm.errors import BadMedia, BadParameter
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.blip2 import Blip2Processor
from minivllm.request import PatchRect
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import picture

IMAGE = 444

Make = Callable[..., Blip2Processor]


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-blip2"


@pytest.fixture
def make(directory: Path) -> Make:
    def make(**settings: Any) -> Blip2Processor:
        family = MULTIMODAL.get("Blip2ForConditionalGeneration")
        made = family(directory, load_model_config(directory), load_tokenizer(directory), settings)
        assert isinstance(made, Blip2Processor)
        return made

    return make


@pytest.mark.parametrize("size", [(112, 84), (84, 120), (56, 56), (1, 1), (1, 10_000), (10_000, 1)])
@pytest.mark.parametrize("settings", [{}, {"resample": 2, "do_normalize": False}])
def test_ids_and_pixels_are_those_of_transformers(
    directory: Path, make: Make, size: tuple[int, int], settings: dict[str, Any]
) -> None:
    image = picture(*size)
    hf = load_processor(directory)(images=[image], text=["Hi"], return_tensors="pt", **settings)
    for made in (
        make(**settings).expand("image", [image], {})[0],
        make().expand("image", [image], settings)[0],
    ):
        bos_and_text = load_tokenizer(directory).encode("Hi")  # type: ignore[union-attr]  # it has one
        assert [*made.token_ids, *bos_and_text] == hf["input_ids"][0].tolist()
        assert torch.equal(made.item.data["pixel_values"], hf["pixel_values"])


def test_a_picture_is_four_placeholders_and_each_row_sees_all_of_it(make: Make) -> None:
    first, second = make().expand("image", [picture(112, 84), picture(84, 120, 1)], {})
    assert first.token_ids == second.token_ids == (IMAGE,) * 4
    assert first.is_embed == (True,) * 4
    assert first.item.patches == (PatchRect(0, 0.0, 0.0, 1.0, 1.0),) * 4
    assert (first.item.num_embeddings, first.item.facts["size"]) == (4, (112, 84))
    assert first.item.content_hash != second.item.content_hash


def test_prompts_name_no_placeholder(make: Make) -> None:
    assert make().implicit_placeholders
    assert make().placeholder_ids == {"image": IMAGE}
    assert make().positions([1], [], {}) is None


def test_settings_about_sizes_are_refused(make: Make) -> None:
    with pytest.raises(BadMedia, match="made 28 × 42 pixels where the model takes 56 × 56"):
        make().expand("image", [picture(56, 56)], {"size": {"height": 28, "width": 42}})
    with pytest.raises(BadParameter, match=r"unknown image processor settings \['do_image_splitting'\]"):
        make(do_image_splitting=True)


def test_supplied_embeddings_are_one_row_per_query(make: Make) -> None:
    rows = torch.randn(4, 64)
    for given in (rows, {"image_embeds": rows}):
        (made,) = make().expand("image", [given], {})
        assert made.token_ids == (IMAGE,) * 4
        assert torch.equal(made.item.data["embeddings"], rows)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(5, 64), r"a picture needs embeddings \[4, 64\], got \[5, 64\]"),
        ({"image_embeds": torch.zeros(4, 64), "rows": 1}, r"'image_embeds', got \['image_embeds', 'rows'\]"),
    ],
)
def test_supplied_embeddings_that_do_not_fit_are_refused(make: Make, given: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        make().expand("image", [given], {})
