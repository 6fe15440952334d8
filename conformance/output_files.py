"""The files a command is to write, settled before it runs an engine.

No two of them may be one, or the last to be written would be all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path

__all__ = ["OutputClash", "must_be_writable", "must_not_clash", "output_path"]


class OutputClash(ValueError):
    """A file would be written over another of the same command; the message names both options."""


def output_path(text: str) -> Path:
    """The path an option gives, from here: an engine may change the working directory."""
    return Path(text).absolute()


def must_be_writable(path: Path | None) -> None:
    """See that a file can be written, now and not after an hour; it is there afterwards.

    Raises:
        OSError: it cannot.
    """
    if path is not None:
        path.open("a").close()


def must_not_clash(written: Mapping[str, Path | None], read: Iterable[Path | None] = ()) -> None:
    """See that every file is written once, and none over what the command reads.

    Args:
        written: option → its file, None where it was not given.
        read: files that the command reads.

    Raises:
        OutputClash: two are one file, by whatever spelling or link. Devices and pipes take both.
    """
    given = [(option, path) for option, path in written.items() if path is not None]
    for (one, path), (other, twin) in combinations(given, 2):
        if _is_same(path, twin):
            raise OutputClash(f"{one} and {other} are both {twin}: give each a file of its own")
    for option, path in given:
        if any(source is not None and _is_same(path, source) for source in read):
            raise OutputClash(f"{option} {path} would be written over a file that this command reads")


def _is_same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other) and one.is_file()
    return one.resolve() == other.resolve()
