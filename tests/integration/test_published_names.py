"""Full-size configurations, without weights: our loader takes every parameter of Transformers' class.

Names and shapes come from Transformers' own class on the `meta` device, the spelling from the published
files. Neither `accelerate` nor `device_map` has a part in it.

The configurations were written from the published model cards. Transformers' defaults confirm them but for
what `unconfirmed` lists: no copy of the files was at hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MODELS, load_model, load_model_config
from minivllm.models.weights import fill
from tests.integration.published import GLM_AND_GEMMA3, LLAVA_LINE, SMOLVLM_AND_BLIP2, Published

PUBLISHED: dict[str, Published] = {
    "Qwen2.5-VL-3B": Published(
        # An old file: the decoder's fields are not in a text_config.
        config={
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "image_token_id": 151655,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 128000,
            "max_window_layers": 70,
            "model_type": "qwen2_5_vl",
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "video_token_id": 151656,
            "vision_config": {
                "depth": 32,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "hidden_act": "silu",
                "hidden_size": 1280,
                "in_chans": 3,
                "intermediate_size": 3420,
                "model_type": "qwen2_5_vl",
                "num_heads": 16,
                "out_hidden_size": 2048,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
                "tokens_per_second": 2,
                "window_size": 112,
            },
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
            "vocab_size": 151936,
        },
        spelling={"model.language_model.": "model.", "model.visual.": "visual."},
        unconfirmed=(
            "hidden_size",
            "intermediate_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "rms_norm_eps",
            "tie_word_embeddings",
            "vision_config.hidden_size",
            "vision_config.out_hidden_size",
            "vision_config.tokens_per_second",
            "vocab_size",
        ),
        parameters=3.75,
    ),
    "Qwen3-VL-4B": Published(
        config={
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "dtype": "bfloat16",
            "image_token_id": 151655,
            "model_type": "qwen3_vl",
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": 151643,
                "dtype": "bfloat16",
                "eos_token_id": 151645,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 2560,
                "initializer_range": 0.02,
                "intermediate_size": 9728,
                "max_position_embeddings": 262144,
                "model_type": "qwen3_vl_text",
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                },
                "rope_theta": 5000000,
                "tie_word_embeddings": True,
                "use_cache": True,
                "vocab_size": 151936,
            },
            "tie_word_embeddings": True,
            "video_token_id": 151656,
            "vision_config": {
                "deepstack_visual_indexes": [5, 11, 17],
                "depth": 24,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1024,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": 4096,
                "model_type": "qwen3_vl",
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": 2560,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
        },
        spelling={},
        unconfirmed=(
            "text_config.bos_token_id",
            "text_config.eos_token_id",
            "text_config.hidden_size",
            "text_config.intermediate_size",
            "text_config.max_position_embeddings",
            "text_config.num_hidden_layers",
            "text_config.num_key_value_heads",
            "text_config.rope_theta",
            "text_config.tie_word_embeddings",
            "tie_word_embeddings",
            "vision_config.deepstack_visual_indexes",
            "vision_config.depth",
            "vision_config.hidden_size",
            "vision_config.intermediate_size",
            "vision_config.out_hidden_size",
        ),
        parameters=4.44,
    ),
    **LLAVA_LINE,
    **SMOLVLM_AND_BLIP2,
    **GLM_AND_GEMMA3,
}


class MetaSource:
    """A checkpoint of the right names and shapes, and nothing in it."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.where = "published"
        self._shapes = shapes
        self.read_names: list[str] = []

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        self.read_names.append(name)
        return torch.empty(self._shapes[name], dtype=torch.bfloat16, device="meta")


def published_shapes(directory: Path, published: Published) -> dict[str, tuple[int, ...]]:
    """Every tensor the files hold: the class's parameters, tied ones once, spelt as published."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, published.config["architectures"][0])(config)
    found = {}
    for name, parameter in model.named_parameters():  # tied ones come once, as embeddings
        for memory, file in published.spelling.items():
            if name.startswith(memory):
                name = file + name.removeprefix(memory)
                break
        found[name] = tuple(parameter.shape)
    return found


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Published, Path]:
    """A checkpoint, and a directory with its config.json and nothing else."""
    chosen = PUBLISHED[request.param]
    (tmp_path / "config.json").write_text(json.dumps(dict(chosen.config)), encoding="utf-8")
    return chosen, tmp_path


def test_the_loader_takes_every_parameter_by_name_and_shape(published: tuple[Published, Path]) -> None:
    chosen, directory = published
    shapes = published_shapes(directory, chosen)
    config = load_model_config(directory)
    model = MODELS.get(config.architecture)(config, dtype=torch.bfloat16, device="meta", ops=TorchOps())
    source = MetaSource(shapes)
    fill(model, source)
    assert sorted(source.read_names) == sorted(shapes)
    assert len(list(model.parameters())) == len(source.read_names)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert total == pytest.approx(chosen.parameters * 1e9, rel=0.01)


def test_one_missing_and_one_unknown_tensor_are_noticed(published: tuple[Published, Path]) -> None:
    chosen, directory = published
    shapes = published_shapes(directory, chosen)
    last = list(shapes)[-1]
    shapes[last + ".else"] = shapes.pop(last)
    config = load_model_config(directory)
    model = MODELS.get(config.architecture)(config, dtype=torch.bfloat16, device="meta", ops=TorchOps())
    with pytest.raises(ValueError, match=r"missing 1 tensors .*unknown to the model 1 tensors"):
        fill(model, MetaSource(shapes))


def test_what_the_defaults_do_not_confirm_is_listed(published: tuple[Published, Path]) -> None:
    """Every shape and constant that a plain configuration of the class does not have already."""
    chosen, _ = published
    defaults = AutoConfig.for_model(chosen.config["model_type"]).to_dict()
    different = set()
    for part, values in (
        ("", chosen.config),
        *((k, v) for k, v in chosen.config.items() if k.endswith("_config")),
    ):
        known = defaults[part] if part else {**defaults.get("text_config", {}), **defaults}
        prefix = f"{part}." if part else ""
        for key, value in values.items():
            if key.endswith("_config") or key in _NO_CONSTANTS:
                continue
            confirmed = known.get(key, _rope(known).get(key, ...))
            if isinstance(confirmed, tuple):
                confirmed = list(confirmed)
            if confirmed != value:
                different.add(prefix + key)
    assert different == set(chosen.unconfirmed)


def _rope(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Defaults of rope under the names that files have for them."""
    rope: Mapping[str, Any] = known.get("rope_parameters") or {}
    if "full_attention" not in rope:
        return rope
    names = {"rope_theta": "full_attention", "rope_local_base_freq": "sliding_attention"}
    return {name: rope[layers]["rope_theta"] for name, layers in names.items()}


#: Not shapes of the model: how it was trained or stored, and what has another name or form by now.
_NO_CONSTANTS = (
    "architectures",
    "dtype",
    "in_chans",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "rope_scaling",
    "sliding_window",
    "spatial_patch_size",
    "torch_dtype",
    "use_cache",
)


def test_loading_needs_no_accelerate(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # importing it fails now
    model = load_model(checkpoints / "tiny-qwen3-vl", dtype=torch.float32, device="cpu", ops=TorchOps())
    assert not any(parameter.is_meta for parameter in model.parameters())
