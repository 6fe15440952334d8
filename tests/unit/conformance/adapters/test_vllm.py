"""vLLM's adapter as far as it goes without vLLM: arguments, capabilities, conversion.

With vLLM installed, test_contract.py runs it too.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from conformance.adapters import vllm
from conformance.adapters.base import EngineRequest, Media, ModelSource
from conformance.adapters.vllm import VLLMAdapter


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource("tiny", tmp_path, "w")


def logprob(value: float, rank: int) -> Any:
    return SimpleNamespace(logprob=value, rank=rank)


def output(key: str = "0", index: int = 0, **changes: Any) -> Any:
    completion = {
        "index": index,
        "text": "hi",
        "token_ids": [4, 5],
        "finish_reason": "stop",
        "stop_reason": 5,
        "logprobs": [{4: logprob(-2.0, 2), 9: logprob(-0.5, 1)}, {5: logprob(-0.1, 1)}],
    }
    completion |= {k: v for k, v in changes.items() if k in completion}
    return SimpleNamespace(
        request_id=key,
        outputs=[SimpleNamespace(**completion)],
        prompt_token_ids=[1, 2],
        prompt_logprobs=changes.get("prompt_logprobs"),
        num_cached_tokens=0,
    )


def adapter(source: ModelSource, request: EngineRequest, **options: Any) -> VLLMAdapter:
    """One that has handed over the request as vLLM's request 0."""
    made = VLLMAdapter(source, {"dtype": "float32", **options})
    made._add = lambda _request: "0-deadbeef"  # type: ignore[method-assign]
    assert made.submit(request) is None
    return made


def test_block_sizes_of_its_backend_are_honoured_others_are_no_option(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_version", lambda: "0")
    small = VLLMAdapter(source, {"dtype": "float32", "block_size": 4, "num_kv_blocks": 9})
    assert not {"block_size", "num_kv_blocks"} & small.capabilities().options
    assert "multiple of 32" in small.capabilities().missing["pool_size"]
    assert small._arguments()["block_size"] == 32
    assert small._arguments()["num_gpu_blocks_override"] == vllm._NUM_BLOCKS
    large = VLLMAdapter(source, {"dtype": "float32", "block_size": 64, "num_kv_blocks": 9})
    assert {"block_size", "num_kv_blocks"} <= large.capabilities().options
    assert large._arguments()["block_size"] == 64
    assert large._arguments()["num_gpu_blocks_override"] == 9


def test_options_of_a_scenario_become_vllms(source: ModelSource) -> None:
    given = {
        "dtype": "float32",
        "max_num_batched_tokens": 8,
        "enable_prefix_caching": False,
        "device": "auto",
    }
    arguments = VLLMAdapter(source, given)._arguments()
    assert arguments["max_num_batched_tokens"] == 8
    assert arguments["enable_prefix_caching"] is False
    assert not {"device", "model_impl"} & set(arguments)
    assert (
        VLLMAdapter(source, {**given, "model_impl": "transformers"})._arguments()["model_impl"]
        == "transformers"
    )
    assert all(
        isinstance(value, str | int | bool) for value in arguments.values()
    )  # a key of the kept engines


def test_an_answer_is_taken_by_the_id_without_its_suffix(source: ModelSource) -> None:
    made = adapter(source, EngineRequest("r", {"temperature": 0.0, "max_tokens": 2}, (1, 2)))
    made._take(output(prompt_logprobs=[None, {2: logprob(-1.0, 1)}]))
    made._take(output(key="17"))  # nobody's
    [one] = made.outputs()
    assert (one.request_id, one.text, one.token_ids, one.prompt_token_ids) == ("r", "hi", (4, 5), (1, 2))
    assert (one.finish_reason, one.stop_reason, one.finished) == ("stop", 5, True)
    assert one.logprobs is not None
    assert [(e.token_id, e.rank) for e in one.logprobs[0]] == [(9, 1), (4, 2)]
    assert one.prompt_logprobs is not None
    assert one.prompt_logprobs[0] is None


def test_sequences_of_one_request_have_outputs_of_their_own(source: ModelSource) -> None:
    made = adapter(source, EngineRequest("r", {"temperature": 1.0, "max_tokens": 2, "n": 2}, (1, 2)))
    made._take(output(index=1, text="second"))
    first, second = made.outputs()
    assert (first.request_id, first.finished) == ("r", False)
    assert (second.request_id, second.text) == ("r/1", "second")
    made._take(output(index=0))
    assert made._finished("r")


def test_forced_ids_are_judged_by_prompt_logprobs(source: ModelSource) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 8, "logprobs": 2}
    made = adapter(source, EngineRequest("r", sampling, (1, 2), forced_token_ids=(7, 8)))
    rows = [None, {2: logprob(-1.0, 1)}, {7: logprob(-3.0, 2), 6: logprob(-0.2, 1)}, {8: logprob(-0.1, 1)}]
    made._take(output(token_ids=[3], prompt_logprobs=rows))
    [one] = made.outputs()
    assert one.token_ids == (7, 8)
    assert one.choice_token_ids == (6, 8)
    assert one.prompt_token_ids == (1, 2)
    assert one.logprobs is not None
    assert [e.token_id for e in one.logprobs[0]] == [6, 7]


