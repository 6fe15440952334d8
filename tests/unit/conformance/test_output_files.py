"""Two outputs of one command are two files, however they are spelled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conformance.output_files import OutputClash, must_not_clash


def test_files_of_their_own_and_none_at_all_are_right(tmp_path: Path) -> None:
    must_not_clash({"--json": tmp_path / "a", "--html": tmp_path / "b", "--junit": None}, [tmp_path / "c"])


def test_one_file_is_refused_by_both_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for other in (Path("x"), tmp_path / "x", Path("below/../x"), Path("link")):
        with pytest.raises(OutputClash, match="--json and --html are both "):
            must_not_clash({"--json": Path("x"), "--junit": Path("y"), "--html": other})


def test_one_file_of_two_names_is_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.touch()
    os.link(one, other)
    with pytest.raises(OutputClash):
        must_not_clash({"--json": one, "--html": other})


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(OutputClash, match=r"--json .* over a file that this command reads"):
        must_not_clash({"--json": tmp_path / "r"}, [None, tmp_path / "s", tmp_path / "." / "r"])


def test_a_device_takes_both() -> None:
    must_not_clash({"--json": Path(os.devnull), "--html": Path(os.devnull)})
