"""Each printed command, parsed by the command line's own parser, selects exactly its case again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.adapters.fake_model import write_toy_suite
from conformance.again import Invocation, command_for, invocation_of, with_commands
from conformance.cli import _engine_name, _factory, _selection, parser
from conformance.paths import data_root
from conformance.scenario import Scenario, load_scenarios
from conformance.suite import Case, Outcome, Selection, select
from conformance.verdicts import Finding, Judgement, Power, Verdict

ODD = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
dtype: [float32, bfloat16]
matrix: {block_size: [1, 4], enable_prefix_caching: [true, false], limit_mm_per_prompt: [{image: 1}, null]}
requests: {one: {token_ids: [3, 4], max_tokens: 2}}
steps: [{submit: one}, run]
checks: [tokens_match_golden]
"""
PARSER = parser()
GIVEN = Invocation(
    "my.engines:Engine; rm",
    "two words",
    ("base_url=http://h/v1?a=b&c", "x=[1, 2]"),
    True,
    Path("/d d/x"),
    ("--jobs", "3", "--case-timeout", "7.5"),
)


def parsed(command: str) -> tuple[Invocation, Selection]:
    words = shlex.split(command)
    assert words[:2] == ["conformance", "run"]
    args = PARSER.parse_args(words[1:])
    [device] = args.devices or [None]
    return invocation_of(args, args.engine[0]), replace(_selection(args), device=device)


@pytest.fixture(scope="module")
def suite() -> list[Scenario]:
    return load_scenarios(data_root() / "scenarios")


def test_every_case_of_the_suite_is_selected_by_its_command_and_no_other(suite: list[Scenario]) -> None:
    invocation = Invocation("hf", "sdpa")
    for case in select(suite, Selection(profile="full")):
        told, selection = parsed(command_for(case, invocation))
        assert told == invocation
        assert select([case.scenario], selection) == [case]
        assert selection.ids == (case.scenario.id,)


def test_values_of_any_form_select_exactly_one_point(tmp_path: Path) -> None:
    scenarios = load_scenarios(write_toy_suite(tmp_path, {"toy/odd": ODD}) / "scenarios")
    cases = select(scenarios, Selection())
    assert {str(case.point["limit_mm_per_prompt"]) for case in cases} == {"{'image': 1}", "None"}
    for case in cases:
        _, selection = parsed(command_for(case, GIVEN))
        assert select(scenarios, selection) == [case]


def test_the_selections_device_and_dtype_are_repeated(tmp_path: Path) -> None:
    scenarios = load_scenarios(write_toy_suite(tmp_path, {"toy/odd": ODD}) / "scenarios")
    for case in select(scenarios, Selection(device="cuda:1", dtype="bfloat16")):
        _, selection = parsed(command_for(case, GIVEN))
        assert (selection.device, selection.dtype) == ("cuda:1", "bfloat16")
        assert select(scenarios, selection) == [case]


def test_what_can_change_a_verdict_survives_the_shell(tmp_path: Path) -> None:
    scenarios = load_scenarios(write_toy_suite(tmp_path, {"toy/odd": ODD}) / "scenarios")
    case = select(scenarios, Selection())[0]
    assert parsed(command_for(case, GIVEN))[0] == GIVEN
    assert parsed(command_for(case, Invocation("fake")))[0] == Invocation("fake")
    assert "--strict" not in command_for(case, Invocation("fake"))


def test_a_variant_is_the_engine_it_was(tmp_path: Path) -> None:
    args = PARSER.parse_args(["run", "--engine", "hf", "--variant", "sdpa"])
    words = shlex.split(command_for(some_case(tmp_path), invocation_of(args, args.engine[0])))
    again = PARSER.parse_args(words[1:])
    assert _factory(again, _engine_name(again, again.engine[0])) is _factory(args, "hf-sdpa")


def some_case(root: Path) -> Case:
    [scenario] = load_scenarios(write_toy_suite(root, {"toy/odd": ODD}) / "scenarios")
    return Case(scenario, scenario.points()[0])


def test_what_ran_on_a_cluster_is_shown_again_there_with_the_labels_of_its_own(tmp_path: Path) -> None:
    labels = ["mine=left", "theirs=right", "cuda=H200:1"]
    options = [word for label in labels for word in ("--ray-resource", label)]
    args = PARSER.parse_args(["run", "--engine", "mine", "--engine", "theirs", "--ray", "h:1", *options])
    case = replace(some_case(tmp_path), engine="mine", point={**some_case(tmp_path).point, "device": "cuda"})
    again = PARSER.parse_args(shlex.split(command_for(case, invocation_of(args, "mine")))[1:])
    assert (again.ray, again.ray_resource) == ("h:1", ["mine=left", "cuda=H200:1"])


@pytest.mark.parametrize(
    ("verdict", "command", "gets_one"),
    [
        (Verdict.FAIL, "conformance run x --engine engine", True),
        (Verdict.FAIL, None, False),
        (Verdict.ERROR, None, True),
        (Verdict.SKIP, None, False),
    ],
)
def test_errors_and_findings_that_name_a_command_get_the_whole_one(
    verdict: Verdict, command: str | None, gets_one: bool, tmp_path: Path
) -> None:
    finding = Finding(verdict, "c", None, "m", reproduce=command)
    outcome = Outcome(some_case(tmp_path), Judgement(verdict, (finding,), Power((), {})), 1.0)
    [told] = with_commands(outcome, GIVEN).judgement.findings
    assert told.reproduce == (command_for(outcome.case, GIVEN) if gets_one else None)
