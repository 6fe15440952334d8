"""Failing examples on disk: one JSON file, one operation a line, that `--replay` runs again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from conformance.fuzz.allocator_world import AllocatorSetup
from conformance.fuzz.driver import Failure, Setup
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.operations import from_plain, to_plain

__all__ = ["LogError", "file_stem", "load_log", "save_log"]

_KIND = "conformance fuzz operation log"
_SCHEMA = 1


class LogError(ValueError):
    """A file is no operation log, or one that this version cannot read."""


def save_log(failure: Failure, path: Path) -> None:
    """Write a failure so that `load_log` gives it back."""
    head = {
        "kind": _KIND,
        "schema": _SCHEMA,
        "target": failure.target,
        "signature": failure.signature,
        "message": failure.message,
        "seed": failure.seed,
        "example": failure.example,
        "level": "allocator" if isinstance(failure.setup, AllocatorSetup) else "engine",
        "setup": failure.setup._asdict(),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    operations = [f"    {json.dumps(to_plain(operation))}" for operation in failure.operations]
    text = "\n".join(["{", *lines, '  "operations": [', ",\n".join(operations), "  ]", "}"])
    path.write_text(text + "\n", encoding="utf-8")


def load_log(path: Path) -> Failure:
    """Read what `save_log` wrote, or what a person wrote in the same form.

    Raises:
        LogError: with the file and what is wrong in it.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.get("kind") != _KIND or data.get("schema") != _SCHEMA:
            raise LogError(f"{path}: not a {_KIND} of schema {_SCHEMA}")
        kinds: dict[str, type[Setup]] = {"allocator": AllocatorSetup, "engine": EngineSetup}
        return Failure(
            target=str(data["target"]),
            signature=str(data["signature"]),
            message=str(data["message"]),
            setup=kinds[data["level"]](**data["setup"]),
            operations=tuple([from_plain(operation) for operation in data["operations"]]),
            seed=int(data["seed"]),
            example=int(data["example"]),
        )
    except LogError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LogError(f"{path}: {type(error).__name__}: {error}") from error


def file_stem(failure: Failure) -> str:
    """A file name that tells the law and the place in the run."""
    words = re.sub(r"[^a-z0-9]+", "-", failure.signature.partition(" @")[0].lower()).strip("-")
    return f"{words}-seed{failure.seed}-example{failure.example}"
