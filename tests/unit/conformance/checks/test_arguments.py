"""Arguments of checks: what is wrong with them is told before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.checks import CHECKS, lint
from conformance.checks.arguments import arm_name, arm_names, compare

GOOD: list[tuple[str, Any]] = [
    ("tokens_match_golden", None),
    ("tokens_match_golden", ["red", "blue"]),
    ("tokens_match_golden", "red"),
    ("tokens_match_golden", {"requests": ["red"]}),
    ("logits_within_yardstick", None),
    ("logits_within_yardstick", {"strict": True}),
    ("logits_within_yardstick", {"strict": False, "requests": ["red"]}),
    ("logprobs_by_value", ["red"]),
    ("stages_within_band", ["red"]),
    ("cached_tokens", {"red": 3}),
    ("cached_tokens", {"red": {"min": 1, "max": 3}, "blue": {"equals": 0}}),
    ("finish_reason", {"red": "stop"}),
    ("finish_reason", {"red": {"reason": "stop", "stop_reason": None}}),
    ("text_equals", {"red": "x"}),
    ("text_equals", {"red": {"golden": True, "streaming": "consistent"}}),
    ("text_equals", {"red": {"equals": ""}}),
    ("error", {"red": "CapacityError"}),
    ("error", {"engine": "any"}),
    ("error", {"red": {"type": ["A", "B"], "contains": "blocks"}}),
    ("happened", {"preempted": ">=1", "batch": "==2", "steps": 3, "chunked": {"red": ">0"}}),
    ("pool_conserved", None),
    ("same_under", {"chunk": [1, 7], "prefix_cache": ["on", "off"]}),
    ("same_under", {"preempt": "every"}),
    ("same_under", {"preemption": ["recompute", "swap"]}),
    ("same_under", {"preempt": ["every", 2], "requests": ["red"]}),
    ("sampled_within_kept_set", None),
    ("equal", ["solo", "red"]),
    ("differ", ["red", "red/1", "red/2"]),
]

BAD: list[tuple[str, Any, str]] = [
    ("token_match_golden", None, "unknown check"),
    ("tokens_match_golden", 3, "request names"),
    ("tokens_match_golden", [], "request names"),
    ("tokens_match_golden", {"strict": True}, "unknown argument"),
    ("logits_within_yardstick", {"strict": "yes"}, "true or false"),
    ("logits_within_yardstick", {"loose": True}, "unknown argument"),
    ("cached_tokens", None, "expected {request"),
    ("cached_tokens", {}, "expected {request"),
    ("cached_tokens", {"red": {}}, "min, max, equals"),
    ("cached_tokens", {"red": {"most": 3}}, "min, max, equals"),
    ("cached_tokens", {"red": {"max": "3"}}, "integers"),
    ("cached_tokens", {"red": True}, "min, max, equals"),
    ("finish_reason", {"red": "done"}, "expected one of"),
    ("finish_reason", {"red": {"reason": "stop", "why": 1}}, "expected one of"),
    ("text_equals", {"red": 3}, "expected a text"),
    ("text_equals", {"red": {"golden": False}}, "expected a text"),
    ("text_equals", {"red": {"streaming": "fast"}}, "expected a text"),
    ("text_equals", {"red": {}}, "expected a text"),
    ("error", {"red": ""}, "expected an error type"),
    ("error", {"red": {"message": "x"}}, "expected an error type"),
    ("error", {"red": {"contains": []}}, "expected an error type"),
    ("error", None, "expected {request"),
    ("happened", {"preemted": ">=1"}, "unknown counter 'preemted'"),
    ("happened", {"preempted": "some"}, "no comparison"),
    ("same_under", {"preemption": "swap"}, "preemption: expected a list of recompute, swap"),
    ("same_under", {"preemption": ["auto"]}, "preemption: expected a list of recompute, swap"),
    ("same_under", {"preemption": []}, "preemption: expected a list"),
    ("happened", {"preempted": True}, "comparison"),
    ("happened", {"evicted": {"red": ">=1"}}, "no single request"),
    ("happened", None, "expected {counter"),
    ("pool_conserved", {"x": 1}, "takes no arguments"),
    ("same_under", ["chunk"], "expected {axis"),
    ("same_under", {"chunks": [1]}, "unknown axis"),
    ("same_under", {"chunk": []}, "list of values"),
    ("same_under", {"chunk": "7"}, "list of values"),
    ("same_under", {"chunk": "every"}, "list of values"),
    ("same_under", {"requests": ["red"]}, "no axis"),
    ("same_under", {"chunk": [3, 3]}, "twice"),
    ("equal", None, "at least two request names"),
    ("equal", {"requests": ["red", "blue"]}, "at least two request names"),
    ("differ", ["red"], "at least two request names"),
    ("differ", ["red", 3], "at least two request names"),
    ("differ", ["red", "blue", "red"], "'red' is given twice"),
]


@pytest.mark.parametrize(("name", "args"), GOOD, ids=str)
def test_good_arguments_have_no_problem(name: str, args: Any) -> None:
    assert lint(name, args) == []


@pytest.mark.parametrize(("name", "args", "words"), BAD, ids=str)
def test_bad_arguments_are_told(name: str, args: Any, words: str) -> None:
    assert any(words in problem for problem in lint(name, args))


def test_every_check_has_good_and_bad_examples() -> None:
    assert {n for n, _ in GOOD} == set(CHECKS)
    assert set(CHECKS) - {n for n, *_ in BAD} <= {
        "logprobs_by_value",
        "sampled_within_kept_set",
        "stages_within_band",
    }


@pytest.mark.parametrize(
    ("value", "wanted", "met"),
    [
        (1, ">=1", True),
        (0, ">=1", False),
        (2, "<=2", True),
        (3, "<=2", False),
        (3, "== 3", True),
        (3, 3, True),
        (3, "3", True),
        (2, 3, False),
        (3, "!=0", True),
        (0, "!=0", False),
        (1, ">0", True),
        (0, ">0", False),
        (0, "<1", True),
        (1, "<1", False),
    ],
)
def test_comparisons_mean_what_they_say(value: int, wanted: Any, met: bool) -> None:
    assert compare(value, wanted) is met


def test_arms_are_named_as_the_runner_names_them() -> None:
    assert arm_name("chunk", 7) == "chunk=7"
    assert arm_name("prefix_cache", False) == "prefix_cache=off"  # YAML's bare off
    args = {"chunk": [1, 7], "preempt": ["every", 2], "requests": ["red"]}
    assert arm_names(args) == ["chunk=1", "chunk=7", "preempt=2"]
    assert arm_names({"preempt": "every"}) == []
    assert arm_names({"preemption": ["swap"], "chunk": [2]}) == ["chunk=2"]
