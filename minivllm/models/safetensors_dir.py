"""Tensors of a model directory: one model.safetensors, or shards named by an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minivllm.device import ran_out_of_memory
from minivllm.errors import ConfigError, UnsupportedError, WeightError
from minivllm.models.hf_config import read_json

__all__ = ["SafetensorsSource"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsSource:
    """The tensors of a directory, memory-mapped.

    model.safetensors is preferred over an index, as in Transformers. Opening checks every shard:
    present, whole, and holding exactly the tensors that the index places there.

    Raises:
        WeightError: no weights; a shard is missing, truncated or not as the index says.
        UnsupportedError: weights only in another format.
    """

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._home: dict[str, Any] = {}
        self._dtypes: dict[str, str] = {}
        if (directory / _SINGLE).exists():
            self._open(directory / _SINGLE, expected=None)
        elif (directory / _INDEX).exists():
            for shard, names in _read_index(directory).items():
                self._open(directory / shard, expected=names)
        else:
            _refuse_without_weights(directory)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name → shape of every tensor."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, as stored."""
        tensor: Tensor = self._home[name].get_tensor(name)
        return tensor

    def stored_dtype(self) -> str:
        """Name of the first floating-point dtype found, in name order; "float32" if there is none."""
        names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return next((names[d] for _, d in sorted(self._dtypes.items()) if d in names), "float32")

    def _open(self, path: Path, expected: frozenset[str] | None) -> None:
        if not path.exists():
            raise WeightError(
                f"{path} is named by {_INDEX} but does not exist; download the checkpoint again"
            )
        try:
            # safe_open is untyped
            file: Any = safe_open(str(path), framework="pt", device="cpu")
            found = frozenset(file.keys())
        except (SafetensorError, OSError) as error:
            if ran_out_of_memory(error):
                raise
            raise WeightError(f"{path} is not a whole safetensors file: {error}") from error
        if expected is not None and found != expected:
            raise WeightError(
                f"{path} does not hold what {_INDEX} says: missing {sorted(expected - found)}, "
                f"not in the index {sorted(found - expected)}"
            )
        for name in found:
            view = file.get_slice(name)
            self._shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = view.get_dtype()
            self._home[name] = file


def _read_index(directory: Path) -> dict[str, frozenset[str]]:
    """Shard file name → names of its tensors."""
    path = directory / _INDEX
    try:
        weight_map = read_json(path).get("weight_map")
    except ConfigError as error:
        raise WeightError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path} needs a weight_map from tensor to file, got {weight_map!r}")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise WeightError(f"{path}: {name} must be in a file of this directory, got {shard!r}")
        shards.setdefault(shard, set()).add(name)
    return {shard: frozenset(names) for shard, names in sorted(shards.items())}


def _refuse_without_weights(directory: Path) -> None:
    here = sorted(p.name for p in directory.iterdir())
    other = [name for name in here if name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack"))]
    if other:
        raise UnsupportedError(f"{directory} holds weights as {other}; only safetensors and GGUF can be read")
    raise WeightError(f"{directory} holds neither {_SINGLE} nor {_INDEX}; found {here}")
