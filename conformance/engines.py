"""Finds an engine's adapter by name: in the box, from an entry point, or `package.module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from conformance.runner import EngineFactory

__all__ = ["ENGINES", "ENTRY_POINT_GROUP", "EngineNotFound", "engine_names", "find_engine"]

#: Where other packages may name their adapters.
ENTRY_POINT_GROUP = "conformance.engines"

#: The adapters in the box.
ENGINES: Mapping[str, str] = {
    "minivllm": "conformance.adapters.minivllm:MiniVLLMAdapter",
    "hf": "conformance.adapters.hf:HFAdapter",
    "hf-sdpa": "conformance.adapters.hf:HFSdpaAdapter",
}


class EngineNotFound(LookupError):
    """No adapter has this name, or it cannot be imported."""


def engine_names() -> list[str]:
    """Names that `find_engine` knows, beside any `package.module:Class`."""
    return sorted({*ENGINES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_engine(name: str) -> EngineFactory:
    """The adapter class (or factory function) of this name.

    Raises:
        EngineNotFound: with the names that exist, or the import error.
    """
    if ":" in name:
        target = name
    else:
        outside = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        twice = sorted(set(ENGINES) & set(outside))
        if twice:
            raise EngineNotFound(f"entry points of {ENTRY_POINT_GROUP} redefine {twice}; rename them")
        if name not in {**ENGINES, **outside}:
            known = ", ".join(engine_names())
            raise EngineNotFound(f"unknown engine {name!r}; known: {known}, or package.module:Class")
        target = {**ENGINES, **outside}[name]
    module, _, attribute = target.partition(":")
    try:
        return cast("EngineFactory", getattr(import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise EngineNotFound(f"engine {name!r} cannot be imported from {target}: {error}") from error
