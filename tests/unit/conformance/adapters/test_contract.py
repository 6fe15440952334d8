"""What every adapter in the box must keep, whatever its engine: one contract, run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from conformance.adapters.base import (
    FEATURES,
    Controlled,
    EngineAdapter,
    EngineRequest,
    KVAccess,
    ModelSource,
    Snapshots,
    Stages,
    Stepped,
    Swapping,
    Traced,
    Weights,
)
from conformance.engines import ENGINES, NEEDED, find_engine

from .http_server import serve

#: Feature → what an adapter that declares it must offer.
PROTOCOLS: Mapping[str, type] = {
    "stepped": Stepped,
    "preempt": Controlled,
    "poison": Controlled,
    "pool": Controlled,
    "swap": Swapping,
    "traced": Traced,
    "stages": Stages,
    "kv": KVAccess,
    "snapshot": Snapshots,
    "update_weights": Weights,
}
PROMPTS = ((3, 20, 11, 27, 5), (9, 8, 7, 6, 5, 4, 3), (3, 20))

Make = Callable[[], EngineAdapter]


def marked(name: str) -> Any:
    absent = name in NEEDED and find_spec(NEEDED[name][0]) is None
    return pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{name} is not installed here"))


@pytest.fixture(scope="module")
def source(save_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model for all of them: vLLM's CPU backend takes no heads of 16."""
    return ModelSource("tiny", save_tiny(tmp_path_factory.mktemp("contract") / "tiny", head_dim=32), "w")


@pytest.fixture(scope="module", params=[marked(name) for name in ENGINES])
def make(request: pytest.FixtureRequest, source: ModelSource) -> Iterator[Make]:
    """Makes the adapter, not yet entered; of an HTTP server that serves minivllm, for `openai`."""
    options: dict[str, Any] = {"dtype": "float32"}
    with ExitStack() as stack:
        if request.param == "openai":
            served = stack.enter_context(serve(source))
            options |= {"base_url": served.url, "server_dtype": "float32"}
        factory = find_engine(request.param)
        yield lambda: factory(source, options)


@pytest.fixture(scope="module")
def adapter(make: Make) -> Iterator[EngineAdapter]:
    with make() as entered:
        yield entered


def asked(**sampling: Any) -> list[EngineRequest]:
    values = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling}
    return [EngineRequest(f"r{i}", values, prompt) for i, prompt in enumerate(PROMPTS)]


def test_it_says_what_it_can_do_before_and_after_entering(make: Make, adapter: EngineAdapter) -> None:
    before, after = make().capabilities(), adapter.capabilities()
    assert before == after
    assert before.engine
    assert before.version
    assert "float32" in before.dtypes
    assert before.features <= set(FEATURES), before.features - set(FEATURES)
    assert set(before.missing) <= set(FEATURES)
    assert not before.features & set(before.missing)
    assert all(before.missing.values())


def test_what_it_declares_it_offers(adapter: EngineAdapter) -> None:
    features = adapter.capabilities().features
    for feature, protocol in PROTOCOLS.items():
        if feature in features:
            assert isinstance(adapter, protocol), feature
    assert features & {"token_ids", "text", "chat"}


def test_it_answers_in_order_and_again_the_same(adapter: EngineAdapter) -> None:
    first = adapter.generate(asked())
    again = adapter.generate(
        [EngineRequest(f"x{r.request_id}", r.sampling, r.prompt_token_ids) for r in asked()]
    )
    assert [o.request_id for o in first] == ["r0", "r1", "r2"]
    for request, one, other in zip(asked(), first, again, strict=True):
        assert one.error is None
        assert one.finished
        assert one.finish_reason == "length"
        assert one.token_ids == other.token_ids
        assert one.prompt_token_ids == request.prompt_token_ids
        assert one.token_ids is not None
        assert len(one.token_ids) == 4
        assert all(type(token) is int for token in one.token_ids)


def test_logprobs_come_as_declared(adapter: EngineAdapter) -> None:
    features = adapter.capabilities().features
    if not features & {"logprobs", "chosen_logprobs"}:
        pytest.skip("it declares no logprobs")
    count = 3 if "logprobs" in features else 0
    for output in adapter.generate(asked(logprobs=count)):
        assert output.logprobs is not None
        assert output.token_ids is not None
        for row, token in zip(output.logprobs, output.token_ids, strict=True):
            assert len(row) == max(count, 1)
            assert row[0].token_id == token
            values = [entry.logprob for entry in row]
            assert values == sorted(values, reverse=True)
            assert values[0] <= 1e-5


def test_forcing_tells_its_own_choices_along_the_given_ids(adapter: EngineAdapter) -> None:
    if not adapter.capabilities().features & {"forced_decode", "forced_prompt"}:
        pytest.skip("it declares no forcing")
    [free, *_] = adapter.generate(asked())
    assert free.token_ids is not None
    first = asked(logprobs=2)[0]
    forced = EngineRequest("f", first.sampling, first.prompt_token_ids, forced_token_ids=free.token_ids)
    [output] = adapter.generate([forced])
    assert output.token_ids == output.choice_token_ids == free.token_ids
    assert output.logprobs is not None
    assert len(output.logprobs) == 4


def test_a_refusal_is_an_output_with_a_name_and_the_others_are_served(adapter: EngineAdapter) -> None:
    bad = EngineRequest("bad", {"temperature": 0.0, "max_tokens": 4}, ())
    outputs = adapter.generate([bad, *asked()])
    assert [o.request_id for o in outputs] == ["bad", "r0", "r1", "r2"]
    error = outputs[0].error
    assert error is not None
    assert error.type.isidentifier()
    assert error.message
    assert all(output.error is None for output in outputs[1:])


def test_stepping_ends_as_generating_does(make: Make) -> None:
    with make() as fresh:
        if "stepped" not in fresh.capabilities().features:
            pytest.skip("it declares no stepping")
        stepped = cast("Stepped", fresh)
        for request in asked():
            assert stepped.submit(request) is None
        steps = 0
        while stepped.advance():
            steps += 1
            assert steps < 100
        outputs = stepped.outputs()
    with make() as other:
        expected = other.generate(asked())
    assert [(o.request_id, o.token_ids) for o in outputs] == [(o.request_id, o.token_ids) for o in expected]
