from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.manifest import MANIFEST_NAME, Manifest, ManifestError, sign


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    directory = tmp_path / "golden"
    (directory / "checkpoints" / "a").mkdir(parents=True)
    (directory / "records" / "a").mkdir(parents=True)
    (directory / "checkpoints" / "a" / "config.json").write_bytes(b"{}")
    (directory / "records" / "a" / "case.json").write_bytes(b'{"key": "k1"}')
    (directory / "NOTICE.md").write_bytes(b"made here")
    sign(directory, "first")
    return directory


def test_a_signed_directory_has_no_faults(golden: Path) -> None:
    assert Manifest.load(golden).faults(golden) == []


def test_an_entry_holds_digest_licence_author_and_reason(golden: Path) -> None:
    entry = Manifest.load(golden).entries["NOTICE.md"]
    assert entry.sha256 == hashlib.sha256(b"made here").hexdigest()
    assert (entry.licence, entry.reason, entry.key) == ("Apache-2.0", "first", "")
    assert entry.author


def test_a_record_is_listed_with_its_key(golden: Path) -> None:
    assert Manifest.load(golden).entries["records/a/case.json"].key == "k1"


def test_a_flipped_byte_is_a_fault(golden: Path) -> None:
    (golden / "NOTICE.md").write_bytes(b"made herf")
    assert [f.split(" has ")[0] for f in Manifest.load(golden).faults(golden)] == [
        "corrupted: golden/NOTICE.md"
    ]


def test_an_unknown_file_is_a_fault(golden: Path) -> None:
    (golden / "checkpoints" / "a" / "extra.bin").write_bytes(b"")
    (fault,) = Manifest.load(golden).faults(golden)
    assert fault.startswith("unknown file golden/checkpoints/a/extra.bin")


def test_a_missing_file_is_a_fault(golden: Path) -> None:
    (golden / "checkpoints" / "a" / "config.json").unlink()
    (fault,) = Manifest.load(golden).faults(golden)
    assert fault.startswith("missing file golden/checkpoints/a/config.json")


def test_without_a_manifest_every_file_is_unknown(golden: Path) -> None:
    (golden / MANIFEST_NAME).unlink()
    assert len(Manifest.load(golden).faults(golden)) == 3


def test_signing_touches_only_what_changed(golden: Path) -> None:
    (golden / "NOTICE.md").write_bytes(b"new")
    (golden / "checkpoints" / "a" / "config.json").unlink()
    assert sign(golden, "second", licence="MIT", author="me") == ["checkpoints/a/config.json", "NOTICE.md"]
    entries = Manifest.load(golden).entries
    assert (entries["NOTICE.md"].reason, entries["NOTICE.md"].licence) == ("second", "MIT")
    assert entries["records/a/case.json"].reason == "first"
    assert "checkpoints/a/config.json" not in entries


def test_signing_can_be_restricted_to_some_files(golden: Path) -> None:
    (golden / "NOTICE.md").write_bytes(b"new")
    (golden / "checkpoints" / "a" / "config.json").write_bytes(b"[]")
    assert sign(golden, "second", under="checkpoints/") == ["checkpoints/a/config.json"]
    assert len(Manifest.load(golden).faults(golden)) == 1


def test_signing_again_changes_no_byte(golden: Path) -> None:
    before = (golden / MANIFEST_NAME).read_bytes()
    assert sign(golden, "again") == []
    assert (golden / MANIFEST_NAME).read_bytes() == before


def test_signing_needs_a_reason(golden: Path) -> None:
    with pytest.raises(ManifestError, match="--reason"):
        sign(golden, "  ")


def test_a_file_that_is_no_record_cannot_be_signed_as_one(golden: Path) -> None:
    (golden / "records" / "a" / "other.json").write_bytes(b"{}")
    with pytest.raises(ManifestError, match=r"other\.json is not a record"):
        sign(golden, "second")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
        ("[]", "has schema None"),
        ('{"schema": 2, "files": {}}', "has schema 2; this suite reads 1"),
        ('{"schema": 1}', "no table of files"),
        ('{"schema": 1, "files": {"a": {}}}', "entry 'a' must hold"),
        ('{"schema": 1, "files": {"a": 3}}', "entry 'a' must hold"),
    ],
)
def test_a_manifest_of_another_form_is_refused(golden: Path, content: str, message: str) -> None:
    (golden / MANIFEST_NAME).write_text(content)
    with pytest.raises(ManifestError, match=message):
        Manifest.load(golden)


@pytest.mark.parametrize("change", [{"size": "3"}, {"sha256": 3}])
def test_an_entry_of_another_form_is_refused(golden: Path, change: dict[str, Any]) -> None:
    content = json.loads((golden / MANIFEST_NAME).read_text())
    content["files"]["NOTICE.md"] |= change
    (golden / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=r"'NOTICE\.md' must hold"):
        Manifest.load(golden)
