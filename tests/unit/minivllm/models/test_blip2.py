"""BLIP-2: names of checkpoints, and the rows of a picture as in Transformers eager."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from minivllm.errors import BadMedia, InvariantError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.blip2 import Blip2Config, Blip2ForConditionalGeneration
from minivllm.request import MediaItem

NAME = "tiny-blip2"


def load(path: Path, dtype: torch.dtype = torch.float32) -> Blip2ForConditionalGeneration:
    model = load_model(path, dtype=dtype, device="cpu", ops=TorchOps())
    assert isinstance(model, Blip2ForConditionalGeneration)
    return model


def picture(side: int = 56) -> MediaItem:
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(side))
    return MediaItem("h", "image", 4, {"pixel_values": pixels})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_rows_are_the_features_of_transformers(checkpoints: Path, dtype: torch.dtype) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoints / NAME, attn_implementation="eager", dtype=dtype
    )
    truth = hf.get_image_features(picture().data["pixel_values"]).pooler_output
    ours = load(checkpoints / NAME, dtype)
    rows = ours.encode(picture()).rows
    # In float16 the patches' product and Transformers' convolution round apart.
    tolerance = 0.01 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(rows, truth[0], rtol=tolerance, atol=tolerance)
    for name, parameter in hf.named_parameters():
        if name.startswith(("query_tokens", "qformer.")):
            assert ours.get_parameter(name).dtype == parameter.dtype, name


def test_every_tensor_has_a_parameter_and_every_parameter_a_tensor(checkpoints: Path) -> None:
    tensors = load_file(checkpoints / NAME / "model.safetensors")
    ours = {Blip2ForConditionalGeneration.rename(name): tensor for name, tensor in tensors.items()}
    model = load(checkpoints / NAME)
    parameters = dict(model.named_parameters())
    assert ours.keys() == parameters.keys()
    assert all(torch.equal(ours[name], parameters[name]) for name in parameters)
    assert (
        model.language_model.lm_head.weight is parameters["language_model.model.decoder.embed_tokens.weight"]
    )


def test_a_checkpoint_that_holds_its_tied_head_too_loads_alike(checkpoints: Path, tmp_path: Path) -> None:
    """The published files do."""
    shutil.copytree(checkpoints / NAME, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    embedding = tensors["language_model.model.decoder.embed_tokens.weight"]
    save_file(
        {**tensors, "language_model.lm_head.weight": embedding.clone()},
        tmp_path / "head" / "model.safetensors",
    )
    assert torch.equal(load(tmp_path / "head").language_model.lm_head.weight, embedding)


def test_a_picture_of_another_size_is_refused(checkpoints: Path) -> None:
    with pytest.raises(BadMedia, match="pixel values are 70 × 70, the model takes 56 × 56"):
        load(checkpoints / NAME).encode(picture(70))


def test_an_item_without_pixels_cannot_be_encoded(checkpoints: Path) -> None:
    with pytest.raises(InvariantError, match=r"holds \['embeddings'\], no pixels"):
        load(checkpoints / NAME).encode(MediaItem("h", "image", 4, {"embeddings": torch.zeros(4, 64)}))


def test_the_config_tells_queries_and_placeholder(checkpoints: Path) -> None:
    config = load_model_config(checkpoints / NAME)
    assert isinstance(config.vision, Blip2Config)
    assert (config.vision.num_query_tokens, config.vision.image_token_id) == (4, 444)
    assert config.vision.qformer.cross_attention_frequency == 2
    assert config.tie_word_embeddings
    assert config.rope is None


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        (None, {"image_token_index": None}, "no image_token_index"),
        ("qformer_config", {"use_qformer_text_input": True}, "use_qformer_text_input is not implemented"),
        ("text_config", {"model_type": "t5", "feed_forward_proj": "relu"}, "over the decoder 't5'"),
    ],
)
def test_what_the_family_does_not_compute_is_refused(
    checkpoints: Path, tmp_path: Path, part: str | None, changes: dict[str, Any], message: str
) -> None:
    values = json.loads((checkpoints / NAME / "config.json").read_text(encoding="utf-8"))
    (values if part is None else values[part]).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=message):
        load_model_config(tmp_path)
