"""The command: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance import EDITION
from conformance.adapters.fake_model import write_toy_suite
from conformance.cli import main

HEAD = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
"""
BODY = """matrix: {block_size: [1, 4]}
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""
RIGHT, WRONG = "conformance.adapters.fake:FakeEngine", "tests.wrong:Engine"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_toy_suite(tmp_path / "data", {"toy/one": HEAD + BODY, "toy/two": HEAD + BODY})


@pytest.fixture
def run(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(arguments…) → exit status, stdout, stderr; the engine WRONG errs in its fourth token."""
    from conformance.adapters.fake import fake_engine
    from conformance.engines import find_engine

    def find(name: str) -> object:
        return fake_engine(fault="wrong_token") if name == WRONG else find_engine(name)

    monkeypatch.setattr("conformance.cli.find_engine", find)

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments] + ["--data", str(data)])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_a_right_engine_exits_with_0(run: Run) -> None:
    status, out, _ = run("run", "--engine", RIGHT)
    assert status == 0
    assert out.count("PASS   toy/") == 4
    assert f"fake 1, suite {EDITION}: passed" in out
    assert "Power: of 4 cases judged" in out


def test_a_wrong_engine_exits_with_1_and_says_how_to_see_it_again(run: Run) -> None:
    status, out, _ = run("run", "--engine", WRONG, "toy/one")
    assert status == 1
    assert "FAIL   toy/one[block_size=1]" in out
    assert "FAIL tokens_match_golden one: position 3" in out
    assert f"again: conformance run toy/one --engine {WRONG} --model toy" in out


def test_the_command_that_reproduces_a_failure_reproduces_it(run: Run) -> None:
    _, out, _ = run("run", "--engine", WRONG, "toy/one", "--point", "block_size=4")
    line = next(line for line in out.splitlines() if "again: " in line)
    words = shlex.split(line.partition("again: conformance ")[2])
    status, out, _ = run(*words)
    assert status == 1
    assert out.count("FAIL   toy/one[block_size=4]") == 1


