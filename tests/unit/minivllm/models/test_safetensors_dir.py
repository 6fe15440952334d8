"""A directory's shards are checked against its index, name by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minivllm.errors import UnsupportedError, WeightError
from minivllm.models.safetensors_dir import SafetensorsSource

A = torch.arange(6.0).reshape(2, 3)
B = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
C = torch.ones(4)


def save_sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Save each shard and the index that describes them; returns the index's weight_map."""
    weight_map = {}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
        weight_map.update(dict.fromkeys(tensors, file))
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_sharded(
        tmp_path,
        {"1-of-3.safetensors": {"a": A}, "2-of-3.safetensors": {"b": B}, "3-of-3.safetensors": {"c": C}},
    )
    return tmp_path


def test_one_file_gives_names_shapes_and_tensors_as_stored(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.shapes() == {"a": (2, 3), "b": (2,)}
    assert torch.equal(source.read("a"), A)
    assert source.read("b").dtype == torch.bfloat16
    assert source.where == str(tmp_path)


def test_shards_are_joined(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    assert set(source.shapes()) == {"a", "b", "c"}
    assert torch.equal(source.read("a"), A)
    assert torch.equal(source.read("c"), C)


def test_a_single_file_is_preferred_over_an_index(sharded: Path) -> None:
    save_file({"only": C}, sharded / "model.safetensors")
    assert set(SafetensorsSource(sharded).shapes()) == {"only"}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "2-of-3.safetensors").unlink()
    with pytest.raises(WeightError, match=r"2-of-3\.safetensors is named by .* but does not exist"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("left", [0, 4, 12, 60, -1])
def test_a_truncated_shard_is_named(sharded: Path, left: int) -> None:
    shard = sharded / "2-of-3.safetensors"
    shard.write_bytes(shard.read_bytes()[:left])
    with pytest.raises(WeightError, match=r"2-of-3\.safetensors is not a whole safetensors file"):
        SafetensorsSource(sharded)


def test_a_truncated_single_file_is_named(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(WeightError, match=r"model\.safetensors is not a whole safetensors file"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_the_index_promises_but_no_shard_holds_is_named(sharded: Path) -> None:
    write_index(
        sharded,
        {
            "a": "1-of-3.safetensors",
            "b": "2-of-3.safetensors",
            "c": "3-of-3.safetensors",
            "d": "3-of-3.safetensors",
        },
    )
    with pytest.raises(WeightError, match=r"3-of-3\.safetensors .*missing \['d'\], not in the index \[\]"):
        SafetensorsSource(sharded)


def test_a_tensor_that_the_index_does_not_know_is_named(sharded: Path) -> None:
    save_file({"a": A, "extra": C}, sharded / "1-of-3.safetensors")
    with pytest.raises(
        WeightError, match=r"1-of-3\.safetensors .*missing \[\], not in the index \['extra'\]"
    ):
        SafetensorsSource(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    save_file({"a": A, "c": C}, sharded / "1-of-3.safetensors")
    with pytest.raises(WeightError, match=r"not in the index \['c'\]"):
        SafetensorsSource(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    write_index(sharded, {"a": "2-of-3.safetensors", "b": "1-of-3.safetensors", "c": "3-of-3.safetensors"})
    with pytest.raises(WeightError, match=r"1-of-3\.safetensors .*missing \['b'\], not in the index \['a'\]"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    "shard", ["../elsewhere.safetensors", "sub/x.safetensors", "/abs.safetensors", 3, ""]
)
def test_a_shard_must_lie_in_the_directory(sharded: Path, shard: object) -> None:
    write_index(sharded, {"a": shard})
    with pytest.raises(WeightError, match="a must be in a file of this directory"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, ["a"]])
def test_an_index_needs_a_weight_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(WeightError, match="needs a weight_map"):
        SafetensorsSource(sharded)


def test_an_index_that_is_no_json_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightError, match="cannot be read as JSON"):
        SafetensorsSource(sharded)


def test_a_directory_without_weights_lists_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(WeightError, match=r"neither model\.safetensors nor .*found \['config\.json'\]"):
        SafetensorsSource(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedError, match=r"\['pytorch_model\.bin'\]; only safetensors and GGUF"):
        SafetensorsSource(tmp_path)


def test_the_stored_dtype_is_that_of_the_first_floating_point_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3), "b": B, "c": C}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).stored_dtype() == "bfloat16"


def test_without_floating_point_tensors_the_stored_dtype_is_float32(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).stored_dtype() == "float32"
