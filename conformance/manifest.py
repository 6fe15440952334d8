"""MANIFEST.json of golden/ and scenarios/assets/: what every file must be, who made it, why it changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST_NAME", "MANIFEST_SCHEMA", "Manifest", "ManifestEntry", "ManifestError", "sign"]

MANIFEST_NAME = "MANIFEST.json"
MANIFEST_SCHEMA = 1

_DEFAULT_LICENCE = "Apache-2.0"
_DEFAULT_AUTHOR = "The minivllm authors"


class ManifestError(ValueError):
    """The manifest is missing, unreadable or of another schema version."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One golden file.

    Attributes:
        sha256: of the file's bytes, hex.
        licence: SPDX identifier.
        author: who made the file.
        reason: why it was added or last changed.
        key: for a record's .json, the key of its request; the store finds records by it.
    """

    sha256: str
    licence: str
    author: str
    reason: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """File name (relative to the manifest's directory, with forward slashes) → entry."""

    entries: Mapping[str, ManifestEntry]

    @classmethod
    def load(cls, golden: Path) -> Manifest:
        """Read golden/MANIFEST.json; an absent one is an empty manifest.

        Raises:
            ManifestError: not JSON, another schema version, or an entry of the wrong form.
        """
        path = golden / MANIFEST_NAME
        if not path.is_file():
            return cls({})
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not JSON: {error}") from error
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != MANIFEST_SCHEMA:
            raise ManifestError(f"{path} has schema {schema!r}; this suite reads {MANIFEST_SCHEMA}")
        files = content.get("files")
        if not isinstance(files, dict):
            raise ManifestError(f"{path} has no table of files; restore it from version control")
        return cls({name: _entry(path, name, values) for name, values in files.items()})

    def save(self, golden: Path) -> None:
        """Write golden/MANIFEST.json, sorted by name."""
        files = {name: _plain(self.entries[name]) for name in sorted(self.entries)}
        text = json.dumps({"schema": MANIFEST_SCHEMA, "files": files}, indent=1, ensure_ascii=False)
        golden.mkdir(parents=True, exist_ok=True)
        # Replaced at once, so that no reader ever sees half a manifest.
        draft = golden / f".{MANIFEST_NAME}.{os.getpid()}"
        draft.write_text(text + "\n", encoding="utf-8", newline="\n")
        draft.replace(golden / MANIFEST_NAME)

    def fault(self, golden: Path, name: str) -> str | None:
        """Why the file `name` is not what was signed, or None."""
        entry = self.entries.get(name)
        if entry is None:
            return f"unknown file {golden.name}/{name}: it is not in {MANIFEST_NAME}; sign it or remove it"
        path = golden / name
        if not path.is_file():
            return (
                f"missing file {golden.name}/{name}: {MANIFEST_NAME} lists it; restore it or sign its removal"
            )
        actual = _sha256(path)
        if actual != entry.sha256:
            return (
                f"corrupted: {golden.name}/{name} has SHA-256 {actual[:12]}…, {MANIFEST_NAME} says "
                f"{entry.sha256[:12]}…; restore it, or sign the change with a reason"
            )
        return None

    def faults(self, golden: Path) -> list[str]:
        """Every file that is unknown, missing or not what was signed; empty when all is well."""
        names = sorted({*self.entries, *_files(golden)})
        return [fault for name in names if (fault := self.fault(golden, name)) is not None]


def sign(
    golden: Path,
    reason: str,
    *,
    under: str = "",
    licence: str = _DEFAULT_LICENCE,
    author: str = _DEFAULT_AUTHOR,
) -> list[str]:
    """Rewrite the manifest so that it describes golden/ as it is.

    Only entries of new, changed or removed files are touched, so every other file keeps the
    reason of its own last change.

    Args:
        reason: why these files changed; must say something.
        under: restrict to files whose name starts so ("checkpoints/tiny-llama/").
        licence: SPDX identifier of the new or changed files.

    Returns:
        Names of the files that were added, changed or removed.

    Raises:
        ManifestError: no reason was given.
    """
    if not reason.strip():
        raise ManifestError("a change of golden files needs a reason; give --reason '…'")
    entries = dict(Manifest.load(golden).entries)
    present = set(_files(golden))
    changed = [name for name in sorted(entries) if name.startswith(under) and name not in present]
    for name in changed:
        del entries[name]
    for name in sorted(name for name in present if name.startswith(under)):
        digest = _sha256(golden / name)
        if name in entries and entries[name].sha256 == digest:
            continue
        entries[name] = ManifestEntry(
            digest, licence, author, reason.strip(), _record_key(golden / name, name)
        )
        changed.append(name)
    Manifest(entries).save(golden)
    return changed


def _entry(path: Path, name: str, values: Any) -> ManifestEntry:
    known = {f.name for f in fields(ManifestEntry)}
    if not isinstance(values, dict) or not known - {"key"} <= set(values) <= known:
        raise ManifestError(f"{path}: entry {name!r} must hold {sorted(known)}, got {values!r}")
    if not all(isinstance(value, str) for value in values.values()):
        raise ManifestError(f"{path}: entry {name!r} must hold strings only, got {values!r}")
    return ManifestEntry(**values)


def _plain(entry: ManifestEntry) -> dict[str, str]:
    values = asdict(entry)
    if not entry.key:
        del values["key"]
    return values


def _files(golden: Path) -> Iterator[str]:
    for path in golden.rglob("*"):
        if path.is_file() and path != golden / MANIFEST_NAME:
            yield path.relative_to(golden).as_posix()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record_key(path: Path, name: str) -> str:
    if not (name.startswith("records/") and name.endswith(".json")):
        return ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"golden/{name} is not a record, so it cannot be signed: {error!r}") from error
