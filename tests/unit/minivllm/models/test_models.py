"""Finding out what a path is, and loading it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minivllm.errors import ConfigError, WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import LanguageModel, load_model, load_model_config


def load(path: Path | str) -> LanguageModel:
    return load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())


def test_a_path_may_be_text(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    assert load(str(path)).config == load_model_config(str(path)) == load_model_config(path)


def test_the_config_can_be_read_without_weights(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    (path / "model.safetensors").unlink()
    assert load_model_config(path).vocab_size == 101
    with pytest.raises(WeightError, match="holds neither"):
        load(path)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("vocab_size", 10**13, WeightError, r"embed_tokens.weight has shape .*needs \[10000000000000, "),
        ("intermediate_size", 10**13, WeightError, "gate_proj.weight has shape"),
        ("num_hidden_layers", 10**9, WeightError, "1000000000 layers, but the checkpoint holds"),
        ("hidden_size", 2**62, ConfigError, "describes impossible tensors"),
    ],
)
def test_no_memory_is_taken_for_a_model_that_the_checkpoint_does_not_hold(
    make_checkpoint: Callable[..., Any], name: str, value: int, error: type[Exception], message: str
) -> None:
    path = make_checkpoint("Llama").path
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, name: value}))
    with pytest.raises(error, match=message):
        load(path)


@pytest.mark.parametrize("call", [load, load_model_config])
def test_a_path_that_does_not_exist_is_named(call: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' does not exist; give a directory or a \.gguf file"):
        call(tmp_path / "nowhere")


@pytest.mark.parametrize("call", [load, load_model_config])
def test_a_file_of_another_kind_is_named(call: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"neither a directory nor a \.gguf file"):
        call(tmp_path / "model.bin")


def test_shards_saved_by_transformers_load_like_one_file(
    make_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("Llama")
    checkpoint.hf.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 2
    whole, parts = load(checkpoint.path), load(tmp_path / "sharded")
    for (name, a), (other, b) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    shards[1].unlink()
    with pytest.raises(WeightError, match=shards[1].name):
        load(tmp_path / "sharded")


def test_a_checkpoint_saved_in_bfloat16_says_so(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    path = make_checkpoint("Qwen3").path
    reloaded = transformers.Qwen3ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    reloaded.save_pretrained(tmp_path / "half")
    assert load_model_config(tmp_path / "half").dtype == "bfloat16"


def test_a_model_loads_from_a_directory_with_other_files_in_it(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    shutil.copy(path / "model.safetensors", path / "consolidated.safetensors")
    (path / "README.md").touch()
    load(path)
