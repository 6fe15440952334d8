"""Damaged copies of a checkpoint, for scenarios about what a loader must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from conformance.adapters.base import ModelSource

__all__ = ["DamageError", "damaged_copy"]


class DamageError(ValueError):
    """The damage asked for cannot be done to this checkpoint."""


@contextmanager
def damaged_copy(source: ModelSource, damage: Mapping[str, Any]) -> Iterator[ModelSource]:
    """A copy of the checkpoint with one fault, deleted on exit.

    Args:
        source: a directory checkpoint.
        damage: one of
            {"remove_file": name}, a file that is gone;
            {"truncate": name}, a file cut in half;
            {"remove_tensor": name}, a tensor that is gone;
            {"extra_tensor": name}, a tensor nobody asked for;
            {"wrong_shape": name}, a tensor that lost its last row;
            {"set_config": {field: value}}, fields of config.json (None deletes one);
            {"set_end_ids": ids}, the ids that end an answer in generation_config.json, the first of
            them alone in config.json. No damage: the numbers are the checkpoint's own, and so is its
            SHA-256, so its golden records judge the copy. The id that ends their answers must be
            among these, and none of the others may be in an answer.

    Raises:
        DamageError: no such file or tensor, or the checkpoint is a single file.
    """
    if not source.path.is_dir():
        raise DamageError(f"only a checkpoint directory can be damaged, {source.name} is a file")
    kind, argument = next(iter(damage.items()))
    with TemporaryDirectory(prefix="conformance-damaged-") as temporary:
        path = Path(temporary) / source.path.name
        shutil.copytree(source.path, path)
        _KINDS[kind](path, argument)
        yield ModelSource(source.name, path, source.sha256 if kind in _HARMLESS else f"damaged-{kind}")


def _file(path: Path, name: str) -> Path:
    if not (path / name).is_file():
        raise DamageError(
            f"{path.name} has no file {name!r}; it has {sorted(p.name for p in path.iterdir())}"
        )
    return path / name


def _remove_file(path: Path, name: str) -> None:
    _file(path, name).unlink()


def _truncate(path: Path, name: str) -> None:
    file = _file(path, name)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _remove_tensor(path: Path, name: str) -> None:
    _edit(path, name, lambda tensors: tensors.pop(name))


def _wrong_shape(path: Path, name: str) -> None:
    _edit(path, name, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][:-1])}))


def _extra_tensor(path: Path, name: str) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = safetensors.load_file(file)
    safetensors.save_file({**tensors, name: np.ones((2, 2), np.float32)}, file, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        values = json.loads(index.read_text(encoding="utf-8"))
        values["weight_map"][name] = file.name
        index.write_text(json.dumps(values), encoding="utf-8")


def _edit(path: Path, name: str, change: Callable[[dict[str, NDArray[Any]]], object]) -> None:
    for file in sorted(path.glob("*.safetensors")):
        tensors = safetensors.load_file(file)
        if name in tensors:
            change(tensors)
            safetensors.save_file(tensors, file, {"format": "pt"})
            return
    raise DamageError(f"{path.name} has no tensor {name!r}")


def _set_config(path: Path, values: Mapping[str, Any]) -> None:
    file = _file(path, "config.json")
    config = {**json.loads(file.read_text(encoding="utf-8")), **values}
    kept = {name: value for name, value in config.items() if value is not None}
    file.write_text(json.dumps(kept, indent=2), encoding="utf-8")


def _set_end_ids(path: Path, ids: list[int]) -> None:
    for name, value in (("config.json", ids[0]), ("generation_config.json", ids)):
        file = _file(path, name)
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**settings, "eos_token_id": value}, indent=2), encoding="utf-8")


#: Changes that leave every number as it is.
_HARMLESS = frozenset({"set_end_ids"})

_KINDS: Mapping[str, Callable[[Path, Any], None]] = {
    "remove_file": _remove_file,
    "truncate": _truncate,
    "remove_tensor": _remove_tensor,
    "extra_tensor": _extra_tensor,
    "wrong_shape": _wrong_shape,
    "set_config": _set_config,
    "set_end_ids": _set_end_ids,
}
