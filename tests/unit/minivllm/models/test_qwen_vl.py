"""The Qwen vision-language models: names of checkpoints, and what `encode` makes of an item."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from minivllm.errors import ConfigError, InvariantError, UnsupportedError, WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model, load_model_config
from minivllm.models.qwen2_vl import Qwen2VLForConditionalGeneration, QwenVLConfig
from minivllm.request import MediaItem

NAMES = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")


def load(path: Path) -> VisionLanguageModel:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    return model


def respelt(source: Path, target: Path, spell: dict[str, str]) -> Path:
    """A copy of a checkpoint whose tensors have other prefixes; the first that fits counts."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")

    def name(old: str) -> str:
        for theirs, other in spell.items():
            if old.startswith(theirs):
                return other + old.removeprefix(theirs)
        return old

    save_file({name(old): tensor for old, tensor in tensors.items()}, target / "model.safetensors")
    return target


def item(modality: str, frames: int, high: int, wide: int, width: int) -> MediaItem:
    pixels = torch.randn(frames * high * wide, width, generator=torch.Generator().manual_seed(4))
    grid = torch.tensor([[frames, high, wide]])
    names = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }[modality]
    return MediaItem("h", modality, len(pixels) // 4, dict(zip(names, (pixels, grid), strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_all_spellings_load_alike(checkpoints: Path, tmp_path: Path, name: str) -> None:
    committed = load(checkpoints / name)
    old = {"model.language_model.": "model.", "model.visual.": "visual."}
    new = {"model.layers.": "model.language_model.layers.", "visual.": "model.visual."}
    new |= {f"model.{part}.": f"model.language_model.{part}." for part in ("embed_tokens", "norm")}
    spelt = 0
    for index, spelling in enumerate((old, new)):
        directory = respelt(checkpoints / name, tmp_path / str(index), spelling)
        spelt += any(
            key.startswith("visual." if index == 0 else "model.visual.")
            for key in load_file(directory / "model.safetensors")
        )
        again = dict(load(directory).named_parameters())
        for key, parameter in committed.named_parameters():
            assert torch.equal(parameter, again[key]), key
    assert spelt == 2


def test_a_tensor_of_no_parameter_is_refused_and_so_is_a_missing_one(
    checkpoints: Path, tmp_path: Path
) -> None:
    directory = respelt(checkpoints / "tiny-qwen2-vl", tmp_path / "bad", {"visual.merger.": "visual.joiner."})
    with pytest.raises(WeightError, match=r"missing 6 tensors \(vision\.merger.*unknown to the model 6"):
        load(directory)


@pytest.mark.parametrize("modality", ["image", "video"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_encoding_gives_the_features_of_transformers(checkpoints: Path, name: str, modality: str) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(checkpoints / name, attn_implementation="eager")
    width = hf.model.visual.patch_embed.proj.weight[0].numel()
    media = item(modality, 1 if modality == "image" else 3, 6, 10, width)
    truth = getattr(hf.model, f"get_{modality}_features")(*media.data.values())
    ours = load(checkpoints / name).encode(media)
    assert ours.rows.shape == (media.num_embeddings, 64)
    torch.testing.assert_close(ours.rows, torch.cat(truth.pooler_output), rtol=1e-4, atol=1e-4)
    features = getattr(truth, "deepstack_features", None) or []
    assert len(ours.deepstack) == len(features) == (2 if name == "tiny-qwen3-vl" else 0)
    for got, (feature,) in zip(ours.deepstack, features, strict=True):
        torch.testing.assert_close(got, feature, rtol=1e-4, atol=1e-4)


def test_an_item_without_pixels_cannot_be_encoded(checkpoints: Path) -> None:
    model = load(checkpoints / "tiny-qwen2-vl")
    with pytest.raises(InvariantError, match=r"modality 'image' holds \['embeddings'\], and no pixels"):
        model.encode(MediaItem("h", "image", 1, {"embeddings": torch.zeros(1, 64)}))


@pytest.mark.parametrize("name", NAMES)
def test_the_config_tells_rope_sections_and_placeholders(checkpoints: Path, name: str) -> None:
    config = load_model_config(checkpoints / name)
    vision = config.vision
    assert isinstance(vision, QwenVLConfig)
    assert (vision.image_token_id, vision.video_token_id) == (445, 446)
    assert (vision.vision_start_token_id, vision.vision_end_token_id) == (443, 444)
    assert vision.tokens_per_second == (2 if name == "tiny-qwen2-5-vl" else 0)
    assert config.rope is not None
    assert config.rope.mrope_section == ((6, 5, 5) if name == "tiny-qwen3-vl" else (4, 6, 6))
    assert config.rope.mrope_interleaved == (name == "tiny-qwen3-vl")
    assert config.tie_word_embeddings == (name == "tiny-qwen2-5-vl")


@pytest.mark.parametrize(
    ("name", "part", "changes", "error", "message"),
    [
        ("tiny-qwen2-vl", "vision_config", {"hidden_size": 32}, ConfigError, "rows of width 32, the decoder"),
        (
            "tiny-qwen3-vl",
            "vision_config",
            {"deepstack_visual_indexes": [0, 1, 2], "depth": 3},
            ConfigError,
            "3 deepstack_visual_indexes, but the decoder has 2 layers",
        ),
        ("tiny-qwen2-vl", "vision_config", {"hidden_act": "tanh"}, UnsupportedError, "activation 'tanh'"),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(
    checkpoints: Path,
    tmp_path: Path,
    name: str,
    part: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    values = json.loads((checkpoints / name / "config.json").read_text(encoding="utf-8"))
    values[part].update(changes)
    if "deepstack_visual_indexes" in changes:
        values["text_config"]["num_hidden_layers"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    shutil.copy(checkpoints / name / "model.safetensors", tmp_path)
    with pytest.raises(error, match=message):
        load(tmp_path)


def test_names_that_are_not_the_family_s_stay_as_they_are() -> None:
    assert Qwen2VLForConditionalGeneration.rename("language_model.x") == "language_model.x"
    assert Qwen2VLForConditionalGeneration.rename("lm_head.weight") == "language_model.lm_head.weight"