def test_an_abort_keeps_what_there_was(source: ModelSource) -> None:
    made = adapter(source, EngineRequest("r", {"temperature": 0.0, "max_tokens": 9}, (1, 2)))
    aborted: list[list[str]] = []
    made._llm = SimpleNamespace(llm_engine=SimpleNamespace(abort_request=aborted.append))
    made._take(output(finish_reason=None))
    made.abort("r")
    assert aborted == [["0"]]
    [one] = made.outputs()
    assert (one.token_ids, one.finish_reason, one.finished) == ((4, 5), "abort", True)


class VLLMClientError(Exception):
    """As vLLM calls the base of its refusals."""


class MultiModalCacheMissError(RuntimeError):
    """As vLLM calls it."""


class TheirOwnError(ValueError):
    pass


def failing(source: ModelSource, error: type[Exception]) -> VLLMAdapter:
    def refuse(_request: EngineRequest) -> str:
        raise error("top_p must be in (0, 1]")

    made = VLLMAdapter(source, {"dtype": "float32"})
    made._add = refuse  # type: ignore[method-assign]
    return made


def test_a_failure_is_no_refusal(source: ModelSource) -> None:
    with pytest.raises(RuntimeError, match="top_p"):
        failing(source, RuntimeError).submit(EngineRequest("r", {"temperature": 0.0}, (1,)))


@pytest.mark.parametrize("kind", [Image.DecompressionBombError, AssertionError, MultiModalCacheMissError])
def test_what_it_lets_through_while_preparing_costs_the_request_alone(
    source: ModelSource, kind: type[Exception]
) -> None:
    made = failing(source, kind)
    error = made.submit(EngineRequest("r", {"temperature": 0.0, "max_tokens": 1}, (1,)))
    assert error is not None
    assert (error.type, error.message) == (kind.__name__, "top_p must be in (0, 1]")


@pytest.mark.parametrize("kind", [TheirOwnError, VLLMClientError])
def test_a_refusal_has_the_name_everybody_knows(source: ModelSource, kind: type[Exception]) -> None:
    made = failing(source, kind)
    error = made.submit(EngineRequest("r", {"temperature": 0.0, "max_tokens": 1}, (1,)))
    assert error is not None
    assert (error.type, error.message) == ("ValueError", "top_p must be in (0, 1]")


def test_the_pool_is_counted_block_by_block(source: ModelSource) -> None:
    def block(**changes: Any) -> Any:
        return SimpleNamespace(**{"is_null": False, "ref_cnt": 0, "block_hash": None, **changes})

    blocks = [block(is_null=True), block(ref_cnt=2), block(block_hash=b"x"), block(), block(ref_cnt=1)]
    pool = SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks))
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=pool))
    made = VLLMAdapter(source, {"dtype": "float32"})
    made._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    state = made.pool()
    assert (state.total, state.free, state.cached, state.in_use) == (4, 1, 1, 2)


def test_a_salt_goes_with_a_chat(source: ModelSource) -> None:
    added: list[Any] = []

    def add(prompts: list[Any], params: list[Any]) -> list[str]:
        added.extend(zip(prompts, params, strict=True))
        return ["7-deadbeef"]

    made = VLLMAdapter(source, {"dtype": "float32"})
    made._llm = SimpleNamespace(
        _preprocess_chat_one=lambda chat, **options: {"said": chat, **options},
        _render_and_add_requests=add,
    )
    chat = ({"role": "user", "content": "hello"},)
    request = EngineRequest("r", {}, chat=chat, cache_salt="alice", mm_processor_kwargs={"size": 3})
    assert made._add_chat(request, "params") == "7-deadbeef"
    [(prompt, params)] = added
    assert (prompt["said"], prompt["mm_processor_kwargs"], params) == ([*chat], {"size": 3}, "params")
    assert (prompt["cache_salt"], prompt["chat_template_content_format"]) == ("alice", "auto")


