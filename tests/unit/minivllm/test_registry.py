"""The registry is lazy, refuses duplicates, and lists what exists."""

from __future__ import annotations

import sys

import pytest

from minivllm.errors import ConfigError
from minivllm.registry import Registry


def test_a_lazy_entry_is_imported_on_first_use() -> None:
    registry: Registry[object] = Registry("thing")
    sys.modules.pop("this_module_does_not_exist", None)
    registry.register("missing", "this_module_does_not_exist:x")
    registry.register("path", "pathlib:Path")
    from pathlib import Path

    assert registry.get("path") is Path
    with pytest.raises(ModuleNotFoundError):
        registry.get("missing")


def test_a_duplicate_is_refused() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one", 1)
    with pytest.raises(ConfigError, match="thing 'one' is already registered"):
        registry.register("one", 2)
    assert registry.get("one") == 1


def test_an_unknown_name_lists_what_exists() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one", 1)
    registry.register("two", 2)
    with pytest.raises(ConfigError, match="unknown thing 'three'; known: one, two"):
        registry.get("three")
    assert "one" in registry
    assert list(registry) == ["one", "two"]


def test_entry_points_of_other_packages_are_found() -> None:
    registry: Registry[object] = Registry("script", entry_point_group="console_scripts")
    assert "pytest" in registry
    assert callable(registry.get("pytest"))
