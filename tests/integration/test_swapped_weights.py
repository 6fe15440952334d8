"""Negative control on the real engine: with two weights exchanged, the suite must say FAIL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.engines import find_engine
from conformance.paths import data_root
from conformance.scenario import Scenario, Step, load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case, run_case
from conformance.verdicts import Verdict


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    found = {s.id: s for s in load_scenarios(data_root() / "scenarios")}
    return found["parity/tiny-families"]


def verdict(scenario: Scenario, *first: Step) -> Verdict:
    changed = replace(scenario, steps=(*first, *scenario.steps), models=("tiny-llama",))
    [point] = changed.points()
    return run_case(Case(changed, {**point, "device": "cpu"}), find_engine("minivllm"), RecordStore()).verdict


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_exchanged_weights_fail_and_leave_no_trace(scenario: Scenario, names: tuple[str, str]) -> None:
    assert verdict(scenario, Step("swap_weights", list(names), 0)) is Verdict.FAIL
    assert verdict(scenario) is Verdict.PASS


def test_a_swap_that_cannot_be_done_is_never_a_pass(scenario: Scenario) -> None:
    step = Step("swap_weights", ["model.norm.weight", "nope"], 0)
    assert verdict(scenario, step) in (Verdict.FAIL, Verdict.ERROR)
