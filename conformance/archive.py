"""Histories on disk: JSON, read back as they were, so that they can be judged again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from conformance import HISTORY_SCHEMA
from conformance.history import History

__all__ = ["ArchiveError", "history_name", "read_histories", "read_history", "write_history"]

_HISTORY = TypeAdapter(History)


class ArchiveError(ValueError):
    """A file is no history this version can read."""


def history_name(history: History) -> str:
    """File name from scenario, dtype, model and matrix point; distinct for distinct points."""
    point = ",".join(f"{k}={v}" for k, v in sorted(history.point.items()))
    return re.sub(r"[^A-Za-z0-9_.,=-]", "_", f"{history.scenario}@{point}") + ".json"


def write_history(directory: Path, history: History) -> Path:
    """Write one history below `directory`, in place of an earlier one of the same point."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / history_name(history)
    # Python's json keeps NaN and Infinity as such; strict JSON has no word for them.
    text = json.dumps(_HISTORY.dump_python(history, mode="json"))
    path.write_text(text, encoding="utf-8")
    return path


def read_history(path: Path) -> History:
    """Read one history.

    Raises:
        ArchiveError: not JSON, another schema version, or fields of another form.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path}: not JSON: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int or schema != HISTORY_SCHEMA:
        raise ArchiveError(f"{path}: history schema {schema!r}; this suite reads {HISTORY_SCHEMA}: run again")
    try:
        _number_keys(data)
        return _HISTORY.validate_python(data)
    except (ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArchiveError(f"{path}: not a history: {error}") from error


def read_histories(directory: Path) -> list[History]:
    """All histories of a directory, in order of file name.

    Raises:
        ArchiveError: there is none, or one cannot be read.
    """
    paths = sorted(directory.glob("*.json"))
    if not paths:
        raise ArchiveError(f"{directory}: no histories here; save some with: conformance run --history DIR")
    return [read_history(path) for path in paths]


def _number_keys(data: Any) -> None:
    """logit_bias maps token ids, and JSON has only text as keys."""
    for one in data["passes"]:
        for run in one["requests"].values():
            bias = run["sampling"].get("logit_bias")
            if bias:
                run["sampling"]["logit_bias"] = {int(token): value for token, value in bias.items()}
