"""The command: what it prints, what it writes, its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.fuzz.cli import main

RIGHT = "conformance.contracts.example:ExampleAllocator"
WRONG = "conformance.contracts.example:SharedPageFreed"


def test_a_clean_run_prints_rate_and_counters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--allocator", RIGHT, "--seed", "5"]) == 0
    text = capsys.readouterr().out
    assert "seed 5: 3000 examples of" in text
    assert "examples per second" in text
    assert "every law held" in text


def test_a_failure_is_written_and_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--allocator", WRONG, "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "FAIL: LawBroken: law " in text
    assert "shrunk to" in text
    [log] = tmp_path.glob("*.json")
    assert f"replay: conformance fuzz --replay {log}" in text.replace("\n", "")
    assert main(["--replay", str(log)]) == 1
    assert "FAIL: LawBroken" in capsys.readouterr().out
    assert main(["--replay", str(log), "--allocator", RIGHT]) == 0
    assert "every law held" in capsys.readouterr().out


def test_time_may_be_given_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--allocator", RIGHT, "--minutes", "0.02"]) == 0
    assert "every law held" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--allocator", "nothing"], ["--replay", "no-such-file.json"]], ids=["target", "log"]
)
def test_a_wrong_command_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_time_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--minutes", "0"])
    assert "0 is not a positive number" in capsys.readouterr().err
