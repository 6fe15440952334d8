"""Repeating a selection: what is varied, which changes are found, and that nothing varied is no pass."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import Capabilities
from conformance.adapters.fake import FakeEngine, fake_engine, minimal_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.cli import main
from conformance.scenario import load_scenarios
from conformance.stability import (
    Configuration,
    NothingVaries,
    Variation,
    configurations,
    configured,
    options_for,
    plan_variation,
    verdict_class,
)
from conformance.verdicts import Verdict

TEXT = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
engine: {num_kv_blocks: 40, block_size: 4}
requests:
  one: {generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 5}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""
BACKENDS = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: full
matrix: {attention_backend: [dense, sdpa]}
requests: {one: {token_ids: [3, 4], max_tokens: 2}}
steps: [{submit: one}, run]
checks: [tokens_match_golden]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(factory, arguments…) → exit status, stdout, stderr."""
    root = write_toy_suite(tmp_path / "data", {"toy/one": TEXT, "toy/two": BACKENDS})

    def command(factory: Any, *arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("conformance.cli.find_engine", lambda _name: factory)
        given = ("--profile", "smoke", "--data", str(root), *map(str, arguments))
        status = main(["stability", "--engine", "my:Engine", *given])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def declaring(*options: str) -> Capabilities:
    return Capabilities("e", "1", ("float32",), frozenset(), frozenset(options))


# ---- what is varied --------------------------------------------------------------------------------


def test_an_engine_is_varied_by_the_options_it_declares_and_the_rest_is_told() -> None:
    variation = plan_variation(declaring("seed", "threads", "color"), [], given={}, asked={})
    assert variation.values == {"seed": (), "threads": (1, 2, 3)}
    assert variation.fixed == dict.fromkeys(
        ("prefix_cache_seed", "placement", "attention_backend"), "e does not declare the option"
    )


def test_what_the_command_line_settles_is_not_varied() -> None:
    variation = plan_variation(declaring("seed", "threads"), [], given={"threads": 1}, asked={})
    assert set(variation.values) == {"seed"}
    assert variation.fixed["threads"] == "1 on the command line"


def test_the_backends_tried_are_those_the_suite_names(tmp_path: Path) -> None:
    scenarios = load_scenarios(write_toy_suite(tmp_path, {"toy/two": BACKENDS}) / "scenarios")
    declared = declaring("attention_backend")
    assert plan_variation(declared, scenarios, given={}, asked={}).values == {
        "attention_backend": ("dense", "sdpa")
    }
    with pytest.raises(NothingVaries, match="the suite names fewer than two values"):
        plan_variation(declared, [], given={}, asked={})


def test_other_options_are_varied_when_asked() -> None:
    variation = plan_variation(declaring("color"), [], given={}, asked={"color": ["red", "blue"]})
    assert variation.values == {"color": ("red", "blue")}


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ((), {}, "nothing of e can be varied: seed: e does not declare the option; "),
        (("seed",), {"color": [1, 2]}, "e does not declare the option color: cannot vary it"),
        (("seed",), {"seed": 3}, r"--vary seed takes a list of at least two values, got 3"),
        (("seed",), {"seed": [3]}, r"--vary seed takes a list of at least two values, got \[3\]"),
        (("seed",), {"seed": [3, 3]}, r"--vary seed takes a list of at least two values, got \[3, 3\]"),
        (
            ("dtype",),
            {"dtype": ["float32", "bfloat16"]},
            "--vary dtype: each case has its own; select others",
        ),
    ],
)
def test_nothing_to_vary_is_an_error(
    options: tuple[str, ...], asked: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(NothingVaries, match=message):
        plan_variation(declaring(*options), [], given={}, asked=asked)


def test_the_first_run_is_the_engine_as_it_is_and_every_pair_of_values_meets() -> None:
    made = configurations(8, Variation({"seed": (), "threads": (1, 2, 3), "backend": ("a", "b")}, {}))
    assert made[0] == Configuration(1)
    assert [c.options["seed"] for c in made[1:]] == [2, 3, 4, 5, 6, 7, 8]
    pairs = {(c.options["threads"], c.options["backend"]) for c in made[1:]}
    assert len(pairs) == 6


def test_a_scenario_wins_over_a_configuration_and_bitwise_settles_attention() -> None:
    seen: list[Mapping[str, Any]] = []
    factory = configured(
        lambda _model, options: seen.append(options),  # type: ignore[arg-type,return-value]  # only looks
        Configuration(2, {"seed": 2, "threads": 3, "attention_backend": "dense"}),
    )
    factory(None, {"threads": 1})  # type: ignore[arg-type]  # no model is looked at
    assert seen == [{"seed": 2, "threads": 1, "attention_backend": "dense"}]
    assert "attention_backend" not in options_for(
        Configuration(2, {"attention_backend": "dense"}), {"batch_invariant": True}
    )


@pytest.mark.parametrize("verdict", Verdict)
def test_agreements_are_one_class_and_the_others_their_own(verdict: Verdict) -> None:
    same = {v for v in Verdict if verdict_class(v) == verdict_class(verdict)}
    agreements = {Verdict.PASS, Verdict.NOISE, Verdict.WEAK}
    assert same == (agreements if verdict in agreements else {verdict})


# ---- the command -----------------------------------------------------------------------------------


def test_a_stable_engine_has_no_changes_and_the_report_says_what_was_varied(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    status, out, _ = run(FakeEngine, "--runs", "3", "--json", report)
    assert status == 0
    assert "varied of fake: placement (another each run), threads (1, 2, 3)" in out
    assert "not varied: seed: fake does not declare the option" in out
    assert "0 verdict changes over 3 runs of 1 cases" in out
    told = json.loads(report.read_text(encoding="utf-8"))
    assert [one["options"] for one in told["runs"]] == [
        {},
        {"placement": 2, "threads": 1, "attention_backend": "dense"},
        {"placement": 3, "threads": 2, "attention_backend": "dense"},
    ]
    assert told["changes"] == []
    assert told["environment"]["suite"]
    assert {v for one in told["runs"] for v in one["verdicts"].values()} <= {"PASS", "WEAK"}


def test_an_engine_that_depends_on_where_its_blocks_lie_is_found(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    status, out, _ = run(fake_engine(fault="placement_leak"), "--runs", "2", "--json", report)
    assert status == 1
    assert "CHANGED toy/one" in out
    assert "FAIL in run 2 (placement=2, threads=1, attention_backend=dense)" in out
    assert "in run 1 (as it is)" in out
    assert "1 verdict changes over 2 runs of 1 cases" in out
    [change] = json.loads(report.read_text(encoding="utf-8"))["changes"]
    assert change["runs"] == [1, 2]
    assert change["verdicts"][1] == "FAIL"
    first, other = change["reproduce"]
    assert first.startswith("conformance run toy/one --engine my:Engine --model toy")
    options = shlex.split(other.removeprefix(first))
    assert options == [
        f"--engine-option={o}" for o in ("placement=2", "threads=1", "attention_backend=dense")
    ]


def test_an_engine_that_errs_now_and_then_is_found(run: Run) -> None:
    entered = count()

    class Flaky(FakeEngine):
        def __enter__(self) -> FakeEngine:
            self._fault = "wrong_token" if next(entered) == 2 else None
            return super().__enter__()

    status, out, _ = run(Flaky, "--runs", "4")
    assert status == 1
    assert "CHANGED toy/one" in out
    assert "FAIL in run 3 (" in out
    assert "position 3" in out
    assert "1 verdict changes over 4 runs of 1 cases" in out


class RefusesThreads(FakeEngine):
    """The toy, which loads on one or two threads only, wherever it is told how many."""

    def __enter__(self) -> FakeEngine:
        threads = self._options.get("threads", 1)
        if threads not in (1, 2):
            raise ValueError(f"{threads} threads: one or two, please")
        return super().__enter__()


def test_what_an_engine_refuses_is_left_out_with_its_reason_and_no_change(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    status, out, _ = run(RefusesThreads, "--runs", "4", "--json", report)
    assert status == 0, out
    assert "run 4 (placement=4, threads=3, attention_backend=dense): none judged; 0 changed, 1 refused" in out
    reason = "ValueError: 3 threads: one or two, please"
    assert f"left out, as fake does not load so (1 times): {reason}" in out
    assert "0 verdict changes over 4 runs of 1 cases" in out
    runs = json.loads(report.read_text(encoding="utf-8"))["runs"]
    assert [one["refused"] for one in runs] == [{}, {}, {}, {"toy/one": reason}]
    assert runs[3]["verdicts"] == {}


def test_a_value_that_is_asked_for_and_refused_is_an_error(run: Run) -> None:
    status, out, err = run(RefusesThreads, "--runs", "3", "--vary", "threads=[1, 0]")
    assert (status, out) == (2, "")
    assert "--vary threads: fake refuses 0 for toy/one: ValueError: 0 threads: one or two, please" in err


def test_an_engine_that_refuses_every_configuration_has_not_passed(run: Run) -> None:
    class RefusesAll(FakeEngine):
        def __enter__(self) -> FakeEngine:
            if "placement" in self._options:
                raise ValueError("no placement, please")
            return super().__enter__()

    status, out, err = run(RefusesAll, "--runs", "3")
    assert status == 2
    assert "does not load so (2 times): ValueError: no placement, please" in out
    assert "fake refuses everything it was varied by: nothing was compared" in err


def test_an_engine_that_fails_to_load_now_and_then_has_changed(run: Run) -> None:
    entered = count()

    class Flaky(FakeEngine):
        def __enter__(self) -> FakeEngine:
            if next(entered) == 1:
                raise ValueError("not now")
            return super().__enter__()

    status, out, _ = run(Flaky, "--runs", "2")
    assert status == 1
    assert "CHANGED toy/one" in out


def test_an_engine_that_always_fails_is_stable_and_that_is_told(run: Run) -> None:
    status, out, _ = run(fake_engine(fault="wrong_token"), "--runs", "2")
    assert status == 0
    assert "0 verdict changes over 2 runs of 1 cases; 1 fail in the first run already: toy/one" in out


def test_an_engine_that_cannot_be_varied_has_not_passed(run: Run) -> None:
    status, out, err = run(minimal_engine(), "--runs", "2")
    assert (status, out) == (2, "")
    assert "nothing of fake-minimal can be varied" in err


def test_runs_that_skip_everything_have_judged_nothing(run: Run) -> None:
    assert run(FakeEngine, "--runs", "2", "--dtype", "bfloat16")[0] == 3


def test_one_run_compares_nothing(run: Run) -> None:
    status, _, err = run(FakeEngine, "--runs", "1")
    assert status == 2
    assert "--runs must be at least 2" in err


def test_a_time_limit_ends_it_after_two_runs_at_the_earliest_and_is_told(run: Run) -> None:
    status, out, _ = run(FakeEngine, "--runs", "5", "--minutes", "0")
    assert status == 0
    assert "0 verdict changes over 2 runs of 1 cases; 3 of the 5 runs asked for were not begun" in out


def test_only_the_values_asked_for_are_tried(run: Run) -> None:
    status, out, _ = run(FakeEngine, "--runs", "3", "--vary", "max_num_batched_tokens=[2, 5]")
    assert status == 0
    assert "max_num_batched_tokens (2, 5)" in out
    status, _, err = run(FakeEngine, "--runs", "3", "--vary", "color=[1, 2]")
    assert status == 2
    assert "fake does not declare the option color" in err


@pytest.mark.parametrize("minutes", ["nan", "-1", "x"])
def test_a_time_limit_is_a_number_of_minutes(
    run: Run, minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(FakeEngine, f"--minutes={minutes}")
    assert f"--minutes: invalid number of minutes value: '{minutes}'" in capsys.readouterr().err
