"""What stands in the reference's way is named, and what goes on without it is told."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conformance.doctor import reference
from conformance.doctor.cli import main
from conformance.doctor.reference import Fact, examine_reference


def facts(root: Path | None = None, *, load: bool = False) -> dict[str, Fact]:
    return {fact.what: fact for fact in examine_reference(root, load=load)}


def test_here_every_package_is_there_and_goldens_are_counted() -> None:
    found = facts()
    assert [f.what for f in found.values() if f.ok is False] == []
    assert "not needed: no device map" in found["accelerate"].told
    assert found["devices"].told.startswith("cpu")
    assert found["tiny-llama"].ok is True
    assert int(found["tiny-llama"].told.split()[0]) > 10


def test_a_missing_package_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda n: None if n == "transformers" else find_spec(n))
    found = facts(load=True)
    assert found["transformers"] == Fact("transformers", False, "missing: python -m pip install transformers")
    assert "reference" not in found, "what cannot be imported is not loaded"
    assert main([]) == 1
    assert "Judging needs none of it" in capsys.readouterr().out


def test_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "version", lambda n: "4.57.1" if n == "transformers" else "9.9.9")
    assert facts()["transformers"].told == "4.57.1 is older than 5.20: goldens would differ"


def test_a_torchvision_of_another_torch_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms does not exist")
        return importlib.import_module(name)

    monkeypatch.setattr(reference, "find_spec", lambda _n: object())
    monkeypatch.setattr(reference, "importlib", type("I", (), {"import_module": staticmethod(broken)}))
    told = facts()["torchvision"]
    assert told.ok is False
    assert "torchvision::nms does not exist" in told.told
    assert "uninstall it" in told.told


def test_a_checkpoint_that_the_reference_cannot_read_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "golden" / "checkpoints" / "odd"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "no-such-model"}')
    found = facts(tmp_path, load=True)
    assert found["reference of odd"].ok is False
    assert "no-such-model" in found["reference of odd"].told
    assert found["reference"].ok is False


def test_the_reference_of_a_small_checkpoint_loads(tmp_path: Path, tiny_llama: str) -> None:
    (tmp_path / "golden" / "checkpoints").mkdir(parents=True)
    (tmp_path / "golden" / "checkpoints" / "tiny-llama").symlink_to(tiny_llama)
    found = facts(tmp_path, load=True)
    assert found["reference"] == Fact("reference", True, "tiny-llama loads and answers, eager, float32")
