"""Embeddings in place of pictures, for LLaVA, LLaVA-OneVision and InternVL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.errors import BadMedia
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor
from minivllm.multimodal.image_embeds import is_supplied, supplied_item
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import picture


def rows(count: int, width: int = 64) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def processor(path: Path) -> MultiModalProcessor:
    config = load_model_config(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return MULTIMODAL.get(config.architecture)(path, config, tokenizer, {})


def test_a_picture_is_not_supplied() -> None:
    assert not is_supplied(picture(4, 4))
    assert is_supplied(rows(4))
    assert is_supplied({"image_embeds": rows(4)})


def test_embeddings_are_known_by_content() -> None:
    one, again, other = (supplied_item(x, 4, "") for x in (rows(4), {"image_embeds": rows(4)}, rows(8)))
    assert one.content_hash == again.content_hash != other.content_hash
    assert (one.num_embeddings, other.num_embeddings) == (4, 8)
    assert torch.equal(one.data["embeddings"], rows(4))
    assert supplied_item(rows(4).double(), 4, "").content_hash != one.content_hash


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (rows(6), r"a multiple of 4 rows \(a tile\), got 6"),
        ({"image_embeds": rows(4), "grid": 1}, r"got \['grid', 'image_embeds'\]"),
    ],
)
def test_other_embeddings_are_refused(source: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        supplied_item(source, 4, "a tile")


@pytest.mark.parametrize(
    ("name", "count", "ids"),
    [
        ("tiny-llava", 16, [444] * 16),
        ("tiny-llava-onevision", 5, [443] * 5),
        ("tiny-internvl", 8, [443, *[445] * 8, 444]),
    ],
)
def test_supplied_embeddings_take_the_place_of_a_picture(
    checkpoints: Path, name: str, count: int, ids: list[int]
) -> None:
    made = processor(checkpoints / name).expand("image", [rows(count), picture(112, 84)], {})
    assert list(made[0].token_ids) == ids
    assert sum(made[0].is_embed) == count
    assert set(made[1].item.data) >= {"pixel_values"}


def test_a_picture_beside_supplied_embeddings_is_one_of_several(checkpoints: Path) -> None:
    onevision = processor(checkpoints / "tiny-llava-onevision")
    beside = onevision.expand("image", [rows(5), picture(112, 84)], {})[1].item
    among = onevision.expand("image", [picture(84, 84, 1), picture(112, 84)], {})[1].item
    assert beside.num_embeddings == 17
    assert beside.content_hash == among.content_hash
    assert torch.equal(beside.data["pixel_values"], among.data["pixel_values"])


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [("tiny-llava", 32, "of one picture have 16 rows, got 32"), ("tiny-internvl", 6, "a tile has so many")],
)
def test_rows_that_no_picture_has_are_refused(checkpoints: Path, name: str, count: int, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        processor(checkpoints / name).expand("image", [rows(count)], {})
