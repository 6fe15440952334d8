"""The table of trained checkpoints; that each trains and writes is tested through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.recipes.build import MECHANICS
from conformance.recipes.trained import TRAINED


def test_no_name_is_taken_twice() -> None:
    assert not set(TRAINED) & set(MECHANICS)


@pytest.mark.parametrize("name", list(TRAINED))
def test_the_committed_checkpoint_came_from_the_recipe(name: str, checkpoints: Path) -> None:
    facts = json.loads((checkpoints / name / "RECIPE.json").read_text(encoding="utf-8"))
    assert (facts["name"], facts["summary"]) == (name, TRAINED[name].summary)
