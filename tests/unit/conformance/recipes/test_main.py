"""The command line of the recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.recipes.__main__ import main
from conformance.recipes.build import MECHANICS
from conformance.recipes.trained import TRAINED


def test_list_names_every_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [*MECHANICS, *TRAINED]


def test_build_writes_the_named_checkpoint(tmp_path: Path) -> None:
    assert main(["build", "tiny-llama-yarn", "--out", str(tmp_path / "made")]) == 0
    facts = json.loads((tmp_path / "made" / "RECIPE.json").read_text(encoding="utf-8"))
    assert facts["name"] == "tiny-llama-yarn"


@pytest.mark.parametrize("name", list(TRAINED))
def test_train_writes_the_named_checkpoint(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", name, "--out", str(tmp_path), "--steps", "1", "--seed", "3"]) == 0
    facts = json.loads((tmp_path / "RECIPE.json").read_text(encoding="utf-8"))
    assert facts["name"] == name
    assert facts["training"]["seed"] == 3
    assert {v for k, v in facts["training"].items() if k.endswith("steps")} == {1}
    assert "wrote" in capsys.readouterr().out


def test_search_prints_a_line_per_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "tiny-llama", "--seeds", "1"]) == 0
    assert "seed 0: smallest margin" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["build", "tiny-gpt", "--out", "x"], ["build", "tiny-llama"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_pictures_are_drawn_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pictures", "--out", str(tmp_path), "--reason", "first"]) == 0
    assert (tmp_path / "shapes" / "red_circle.png").is_file()
    listed = json.loads((tmp_path / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    assert listed["shapes/red_circle.png"]["reason"] == "first"
    assert "pictures to" in capsys.readouterr().out
