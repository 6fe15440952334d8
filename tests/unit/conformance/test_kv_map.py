"""`conformance kv-map`, from a file and from a scenario run to a step."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from conformance.cli import main as conformance
from conformance.kv_map import MapError, main, snapshot_of
from conformance.paths import data_root
from conformance.scenario import Scenario, load_scenario

SCENARIO = """
schema: 1
id: area/two
requirement: Two requests share a prompt.
level: must
source: [https://example.org]
model: tiny-llama
engine: {num_kv_blocks: 12, block_size: 4}
profile: smoke
requests:
  one: {token_ids: [5, 6, 7, 8, 9, 10], max_tokens: 4, ignore_eos: true}
  two: {token_ids: [5, 6, 7, 8, 9, 11], max_tokens: 3, ignore_eos: true}
steps:
  - submit: one
  - advance: 2
  - submit: two
  - run
checks:
  - happened: {finished: "==2"}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "scenarios" / "area" / "two.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SCENARIO)
    return load_scenario(path, tmp_path / "scenarios")


def holders(snapshot: object) -> list[tuple[int, list[str]]]:
    assert isinstance(snapshot, dict)
    return [
        (block["block_id"], [owner["request_id"] for owner in block["owners"]])
        for block in snapshot["blocks"]
        if block["owners"]
    ]


def test_a_scenario_is_run_to_the_step_and_no_further(scenario: Scenario) -> None:
    snapshot, step = snapshot_of(scenario, 3)
    assert step == 3
    assert holders(snapshot) == [(1, ["one", "two"]), (2, ["one"]), (3, ["two"])]


def test_without_a_step_the_fullest_one_is_shown(scenario: Scenario) -> None:
    snapshot, step = snapshot_of(scenario, None)
    assert step == 3
    assert len(holders(snapshot)) == 3


def test_a_step_that_never_comes_is_told(scenario: Scenario) -> None:
    with pytest.raises(MapError, match="area/two has no step 50: it ended after"):
        snapshot_of(scenario, 50)


def test_an_engine_that_shows_nothing_is_told(scenario: Scenario) -> None:
    with pytest.raises(MapError, match="does not show its KV cache"):
        snapshot_of(scenario, 1, engine="conformance.adapters.fake:FakeEngine")


def test_a_drawing_of_a_scenario_can_be_drawn_again_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(data_root().glob("scenarios/prefix-cache/shared-prefix.yaml"))
    files = ["--json", str(tmp_path / "map.json"), "--svg", str(tmp_path / "map.svg")]
    assert conformance(["kv-map", "prefix-cache/shared-prefix", "--step", "14", *files]) == 0
    first = capsys.readouterr().out
    assert "after step 14" in first
    assert ET.parse(tmp_path / "map.svg").getroot().tag.endswith("svg")
    assert main([str(tmp_path / "map.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]


def test_blocks_are_listed_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"block_id": 1, "state": "in_use", "owners": [{"request_id": "r", "index": 0}], "num_computed": 1}
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"block_size": 2, "blocks": [{"block_id": 0, "state": "null"}, block]}))
    assert main([str(path), "--blocks"]) == 0
    assert "held by (index)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such"], "no scenario 'no/such'"),
        (["preemption/by-pressure", "--step", "0"], "--step counts from 1"),
        (["preemption/by-pressure", "--engine", "nobody"], "nobody"),
        (["missing.json"], "missing.json"),
    ],
)
def test_a_wrong_command_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["open", "deep"])
def test_a_file_that_is_not_json_is_told(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main([str(tmp_path / "x.json")]) == 2
    assert "is not JSON" in capsys.readouterr().err
