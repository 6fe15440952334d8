"""`--jobs N`: the same report as one process gives, whatever becomes of the workers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conformance.cli import main
from conformance.distribute.calls import Call, Lost
from conformance.distribute.local import Processes, choose, ending

HERE = Path(__file__).parent
RIGHT = "conformance.adapters.fake:FakeEngine"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(toy_suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(str(HERE))

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        status = main(["run", *map(str, arguments), "--data", str(toy_suite)])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def same_for_any_number(report: Path) -> Any:
    """A report without its seconds, and without --jobs in its commands."""
    values = json.loads(re.sub(r" --jobs \d", "", report.read_text(encoding="utf-8")))
    for case in values["cases"]:
        del case["seconds"]
    return values


def test_the_reports_of_two_processes_are_those_of_one(run: Run, tmp_path: Path) -> None:
    """Verdicts, waivers and what goes into files; histories hold the same answers."""
    waivers = tmp_path / "waivers.yaml"
    waivers.write_text(
        "- {scenario: toy/two, scope: {block_size: 4}, reason: known, issue: 'x/1', expiry: 2999-01-01}\n",
        encoding="utf-8",
    )
    told = []
    for jobs in ("1", "2"):
        report, junit, histories = tmp_path / f"{jobs}.json", tmp_path / f"{jobs}.xml", tmp_path / jobs
        options = ["--json", report, "--junit", junit, "--history", histories, "--waivers", waivers]
        options += ["--triage", "0", "--strict", "--engine-option", "max_num_batched_tokens=5"]
        status, out, _ = run("--engine", "mortal:Wrong", "--jobs", jobs, *options)
        answers = {
            path.name: [one["requests"] for one in json.loads(path.read_text(encoding="utf-8"))["passes"]]
            for path in histories.iterdir()
        }
        xml = re.sub(r' time="[^"]*"', "", junit.read_text(encoding="utf-8"))
        told.append((status, same_for_any_number(report), xml, answers, out.count("WAIVED toy/two")))
    assert told[0] == told[1]
    assert told[0][0] == 1


def test_a_worker_that_dies_costs_its_case_only(run: Run) -> None:
    status, out, _ = run("--engine", "mortal:Killed", "--jobs", "2")
    assert status == 1
    assert out.count("PASS   toy/") == 2
    assert out.count("ERROR  toy/") == 2
    assert out.count("the worker process died, twice: killed by SIGKILL") == 2
    assert "Power: of 2 cases judged, " in out, "the others could have seen nothing"
    for name in ("one", "two"):
        assert f"again: conformance run toy/{name} --engine mortal:Killed --model toy " in out


def test_the_command_of_a_case_that_a_worker_ran_has_a_worker_run_it(run: Run) -> None:
    """A worker has one thread, wherever OMP_NUM_THREADS does not say otherwise, and dies alone."""
    _, out, _ = run("--engine", "mortal:Killed", "--jobs", "2", "toy/one")
    [again] = [line for line in out.splitlines() if "again: " in line]
    words = shlex.split(again.partition("again: conformance run ")[2])
    assert ("--jobs", "2") in pairwise(words)
    status, out, _ = run(*words)
    assert (status, out.count("ERROR  toy/one[block_size=4]")) == (1, 1)
    assert "the worker process died, twice: killed by SIGKILL" in out


def test_a_case_that_hangs_is_an_error_that_says_how_long(run: Run) -> None:
    options = ["--jobs", "2", "--case-timeout", "1", "--point", "block_size=4"]
    status, out, _ = run("--engine", "mortal:Hangs", *options)
    assert status == 1
    assert out.count("ERROR  toy/") == 2
    told = r"no answer after \d+ s: --case-timeout 1 has ended its worker"
    assert len(re.findall(told, out)) == 2
    assert "--jobs 2 --case-timeout 1\n" in out, "the command hangs no longer than that, too"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
        (7, "it left with exit status 7"),
        (None, "it closed its pipe and stays"),
    ],
)
def test_how_a_process_ended_is_told_by_name(status: int | None, told: str) -> None:
    assert ending(status) == told


def test_a_case_whose_worker_died_is_run_again(run: Run, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    option = f"marks={marks}"
    status, out, _ = run("--engine", "mortal:DiesOnce", "--jobs", "2", "--engine-option", option, "toy/one")
    assert (status, out.count("PASS   toy/one")) == (0, 2), out
    lives = sorted(path.name.partition("-") for path in marks.iterdir())
    assert len(lives) == 2, "once for the life that ended, once for the case"
    assert lives[0][2] != lives[1][2], "the second is another process's"


def test_engines_are_a_matrix(run: Run, tmp_path: Path) -> None:
    """Twins have labels, verdicts, histories and waivers of their own."""
    report, histories, waivers = tmp_path / "r.json", tmp_path / "histories", tmp_path / "w.yaml"
    waivers.write_text(
        "- {scenario: 'toy/*', scope: {engine: 'mortal:Wrong'}, reason: known, issue: 'x/1', "
        "expiry: 2999-01-01}\n",
        encoding="utf-8",
    )
    arguments = ["--engine", RIGHT, "--engine", "mortal:Wrong", "--point", "block_size=1", "--triage", "0"]
    arguments += ["--json", str(report), "--history", str(histories), "--waivers", str(waivers)]
    shown = []
    for jobs in ("1", "2"):
        status, out, _ = run(*arguments, "--jobs", jobs)
        assert status == 0, out
        assert f"PASS   toy/one[engine={RIGHT}, device=auto, block_size=1]" in out
        assert "WAIVED toy/two[engine=mortal:Wrong, device=auto, block_size=1]" in out
        assert "mortal:Wrong on auto: 2 WAIVED." in out
        shown.append(same_for_any_number(report))
    assert shown[0] == shown[1]
    assert [(case["scenario"], case["engine"], case["verdict"]) for case in shown[0]["cases"]] == [
        ("toy/one", RIGHT, "PASS"),
        ("toy/one", "mortal:Wrong", "WAIVED"),
        ("toy/two", RIGHT, "PASS"),
        ("toy/two", "mortal:Wrong", "WAIVED"),
    ]
    places = {path.name: len(list(path.iterdir())) for path in histories.iterdir()}
    assert places == {"conformance.adapters.fake_FakeEngine": 2, "mortal_Wrong": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", RIGHT, "--engine", RIGHT], "named twice: conformance.adapters.fake:FakeEngine"),
        (["--engine", "hf", "--engine", RIGHT, "--variant", "sdpa"], "--variant is of one engine"),
        (["--engine", "nope", "--jobs", "2"], "unknown engine 'nope'"),
        (["--engine", RIGHT, "--case-timeout", "9"], "--case-timeout needs --jobs 2 or more"),
        (["--engine", RIGHT, "--case-timeout", "9", "--ray", "auto"], "--case-timeout needs --jobs 2"),
    ],
)
def test_a_wrong_matrix_is_refused(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_jobs_is_a_positive_number(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--jobs", "0")
    assert "argument --jobs: invalid positive number value: '0'" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_a_time_limit_is_a_number_of_seconds(
    run: Run, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--jobs", "2", f"--case-timeout={seconds}")
    assert f"--case-timeout: invalid number of seconds value: '{seconds}'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--ray", "auto", f"--ray-timeout={seconds}")
    assert f"--ray-timeout: invalid number of seconds value: '{seconds}'" in capsys.readouterr().err


# ---- the processes themselves -----------------------------------------------------------------------


def call(
    function: Callable[..., Any], *arguments: Any, model: str = "toy", limit: float | None = None
) -> Call:
    return Call(function, arguments, "fake", "cpu", model, "a call", limit)


def test_workers_have_one_thread_and_leave_interrupts_alone() -> None:
    calls = [call(os.getenv, "OMP_NUM_THREADS"), call(signal.getsignal, signal.SIGINT)]
    with Processes(1) as processes:
        answers = dict(processes.map(calls))
    assert answers == {0: "1", 1: signal.SIG_IGN}


def test_a_worker_goes_on_with_its_model_then_takes_one_that_nobody_has_then_any() -> None:
    a, b, c = (call(os.getpid, model=model) for model in "abc")
    mine, other = ("fake", "a"), ("fake", "b")
    calls = [b, c, a, b]
    assert choose([0, 1, 2, 3], calls, mine, {mine, other}) == 2
    assert choose([0, 1, 3], calls, mine, {mine, other}) == 1
    assert choose([0, 3], calls, mine, {mine, other}) == 0
    assert choose([0, 1, 2, 3], calls, None, {other}) == 1


def test_an_answer_that_cannot_be_sent_and_a_call_that_raises_are_lost_with_the_reason() -> None:
    with Processes(1) as processes:
        answers = dict(processes.map([call(open, __file__), call(int, "x"), call(int, "3")]))
    assert isinstance(answers[0], Lost)
    assert "the answer cannot be sent: TypeError" in answers[0].reason
    assert answers[1] == Lost("the worker failed: ValueError: invalid literal for int() with base 10: 'x'")
    assert answers[2] == 3


def test_a_call_that_takes_too_long_costs_nobody_else() -> None:
    calls = [call(time.sleep, 600, limit=0.1), call(int, "1"), call(time.sleep, 600, limit=0.1)]
    with Processes(1) as processes:
        answers = dict(processes.map([*calls, call(int, "3")]))
    assert (answers[1], answers[3]) == (1, 3)
    for place in (0, 2):
        assert isinstance(answers[place], Lost)
        assert "--case-timeout 0.1 has ended its worker" in answers[place].reason
        assert answers[place].seconds > 0.1


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_workers_and_the_command(
    toy_suite: Path, tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    """Ctrl-C goes to the command and its workers at once, a cancelled job's SIGTERM to the command."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from conformance.adapters.fake import FakeEngine\n"
        "class Slow(FakeEngine):\n"
        "    def __enter__(self):\n"
        f"        Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "        time.sleep(600)\n"
    )
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "slow.py").write_text(code, encoding="utf-8")
    path = os.pathsep.join([str(modules), *filter(None, sys.path)])
    command = [sys.executable, "-m", "conformance", "run", "--engine", "slow:Slow", "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--data", str(toy_suite)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
        # What starts a test run in the background may have it ignore interrupts, and it would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        while len(workers := [p for p in tmp_path.iterdir() if p.name.isdigit()]) < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        if sent is signal.SIGINT:
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert ("interrupted" in errors) == (sent is signal.SIGINT)
    assert "Traceback" not in errors
    for worker in workers:
        assert not Path("/proc", worker.name).exists(), "no worker is left"
