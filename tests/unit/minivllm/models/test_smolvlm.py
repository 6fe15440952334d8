"""SmolVLM and Idefics3: names of checkpoints, crops, positions and rows as in Transformers eager."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionEmbeddings

from conformance.recipes.build import MECHANICS, make_model
from minivllm.errors import BadMedia, ConfigError, InvariantError, UnsupportedError, WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.smolvlm import (
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    position_ids,
)
from minivllm.models.vision.vit import pixel_shuffle
from minivllm.request import MediaItem

NAME = "tiny-smolvlm"


def load(path: Path, dtype: torch.dtype = torch.float32) -> SmolVLMForConditionalGeneration:
    model = load_model(path, dtype=dtype, device="cpu", ops=TorchOps())
    assert isinstance(model, SmolVLMForConditionalGeneration)
    return model


def transformers_of(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=dtype)


def picture(crops: int, side: int = 56) -> MediaItem:
    pixels = torch.randn(crops, 3, side, side, generator=torch.Generator().manual_seed(crops))
    return MediaItem("h", "image", crops * 4, {"pixel_values": pixels})


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    edit(values)
    (target / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return target


@pytest.mark.parametrize("crops", [1, 5])
@torch.inference_mode()
def test_rows_are_the_features_of_transformers(checkpoints: Path, crops: int) -> None:
    item = picture(crops)
    truth = transformers_of(checkpoints / NAME).get_image_features(item.data["pixel_values"][None])
    rows = load(checkpoints / NAME).encode(item).rows
    assert rows.shape == (item.num_embeddings, 64)
    torch.testing.assert_close(rows, torch.cat(list(truth.pooler_output)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("crops", [1, 5])
@torch.inference_mode()
def test_in_bfloat16_rows_are_as_near_to_the_exact_ones_as_those_of_transformers(
    checkpoints: Path, crops: int
) -> None:
    """Bits are another CPU's: it may multiply a convolution's weights and a matrix's in other orders."""
    item, half = picture(crops), transformers_of(checkpoints / NAME, torch.bfloat16)
    pixels = item.data["pixel_values"][None]
    theirs = torch.cat(list(half.get_image_features(pixels).pooler_output))
    exact = torch.cat(list(half.float().get_image_features(pixels.bfloat16().float()).pooler_output))
    rows = load(checkpoints / NAME, torch.bfloat16).encode(item).rows
    assert (rows.shape, rows.dtype) == (exact.shape, torch.bfloat16)
    rms = [(arm.float() - exact).square().mean().sqrt().item() for arm in (rows, theirs)]
    assert 0 < rms[0] < 1.5 * rms[1]


