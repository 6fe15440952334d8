"""The suite can be listed, explained and linted."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from conformance.adapters.fake_model import write_toy_suite
from conformance.catalogue import cost_of, lint_suite, passes_of, print_explanation, print_list, tokens_of
from conformance.scenario import Scenario, load_scenarios
from conformance.store import RecordStore
from conformance.suite import Selection, select

TEXT = """requirement: Chunks do not change an answer.
level: must
source: [https://example.org/issue/1, measured]
needs: [chunked_prefill]
model: toy
profile: smoke
engine: {num_kv_blocks: 40}
matrix: {block_size: [1, 4]}
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 7}
  two: {token_ids: [6], max_tokens: 4, ignore_eos: true}
steps: [{submit: [one, two]}, {run: {preempt: every, period: 2}}]
checks:
  - tokens_match_golden
  - happened: {finished: "==2"}
  - same_under: {chunk: [1, 2], preempt: every}
"""


def suite(root: Path, **texts: str) -> list[Scenario]:
    write_toy_suite(root, {f"toy/{name}": text for name, text in texts.items()})
    return load_scenarios(root / "scenarios")


def explained(scenario: Scenario) -> str:
    out = io.StringIO()
    print_explanation(Console(file=out, width=60), scenario)
    return out.getvalue()


def test_an_explanation_tells_what_why_whose_rule_and_how_to_run_it(tmp_path: Path) -> None:
    [scenario] = suite(tmp_path, one=TEXT)
    text = explained(scenario)
    for words in (
        "toy/one (must, profile smoke)",
        "Chunks do not change an answer.",
        "    https://example.org/issue/1\n    measured\n",
        "Needs: chunked_prefill",
        "Models: toy in float32",
        "Engine: num_kv_blocks=40",
        "For block_size of 1, 4",
        "Runs (2 points, 10 passes each):",
        "one: 3 token ids; temperature=0.0, max_tokens=7",
        "1. submit ['one', 'two']",
        "2. run {'preempt': ['every'], 'period': 2}",
        "same_under: {'chunk': [1, 2], 'preempt': 'every'}",
        "conformance run toy/one\n",
    ):
        assert words in text, words


def test_an_explanation_shows_the_prompt_of_a_text_request_and_the_damage(tmp_path: Path) -> None:
    text = TEXT.replace("token_ids: [6]", "text: 'Hello [there]', logit_bias: {3: 1.0}")
    text = text.replace("profile:", "damage: {truncate: config.json}\nprofile:")
    text = text.replace("- tokens_match_golden\n", "- tokens_match_golden: one\n")
    [scenario] = suite(tmp_path, one=text)
    assert "two: text 'Hello [there]'" in explained(scenario)
    assert "Damages the checkpoint first: {'truncate': 'config.json'}" in explained(scenario)


def test_cost_counts_points_passes_and_tokens(tmp_path: Path) -> None:
    [scenario] = suite(tmp_path, one=TEXT)
    assert passes_of(scenario) == 1 + 2 + 7
    assert tokens_of(scenario) == (3 + 7 + 1 + 4) * 10 * 2
    out = io.StringIO()
    print_list(Console(file=out, width=120), select([scenario], Selection()), cost=True)
    assert out.getvalue().splitlines()[-2].split() == ["toy/one", "smoke", "must", "toy", "2", "20", "300"]
    assert out.getvalue().splitlines()[-1] == "1 scenarios, 2 cases, about 300 tokens to compute"


def test_the_cost_of_a_case_is_its_tokens_times_the_weights_it_reads(tmp_path: Path) -> None:
    cases = select(suite(tmp_path, one=TEXT), Selection())
    weights = (tmp_path / "golden/checkpoints/toy/model.safetensors").stat().st_size
    assert [cost_of(case, tmp_path) for case in cases] == [150.0 * weights] * 2
    gone = replace(cases[0], point={**cases[0].point, "model": "not-here"})
    assert cost_of(gone, tmp_path) == 0, "it will be skipped"


def test_the_list_follows_the_selection(tmp_path: Path) -> None:
    scenarios = suite(tmp_path, one=TEXT, two=TEXT)
    out = io.StringIO()
    cases = select(scenarios, Selection(ids=("toy/two",), point={"block_size": "4"}))
    print_list(Console(file=out, width=120), cases, cost=True)
    assert "toy/one" not in out.getvalue()
    assert out.getvalue().splitlines()[-1] == "1 scenarios, 1 cases, about 150 tokens to compute"


def test_a_sound_suite_has_no_problems(tmp_path: Path) -> None:
    scenarios = suite(tmp_path, one=TEXT)
    assert lint_suite(scenarios, RecordStore(tmp_path), tmp_path) == []


def test_a_missing_golden_is_told_with_the_line_of_its_request(tmp_path: Path) -> None:
    scenarios = suite(tmp_path, one=TEXT)
    problems = lint_suite(scenarios, RecordStore(tmp_path / "empty"), tmp_path)
    assert len(problems) == 2
    assert problems[0].startswith(
        f"{tmp_path}/scenarios/toy/one.yaml:12: no golden for toy/one:one on toy in float32"
    )


@pytest.mark.parametrize(
    "proof", ['happened: {finished: "==2"}', "same_under: {chunk: [1, 2], preempt: every}"]
)
def test_a_scenario_must_prove_that_its_path_ran(tmp_path: Path, proof: str) -> None:
    scenarios = suite(tmp_path, one=TEXT.replace(f"  - {proof}\n", ""))
    problems = lint_suite(scenarios, RecordStore(tmp_path), tmp_path)
    assert [("nothing proves" in p) for p in problems] == ([True] if proof.startswith("happened") else [])


def test_an_expected_error_is_proof_enough(tmp_path: Path) -> None:
    text = (
        TEXT.split("requests:", maxsplit=1)[0]
        + "damage: {remove_file: config.json}\nchecks: [{error: {engine: any}}]\n"
    )
    scenarios = suite(tmp_path, one=text)
    assert lint_suite(scenarios, RecordStore(tmp_path), tmp_path) == []


def test_an_unknown_model_is_told(tmp_path: Path) -> None:
    scenarios = suite(tmp_path, one=TEXT.replace("model: toy", "model: tyo"))
    assert "unknown model 'tyo'" in lint_suite(scenarios, RecordStore(tmp_path), tmp_path)[0]
