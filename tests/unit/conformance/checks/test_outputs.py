"""Reused tokens, reasons, text and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from conformance.adapters.base import FEATURES, EngineError, EngineOutput
from conformance.checks import judge
from conformance.history import RequestRun
from conformance.testing import Spec, answer, make_events, make_history, make_pass, make_record, records_of
from conformance.verdicts import Judgement, Verdict

RED = make_record("red", undecided=[10])


def run(**changes: Any) -> RequestRun:
    one = answer(RED, undecided=[10])
    assert one.output is not None
    return replace(one, output=replace(one.output, **changes))


def judged(
    one: RequestRun,
    check: str,
    args: Any,
    *,
    events: tuple[Mapping[str, Any], ...] = (),
    features: frozenset[str] = frozenset(FEATURES),
    error: EngineError | None = None,
) -> Judgement:
    passed = make_pass("free", [one], events=(*make_events([answer(RED)]), *events), error=error)
    return judge(make_history([passed], features=features), [Spec(check, args)], records_of(RED))


def verdict(one: RequestRun, check: str, args: Any, **kwargs: Any) -> Verdict:
    return judged(one, check, args, **kwargs).verdict


def hits(*tokens: int, resumed: bool = False) -> tuple[dict[str, Any], ...]:
    common = {"event": "prefix_hit", "request_id": "red", "block_ids": (1,), "resumed": resumed}
    return tuple({**common, "num_tokens": t} for t in tokens)


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        (4, True),
        (3, False),
        ({"equals": 4}, True),
        ({"min": 4}, True),
        ({"min": 5}, False),
        ({"max": 4}, True),
        ({"max": 3}, False),
        ({"min": 1, "max": 6}, True),
    ],
)
def test_reused_tokens_are_within_bounds(wanted: Any, met: bool) -> None:
    found = verdict(run(num_cached_tokens=4), "cached_tokens", {"red": wanted}, events=hits(4))
    assert found is (Verdict.PASS if met else Verdict.FAIL)


def test_a_resumed_hit_is_no_hit_of_the_users_request() -> None:
    events = hits(4, resumed=True)
    assert verdict(run(num_cached_tokens=0), "cached_tokens", {"red": 0}, events=events) is Verdict.PASS
    assert verdict(run(num_cached_tokens=4), "cached_tokens", {"red": 4}, events=events) is Verdict.FAIL


def test_one_token_of_a_prompt_is_always_computed() -> None:
    found = judged(run(num_cached_tokens=7), "cached_tokens", {"red": {"min": 1}}, events=hits(7))
    assert found.verdict is Verdict.FAIL
    assert "of a prompt of 7" in found.findings[0].message


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [
        (0, 4, Verdict.WEAK),
        (4, 4, Verdict.WEAK),
        (5, 4, Verdict.FAIL),
        (0, {"min": 4}, Verdict.WEAK),
        (1, 0, Verdict.FAIL),
    ],
)
def test_with_blocks_of_another_size_only_too_many_reused_tokens_are_wrong(
    count: int, wanted: Any, expected: Verdict
) -> None:
    untraced = frozenset(FEATURES) - {"traced"}
    history = make_history([make_pass("free", [run(num_cached_tokens=count)], events=())], features=untraced)
    other = replace(history, capabilities=replace(history.capabilities, options=frozenset()))
    found = judge(other, [Spec("cached_tokens", {"red": wanted})], records_of(RED)).findings
    assert [f.verdict for f in found if f.check == "cached_tokens"] == [expected]


def test_reused_tokens_are_skipped_without_a_prefix_cache() -> None:
    found = verdict(run(num_cached_tokens=None), "cached_tokens", {"red": 0}, features=frozenset())
    assert found is Verdict.SKIP


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("stop", True),
        ("length", False),
        ({"reason": "stop", "stop_reason": 7}, True),
        ({"reason": "stop", "stop_reason": "7"}, False),
        ({"reason": "stop", "stop_reason": None}, False),
    ],
)
def test_finish_and_stop_reasons_are_exact(wanted: Any, met: bool) -> None:
    one = run(finish_reason="stop", stop_reason=7)
    assert verdict(one, "finish_reason", {"red": wanted}) is (Verdict.PASS if met else Verdict.FAIL)


def test_an_abort_has_its_own_reason() -> None:
    assert verdict(run(finish_reason="abort"), "finish_reason", {"red": "abort"}) is Verdict.PASS


def test_a_refused_request_has_no_finish_reason() -> None:
    refused = RequestRun("red", {}, None, refused=EngineError("X", "y"))
    assert verdict(refused, "finish_reason", {"red": "stop"}) is Verdict.FAIL


@pytest.mark.parametrize("args", ["hello", {"equals": "hello"}])
def test_text_is_compared_exactly(args: Any) -> None:
    assert verdict(run(text="hello"), "text_equals", {"red": args}) is Verdict.PASS
    assert verdict(run(text="hello "), "text_equals", {"red": args}) is Verdict.FAIL


def test_golden_text_is_not_judged_after_a_legal_swap() -> None:
    other = int(RED.output.top_ids[10, 1])
    swapped = answer(RED, undecided=[10], choices={10: other})
    assert verdict(swapped, "text_equals", {"red": {"golden": True}}) is Verdict.WEAK
    wrong = answer(RED, undecided=[10], choices={9: other})
    assert verdict(wrong, "text_equals", {"red": {"golden": True}}) is Verdict.FAIL


@pytest.mark.parametrize(
    ("texts", "met"),
    [
        (("he", "hello"), True),
        (("he", "he", "hello"), True),
        (("hello",), True),
        (("hx", "hello"), False),
        (("hello", "he", "hello"), False),
        (("he",), False),
        ((), False),
    ],
)
def test_streamed_text_only_grows_to_the_final_text(texts: tuple[str, ...], met: bool) -> None:
    one = replace(run(text="hello"), texts=texts)
    found = verdict(one, "text_equals", {"red": {"streaming": "consistent"}})
    assert found is (Verdict.PASS if met else Verdict.FAIL)


def test_streaming_is_skipped_where_the_engine_does_not_stream() -> None:
    one = run(text="hello")
    args = {"red": {"streaming": "consistent"}}
    assert verdict(one, "text_equals", args, features=frozenset()) is Verdict.SKIP


ERROR = EngineError("CapacityError", "needs 9 blocks, the pool has 4")


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("CapacityError", True),
        ("any", True),
        ({"type": ["ValueError", "CapacityError"]}, True),
        ({"contains": ["9 blocks", "POOL"]}, True),
        ({"type": "CapacityError", "contains": "9 blocks"}, True),
        ("ValueError", False),
        ({"type": "CapacityError", "contains": "8 blocks"}, False),
    ],
)
@pytest.mark.parametrize("where", ["refused", "output", "engine"])
def test_errors_are_matched_by_type_and_words(where: str, wanted: Any, met: bool) -> None:
    expected = Verdict.PASS if met else Verdict.FAIL
    if where == "engine":
        assert verdict(run(), "error", {"engine": wanted}, error=ERROR) is expected
        return
    output = EngineOutput("red", "", True, error=ERROR, finish_reason="error")
    one = RequestRun(
        "red",
        {},
        output if where == "output" else None,
        refused=ERROR if where == "refused" else None,
    )
    assert verdict(one, "error", {"red": wanted}) is expected


@pytest.mark.parametrize("args", [{"red": "any"}, {"engine": "any"}])
def test_a_missing_error_fails(args: Any) -> None:
    assert verdict(run(), "error", args) is Verdict.FAIL


@pytest.mark.parametrize("error", [EngineError("", "text"), EngineError("X", " ")])
def test_an_error_without_name_or_message_fails(error: EngineError) -> None:
    assert verdict(RequestRun("red", {}, None, refused=error), "error", {"red": "any"}) is Verdict.FAIL