@torch.inference_mode()
def test_crops_smaller_than_the_table_of_positions_spread_over_it(tmp_path: Path) -> None:
    """As the model was trained for pictures of any size: 4 × 4 patches over 6 × 6 positions."""
    recipe = MECHANICS[NAME]
    assert recipe.vision is not None
    larger = replace(recipe.vision, vision_config={**recipe.vision.vision_config, "image_size": 84})
    hf = make_model(replace(recipe, vision=larger))
    hf.save_pretrained(tmp_path)
    item = picture(2)
    truth = hf.get_image_features(item.data["pixel_values"][None]).pooler_output
    torch.testing.assert_close(load(tmp_path).encode(item).rows, torch.cat(list(truth)), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_idefics3_is_the_same_computation_under_another_name(checkpoints: Path, tmp_path: Path) -> None:
    def rename(values: dict[str, Any]) -> None:
        values.update(architectures=["Idefics3ForConditionalGeneration"], model_type="idefics3")
        values["vision_config"]["model_type"] = "idefics3_vision"

    directory = edited(checkpoints / NAME, tmp_path / "idefics3", rename)
    item = picture(3)
    ours = load(directory)
    assert isinstance(ours, Idefics3ForConditionalGeneration)
    assert torch.equal(ours.encode(item).rows, load(checkpoints / NAME).encode(item).rows)
    hf = transformers_of(directory)
    assert type(hf).__name__ == "Idefics3ForConditionalGeneration"
    truth = torch.cat(list(hf.model.get_image_features(item.data["pixel_values"][None]).pooler_output))
    torch.testing.assert_close(ours.encode(item).rows, truth, rtol=1e-4, atol=1e-4)


def test_every_tensor_has_a_parameter_and_every_parameter_a_tensor(checkpoints: Path) -> None:
    tensors = load_file(checkpoints / NAME / "model.safetensors")
    ours = {SmolVLMForConditionalGeneration.rename(name): tensor for name, tensor in tensors.items()}
    parameters = dict(load(checkpoints / NAME).named_parameters())
    assert ours.keys() == parameters.keys()
    assert all(torch.equal(ours[name], parameters[name]) for name in parameters)
    assert "projection.weight" in parameters
    assert {name.split(".")[0] for name in parameters} == {"language_model", "projection", "vision"}


def test_a_tensor_of_no_parameter_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / NAME, tmp_path / "more")
    tensors = load_file(tmp_path / "more" / "model.safetensors")
    tensors["model.connector.extra.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "more" / "model.safetensors")
    with pytest.raises(
        WeightError, match=r"unknown to the model 1 tensors \(model\.connector\.extra\.weight\)"
    ):
        load(tmp_path / "more")


def test_patches_spread_over_the_table_as_the_fractions_fall() -> None:
    assert position_ids(2, 2, 2).tolist() == [0, 1, 2, 3]
    assert position_ids(2, 4, 6).tolist() == [0, 1, 3, 4, 18, 19, 21, 22]
    assert position_ids(1, 3, 2).tolist() == [0, 0, 1]


@pytest.mark.parametrize("grid", [4, 6, 10, 27])
@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 6, 10, 26, 27])
def test_ties_of_positions_fall_as_in_transformers(grid: int, side: int) -> None:
    hf = SmolVLMVisionEmbeddings(SmolVLMVisionConfig(hidden_size=4, image_size=grid * 2, patch_size=2))
    with torch.no_grad():
        hf.patch_embedding.weight.zero_()
        hf.patch_embedding.bias.zero_()
        hf.position_embedding.weight.copy_(torch.arange(grid**2)[:, None].expand(-1, 4))
        ids = hf(torch.zeros(1, 3, 2 * side, 2 * side), torch.ones(1, side, side, dtype=torch.bool))[0, :, 0]
    assert position_ids(side, side, grid).tolist() == ids.long().tolist()


@pytest.mark.parametrize(("side", "scale"), [(4, 2), (6, 3), (6, 2), (4, 1), (4, 4)])
def test_neighbours_are_put_together_as_in_transformers(side: int, scale: int) -> None:
    patches = torch.randn(3, side * side, 5)
    truth = SmolVLMConnector.pixel_shuffle(None, patches, scale)  # type: ignore[arg-type]  # it uses no self
    ours = pixel_shuffle(patches.unflatten(1, (side, side)), scale).flatten(1, 2)
    assert torch.equal(ours, truth)


@pytest.mark.parametrize(("high", "wide"), [(56, 42), (70, 70), (13, 13)])
def test_crops_that_make_no_square_of_blocks_are_refused(checkpoints: Path, high: int, wide: int) -> None:
    item = MediaItem("h", "image", 4, {"pixel_values": torch.zeros(1, 3, high, wide)})
    with pytest.raises(BadMedia, match=rf"crops of {high} × {wide} pixels cannot be encoded"):
        load(checkpoints / NAME).encode(item)


def test_an_item_without_pixels_cannot_be_encoded(checkpoints: Path) -> None:
    with pytest.raises(InvariantError, match=r"holds \['embeddings'\], no pixels"):
        load(checkpoints / NAME).encode(MediaItem("h", "image", 1, {"embeddings": torch.zeros(1, 64)}))


def test_the_config_tells_the_scale_and_the_placeholder(checkpoints: Path) -> None:
    vision = load_model_config(checkpoints / NAME).vision
    assert isinstance(vision, SmolVLMConfig)
    assert (vision.scale, vision.image_token_id, vision.rows_per_crop(56)) == (2, 444, 4)
    with pytest.raises(ConfigError, match="crops of 42 pixels have 3 patches of 14 along a side"):
        vision.rows_per_crop(42)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda values: values.update(scale_factor=0), ConfigError, "scale_factor must be at least 1, got 0"),
        (
            lambda values: values["text_config"].update(model_type="mistral"),
            UnsupportedError,
            "over the decoder 'mistral' is not implemented; known: llama",
        ),
        (
            lambda values: values["vision_config"].update(hidden_act="tanh"),
            UnsupportedError,
            "activation 'tanh' is not implemented",
        ),
    ],
)
def test_what_the_family_does_not_compute_is_refused(
    checkpoints: Path,
    tmp_path: Path,
    edit: Callable[[dict[str, Any]], None],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        load(edited(checkpoints / NAME, tmp_path / "other", edit))
