"""Transformers' own video processing, for tests that compare with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import transformers.utils  # noqa: F401 (looks for torchvision before something is put in its place)


@pytest.fixture(scope="module")
def genuine() -> Iterator[Callable[[str], Any]]:
    """`genuine("qwen3_vl")`: Transformers' module of video processing, imported without torchvision."""
    before = dict(sys.modules)
    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    if "torchvision" not in sys.modules:
        for name in names:
            sys.modules["torchvision" + name] = ModuleType("torchvision" + name)
        for parent, child in zip(names, ("transforms", "v2", "functional"), strict=False):
            setattr(sys.modules["torchvision" + parent], child, sys.modules[f"torchvision{parent}.{child}"])

    def load(family: str) -> Any:
        return importlib.import_module(f"transformers.models.{family}.video_processing_{family}")

    yield load
    for name in set(sys.modules) - set(before):
        if name.startswith("torchvision") or ".video_processing_qwen" in name:
            del sys.modules[name]