def test_a_run_in_which_every_case_is_skipped_has_proven_nothing(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    status, out, _ = run("run", "--engine", RIGHT, "--dtype", "bfloat16", "--json", report)
    assert status == 3
    assert "SKIP   toy/" not in out
    why = "      4  fake does not offer bfloat16; it offers float32\n"
    assert f"Skipped (4 cases; --json FILE or --html FILE names each):\n{why}" in out
    assert out.endswith(": FAILED: nothing was judged, all of 4 cases were skipped\n")
    assert json.loads(report.read_text(encoding="utf-8"))["failed"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "toy/three"], "no scenario matches 'toy/three'"),
        (["run", "--engine", "nope"], "unknown engine 'nope'"),
        (["run", "--engine", "nope:x"], "cannot be imported from nope:x: ModuleNotFoundError"),
        (["run", "--area", "nope"], "no area 'nope'"),
        (["run", "--point", "block_size"], "--point takes OPTION=VALUE, got 'block_size'"),
        (["run", "--model", "other"], "no scenario runs model 'other'; models are toy"),
        (["run", "--model", "toy", "--model", "other"], "no scenario runs model 'other'"),
        (["run", "--point", "block_size=99"], "nothing is selected"),
        (["explain", "nope/nope"], "no scenario matches"),
        (["models", "path", "nope"], "unknown model 'nope'"),
    ],
)
def test_a_wrong_command_exits_with_2_and_a_message(run: Run, arguments: list[str], message: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert message in err


def test_a_broken_scenario_exits_with_2_with_file_and_line(run: Run, data: Path) -> None:
    path = data / "scenarios/toy/one.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("max_tokens", "max_tokenz"), encoding="utf-8")
    status, _, err = run("run", "--engine", RIGHT)
    assert status == 2
    assert f"{path}:10: requests.one.max_tokenz: unknown key" in err


def test_a_broken_manifest_exits_with_2(run: Run, data: Path) -> None:
    (data / "golden/MANIFEST.json").write_text("{", encoding="utf-8")
    assert run("run", "--engine", RIGHT)[0] == 2


def test_an_unknown_argument_exits_with_2(run: Run) -> None:
    with pytest.raises(SystemExit) as caught:
        run("run", "--enjine", RIGHT)
    assert caught.value.code == 2


def test_a_negative_number_of_cases_to_look_into_exits_with_2(run: Run) -> None:
    with pytest.raises(SystemExit) as caught:
        run("run", "--engine", RIGHT, "--triage", -1)
    assert caught.value.code == 2


def test_the_report_of_a_run_is_compared_with_that_of_another_and_summed_up(run: Run, tmp_path: Path) -> None:
    right, wrong, summary = tmp_path / "right.json", tmp_path / "wrong.json", tmp_path / "s.md"
    assert run("run", "--engine", RIGHT, "toy/one", "--json", right)[0] == 0
    assert run("run", "--engine", WRONG, "toy/one", "--json", wrong, "--markdown", summary)[0] == 1
    assert main(["compare", str(right), str(right)]) == main(["compare", str(wrong), str(right)]) == 0
    assert main(["compare", str(right), str(wrong)]) == 1
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("# fake 1: FAILED\n")
    assert "## FAIL `toy/one[block_size=1]`\n\nIt answers.\n" in text
    assert f"```console\nconformance run toy/one --engine {WRONG}" in text


def test_json_and_junit_are_written(run: Run, tmp_path: Path) -> None:
    report, junit = tmp_path / "r.json", tmp_path / "r.xml"
    status, _, _ = run("run", "--engine", WRONG, "--json", report, "--junit", junit)
    assert status == 1
    values = json.loads(report.read_text(encoding="utf-8"))
    assert values["failed"] is True
    assert len(values["cases"]) == 4
    assert values["environment"]["suite"] == EDITION
    assert len(ElementTree.parse(junit).getroot().findall(".//failure")) == 4


def test_saved_histories_are_judged_again_without_an_engine(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "histories"
    assert run("run", "--engine", WRONG, "--history", directory)[0] == 1
    status, out, _ = run("recheck", directory)
    assert status == 1
    assert out.count("FAIL   toy/") == 4
    assert f"fake 1, suite {EDITION}: FAILED" in out


def test_a_recheck_reports_where_the_engine_ran_and_not_where_it_is_judged(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, report = tmp_path / "histories", tmp_path / "r.json"
    monkeypatch.setenv("MKL_CBWR", "where it ran")
    run("run", "--engine", WRONG, "--history", directory)
    monkeypatch.setenv("MKL_CBWR", "where it is judged")
    status, out, _ = run("recheck", directory, "--strict", "--engine-option", "part=old", "--json", report)
    assert status == 1
    assert json.loads(report.read_text(encoding="utf-8"))["environment"]["MKL_CBWR"] == "where it ran"
    assert "again: conformance run toy/one --engine fake --engine-option part=old --model toy" in out
    assert "--strict --data" in out


def test_a_history_of_a_scenario_that_is_gone_is_an_error(run: Run, tmp_path: Path, data: Path) -> None:
    directory = tmp_path / "histories"
    run("run", "--engine", RIGHT, "--history", directory)
    (data / "scenarios/toy/two.yaml").unlink()
    status, _, err = run("recheck", directory)
    assert status == 2
    assert "'toy/two', which the suite does not have" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["point"].update(block_size=99), "the scenario has no point {'model': 'toy'"),
        (lambda h: h["point"].pop("model"), "the scenario has no point"),
        (lambda h: h["point"].pop("dtype"), "the scenario has no point"),
        (lambda h: h.update(dtype="bfloat16"), "it computed in bfloat16, and its point says float32"),
        (lambda h: h.update(model="other"), "it is of model other, and its point says toy"),
        (
            lambda h: h["passes"][0]["requests"]["one"].update(request_id="two"),
            "it has the answer to 'two' under 'one'",
        ),
        (
            lambda h: h["passes"][0]["requests"]["one"].update(golden_key="0" * 64),
            "'one' refers to the golden of another request",
        ),
        (
            lambda h: h["passes"][0]["requests"].update(two=h["passes"][0]["requests"]["one"]),
            "it answers 'two', which the scenario does not ask",
        ),
    ],
)
def test_a_history_that_does_not_fit_its_scenario_is_not_believed(
    run: Run, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    directory = tmp_path / "histories"
    run("run", "--engine", RIGHT, "toy/one", "--history", directory)
    file = next(directory.iterdir())
    history = json.loads(file.read_text(encoding="utf-8"))
    change(history)
    file.write_text(json.dumps(history), encoding="utf-8")
    status, _, err = run("recheck", directory)
    assert status == 2
    assert f"a history of toy/one does not fit the scenario: {message}" in err


def test_a_history_of_a_request_that_has_changed_since_is_refused(
    run: Run, tmp_path: Path, data: Path
) -> None:
    directory = tmp_path / "histories"
    run("run", "--engine", RIGHT, "toy/one", "--history", directory)
    path = data / "scenarios/toy/one.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("[3, 4, 5]", "[3, 4, 6]"), encoding="utf-8")
    status, _, err = run("recheck", directory)
    assert status == 2
    assert "golden of another request than the scenario's; run it again" in err


@pytest.mark.parametrize("option", ["--json", "--junit", "--markdown", "--history"])
def test_a_place_that_cannot_be_written_is_told_before_the_run(run: Run, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").touch()
    status, out, err = run("run", "--engine", RIGHT, option, tmp_path / "file" / "below")
    assert (status, out) == (2, "")
    assert f"{tmp_path / 'file'}" in err.replace("\n", "")


@pytest.mark.parametrize("command", ["triage", "stability", "diff", "faults"])
def test_no_command_runs_an_engine_for_what_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def ran(*_: object, **__: object) -> object:
        raise AssertionError("it ran")

    for name in ("cli.run_case", "stability_report.repeat", "diff_cli.compare", "faults.cli.judge_all"):
        monkeypatch.setattr(f"conformance.{name}", ran)
    asked = ["--model", "tiny-llama", "--prompt", "x"] if command == "diff" else []
    asked = asked or ([] if command == "faults" else ["--engine", RIGHT])
    (tmp_path / "file").touch()
    status = main([command, *asked, "--json", str(tmp_path / "file" / "below")])
    assert status == 2


def test_reports_lie_where_they_were_asked_for_wherever_the_engine_goes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conformance.adapters.fake import FakeEngine

    class Goes(FakeEngine):
        def __enter__(self) -> FakeEngine:
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            os.chdir(tmp_path / "elsewhere")
            return super().__enter__()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("conformance.cli.find_engine", lambda _: Goes)
    assert run("run", "toy/one", "--json", "r.json", "--history", "h")[0] == 0
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["failed"] is False
    assert len(list((tmp_path / "h").iterdir())) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_two_reports_in_one_file_are_refused_before_the_run(run: Run, tmp_path: Path) -> None:
    one, again = tmp_path / "r", tmp_path / "." / "r"
    for command in ("run", "--engine", RIGHT), ("recheck", str(tmp_path)):
        status, out, err = run(*command, "--html", one, "--json", again)
        assert (status, out) == (2, "")
        assert "--json and --html are both" in err
        assert not one.exists()


def test_an_engines_control_characters_are_shown_and_not_obeyed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conformance.adapters.fake import FakeEngine

    def fails(*_: object) -> None:
        raise RuntimeError("\x1b[2Jgone \x9b31m\rPASS")

    monkeypatch.setattr(FakeEngine, "submit", fails)
    for command in ("run", "triage"):
        status, out, _ = run(command, "--engine", RIGHT, "toy/one")
        assert status == 1
        assert r"\x1b[2Jgone \x9b31m\rPASS" in out
        assert not set(out) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160))}


