"""The command `conformance faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.cli import main
from conformance.faults import FAULTS, cli
from conformance.kill_matrix import Row, load

KILLED = Row("a/b", "x.", "o", "p: q", "killed", 2, ("history",), "s", "tokens", "float32")


def test_the_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(fault.id in shown and fault.about in shown for fault in FAULTS)


def test_one_fault_is_judged_and_the_matrix_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "prefix-cache/published-then-cancelled", "--jobs", "1"]
    assert cli.main([*arguments, "--json", str(tmp_path / "m.json")]) == 0
    assert "1 faults: 1 found (1 by contract)" in capsys.readouterr().out
    [row] = load(tmp_path / "m.json")
    assert row.id == "prefix-cache/published-then-cancelled"


@pytest.mark.parametrize("outcome", ["survived", "not fired"])
def test_a_fault_that_nobody_found_fails_the_command_and_is_named(
    outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = Row("a/c", "Something is wrong.", "o", "p: r", outcome, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(cli, "judge_all", lambda *_: [KILLED, lost])
    assert cli.main([]) == 1
    shown = capsys.readouterr().out
    assert f"{outcome}: a/c: Something is wrong." in shown
    assert f"2 faults: 1 found (1 by tokens), 1 {outcome}" in shown


def test_an_unknown_fault_is_the_commands_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--only", "nothing"]) == 2
    assert "neither the id of a fault nor an area" in capsys.readouterr().err
