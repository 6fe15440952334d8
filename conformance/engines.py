"""Finds an engine's adapter by name: in the box, from an entry point, or `package.module:Class`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, cast

import yaml

from conformance.adapters.base import EngineAdapter, ModelSource
from conformance.outside import FROM_OUTSIDE
from conformance.runner import EngineFactory

__all__ = [
    "ENGINES",
    "ENTRY_POINT_GROUP",
    "EngineNotFound",
    "EngineOptionError",
    "engine_names",
    "find_engine",
    "parse_options",
    "with_options",
]

#: Where other packages may name their adapters.
ENTRY_POINT_GROUP = "conformance.engines"

#: The adapters in the box.
ENGINES: Mapping[str, str] = {
    "minivllm": "conformance.adapters.minivllm:MiniVLLMAdapter",
    "hf": "conformance.adapters.hf:HFAdapter",
    "hf-sdpa": "conformance.adapters.hf:HFSdpaAdapter",
    "hf-continuous-batching": "conformance.adapters.hf_continuous:HFContinuousAdapter",
    "openai": "conformance.adapters.openai:OpenAIAdapter",
    "vllm": "conformance.adapters.vllm:VLLMAdapter",
    "fake": "conformance.adapters.fake:FakeEngine",
}

#: Engines of the box that need a package this one does not depend on → the package, and how to get it.
NEEDED: Mapping[str, tuple[str, str]] = {
    "vllm": ("vllm", "`nox -s peer-vllm` makes an environment with it"),
}


class EngineNotFound(LookupError):
    """No adapter has this name, or it cannot be imported."""


class EngineOptionError(ValueError):
    """An option for the adapter is not of the form NAME=VALUE."""


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
    if name in NEEDED and find_spec(NEEDED[name][0]) is None:
        package, how = NEEDED[name]
        raise EngineNotFound(f"engine {name!r} needs the package {package}, which is not here; {how}")
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others: it may raise anything, or leave
        told = f"{type(error).__name__}: {error}"
        raise EngineNotFound(f"engine {name!r} cannot be imported from {target}: {told}") from error
    if not callable(factory):
        raise EngineNotFound(f"engine {name!r}: {target} is no class or function, but {factory!r:.200}")
    return cast("EngineFactory", factory)


def parse_options(items: Sequence[str], flag: str = "--engine-option") -> dict[str, Any]:
    """{"name": value} of "name=value" items; a value is read as YAML, so 8 is a number.

    Args:
        flag: what gave them, for the messages.

    Raises:
        EngineOptionError: an item has no "=", no name, or a value that is no YAML.
    """
    options: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise EngineOptionError(f"{flag} takes NAME=VALUE, got {item!r}")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EngineOptionError(f"{flag} {name}: {value!r} is no YAML: {error}") from error
    return options


def with_options(factory: EngineFactory, options: Mapping[str, Any]) -> EngineFactory:
    """The same adapter, given these options too; where a scenario says otherwise, the scenario wins."""
    if not options:
        return factory

    def make(model: ModelSource, given: Mapping[str, Any]) -> EngineAdapter:
        return factory(model, {**options, **given})

    return make
