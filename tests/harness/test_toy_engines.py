"""A toy engine of one file passes; eleven that are each wrong in one subtle way are caught."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from conformance.paths import data_root
from conformance.scenario import load_scenario
from conformance.store import RecordStore
from conformance.suite import Selection, run_case, select
from conformance.verdicts import Verdict

SCENARIOS = ("prefix-cache/salt-isolation", "prefix-cache/shared-prefix")
WRONG = ("PlainRope", "TiledHeads", "ZeroEpsilon", "QuickGelu", "SeesTheNext", "SaltBlind", "StaleHit")
WRONG += ("WholePromptHit", "HalfScores", "LatePositions", "TopOnly")


def verdicts(engine: Any) -> set[Verdict]:
    root = data_root() / "scenarios"
    scenarios = [load_scenario(root / f"{name}.yaml", root) for name in SCENARIOS]
    store = RecordStore()
    return {run_case(case, engine, store).verdict for case in select(scenarios, Selection(ids=SCENARIOS))}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "toy_engines"))


def test_the_right_toy_is_agreed_with() -> None:
    found = verdicts(importlib.import_module("toy").ToyEngine)
    assert all(verdict.is_agreement for verdict in found), found


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_toy_is_caught(name: str) -> None:
    assert Verdict.FAIL in verdicts(getattr(importlib.import_module("wrong"), name))
