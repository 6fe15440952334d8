"""Pictures and frames that scenarios show to a model: scenarios/assets, known by name and by content."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from conformance.manifest import MANIFEST_NAME, Manifest, ManifestError

__all__ = ["ASSETS", "DIGEST", "Asset", "AssetError", "asset_directory", "asset_of_digest", "find_asset"]

#: Name of the directory below scenarios/.
ASSETS = "assets"

#: What a content digest starts with, so that it cannot be taken for a name.
DIGEST = "sha256:"


class AssetError(ValueError):
    """There is no such asset, or its file is not the one the manifest lists."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of scenarios/assets.

    Attributes:
        name: path below the directory, with forward slashes.
        digest: "sha256:" and the SHA-256 of the file's bytes, hex.
    """

    name: str
    path: Path
    digest: str


def asset_directory(root: Path) -> Path:
    """The assets of the suite whose data directory (with golden/ and scenarios/) is `root`."""
    return root / "scenarios" / ASSETS


def find_asset(directory: Path, name: str) -> Asset:
    """The asset called `name` below `directory`, checked against the manifest there.

    Raises:
        AssetError: no such file, a name that leads elsewhere, or other bytes than the manifest lists.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or str(pure) != name:
        raise AssetError(f"asset {name!r} must be a plain path below {ASSETS}/, such as shapes/a.png")
    manifest = _manifest(directory, _changed(directory / MANIFEST_NAME))
    fault = manifest.fault(directory, name)
    if fault is None:
        return Asset(name, directory / name, DIGEST + manifest.entries[name].sha256)
    if name not in manifest.entries:
        similar = sorted(n for n in manifest.entries if PurePosixPath(n).parts[0] == pure.parts[0])
        known = similar or sorted({f"{PurePosixPath(n).parts[0]}/…" for n in manifest.entries})
        raise AssetError(f"no asset {name!r}; known: {', '.join(known) or 'none'}")
    raise AssetError(fault)


def asset_of_digest(directory: Path, digest: str) -> Asset:
    """The asset with this content.

    Raises:
        AssetError: none has it, or its file has changed since.
    """
    manifest = _manifest(directory, _changed(directory / MANIFEST_NAME))
    for name, entry in sorted(manifest.entries.items()):
        if DIGEST + entry.sha256 == digest:
            return find_asset(directory, name)
    raise AssetError(
        f"no asset has the content {digest[:19]}…; {ASSETS}/ holds {len(manifest.entries)} files"
    )


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


@functools.lru_cache(maxsize=8)
def _manifest(directory: Path, changed: int) -> Manifest:  # noqa: ARG001  (changed: part of the cache's key)
    try:
        return Manifest.load(directory)
    except ManifestError as error:
        raise AssetError(str(error)) from error
