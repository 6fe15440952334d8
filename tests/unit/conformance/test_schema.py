"""The schema is closed, and says what is wrong in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from conformance.adapters.base import FEATURES
from conformance.schema import (
    PROMPT_FORMS,
    SAMPLING_NAMES,
    EngineOptions,
    RequestModel,
    ScenarioModel,
    StepModel,
    cross_check,
)
from minivllm.config import EngineConfig
from minivllm.request import SamplingParams

MINIMAL: dict[str, Any] = {
    "schema": 1,
    "id": "area/name",
    "requirement": "It answers.",
    "level": "must",
    "source": ["https://example.org"],
    "model": "toy",
    "profile": "smoke",
    "requests": {"one": {"token_ids": [3, 4]}},
    "steps": [{"submit": "one"}, "run"],
    "checks": ["tokens_match_golden"],
}


def problems(**changes: Any) -> list[str]:
    """Messages of both stages of checking."""
    try:
        model = ScenarioModel.model_validate({**MINIMAL, **changes})
    except ValidationError as error:
        return [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return [f"{'.'.join(map(str, where))}: {text}" for where, text in cross_check(model)]


def test_the_minimal_scenario_is_accepted() -> None:
    assert problems() == []


def test_engine_options_are_those_of_minivllm_and_two_of_the_harness() -> None:
    # Settings of the image processor decide the truth, so they belong to a request.
    engine = {f.name for f in fields(EngineConfig)} - {"model", "dtype", "device", "mm_processor_kwargs"}
    assert set(EngineOptions.model_fields) == engine | {"threads", "num_host_blocks"}


def test_sampling_names_are_those_of_minivllm() -> None:
    assert set(SAMPLING_NAMES) == {f.name for f in fields(SamplingParams)}


def test_requests_are_greedy_unless_told_otherwise() -> None:
    assert RequestModel(token_ids=[1]).temperature == 0.0


@pytest.mark.parametrize("name", sorted(MINIMAL))
def test_every_field_of_the_minimal_scenario_but_requests_and_steps_is_required(name: str) -> None:
    rest = {key: value for key, value in MINIMAL.items() if key != name}
    if name in ("requests", "steps"):
        assert cross_check(ScenarioModel.model_validate({**MINIMAL, "requests": {}, "steps": []})) == []
        return
    with pytest.raises(ValidationError, match="Field required"):
        ScenarioModel.model_validate(rest)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema": 2}, "schema: Input should be 1"),
        ({"requirment": "x"}, "requirment: Extra inputs"),
        ({"id": "nameonly"}, "id: String should match"),
        ({"id": "Area/Name"}, "id: String should match"),
        ({"level": "may"}, "level: Input should be 'must' or 'should'"),
        ({"source": []}, "source: List should have at least 1"),
        ({"needs": ["prefix_cashe"]}, "needs.0: Input should be"),
        ({"profile": "nightly"}, "profile: Input should be"),
        ({"engine": {"blocksize": 4}}, "engine.blocksize: Extra inputs"),
        ({"engine": {"block_size": 0}}, "engine.block_size: Input should be greater"),
        ({"engine": {"block_size": "4"}}, "engine.block_size: Input should be a valid integer"),
        (
            {"engine": {"enable_prefix_caching": "on"}},
            "engine.enable_prefix_caching: Input should be a valid bool",
        ),
        ({"dtype": "float64"}, "dtype.0: Input should be"),
        ({"checks": []}, "checks: List should have at least 1"),
        ({"checks": [{"a": 1, "b": 2}]}, "checks.0: Value should have at most 1"),
        ({"requests": {"One": {"token_ids": [1]}}}, "requests.One.[key]: String should match"),
        ({"requests": {"one": {}}}, "give exactly one of text, chat, messages, token_ids, generate"),
        ({"requests": {"one": {"text": "a", "token_ids": [1]}}}, "got ['text', 'token_ids']"),
        ({"requests": {"one": {"token_ids": [1], "temprature": 1}}}, "temprature: Extra inputs"),
        ({"damage": {"truncate": "a", "remove_file": "b"}}, "give exactly one of"),
        ({"damage": {"burn": "a"}}, "damage.burn: Extra inputs"),
        ({"steps": ["sumbit"]}, "steps.0.sumbit: Extra inputs"),
        ({"steps": [{"submit": "one", "run": None}]}, "give exactly one of submit"),
        ({"steps": [{"advance": None}]}, "step advance needs an argument"),
        ({"steps": [{"advance": 0}]}, "steps.0.advance: Input should be greater"),
        ({"steps": [{"run": {"every": 2}}]}, "steps.0.run.every: Extra inputs"),
        ({"steps": [{"swap_weights": ["a"]}]}, "swap_weights: List should have at least 2"),
    ],
)
def test_what_the_schema_refuses(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in text for text in problems(**changes)), problems(**changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"steps": [{"submit": "one"}, {"abort": "two"}]},
            "steps.1: unknown request 'two'; requests are ['one']",
        ),
        ({"steps": [{"submit": "one"}, {"run": {"preempt": "two"}}]}, "steps.1: unknown request 'two'"),
        ({"steps": [{"submit": "one"}, {"expect_error": {"two": "any"}}]}, "steps.1: unknown request 'two'"),
        ({"steps": [{"submit": ["one", "one"]}]}, "steps.0: request 'one' is submitted twice"),
        ({"steps": ["run"]}, "requests.one: request 'one' is never submitted"),
        (
            {"steps": [{"abort": "one"}, {"submit": "one"}]},
            "steps.0: abort of ['one'] before they are submitted",
        ),
        (
            {"requests": {"every": {"token_ids": [1]}}, "steps": [{"submit": "every"}]},
            "requests.every: a request must not be called 'every'",
        ),
        ({"matrix": {"blocksize": [1]}}, "matrix.blocksize: unknown option 'blocksize'; known: device"),
        ({"matrix": {"block_size": 4}}, "matrix.block_size: must be a list of values, got 4"),
        ({"matrix": {"block_size": []}}, "matrix.block_size: must be a list of values"),
        ({"matrix": {"block_size": [4, 0]}}, "matrix.block_size.1: Input should be greater"),
        (
            {"matrix": {"block_size": [4]}, "engine": {"block_size": 2}},
            "block_size is given in engine and in matrix: keep one",
        ),
    ],
)
def test_what_only_the_whole_file_can_tell(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in text for text in problems(**changes)), problems(**changes)


def test_steps_may_name_a_sequence_of_a_request_for_several() -> None:
    several = {"requests": {"one": {"token_ids": [1], "n": 3, "temperature": 1.0}}}
    for step in ("abort", "preempt", "swap"):
        assert problems(**several, steps=[{"submit": "one"}, {step: ["one/2", "one"]}]) == []
        [problem] = problems(**several, steps=[{"submit": "one"}, {step: "one/3"}])
        assert problem == "steps.1: unknown request 'one/3'; requests are ['one', 'one/1', 'one/2']"
        [problem] = problems(**several, steps=[{step: "one/1"}, {"submit": "one"}])
        assert problem == f"steps.0: {step} of ['one/1'] before they are submitted"
    assert "should match" in str(problems(**several, steps=[{"submit": "one/1"}]))
    assert "should match" in str(problems(**several, steps=[{"submit": "one"}, {"abort": "one/0"}]))


def test_every_is_a_word_for_preemption_only() -> None:
    assert problems(steps=[{"submit": "one"}, {"preempt": "every"}, {"run": {"preempt": "every"}}]) == []
    assert problems(steps=[{"submit": ["one", "every"]}]) == [
        "steps.0: unknown request 'every'; requests are ['one']"
    ]


@pytest.mark.parametrize("value", ["auto", ["cpu"], ["cpu", "cuda"]])
def test_the_device_may_be_left_to_the_command_line(value: Any) -> None:
    assert problems(matrix={"device": value}) == []


@pytest.mark.parametrize("step", ["run", "reset_cache", "poison", "fragment"])
def test_a_step_without_arguments_may_be_written_as_its_bare_name(step: str) -> None:
    assert StepModel.model_validate({step: None}).kind == step
    assert problems(steps=[{"submit": "one"}, step]) == []


def test_one_name_may_stand_for_a_list_of_one() -> None:
    model = ScenarioModel.model_validate({**MINIMAL, "steps": [{"submit": "one"}]})
    assert model.steps[0].argument == ["one"]
    assert model.model == ["toy"]
    assert model.dtype == ["float32"]


def test_needs_takes_every_feature_there_is() -> None:
    assert problems(needs=sorted(FEATURES)) == []


def test_each_form_of_prompt_is_accepted() -> None:
    prompts: dict[str, Any] = {
        "text": "hello",
        "chat": [{"text": "hello"}],
        "messages": [{"role": "user", "content": "hello"}],
        "token_ids": [1, 2],
        "generate": {"kind": "ids", "ids": [1]},
    }
    assert set(prompts) == set(PROMPT_FORMS)
    for form, value in prompts.items():
        assert problems(requests={"one": {form: value}}) == []


def test_all_problems_are_told_at_once() -> None:
    found = problems(level="may", profile="nightly", engine={"a": 1, "b": 2})
    assert len(found) == 4
