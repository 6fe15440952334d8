"""LLaVA: what its config means, what checkpoints call its tensors, and what `encode` gives."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

from conformance.recipes.initialise import initialise
from minivllm.errors import ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model, load_model_config
from minivllm.models.llava import LlavaVision
from minivllm.request import MediaItem

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 26,
    "patch_size": 8,
}
TEXT = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def load(path: Path) -> VisionLanguageModel:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    return model


def item(pixels: torch.Tensor) -> MediaItem:
    return MediaItem("h", "image", 0, {"pixel_values": pixels})


@torch.inference_mode()
def test_embeddings_of_the_checkpoint_are_those_of_transformers(checkpoints: Path) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoints / "tiny-llava", attn_implementation="eager"
    )
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    (truth,) = hf.model.get_image_features(pixels).pooler_output
    rows = load(checkpoints / "tiny-llava").encode(item(pixels)).rows
    assert rows.shape == (16, 64)
    torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [-2, -1, 1, [0, -1], [1, 3]])
@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
@torch.inference_mode()
def test_every_tower_strategy_and_layer_gives_the_rows_of_transformers(
    tmp_path: Path, tower: str, strategy: str, layer: int | list[int]
) -> None:
    """Transformers drops the first row by strategy, even of a tower without a class token."""
    config = LlavaConfig(
        vision_config={"model_type": tower, **TOWER},
        text_config=TEXT,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=layer,
        image_token_index=49,
    )
    config._attn_implementation = "eager"
    hf = LlavaForConditionalGeneration(config).eval()
    initialise(hf, 1) if tower == "clip_vision_model" else spread(hf)
    hf.save_pretrained(tmp_path)
    pixels = torch.randn(1, 3, 26, 26, generator=torch.Generator().manual_seed(1))
    (truth,) = hf.model.get_image_features(pixels).pooler_output
    ours = load(tmp_path)
    rows = ours.encode(item(pixels)).rows
    assert ours.config.vision.rows_per_square == len(rows)
    assert len(rows) == 9 + (tower == "clip_vision_model") - (strategy == "default")
    torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)


def spread(model: torch.nn.Module) -> None:
    """Uneven weights for a tower whose pooling head the recipes have no rule for."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))


def test_every_spelling_of_the_tensors_loads(checkpoints: Path, tmp_path: Path) -> None:
    committed = dict(load(checkpoints / "tiny-llava").named_parameters())
    tensors = load_file(checkpoints / "tiny-llava" / "model.safetensors")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()
    }
    published["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    hf = AutoModelForImageTextToText.from_pretrained(checkpoints / "tiny-llava")
    in_memory = {name: t.contiguous() for name, t in hf.state_dict().items()}
    assert len({frozenset(names) for names in (tensors, published, in_memory)}) == 3
    for number, spelt in enumerate((published, in_memory)):
        directory = tmp_path / str(number)
        shutil.copytree(checkpoints / "tiny-llava", directory)
        save_file(spelt, directory / "model.safetensors")
        again = dict(load(directory).named_parameters())
        assert all(torch.equal(committed[name], again[name]) for name in committed)


def test_the_decoder_is_read_from_the_inner_config(checkpoints: Path) -> None:
    config = load_model_config(checkpoints / "tiny-llava")
    assert (config.text_model_type, config.vocab_size, config.head_dim) == ("llama", 448, 32)
    vision = config.vision
    assert isinstance(vision, LlavaVision)
    assert (vision.feature_layers, vision.drop_first, vision.image_token_id) == ((2,), True, 444)
    assert replace(vision, drop_first=False).rows_per_square == 17


@pytest.mark.parametrize(
    ("part", "changes", "error", "message"),
    [
        ("", {"vision_feature_layer": -9}, ConfigError, "vision_feature_layer -9 does not exist"),
        ("vision_config", {"hidden_act": "mish"}, UnsupportedError, "activation 'mish' is not implemented"),
        ("vision_config", {"image_size": [56, 28]}, UnsupportedError, "is not square"),
        ("vision_config", {"model_type": "dinov2"}, UnsupportedError, "vision tower 'dinov2' is not impl"),
        ("text_config", {"model_type": "opt"}, UnsupportedError, "opt"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    checkpoints: Path,
    tmp_path: Path,
    part: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    values = json.loads((checkpoints / "tiny-llava" / "config.json").read_text(encoding="utf-8"))
    (values[part] if part else values).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    shutil.copy(checkpoints / "tiny-llava" / "model.safetensors", tmp_path)
    with pytest.raises(error, match=message):
        load(tmp_path)
