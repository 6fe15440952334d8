"""SmolVLM's crops, placeholders and picture parts are those of Transformers' processor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.hf_processors import load_processor
from minivllm.errors import BadMedia, BadParameter, ConfigError
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL, Expansion
from minivllm.multimodal.smolvlm import SmolVLMProcessor, placeholder_text
from minivllm.request import PatchRect
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import picture, place

AROUND, IMAGE, WHOLE, LINE = 443, 444, 445, 198

Make = Callable[..., SmolVLMProcessor]


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-smolvlm"


@pytest.fixture
def make(directory: Path) -> Make:
    def make(path: Path = directory, **settings: Any) -> SmolVLMProcessor:
        family = MULTIMODAL.get("SmolVLMForConditionalGeneration")
        made = family(path, load_model_config(path), load_tokenizer(path), settings)
        assert isinstance(made, SmolVLMProcessor)
        return made

    return make


def truth(directory: Path, image: Any, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """Ids and pixels that Transformers' processor makes of one picture."""
    made = load_processor(directory)(images=[[image]], text=["<image>"], return_tensors="pt", **settings)
    return made["input_ids"][0].tolist(), made["pixel_values"][0]


SIZES = [(112, 84), (84, 120), (56, 56), (200, 40), (40, 200), (30, 20), (1, 1), (1, 10_000), (10_000, 1)]
SIZES += [(57, 56), (113, 112), (3, 1000), (640, 480), (2, 3)]


@pytest.mark.parametrize("size", SIZES)
def test_ids_and_pixels_are_those_of_transformers(directory: Path, make: Make, size: tuple[int, int]) -> None:
    image = picture(*size)
    ids, pixels = truth(directory, image)
    (made,) = make().expand("image", [image], {})
    assert list(made.token_ids) == ids
    assert torch.equal(made.item.data["pixel_values"], pixels)
    assert made.is_embed == tuple(token == IMAGE for token in ids)
    assert made.item.num_embeddings == sum(made.is_embed) == 4 * len(pixels)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"longest_edge": 56}},
        {"size": {"longest_edge": 57}},
        {"size": {"longest_edge": 168}},
        {"size": {"longest_edge": 280}},  # more rows and columns than the vocabulary names
        {"do_image_splitting": False},
        {"do_resize": False},
        {"do_normalize": False},
        {"resample": 3},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
    ],
)
def test_settings_act_as_in_transformers_of_the_engine_and_of_a_request(
    directory: Path, make: Make, settings: dict[str, Any]
) -> None:
    image = picture(90, 130)
    ids, pixels = truth(directory, image, **settings)
    for made in (
        make(**settings).expand("image", [image], {})[0],
        make().expand("image", [image], settings)[0],
    ):
        assert list(made.token_ids) == ids
        assert torch.equal(made.item.data["pixel_values"], pixels)


def test_the_expansion_of_two_rows_and_two_columns_is_written_out(make: Make) -> None:
    (made,) = make().expand("image", [picture(112, 84)], {})
    crop = [IMAGE] * 4
    rows = [[AROUND, 446, *crop, AROUND, 447, *crop, LINE], [AROUND, 449, *crop, AROUND, 450, *crop, LINE]]
    assert list(made.token_ids) == [*rows[0], *rows[1], LINE, AROUND, WHOLE, *crop, AROUND]
    assert made.item.facts["grid"] == (2, 2)


def test_a_picture_that_is_not_cut_is_one_crop_without_a_name(make: Make) -> None:
    (made,) = make().expand("image", [picture(112, 84)], {"do_image_splitting": False})
    assert list(made.token_ids) == [AROUND, WHOLE, *[IMAGE] * 4, AROUND]
    assert (made.item.facts["grid"], made.item.num_embeddings) == ((0, 0), 4)


def test_every_crop_is_a_run_of_its_own_that_says_which_rows_it_takes(make: Make) -> None:
    (made,) = make().expand("image", [picture(200, 40)], {})
    placed = place([[71], made])
    assert [(span.start, span.length, span.first_row) for span in placed.spans] == [
        (3, 4, 0),
        (9, 4, 4),
        (17, 4, 8),
    ]
    assert {span.content_hash for span in placed.spans} == {made.item.content_hash}


def test_pictures_of_one_prompt_do_not_depend_on_each_other(directory: Path, make: Make) -> None:
    """Transformers pads the smaller one's crops with zeros; here there are no such crops."""
    images = [picture(112, 84), picture(200, 40, 1)]
    both = make().expand("image", images, {})
    for image, made in zip(images, both, strict=True):
        (alone,) = make().expand("image", [image], {})
        assert made.token_ids == alone.token_ids
        assert made.item.content_hash == alone.item.content_hash
        assert torch.equal(made.item.data["pixel_values"], alone.item.data["pixel_values"])
        assert made.item.data["pixel_values"].abs().sum(dim=(1, 2, 3)).min() > 0
    hf = load_processor(directory)(images=[images], text=["<image> and <image>"], return_tensors="pt")
    pixels = torch.cat([made.item.data["pixel_values"] for made in both])
    assert torch.equal(pixels, hf["pixel_values"][0])


