from __future__ import annotations

from pathlib import Path

import pytest

from conformance.paths import DataMissing, data_root


def test_a_wheel_has_its_data_inside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "conformance"
    (package / "_data" / "golden").mkdir(parents=True)
    (tmp_path / "golden").mkdir()
    assert data_root(package) == package / "_data"


@pytest.mark.parametrize("name", ["golden", "scenarios"])
def test_a_checkout_has_its_data_beside_the_package(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert data_root(tmp_path / "conformance") == tmp_path


def test_a_package_without_data_is_an_error_that_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="_data") as error:
        data_root(tmp_path / "conformance")
    assert str(tmp_path) in str(error.value)


def test_the_data_of_this_checkout_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = data_root()
    monkeypatch.chdir(tmp_path)
    assert data_root() == here
    assert (here / "conformance").is_dir() or here.name == "_data"
