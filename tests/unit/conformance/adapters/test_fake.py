"""The toy engine is a faithful little engine, and each fault breaks exactly what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import Controlled, EngineRequest, ModelSource, Stages, Stepped, Traced
from conformance.adapters.fake import FAULTS, FakeEngine, fake_engine, minimal_engine
from conformance.adapters.fake_model import EOS, toy_logits

SOURCE = ModelSource("toy", Path("nowhere"), "w")


def request(
    name: str = "one", prompt: tuple[int, ...] = (5, 9, 20, 33, 7, 8), **sampling: Any
) -> EngineRequest:
    values = {"temperature": 0.0, "max_tokens": 6, **sampling}
    return EngineRequest(name, values, prompt_token_ids=prompt)


def engine(fault: str | None = None, **options: Any) -> FakeEngine:
    return fake_engine(fault=fault)(SOURCE, {"block_size": 4, **options})


def greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(toy_logits([*prompt, *tokens]).argmax()))
    return tuple(tokens)


def answer(e: FakeEngine, *requests: EngineRequest) -> dict[str, tuple[int, ...]]:
    return {o.request_id: tuple(o.token_ids or ()) for o in e.generate(requests)}


def test_it_offers_every_protocol_it_declares() -> None:
    e = engine()
    for protocol in (Stepped, Controlled, Traced, Stages):
        assert isinstance(e, protocol)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 1}, {"block_size": 1}, {"num_kv_blocks": 7}]
)
def test_the_answer_is_greedy_whatever_the_options(options: dict[str, int]) -> None:
    one, two = request(), request("two", (40, 41, 42))
    assert answer(engine(**options), one, two) == {
        "one": greedy(one.prompt_token_ids or (), 6),
        "two": greedy((40, 41, 42), 6),
    }


def test_a_request_that_finds_no_room_waits() -> None:
    e = engine(num_kv_blocks=4)  # three blocks: one request at a time
    e.submit(request())
    e.submit(request("two"))
    e.advance()
    assert [len(o.token_ids or ()) for o in e.outputs()] == [1, 0]
    while e.advance():
        pass
    assert all(o.finished for o in e.outputs())


def test_a_request_that_can_never_fit_is_refused() -> None:
    error = engine(num_kv_blocks=3).submit(request())
    assert error is not None
    assert error.type == "CapacityError"


def test_forcing_appends_the_forced_and_tells_the_choice() -> None:
    e = engine()
    free = greedy(request().prompt_token_ids or (), 2)
    forced = EngineRequest(
        "one", {"temperature": 0.0, "max_tokens": 2}, (5, 9, 20, 33, 7, 8), forced_token_ids=(50, 51)
    )
    [output] = e.generate([forced])
    assert output.token_ids == (50, 51)
    assert output.choice_token_ids is not None
    assert output.choice_token_ids[0] == free[0]


def test_stop_tokens_end_a_request() -> None:
    tokens = greedy(request().prompt_token_ids or (), 6)
    [output] = engine().generate([request(stop_token_ids=[tokens[2]])])
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens[:3], "stop", tokens[2])
    assert EOS not in tokens


def test_a_prefix_is_reused_and_told() -> None:
    e = engine()
    first, second = e.generate([request()])[0], None
    [second] = [o for o in e.generate([request("again")]) if o.request_id == "again"]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert second.token_ids == first.token_ids
    assert engine(enable_prefix_caching=False).generate([request()])[0].num_cached_tokens == 0


def test_salts_separate_cached_prefixes() -> None:
    e = engine()
    e.generate([request()])
    salted = EngineRequest("b", request().sampling, request().prompt_token_ids, cache_salt="other")
    assert e.generate([salted])[0].num_cached_tokens == 0


def test_preemption_takes_the_blocks_and_changes_nothing() -> None:
    e = engine()
    e.submit(request())
    assert not e.preempt("one")
    e.advance()
    assert e.preempt("one")
    assert e.pool().in_use == 0
    while e.advance():
        pass
    [output] = e.outputs()
    assert output.token_ids == greedy(request().prompt_token_ids or (), 6)
    assert output.num_preemptions == 1


def test_logprobs_are_of_the_logits_and_sorted() -> None:
    [output] = engine().generate([request(logprobs=3)])
    assert output.logprobs is not None
    for row in output.logprobs:
        values = [entry.logprob for entry in row]
        assert values == sorted(values, reverse=True)
        assert [entry.rank for entry in row] == [1, 2, 3]


def test_prompt_logprobs_are_of_the_logits_after_each_prompt_token() -> None:
    prompt = (5, 9, 20)
    e = engine()
    asked = EngineRequest(
        "one",
        {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1},
        prompt,
        capture=frozenset({"logits", "prompt_logits"}),
    )
    [output] = e.generate([asked])
    rows = [toy_logits(prompt[:1]), toy_logits(prompt[:2])]
    np.testing.assert_array_equal(e.stages("one")["prompt_logits"], rows)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for row, token, told in zip(rows, prompt[1:], output.prompt_logprobs[1:], strict=True):
        assert told is not None
        assert told[0].token_id == int(row.argmax())
        [own] = [entry for entry in told if entry.token_id == token]
        exact = row.astype(np.float64)
        assert own.logprob == pytest.approx(exact[token] - np.log(np.exp(exact).sum()))


def test_the_pool_is_conserved() -> None:
    e = engine()
    before = e.pool()
    e.generate([request(), request("two")])
    assert e.pool() == before


def test_the_minimal_engine_offers_nothing_more() -> None:
    minimal = minimal_engine()(SOURCE, {})
    for protocol in (Stepped, Controlled, Traced, Stages):
        assert not isinstance(minimal, protocol)
    with minimal as entered:
        assert entered.generate([request()])[0].token_ids == greedy(request().prompt_token_ids or (), 6)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fault 'typo'"):
        fake_engine(fault="typo")


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"crash", "hang"}))
def test_a_fault_that_is_not_met_changes_nothing(fault: str) -> None:
    """One short request, alone and undisturbed, of which only faults of the plain path may show."""
    plain = {"wrong_token", "noisy_logits", "nan_logits", "early_stop"}
    e = engine(fault)
    e.submit(request(max_tokens=4))
    while e.advance():
        pass
    [output] = e.outputs()
    prompt, tokens = list(request().prompt_token_ids or ()), list(output.token_ids or ())
    right = [toy_logits(prompt + tokens[:i]) for i in range(len(tokens))]
    shows = tuple(tokens) != greedy(tuple(prompt), 4) or not np.array_equal(right, e.stages("one")["logits"])
    assert shows is (fault in plain)
