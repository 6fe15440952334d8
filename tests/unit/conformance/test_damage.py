"""A damaged copy has exactly the damage asked for, and the original has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from conformance.adapters.base import ModelSource
from conformance.damage import DamageError, damaged_copy


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"hidden_size": 4, "architectures": ["A"]}), encoding="utf-8"
    )
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(4, np.float32)}
    safetensors.save_file(tensors, path / "model.safetensors")
    return ModelSource("toy", path, "sha")


def tensors_of(source: ModelSource) -> dict[str, Any]:
    return safetensors.load_file(source.path / "model.safetensors")


def test_a_removed_file_is_gone(source: ModelSource) -> None:
    with damaged_copy(source, {"remove_file": "config.json"}) as copy:
        assert not (copy.path / "config.json").exists()
        assert set(tensors_of(copy)) == {"a", "b"}


def test_a_truncated_file_cannot_be_read(source: ModelSource) -> None:
    with damaged_copy(source, {"truncate": "model.safetensors"}) as copy, pytest.raises(SafetensorError):
        tensors_of(copy)


def test_a_removed_tensor_is_gone_and_the_others_are_not(source: ModelSource) -> None:
    with damaged_copy(source, {"remove_tensor": "a"}) as copy:
        assert set(tensors_of(copy)) == {"b"}


def test_an_extra_tensor_is_there(source: ModelSource) -> None:
    with damaged_copy(source, {"extra_tensor": "c"}) as copy:
        assert set(tensors_of(copy)) == {"a", "b", "c"}


def test_an_extra_tensor_of_a_sharded_model_is_in_the_index(source: ModelSource) -> None:
    index = source.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}), encoding="utf-8")
    with damaged_copy(source, {"extra_tensor": "c"}) as copy:
        weight_map = json.loads((copy.path / index.name).read_text(encoding="utf-8"))["weight_map"]
        assert weight_map == {"a": "model.safetensors", "c": "model.safetensors"}


def test_a_wrong_shape_lost_its_last_row(source: ModelSource) -> None:
    with damaged_copy(source, {"wrong_shape": "a"}) as copy:
        assert tensors_of(copy)["a"].tolist() == [[0, 1], [2, 3]]


def test_a_config_field_is_set_or_deleted(source: ModelSource) -> None:
    with damaged_copy(source, {"set_config": {"hidden_size": 5, "architectures": None}}) as copy:
        assert json.loads((copy.path / "config.json").read_text(encoding="utf-8")) == {"hidden_size": 5}


def test_other_end_ids_leave_the_numbers_and_so_the_records_as_they_are(source: ModelSource) -> None:
    (source.path / "generation_config.json").write_text('{"eos_token_id": 7, "do_sample": false}')
    with damaged_copy(source, {"set_end_ids": [4, 7]}) as copy:
        assert json.loads((copy.path / "config.json").read_text(encoding="utf-8"))["eos_token_id"] == 4
        generation = json.loads((copy.path / "generation_config.json").read_text(encoding="utf-8"))
        assert generation == {"eos_token_id": [4, 7], "do_sample": False}
        weights = [path / "model.safetensors" for path in (copy.path, source.path)]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert copy.sha256 == source.sha256


@pytest.mark.parametrize(
    "damage", [{"remove_file": "x"}, {"truncate": "x"}, {"remove_tensor": "x"}, {"wrong_shape": "x"}]
)
def test_damage_to_what_is_not_there_is_an_error(source: ModelSource, damage: dict[str, str]) -> None:
    with pytest.raises(DamageError, match="'x'"), damaged_copy(source, damage):
        pass


def test_the_original_stays_whole_and_the_copy_goes(source: ModelSource) -> None:
    before = {p.name: p.read_bytes() for p in source.path.iterdir()}
    with damaged_copy(source, {"truncate": "model.safetensors"}) as copy:
        where = copy.path
        assert copy.sha256 != source.sha256  # so that no cache takes one for the other
    assert not where.exists()
    assert {p.name: p.read_bytes() for p in source.path.iterdir()} == before


def test_a_single_file_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    with (
        pytest.raises(DamageError, match="is a file"),
        damaged_copy(ModelSource("m", file, "s"), {"truncate": "a"}),
    ):
        pass
