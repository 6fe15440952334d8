"""Whether the reference (Hugging Face eager) can be loaded here, and what does without it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from conformance.models import list_models
from conformance.paths import data_root

__all__ = ["Fact", "examine_reference"]

#: What recording goldens needs, beside what judging needs.
_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "PIL")
_OLDEST = {"transformers": (5, 20), "torch": (2, 9)}


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing looked at: `ok` is None for what is merely told."""

    what: str
    ok: bool | None
    told: str


def examine_reference(root: Path | None = None, *, load: bool = True) -> Iterator[Fact]:
    """Look at packages, devices, data and checkpoints; load one small checkpoint if asked to."""
    usable = True
    for fact in _packages():
        usable = usable and fact.ok is not False
        yield fact
    yield from _unneeded()
    if usable:
        yield from _devices()
    yield from _data(root or data_root())
    if usable and load:
        yield from _loading(root or data_root())


def _packages() -> Iterator[Fact]:
    for package in _NEEDED:
        if find_spec(package) is None:
            yield Fact(package, False, f"missing: python -m pip install {package.replace('PIL', 'pillow')}")
            continue
        try:
            importlib.import_module(package)
        except Exception as error:  # a broken installation may raise anything
            yield Fact(package, False, f"cannot be imported: {type(error).__name__}: {error}")
            continue
        found = _version(package.replace("PIL", "pillow"))
        oldest = _OLDEST.get(package)
        if oldest is not None and tuple(int(n) for n in found.split("+")[0].split(".")[:2]) < oldest:
            least = ".".join(map(str, oldest))
            yield Fact(package, False, f"{found} is older than {least}: goldens would differ")
        else:
            yield Fact(package, True, found)


def _unneeded() -> Iterator[Fact]:
    """Packages whose absence often stops Transformers elsewhere, and which the reference never needs."""
    accelerate = find_spec("accelerate") is not None
    told = _version("accelerate") if accelerate else "missing"
    yield Fact("accelerate", None, f"{told}; not needed: no device map is ever used")
    if find_spec("torchvision") is None:
        yield Fact("torchvision", None, "missing; not needed: image processors run on Pillow")
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # built for another torch: RuntimeError, OSError, AttributeError…
        why = f"{type(error).__name__}: {error}"
        yield Fact(
            "torchvision",
            False,
            f"{_version('torchvision')} does not fit torch {_version('torch')} ({why}); uninstall it: "
            "the reference needs none, and Transformers imports it where it finds it",
        )
        return
    yield Fact("torchvision", None, f"{_version('torchvision')}; fits, not needed")


def _devices() -> Iterator[Fact]:
    import torch

    backends = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    there = ", ".join(["cpu", *(name for name, here in backends.items() if here)])
    yield Fact("devices", None, f"{there}; the reference always computes on cpu")


def _data(root: Path) -> Iterator[Fact]:
    models = list_models(root)
    for model in models:
        records = len(list((root / "golden" / "records" / model.name).glob("*.json")))
        if model.path is None:
            yield Fact(model.name, None, f"{records} goldens; {model.missing}")
        else:
            yield Fact(model.name, bool(records) or None, f"{records} goldens; {model.path}")


def _loading(root: Path) -> Iterator[Fact]:
    """Load each architecture's config and processor class, and one whole model."""
    from conformance.hf_models import NoTruth, load_config

    checkpoints = sorted(p.parent for p in (root / "golden" / "checkpoints").glob("*/config.json"))
    for directory in checkpoints:
        try:
            load_config(directory)
            _processor(directory)
        except Exception as error:  # third-party code of many kinds
            yield Fact(f"reference of {directory.name}", False, f"{type(error).__name__}: {error}")
    plain = [d for d in checkpoints if not _is_vision(d)]
    if plain:
        try:
            _forward(plain[0])
        except (NoTruth, Exception) as error:
            yield Fact("reference", False, f"{plain[0].name}: {type(error).__name__}: {error}")
        else:
            yield Fact("reference", True, f"{plain[0].name} loads and answers, eager, float32")


def _is_vision(directory: Path) -> bool:
    return "vision_config" in json.loads((directory / "config.json").read_text(encoding="utf-8"))


def _processor(directory: Path) -> None:
    if _is_vision(directory):
        from conformance.hf_processors import load_processor

        load_processor(directory)


def _forward(directory: Path) -> None:
    import torch

    from conformance.hf_models import load_hf

    model = load_hf(directory, torch.float32)
    logits = model.module(torch.tensor([[3, 20, 11]])).logits
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("its logits are not finite")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
