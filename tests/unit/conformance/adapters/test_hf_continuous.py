"""Transformers' continuous batching as an engine: the ids of plain `generate`, several requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineOutput, EngineRequest, ModelSource, Stepped
from conformance.adapters.hf import HFAdapter
from conformance.adapters.hf_continuous import HFContinuousAdapter

PROMPTS = ((1, 20, 33, 47, 5), (1, 9, 8, 7, 6, 5, 4, 3, 22, 31, 40), (1, 20, 33))


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path) -> ModelSource:
    return ModelSource("tiny", tiny_checkpoint, "w")


@pytest.fixture
def adapter(source: ModelSource) -> Iterator[HFContinuousAdapter]:
    options = {"dtype": "float32", "block_size": 4, "num_kv_blocks": 64, "max_num_batched_tokens": 32}
    with HFContinuousAdapter(source, options) as entered:
        yield entered


def requests(**sampling: Any) -> list[EngineRequest]:
    values = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling}
    return [EngineRequest(f"r{i}", values, prompt) for i, prompt in enumerate(PROMPTS)]


def test_requests_at_once_get_the_ids_and_logprobs_of_plain_generate(
    adapter: HFContinuousAdapter, source: ModelSource
) -> None:
    mine = adapter.generate(requests(logprobs=0))
    with HFAdapter(source, {"dtype": "float32"}) as plain:
        theirs = plain.generate(requests(logprobs=0))
    for a, b in zip(mine, theirs, strict=True):
        assert (a.request_id, a.token_ids, a.text) == (b.request_id, b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == ("length", None)
        assert a.logprobs is not None
        assert b.logprobs is not None
        for [x], [y] in zip(a.logprobs, b.logprobs, strict=True):
            assert x.token_id == y.token_id
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


def test_a_manager_serves_one_call_after_another(adapter: HFContinuousAdapter) -> None:
    first, second = adapter.generate(requests()), adapter.generate(requests())
    assert [o.token_ids for o in first] == [o.token_ids for o in second]


def test_a_stop_token_ends_its_own_request_only(adapter: HFContinuousAdapter) -> None:
    free = adapter.generate(requests())
    assert free[0].token_ids is not None
    stop = free[0].token_ids[1]
    stopped, other = requests()[0], requests()[1]
    sampling = {**stopped.sampling, "stop_token_ids": [stop]}
    one, two = adapter.generate([EngineRequest("s", sampling, stopped.prompt_token_ids), other])
    assert one.token_ids == free[0].token_ids[: free[0].token_ids.index(stop) + 1]
    assert (one.finish_reason, one.stop_reason) == ("stop", stop)
    assert two.token_ids == free[1].token_ids


def test_what_it_does_not_serve_is_refused_and_the_others_are_served(adapter: HFContinuousAdapter) -> None:
    bad = EngineRequest("bad", {"temperature": 0.0, "max_tokens": 2, "stop": ["x"]}, PROMPTS[0])
    outputs: list[EngineOutput] = adapter.generate([bad, *requests()])
    assert outputs[0].error is not None
    assert "['stop']" in outputs[0].error.message
    assert all(output.error is None for output in outputs[1:])


def test_a_page_too_small_for_transformers_is_not_an_option(source: ModelSource) -> None:
    capabilities = HFContinuousAdapter(source, {"dtype": "float32", "block_size": 1}).capabilities()
    assert "block_size" not in capabilities.options
    assert "at least 4" in capabilities.missing["block_size"]
    assert not capabilities.features & set(capabilities.missing)


def test_it_is_not_stepped_and_leaves_plain_transformers_alone(source: ModelSource) -> None:
    with HFAdapter(source, {"dtype": "float32"}) as plain:
        with HFContinuousAdapter(source, {"dtype": "float32"}) as adapter:
            assert not isinstance(adapter, Stepped)
            adapter.generate(requests())
        assert plain._loaded.module.config._attn_implementation == "eager"
        assert all(output.error is None for output in plain.generate(requests()))
