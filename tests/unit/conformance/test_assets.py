"""Assets by name and by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from conformance.assets import AssetError, asset_directory, asset_of_digest, find_asset
from conformance.manifest import sign


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    assets = asset_directory(tmp_path)
    (assets / "shapes").mkdir(parents=True)
    (assets / "shapes" / "a.png").write_bytes(b"a picture")
    (assets / "shapes" / "b.png").write_bytes(b"another")
    sign(assets, "first")
    return assets


def test_a_name_finds_the_file_and_its_digest(directory: Path) -> None:
    asset = find_asset(directory, "shapes/a.png")
    assert asset.name == "shapes/a.png"
    assert asset.path.read_bytes() == b"a picture"
    assert asset.digest == "sha256:" + hashlib.sha256(b"a picture").hexdigest()


def test_a_digest_finds_the_file_again(directory: Path) -> None:
    asset = find_asset(directory, "shapes/b.png")
    assert asset_of_digest(directory, asset.digest) == asset


def test_an_unknown_name_lists_its_neighbours(directory: Path) -> None:
    with pytest.raises(AssetError, match=r"no asset 'shapes/c.png'; known: shapes/a.png, shapes/b.png"):
        find_asset(directory, "shapes/c.png")
    with pytest.raises(AssetError, match=r"no asset 'video/c.png'; known: shapes/…"):
        find_asset(directory, "video/c.png")


def test_an_unknown_digest_is_told(directory: Path) -> None:
    with pytest.raises(AssetError, match=r"no asset has the content sha256:000000000000…; .* holds 2 files"):
        asset_of_digest(directory, "sha256:" + "0" * 64)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a.png", "shapes/../shapes/a.png", "shapes\\a.png", "./a.png"]
)
def test_a_name_that_leads_elsewhere_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(AssetError, match="must be a plain path below assets/"):
        find_asset(directory, name)


def test_other_bytes_than_the_manifest_lists_are_refused(directory: Path) -> None:
    (directory / "shapes" / "a.png").write_bytes(b"a pictura")
    with pytest.raises(AssetError, match=r"corrupted: assets/shapes/a.png"):
        find_asset(directory, "shapes/a.png")


def test_a_file_that_nobody_signed_is_no_asset(directory: Path) -> None:
    (directory / "shapes" / "c.png").write_bytes(b"new")
    with pytest.raises(AssetError, match=r"no asset 'shapes/c\.png'"):
        find_asset(directory, "shapes/c.png")


def test_a_new_signature_is_seen(directory: Path) -> None:
    find_asset(directory, "shapes/a.png")
    (directory / "shapes" / "c.png").write_bytes(b"new")
    sign(directory, "one more")
    assert find_asset(directory, "shapes/c.png").path.read_bytes() == b"new"


def test_a_manifest_that_cannot_be_read_is_told(directory: Path) -> None:
    (directory / "MANIFEST.json").write_text("{", encoding="utf-8")
    with pytest.raises(AssetError, match="is not JSON"):
        find_asset(directory, "shapes/a.png")
