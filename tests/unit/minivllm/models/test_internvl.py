"""InternVL: what its config means, and what `encode` gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, InternVLConfig, InternVLForConditionalGeneration

from conformance.recipes.initialise import initialise
from minivllm.errors import ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model
from minivllm.request import MediaItem


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-internvl"


def load(path: Path) -> VisionLanguageModel:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    return model


@pytest.mark.parametrize("tiles", [1, 3, 5])
@torch.inference_mode()
def test_embeddings_of_the_checkpoint_are_those_of_transformers(directory: Path, tiles: int) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    pixels = torch.randn(tiles, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    truth = hf.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    rows = load(directory).encode(MediaItem("h", "image", 4 * tiles, {"pixel_values": pixels})).rows
    assert rows.shape == (4 * tiles, 64)
    torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "tower", "outer"),
    [
        ("qwen2", {"use_qk_norm": True, "norm_type": "rms_norm"}, {"downsample_ratio": 0.25}),
        ("qwen2", {"use_mean_pooling": False, "attention_bias": True}, {"tie_word_embeddings": True}),
        ("llama", {"image_size": 64, "patch_size": 16}, {"vision_feature_layer": -2}),
    ],
)
@torch.inference_mode()
def test_other_members_of_the_family_give_the_rows_of_transformers(
    tmp_path: Path, text: str, tower: dict[str, Any], outer: dict[str, Any]
) -> None:
    """InternVL3 has a Qwen2 decoder, the 6B tower norms on q and k."""
    decoder = {"model_type": text, "vocab_size": 50, "hidden_size": 48, "intermediate_size": 64}
    decoder |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = InternVLConfig(
        vision_config={**shape, "image_size": 32, "patch_size": 8, **tower}, text_config=decoder, **outer
    )
    config._attn_implementation = "eager"
    hf = InternVLForConditionalGeneration(config).eval()
    initialise(hf, 1)
    hf.save_pretrained(tmp_path)
    side = config.vision_config.image_size[0]
    pixels = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    truth = hf.model.get_image_features(pixels).pooler_output.flatten(0, 1)
    model = load(tmp_path)
    rows = model.encode(MediaItem("h", "image", 0, {"pixel_values": pixels})).rows
    assert len(rows) == 2 * model.config.vision.rows_per_tile
    torch.testing.assert_close(rows, truth, rtol=1e-4, atol=1e-4)
    assert model.config.tie_word_embeddings == outer.get("tie_word_embeddings", True)


def test_every_spelling_of_the_tensors_loads(directory: Path, tmp_path: Path) -> None:
    committed = dict(load(directory).named_parameters())
    in_memory = AutoModelForImageTextToText.from_pretrained(directory).state_dict()
    assert in_memory.keys() != load_file(directory / "model.safetensors").keys()
    shutil.copytree(directory, tmp_path / "copy")
    save_file(
        {name: t.contiguous() for name, t in in_memory.items()}, tmp_path / "copy" / "model.safetensors"
    )
    again = dict(load(tmp_path / "copy").named_parameters())
    assert all(torch.equal(committed[name], again[name]) for name in committed)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"downsample_ratio": 0.3}, ConfigError, "downsample_ratio 0.3 must divide 4 patches a side"),
        ({"vision_feature_layer": [-1, -2]}, UnsupportedError, "one layer is"),
        ({"vision_feature_select_strategy": "full"}, UnsupportedError, "'full' is not"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    directory: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")
    shutil.copy(directory / "model.safetensors", tmp_path)
    with pytest.raises(error, match=message):
        load(tmp_path)
