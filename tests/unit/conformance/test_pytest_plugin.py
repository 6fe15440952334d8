"""Verdicts become pytest's outcomes; a run of which nothing was judged, or with a stale waiver, fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.adapters.fake_model import write_toy_suite

ROOT = Path(__file__).parents[3]
SCENARIO = """\
requirement: It answers.
level: {level}
source: [https://example.org/1]
model: toy
{more}
profile: smoke
requests:
  r: {{token_ids: [3, 4, 5], max_tokens: 6, ignore_eos: true}}
steps: [{{submit: r}}, run]
checks: [tokens_match_golden]
"""
WRONG = "engine: {num_kv_blocks: 33}"
ENGINE = """\
from conformance.adapters.fake import fake_engine

def engine(model, options):
    \"\"\"Right, but with 33 blocks.\"\"\"
    return fake_engine(fault="wrong_token" if options.get("num_kv_blocks") == 33 else None)(model, options)
"""
WAIVERS = """\
- {scenario: bad/waived, reason: known, issue: "#1", expiry: 2999-01-01}
- {scenario: ok/passes, reason: was once, issue: "#2", expiry: 2999-01-01}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third party's repository: an engine, waivers, and a suite."""
    directory = tmp_path_factory.mktemp("project")
    cases = {
        "ok/passes": ("must", ""),
        "ok/skipped": ("must", "needs: [swap]"),
        "bad/fails": ("must", WRONG),
        "bad/waived": ("must", WRONG),
        "bad/recommended": ("should", WRONG),
    }
    write_toy_suite(
        directory / "data", {name: SCENARIO.format(level=lv, more=more) for name, (lv, more) in cases.items()}
    )
    (directory / "toy.py").write_text(ENGINE)
    (directory / "waivers.yaml").write_text(WAIVERS)
    return directory


def judged(project: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest as the third party would; exit status and output."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "conformance", "-p", "conformance.pytest_plugin"]
    command += ["-rA", "-p", "no:cacheprovider", "--conformance-engine=toy:engine", "--conformance-data=data"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project}", "COLUMNS": "200"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *arguments], cwd=project, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_each_verdict_is_an_outcome_and_a_stale_waiver_is_told(project: Path) -> None:
    status, shown = judged(project, "--conformance-waivers=waivers.yaml")
    assert status == 1, shown
    assert "1 failed, 1 passed, 1 skipped, 2 xfailed" in shown
    assert "test_scenario[ok/passes]" in shown
    assert "toy:engine: 3 FAIL, 1 PASS, 1 SKIP" in shown
    assert "fake lacks swap" in shown
    assert "waived until 2999-01-01: known" in shown
    assert "FAIL bad/fails" in shown
    assert "again: conformance run bad/fails --engine toy:engine --model toy" in shown
    assert "STALE waiver on line 2 (ok/passes): what it waives passes" in shown


def test_a_stale_waiver_fails_a_run_in_which_every_test_passes(project: Path) -> None:
    assert judged(project, "-k", "passes")[0] == 0
    status, shown = judged(project, "-k", "passes", "--conformance-waivers=waivers.yaml")
    assert status == 1
    assert "1 passed" in shown


def test_a_run_in_which_nothing_was_judged_fails(project: Path) -> None:
    status, shown = judged(project, "-k", "ok/skipped")
    assert status == 1
    assert "FAILED: nothing was judged, all of 1 cases were skipped" in shown


def test_a_wrong_option_is_told_before_anything_runs(project: Path) -> None:
    status, shown = judged(project, "--conformance-engine=nobody")
    assert status in (2, 4)
    assert "unknown engine 'nobody'" in shown


def test_without_the_suite_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, conformance.pytest_plugin; "
        "heavy = {'torch', 'transformers', 'numpy', 'conformance.suite'}; print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
