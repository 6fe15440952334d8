"""What all checks share: alignment of passes, expected endings, selection of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.checks.case import (
    Case,
    CheckFailed,
    CheckInputError,
    align,
    expected_text,
    how_texts_differ,
    is_plain_greedy,
    names_in,
    same_text,
)
from conformance.history import History, Operation, RequestRun
from conformance.records import GoldenRecord
from conformance.testing import Spec, answer, make_history, make_pass, make_record, records_of

RED = make_record("red", undecided=[10])
OTHER = int(RED.output.top_ids[10, 1])


def case(*runs: RequestRun, forced: RequestRun | None = None, specs: tuple[Spec, ...] = ()) -> Case:
    passes = [make_pass("free", runs)]
    if forced is not None:
        passes.append(make_pass("forced", [forced]))
    return Case(make_history(passes), records_of(RED), specs)


def speakers(one: Case) -> list[str]:
    """One letter per position: f free, F forced."""
    aligned = align(one, one.run_of("red"), RED)
    return ["F" if run.forced else "f" for _, run in aligned]


def test_without_a_divergence_the_free_run_speaks_for_all() -> None:
    assert speakers(case(answer(RED, undecided=[10]))) == ["f"] * 24


def test_after_a_divergence_the_forced_run_speaks() -> None:
    free = answer(RED, undecided=[10], choices={10: OTHER})
    forced = answer(RED, undecided=[10], forced=True)
    assert speakers(case(free, forced=forced)) == ["f"] * 11 + ["F"] * 13


def test_without_a_forced_run_nobody_speaks_after_a_divergence() -> None:
    assert speakers(case(answer(RED, undecided=[10], choices={10: OTHER}))) == ["f"] * 11


def test_a_forced_run_that_was_refused_speaks_for_nothing() -> None:
    free = answer(RED, undecided=[10], choices={10: OTHER})
    forced = replace(answer(RED, undecided=[10], forced=True), output=None)
    assert speakers(case(free, forced=forced)) == ["f"] * 11


def test_a_forced_run_about_another_golden_is_an_error() -> None:
    forced = replace(answer(RED, forced=True), golden_key="other")
    with pytest.raises(CheckInputError, match="another golden"):
        speakers(case(answer(RED), forced=forced))


@pytest.mark.parametrize(
    ("sampling", "text", "stop"),
    [
        ({}, "a stop b end", None),
        ({"stop": "stop"}, "a ", "stop"),
        ({"stop": ["end", "stop"]}, "a ", "stop"),
        ({"stop": ["stop b", "stop"]}, "a ", "stop"),
        ({"stop": ["op b", "a stop"]}, "", "a stop"),
        ({"stop": ["nowhere"]}, "a stop b end", None),
        ({"stop": "stop", "include_stop_str_in_output": True}, "a stop", "stop"),
    ],
)
def test_stop_strings_cut_the_golden_text(sampling: dict[str, Any], text: str, stop: str | None) -> None:
    record: GoldenRecord = replace(RED, text="a stop b end")
    run = replace(answer(RED), sampling=sampling)
    assert expected_text(run, record) == (text, stop)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0}, True),
        ({}, False),  # the default temperature is 1
        ({"temperature": 0.5}, False),
        ({"temperature": 0.0, "min_tokens": 2}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.0, "repetition_penalty": 1.0, "logit_bias": None, "bad_words": ()}, True),
        ({"temperature": 0.0, "stop": ["x"], "top_k": 3}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7, "top_k": 1, "min_tokens": 2}, False),
    ],
)
def test_plain_greedy_is_what_a_golden_can_judge(sampling: dict[str, Any], plain: bool) -> None:
    assert is_plain_greedy(replace(answer(RED), sampling=sampling)) is plain


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("red", ["red"]),
        (["a", "b"], ["a", "b"]),
        ({"request": "red"}, ["red"]),
        ({"a": 1}, ["a"]),
        (None, []),
    ],
)
def test_names_in_an_operation(argument: Any, names: list[str]) -> None:
    assert names_in(argument) == names


@pytest.mark.parametrize("args", ["red", ["red"], {"requests": ["red"]}])
def test_named_requests_are_taken_as_named(args: Any) -> None:
    assert case(answer(RED), answer(RED, name="blue")).golden_requests(args) == ["red"]


def test_without_names_every_plain_greedy_request_is_taken() -> None:
    warm = replace(answer(RED, name="warm"), sampling={"temperature": 1.0})
    bad = answer(RED, name="bad")
    specs = (Spec("error", {"bad": "X"}),)
    assert case(answer(RED), warm, bad, specs=specs).golden_requests(None) == ["red"]


def test_a_request_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CheckInputError, match="no request 'green'"):
        case(answer(RED)).run_of("green")


def test_the_reason_for_a_missing_golden_is_told() -> None:
    run = replace(answer(RED), golden_key=None, golden_error="corrupted record x")
    with pytest.raises(CheckInputError, match="corrupted record x"):
        case(run).golden(run)


def history(**changes: Any) -> History:
    return replace(make_history([make_pass("free", [answer(RED)])]), **changes)


@pytest.mark.parametrize(
    ("changes", "words"), [({"dtype": "bfloat16"}, "is float32"), ({"weights_sha256": "x"}, "weights")]
)
def test_a_golden_of_another_dtype_or_weights_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckInputError, match=words):
        Case(history(**changes), records_of(RED)).golden(answer(RED))


def test_prompt_ids_the_runner_handed_over_are_known_ids() -> None:
    run = answer(RED)
    assert run.output is not None
    silent = replace(run, output=replace(run.output, prompt_token_ids=None))
    assert case(silent).same_prompt("c", silent, RED)
    unknown = replace(silent, prompt_token_ids=None)
    assert not case(unknown).same_prompt("c", unknown, RED)


def test_a_prompt_that_is_only_too_long_differs_at_its_end() -> None:
    run = answer(RED)
    longer = replace(run, prompt_token_ids=(*RED.prompt_token_ids, 3))
    with pytest.raises(CheckFailed) as caught:
        case(longer).same_prompt("c", longer, RED)
    assert caught.value.finding.detail["at"] == len(RED.prompt_token_ids)


def test_aborted_requests_and_those_with_a_met_stop_string_may_end_early() -> None:
    run = answer(RED)
    one = make_pass("free", [run])
    aborted = replace(one, operations=(*one.operations, Operation("abort", ["red"])))
    assert Case(make_history([aborted]), records_of(RED)).may_end_early(run, RED)
    assert not case(run).may_end_early(run, RED)
    stopped = replace(run, sampling={**run.sampling, "stop": [RED.text[3:8]]})
    assert case(stopped).may_end_early(stopped, RED)


def test_the_command_names_scenario_engine_and_point() -> None:
    command = case(answer(RED)).reproduce()
    assert command.startswith("conformance run made/up --engine made-up")
    assert "block_size=16" in command


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        ("a\ufffdb\ufffd\ufffd", True),
        (" a\ufffdb", True),
        ("a\ufffdb\ufffd", False),
        ("ab", False),
        ("", False),
    ],
)
def test_an_unfinished_character_may_be_held_back_at_the_very_end(shown: str, same: bool) -> None:
    assert same_text(shown, "a\ufffdb\ufffd\ufffd") is same
    assert not same_text("a\ufffdb\ufffd\ufffd", "a\ufffdb")


def test_a_message_shows_short_texts_whole_and_long_ones_where_they_part() -> None:
    assert how_texts_differ("a b", "a c") == "'a b' for 'a c'"
    shared = "x" * 1000
    message = how_texts_differ(f"{shared}left{shared}", f"{shared}right")
    assert f"…'{'x' * 20}left{'x' * 36}'… for …'{'x' * 20}right'" in message
    assert "character 1000" in message
    assert "2004 characters for 1005" in message


def test_a_message_shows_what_stands_before_an_answer() -> None:
    answer = "".join(chr(ord("a") + i % 26) for i in range(200))
    assert how_texts_differ(f"prompt{answer}", answer).startswith("'promptabc")