def test_what_a_template_is_given_can_be_chosen(source: ModelSource) -> None:
    taken: list[str] = []

    def enqueue(_chat: Any, _params: Any, *, chat_template_content_format: str, **_options: Any) -> list[str]:
        taken.append(chat_template_content_format)
        return ["7"]

    for given in ({}, {"chat_template_content_format": "openai"}):
        made = VLLMAdapter(source, {"dtype": "float32", **given})
        made._llm = SimpleNamespace(enqueue_chat=enqueue)
        made._add_chat(EngineRequest("r", {}, chat=({"role": "user", "content": "hello"},)), "params")
    assert taken == ["auto", "openai"]


def test_forced_ids_follow_a_chat_as_vllm_renders_it(source: ModelSource) -> None:
    added: list[Any] = []

    def render(_chat: Any, mm_processor_kwargs: Any, chat_template_content_format: str) -> dict[str, Any]:
        assert mm_processor_kwargs is None
        assert chat_template_content_format == "auto"
        return {"prompt_token_ids": [1, 9, 9], "pictures": 1}

    def add(prompts: list[Any], params: list[Any]) -> list[str]:
        assert [values["prompt_logprobs"] for values in params] == [1]
        added.extend(prompts)
        return ["7-deadbeef"]

    made = VLLMAdapter(source, {"dtype": "float32"})
    made._llm = SimpleNamespace(_preprocess_chat_one=render, _render_and_add_requests=add)
    media = (Media("image", (source.path / "a.png",), None),)
    chat = ({"role": "user", "content": [{"type": "image"}]},)
    given = EngineRequest("r", {"max_tokens": 2}, (1, 9, 9), chat=chat, media=media, forced_token_ids=(4, 5))
    for request in (given, replace(given, prompt_token_ids=None)):
        assert made._add_forced(request, dict) == "7-deadbeef"
        assert made._rendered["r"] == (1, 9, 9)
    assert added == [{"prompt_token_ids": [1, 9, 9, 4, 5], "pictures": 1}] * 2
    with pytest.raises(NotImplementedError, match="renders another prompt"):
        made._add_forced(replace(given, prompt_token_ids=(1, 9)), dict)
    with pytest.raises(NotImplementedError, match="or a chat"):
        made._add_forced(replace(given, chat=None), dict)


def test_a_video_goes_as_frames_with_their_times_behind_the_tokenizers_prompt(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    paths = tuple(tmp_path / f"{i}.png" for i in range(2))
    for i, path in enumerate(paths):
        Image.new("RGB", (4, 3), (i, 20, 30)).save(path)
    chat = ({"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]},)
    added: list[Any] = []

    def enqueue(prompts: list[Any], _params: Any, **_options: Any) -> list[str]:
        added.extend(prompts)
        return ["7"]

    def template(messages: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return f"<{messages[0]['content'][0]['type']}>"

    made = VLLMAdapter(source, {"dtype": "float32"})
    tokenizer = SimpleNamespace(apply_chat_template=template)
    made._llm = SimpleNamespace(enqueue=enqueue, get_tokenizer=lambda: tokenizer)
    film = EngineRequest("r", {"max_tokens": 2}, chat=chat, media=(Media("video", paths, 0.5),))
    assert made._add(film) == "7"
    [prompt] = added
    [(frames, told)] = prompt["multi_modal_data"]["video"]
    assert prompt["prompt"] == "<video>"
    assert frames.shape == (2, 3, 4, 3)
    assert frames[1, 0, 0].tolist() == [1, 20, 30]
    assert (told["fps"], told["duration"], told["frames_indices"]) == (0.5, 4.0, [0, 1])
    with pytest.raises(NotImplementedError, match="known frames per second"):
        made._add(replace(film, media=(Media("video", paths, None),)))
    with pytest.raises(NotImplementedError, match="behind a video"):
        made._add(replace(film, forced_token_ids=(1,)))


def test_it_must_be_entered_first(source: ModelSource) -> None:
    with pytest.raises(RuntimeError, match="not entered"):
        VLLMAdapter(source, {"dtype": "float32"}).advance()