def test_an_engines_long_message_is_shown_in_part_and_none_of_its_lines_as_our_own(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conformance.adapters.fake import FakeEngine

    message = "gone\nPASS   toy/two\n" + "x" * 5000

    def fails(*_: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(FakeEngine, "submit", fails)
    _, out, _ = run("run", "--engine", RIGHT, "toy/one", "--json", tmp_path / "r.json")
    assert "\n         PASS   toy/two\n" in out
    assert "\nPASS" not in out
    assert "… (of 5," in out
    assert "x" * 2001 not in out
    assert "x" * 5000 in (tmp_path / "r.json").read_text(encoding="utf-8"), "programs get all of it"


def test_an_adapter_that_raises_at_once_fails_every_case_and_not_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise ZeroDivisionError("at once")

    monkeypatch.setattr("conformance.cli.find_engine", lambda _: broken)
    status, out, _ = run("run", "toy/one")
    assert status == 1
    assert out.count("ERROR  toy/one") == 2
    assert "the adapter cannot tell its capabilities: ZeroDivisionError: at once" in out


def test_an_interrupted_run_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("conformance.distribute.run.run_case", interrupted)
    status, _, err = run("run", "--engine", RIGHT)
    assert status == 130
    assert "interrupted" in err


def test_waived_failures_do_not_fail_the_run_and_stale_ones_do(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "waivers.yaml"
    file.write_text(
        "- {scenario: 'toy/*', reason: known, issue: 'https://example.org/1', expiry: 2999-01-01}\n",
        encoding="utf-8",
    )
    status, out, _ = run("run", "--engine", WRONG, "--waivers", file)
    assert status == 0
    assert out.count("WAIVED toy/") == 4
    status, out, _ = run("run", "--engine", RIGHT, "--waivers", file)
    assert status == 1
    assert "STALE  waiver on line 1 (toy/*): what it waives passes" in out


def test_a_failed_should_fails_only_when_asked(run: Run, data: Path) -> None:
    for path in (data / "scenarios/toy").iterdir():
        path.write_text(
            path.read_text(encoding="utf-8").replace("level: must", "level: should"), encoding="utf-8"
        )
    assert run("run", "--engine", WRONG)[0] == 0
    assert run("run", "--engine", WRONG, "--strict-should")[0] == 1


def test_list_explain_and_lint(run: Run) -> None:
    status, out, _ = run("list", "--cost")
    assert (status, out.splitlines()[-1]) == (0, "2 scenarios, 4 cases, about 48 tokens to compute")
    status, out, _ = run("explain", "toy/one")
    assert status == 0
    assert "conformance run toy/one" in out
    status, out, _ = run("lint")
    assert (status, out) == (0, "2 scenarios, 0 problems\n")


def test_lint_fails_on_a_problem(run: Run, data: Path) -> None:
    path = data / "scenarios/toy/one.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("[3, 4, 5]", "[3, 4, 6]"), encoding="utf-8")
    status, out, _ = run("lint")
    assert status == 1
    assert "no golden for toy/one:one on toy in float32" in out


def test_models_are_listed_found_and_exported(run: Run, data: Path, tmp_path: Path) -> None:
    checkpoint = data / "golden/checkpoints/toy"
    status, out, _ = run("models", "list")
    assert status == 0
    assert f"toy  {checkpoint}\n" in out
    assert run("models", "path", "toy")[:2] == (0, f"{checkpoint}\n")
    assert run("models", "export", tmp_path / "out", "toy")[0] == 0
    assert (tmp_path / "out/toy/config.json").is_file()


def test_golden_is_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def golden(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr("conformance.golden_cli.main", golden)
    assert main(["golden", "verify", "--model", "toy"]) == 7
    assert seen == [["verify", "--model", "toy"]]


def test_the_version_is_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert EDITION in capsys.readouterr().out
