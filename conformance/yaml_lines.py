"""Reads YAML as plain data and remembers the line of every key and item.

The dialect is YAML 1.2's core schema on PyYAML's parser: `on`, `off`, `yes` and `no` are words, not
booleans, so that `prefix_cache: [on, off]` means what it says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Document", "Location", "YamlError", "read_yaml"]

#: No scenario nests this deep; a file whose alias contains itself would never end.
_DEEPEST = 32

#: Nor does one hold as many values; aliases of aliases multiply.
_MOST_VALUES = 200_000

#: Where a value sits in a document: keys and indexes from the root.
Location = tuple[str | int, ...]


class YamlError(ValueError):
    """A file that is not YAML, or not YAML we accept; the message starts with file and line."""


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data with the line (from 1) of each key and list item."""

    path: Path
    data: Any
    lines: dict[Location, int]

    def line(self, location: Sequence[str | int]) -> int:
        """Line of the deepest known part of `location`; parts that name no node are passed over."""
        known: Location = ()
        for part in location:
            if (*known, part) in self.lines:
                known = (*known, part)
        return self.lines.get(known, 1)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader, resolving plain scalars as YAML 1.2's core schema does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's hook)


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"(?:~|null|)", ["~", "n", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|false)", ["t", "f"]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(_tag, re.compile(f"^{_pattern}$"), _first)


def _construct_int(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(node.value)  # PyYAML would read 010 as octal


def _construct_float(_loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_yaml(path: Path) -> Document:
    """Read one YAML document.

    Raises:
        YamlError: not UTF-8, a control character, syntax error, duplicate key, key that is not text, a
            tag we do not know, nested too deep, or a number too long.
    """
    try:
        return _read(path, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise YamlError(
            f"{path}:{line}: not UTF-8: {error.reason} {error.object[error.start]:#04x}"
        ) from error
    except RecursionError as error:
        raise YamlError(f"{path}:1: nested more than {_DEEPEST} deep") from error


def _read(path: Path, text: str) -> Document:
    try:
        loader = _CoreLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"{path}:{line}: the character {error.character:#04x} is not allowed") from error
    try:
        node = loader.get_single_node()
        lines: dict[Location, int] = {}
        data = None if node is None else _build(loader, node, (), lines, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from error
    finally:
        loader.dispose()
    return Document(path, data, lines)


def _build(
    loader: _CoreLoader, node: yaml.Node, where: Location, lines: dict[Location, int], path: Path
) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(where, line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(loader, node, path)
    if node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        raise YamlError(f"{path}:{line}: unknown tag {node.tag!r}: only plain data is read")
    if len(lines) > _MOST_VALUES:
        raise YamlError(f"{path}:{line}: more than {_MOST_VALUES} values (aliases of aliases?)")
    if len(where) > _DEEPEST:
        raise YamlError(f"{path}:{line}: nested more than {_DEEPEST} deep (an alias of its own parent?)")
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*where, i), lines, path) for i, item in enumerate(node.value)]
    result: dict[str | int, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(loader, key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise YamlError(f"{path}:{line}: a key must be a word or a number, got {key!r}")
        if key in result:
            first = lines[(*where, key)]
            raise YamlError(f"{path}:{line}: duplicate key {key!r}, first given on line {first}")
        lines[(*where, key)] = line
        result[key] = _build(loader, value_node, (*where, key), lines, path)
    return result


def _scalar(loader: _CoreLoader, node: yaml.ScalarNode, path: Path) -> Any:
    try:
        return loader.construct_object(node)
    except (ValueError, KeyError, IndexError) as error:  # more digits than Python reads, or no such day
        said = f"{node.value[:40]!r} is no {node.tag.rpartition(':')[2]}"
        raise YamlError(f"{path}:{node.start_mark.line + 1}: {said}: {error}") from error
