"""One small registry for everything that can be plugged in by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar, cast

from minivllm.errors import ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to an object, imported lazily from ``"module:attribute"``.

    Args:
        kind: what the entries are, for messages ("attention backend").
        entry_point_group: where third parties may add entries, or None.

    Registering a name twice raises ConfigError; asking for an unknown name raises
    ConfigError that lists what exists.
    """

    def __init__(self, kind: str, entry_point_group: str | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, str | T] = {}
        self._entry_point_group = entry_point_group

    def register(self, name: str, target: str | T) -> None:
        """Add an entry: an object, or a lazy ``"module:attribute"`` string."""
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is already registered as {self._entries[name]!r}")
        self._entries[name] = target

    def get(self, name: str) -> T:
        """Return the entry, importing it on first use."""
        if name in self._entries:
            target = self._entries[name]
        else:
            target = self._outside().get(name, "")
            if not target:
                known = ", ".join(self) or "none"
                raise ConfigError(f"unknown {self.kind} {name!r}; known: {known}")
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = cast("T", getattr(import_module(module), attribute))
            self._entries[name] = target
        return target

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._entries, *self._outside()}))

    def _outside(self) -> dict[str, str | T]:
        if self._entry_point_group is None:
            return {}
        return {e.name: e.value for e in entry_points(group=self._entry_point_group)}