def test_rows_know_their_part_of_the_picture_crop_by_crop_then_as_a_whole(make: Make) -> None:
    (made,) = make().expand("image", [picture(200, 40)], {})
    patches = made.item.patches
    assert len(patches) == 12
    assert patches[0] == PatchRect(0, 0.0, 0.0, 0.25, 0.5)
    assert patches[5] == PatchRect(0, 0.75, 0.0, 0.25, 0.5)
    assert patches[7] == PatchRect(0, 0.75, 0.5, 0.25, 0.5)
    assert patches[8:] == (
        PatchRect(0, 0.0, 0.0, 0.5, 0.5),
        PatchRect(0, 0.5, 0.0, 0.5, 0.5),
        PatchRect(0, 0.0, 0.5, 0.5, 0.5),
        PatchRect(0, 0.5, 0.5, 0.5, 0.5),
    )


def test_the_hash_follows_pixels_and_settings(make: Make) -> None:
    def hash_of(image: Any, **settings: Any) -> str:
        made: Expansion = make().expand("image", [image], settings)[0]
        return made.item.content_hash

    image = picture(112, 84)
    assert hash_of(image) == hash_of(image.copy())
    others = {hash_of(picture(112, 84, 1)), hash_of(image, resample=3), hash_of(image.transpose(0))}
    assert len(others | {hash_of(image)}) == 4


@pytest.mark.parametrize("name", ["do_pad", "max_image_size", "return_row_col_info"])
def test_settings_that_cannot_be_honoured_are_refused(make: Make, name: str) -> None:
    assert name not in make().setting_names
    with pytest.raises(BadParameter, match=f"'{name}' cannot be changed"):
        make().expand("image", [picture(56, 56)], {name: True})
    with pytest.raises(BadParameter, match=f"'{name}' cannot be changed"):
        make(**{name: True})


def test_unknown_settings_are_refused_with_the_known_ones(make: Make) -> None:
    with pytest.raises(BadParameter, match=r"\['max_pixels'\]; known: .*do_image_splitting"):
        make().expand("image", [picture(56, 56)], {"max_pixels": 1})


def test_supplied_embeddings_say_how_the_picture_was_cut(make: Make) -> None:
    processor = make()
    (cut,) = processor.expand("image", [picture(200, 40)], {})
    rows = torch.randn(12, 64)
    (made,) = processor.expand("image", [{"image_embeds": rows, "rows": 1, "cols": 2}], {})
    assert (made.token_ids, made.is_embed) == (cut.token_ids, cut.is_embed)
    assert torch.equal(made.item.data["embeddings"], rows)
    assert made.item.patches == cut.item.patches
    (whole,) = processor.expand("image", [rows[:4]], {})
    assert list(whole.token_ids) == [AROUND, WHOLE, *[IMAGE] * 4, AROUND]
    again = processor.expand("image", [{"image_embeds": rows[:4], "rows": 0, "cols": 0}], {})[0]
    assert again.item.content_hash == whole.item.content_hash != made.item.content_hash


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(5, 64), r"0 × 0 crops and the whole need embeddings \[4, 64\], got \[5, 64\]"),
        ({"image_embeds": torch.zeros(4, 63)}, r"got \[4, 63\]"),
        ({"image_embeds": torch.zeros(12, 64), "rows": 2, "cols": 2}, r"\[20, 64\], got \[12, 64\]"),
        ({"image_embeds": torch.zeros(8, 64), "rows": 1, "cols": 0}, "must be positive numbers, or both 0"),
        ({"image_embeds": torch.zeros(4, 64), "rows": -1, "cols": -1}, "must be positive numbers"),
        ({"image_embeds": torch.zeros(8, 64), "rows": True, "cols": 1}, "must be positive numbers"),
        ({"rows": 1, "cols": 1}, r"got \['cols', 'rows'\]"),
        ({"image_embeds": torch.zeros(4, 64), "grid": 1}, r"got \['grid', 'image_embeds'\]"),
    ],
)
def test_supplied_embeddings_that_do_not_fit_are_refused(make: Make, given: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        make().expand("image", [given], {})


def test_a_tokenizer_of_another_vocabulary_is_refused(directory: Path, make: Make, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "other")
    values = json.loads((tmp_path / "other" / "config.json").read_text(encoding="utf-8"))
    values["image_token_id"] = 445
    (tmp_path / "other" / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="'<image>' is token 444 of the tokenizer, but image_token_id is 445"
    ):
        make(tmp_path / "other")


def test_a_crop_that_makes_no_whole_tokens_is_refused(directory: Path, make: Make, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "other")
    values = json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))
    values["image_processor"]["max_image_size"] = {"longest_edge": 42}
    (tmp_path / "other" / "processor_config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="crops of 42 pixels have 3 patches"):
        make(tmp_path / "other")


def test_positions_are_counted(make: Make) -> None:
    assert make().positions([1, 2], [], {}) is None


def test_the_text_of_one_row_of_one_crop_has_both_line_ends() -> None:
    assert placeholder_text(1, 1, 1) == (
        "<fake_token_around_image><row_1_col_1><image>\n\n"
        "<fake_token_around_image><global-img><image><fake_token_around_image>"
    )
