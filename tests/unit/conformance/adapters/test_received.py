"""What adapters answer: near misses are understood, mistakes are the adapter's and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    ModelSource,
    PoolState,
    TokenLogprob,
)
from conformance.adapters.received import (
    AdapterError,
    declared,
    received,
    received_error,
    received_events,
    received_heads,
    received_pool,
)

SOURCE = ModelSource("toy", Path("toy"), "0" * 64)
SAID = Capabilities("mine", "1", ("float32",), frozenset({"token_ids"}), frozenset({"block_size"}))
OUTPUT = EngineOutput("a", "text", True, token_ids=(1, 2), finish_reason="length")
KNOWN = {"a", "b"}


class Says:
    """An adapter of which only the capabilities matter."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def capabilities(self) -> Any:
        return self._said


def says(said: Any) -> Any:
    return lambda _source, _options: Says(said)


def loose(value: object) -> Any:
    """A value of another type than the annotation; that is what is tested."""
    return value


def test_what_is_right_stays_as_it_is() -> None:
    assert declared(says(SAID), SOURCE, {}) == SAID
    assert received([OUTPUT], KNOWN, "generate()") == {"a": OUTPUT}


def test_lists_and_sets_are_taken_for_what_they_mean() -> None:
    near = replace(
        SAID, dtypes=loose(["float32"]), features=loose(["token_ids"]), options=loose({"block_size"})
    )
    assert declared(says(near), SOURCE, {}) == SAID


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "capabilities\\(\\) must return Capabilities, got None"),
        ({"engine": "x"}, "must return Capabilities, got {'engine'"),
        (
            replace(SAID, features=loose("token_ids")),
            "features must be a collection of names, got 'token_ids'",
        ),
        (replace(SAID, features=loose(None)), "features must be a collection of names, got None"),
        (replace(SAID, features=loose({1})), "features must hold names, got 1"),
        (replace(SAID, features=loose({"token_id"})), "has no token_id; did you mean 'token_ids'?"),
        (replace(SAID, dtypes=loose("float32")), "dtypes must be a collection of names, got 'float32'"),
        (replace(SAID, missing=loose(["bitwise"])), "missing must map features to reasons"),
    ],
)
def test_other_capabilities_are_the_adapters_mistake(said: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        declared(says(said), SOURCE, {})


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_adapter_that_cannot_be_made_is_told_with_its_error(error: type[BaseException]) -> None:
    def broken(_source: object, _options: object) -> Any:
        raise error("at once")

    with pytest.raises(AdapterError, match=f"cannot tell its capabilities: {error.__name__}: at once"):
        declared(broken, SOURCE, {})


@pytest.mark.parametrize(
    "ids", [[1, 2], np.array([1, 2]), (np.int64(1), np.int32(2)), torch.tensor([1, 2]), iter([1, 2])]
)
def test_numbers_of_numpy_and_torch_are_numbers(ids: Any) -> None:
    entry = TokenLogprob(loose(np.int64(3)), loose(np.float32(-0.5)), loose(np.int64(1)))
    output = replace(
        OUTPUT,
        finished=loose(np.bool_(True)),
        token_ids=ids,
        logprobs=loose([[entry]]),
        prompt_logprobs=loose([None, [entry]]),
        num_cached_tokens=loose(np.int64(4)),
    )
    got = received([output], KNOWN, "generate()")["a"]
    assert got == replace(
        OUTPUT,
        logprobs=((TokenLogprob(3, -0.5, 1),),),
        prompt_logprobs=(None, (TokenLogprob(3, -0.5, 1),)),
        num_cached_tokens=4,
    )
    assert got.token_ids is not None
    assert [type(i) for i in got.token_ids] == [int, int]
    assert got.finished is True


@pytest.mark.parametrize("read", [received, received_heads])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "generate\\(\\) must return a list of EngineOutput, got None"),
        ({"a": OUTPUT}, "must return a list of EngineOutput, got {"),
        ([None], "must return a list of EngineOutput, got in it None"),
        ([OUTPUT, OUTPUT], "answers 'a' twice"),
        ([replace(OUTPUT, request_id="c")], r"answers 'c', which nobody asked; asked: \['a', 'b'\]"),
        ([replace(OUTPUT, text=loose(None))], "a: text must be a string, got None"),
        ([replace(OUTPUT, finished=loose("no"))], "a: finished must be true or false, got 'no'"),
    ],
)
def test_other_answers_are_the_adapters_mistake(
    read: Callable[..., object], value: object, message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        read(value, KNOWN, "generate()")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", "12", "token_ids must be a list, got '12'"),
        ("token_ids", 7, "token_ids must be a list, got 7"),
        ("token_ids", [1.0], "token_ids must hold integers, got 1.0"),
        ("token_ids", [True], "token_ids must hold integers, got True"),
        ("token_ids", np.array([[1, 2]]), r"token_ids must hold integers, got \[1, 2\]"),
        ("prompt_token_ids", [None], "prompt_token_ids must hold integers, got None"),
        ("logprobs", [{3: -0.5}], "logprobs must be a list, got {3: -0.5}"),
        ("logprobs", [[-0.5]], "logprobs must hold lists of TokenLogprob, got -0.5"),
        ("logprobs", [[TokenLogprob(1, loose("x"))]], "logprobs has the logprob 'x'"),
        ("logprobs", [None], "logprobs has no list for generated token 0"),
        ("finish_reason", 1, "finish_reason must be a text or None, got 1"),
        ("stop_reason", 1.5, "stop_reason must hold integers, got 1.5"),
        ("num_cached_tokens", "4", "num_cached_tokens must hold integers, got '4'"),
        ("error", "boom", "error must be an EngineError of two texts, got 'boom'"),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        received([replace(OUTPUT, **{field: value})], KNOWN, "generate()")


def test_events_are_plain_data() -> None:
    event = {"event": "planned", "ids": (np.int64(3), 4), "rows": np.arange(2), 5: {"x": None}}
    assert received_events(iter([event])) == [
        {"event": "planned", "ids": [3, 4], "rows": [0, 1], "5": {"x": None}}
    ]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (None, "must return a list of mappings, got None"),
        ({"event": "x"}, "must return a list of mappings, got {'event'"),
        ([None], "an event must be a mapping with its name, got None"),
        ([{"kind": "x"}], "an event must be a mapping with its name, got {'kind'"),
        ([{"event": "x", "of": [{1}]}], "drain_events\\(\\), x: .1. is no number, text, list or mapping"),
    ],
)
def test_other_events_are_the_adapters_mistake(events: object, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        received_events(events)


def test_an_error_has_two_texts() -> None:
    error = EngineError("ValueError", "no")
    assert received_error(error, "error") is error
    assert received_error(None, "error") is None
    for wrong in (EngineError(loose(None), "no"), EngineError("ValueError", loose(None)), "no"):
        with pytest.raises(AdapterError, match="error must be an EngineError of two texts, got "):
            received_error(wrong, "error")


def test_a_pool_has_four_integers() -> None:
    assert received_pool(PoolState(loose(np.int64(9)), 4, 3, 2)) == PoolState(9, 4, 3, 2)
    for wrong, message in (
        (None, "return a PoolState, got None"),
        (PoolState(9, 4, 3, loose(None)), "integers"),
    ):
        with pytest.raises(AdapterError, match=message):
            received_pool(wrong)
