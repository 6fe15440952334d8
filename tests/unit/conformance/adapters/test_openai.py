"""An HTTP server as an engine: a real one on the loopback interface, which serves minivllm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters import openai
from conformance.adapters.base import EngineOutput, EngineRequest, Media, ModelSource, Stepped
from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.adapters.openai import OpenAIAdapter, ServerFailed
from conformance.models import ModelUnavailable

from .http_server import Served, serve

PROMPT = (1, 20, 33, 47, 5, 9, 8, 7, 6)


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Path) -> ModelSource:
    return ModelSource("tiny", tiny_checkpoint, "w")


@pytest.fixture(scope="module")
def server(source: ModelSource) -> Iterator[Served]:
    with serve(source) as served:
        yield served


def adapter(served: Served, **options: Any) -> OpenAIAdapter:
    given = {"base_url": served.url, "server_dtype": "float32", "dtype": "float32", **options}
    return OpenAIAdapter(served.source, given)


def ask(served: Served, *requests: EngineRequest) -> list[EngineOutput]:
    with adapter(served) as entered:
        return entered.generate(requests)


def request(name: str = "r", **sampling: Any) -> EngineRequest:
    return EngineRequest(name, {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling}, PROMPT)


def test_what_the_server_shows_is_declared_and_the_rest_has_a_reason(server: Served) -> None:
    capabilities = adapter(server).capabilities()
    assert capabilities.features >= {
        "token_ids",
        "text",
        "chat",
        "output_ids",
        "logprobs",
        "prompt_logprobs",
        "forced_prompt",
        "prefix_cache",
    }
    assert capabilities.version == "7.7"
    assert capabilities.dtypes == ("float32",)
    assert "the server says" in capabilities.missing["image"]
    assert not capabilities.features & set(capabilities.missing)
    assert not isinstance(adapter(server), Stepped)


def test_a_server_of_the_bare_standard_is_a_source_of_text_only(source: ModelSource) -> None:
    with serve(source, extended=False) as bare:
        capabilities = adapter(bare).capabilities()
        assert capabilities.features == {"token_ids"}
        assert "no token_ids" in capabilities.missing["output_ids"]
        assert "do not tell the ids" in capabilities.missing["logprobs"]
        [output] = ask(bare, request())
    assert output.token_ids is None
    assert output.text
    assert output.finish_reason == "length"


def test_answers_are_the_engines_own_behind_the_server(server: Served, source: ModelSource) -> None:
    wanted = [
        request("a", logprobs=4, prompt_logprobs=2),
        request("b", logprobs=3, n=2, temperature=1.0, seed=3),
    ]
    mine = ask(server, *wanted)
    with MiniVLLMAdapter(source, {"dtype": "float32", "block_size": 4, "num_kv_blocks": 256}) as engine:
        theirs = engine.generate(wanted)
    assert [o.request_id for o in mine] == ["a", "b", "b/1"]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.text, a.token_ids, a.prompt_token_ids) == (b.text, b.token_ids, b.prompt_token_ids)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert a.logprobs is not None
        assert b.logprobs is not None
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            # They ran in other batches, so that bits may differ.
            assert {e.token_id: e.logprob for e in x} == pytest.approx(
                {e.token_id: e.logprob for e in y}, abs=1e-4
            )
    for p, q in zip((mine[0].prompt_logprobs or ())[1:], (theirs[0].prompt_logprobs or ())[1:], strict=True):
        assert [(e.token_id, e.rank) for e in p or ()] == [(e.token_id, e.rank) for e in q or ()]


def test_texts_and_chats_bring_their_ids_and_logprobs(server: Served) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 2, "logprobs": 3, "ignore_eos": True}
    text, chat = ask(
        server,
        EngineRequest("t", sampling, text="w0 w1"),
        EngineRequest("c", sampling, chat=({"role": "user", "content": "w0"},)),
    )
    assert text.prompt_token_ids == (1, 5, 6)
    assert chat.prompt_token_ids == (1, 3, 5, 4)
    for output in (text, chat):
        assert output.token_ids is not None
        assert output.logprobs is not None
        assert [row[0].token_id for row in output.logprobs] == list(output.token_ids)


def test_forcing_reads_prompt_logprobs(server: Served) -> None:
    [free] = ask(server, request(logprobs=3))
    assert free.token_ids is not None
    assert free.logprobs is not None
    forced_ids = (*free.token_ids[:2], 40, *free.token_ids[3:])
    forced = EngineRequest("r", request(logprobs=3).sampling, PROMPT, forced_token_ids=forced_ids)
    [output] = ask(server, forced)
    assert output.token_ids == forced_ids
    assert output.prompt_token_ids == PROMPT
    assert output.choice_token_ids is not None
    assert output.choice_token_ids[:3] == free.token_ids[:3]
    assert output.logprobs is not None
    for mine, theirs in zip(output.logprobs[:2], free.logprobs[:2], strict=True):
        values = {e.token_id: e.logprob for e in mine}
        assert values[theirs[0].token_id] == pytest.approx(theirs[0].logprob, abs=1e-4)
    assert 40 in {e.token_id for e in output.logprobs[2]}


def test_cached_tokens_come_from_usage_and_preemptions_from_metrics(server: Served) -> None:
    salted = EngineRequest("s", request().sampling, PROMPT, cache_salt="mine")
    with adapter(server) as entered:
        outputs = [entered.generate([one])[0] for one in (salted, salted, request())]
    assert [output.num_cached_tokens for output in outputs] == [0, 8, 0]
    assert outputs[1].num_preemptions == 0


def test_a_scenario_finds_nothing_that_another_left_in_the_servers_cache(server: Served) -> None:
    assert [ask(server, request())[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_hits_are_not_judged_where_the_server_heeds_no_salt(source: ModelSource) -> None:
    with serve(source, salts=False) as careless:
        capabilities = adapter(careless).capabilities()
    assert "prefix_cache" not in capabilities.features
    assert "heeds no cache_salt" in capabilities.missing["prefix_cache"]


@pytest.mark.parametrize("media", [(), (Media("image", (Path("a.png"),), None),)])
def test_nothing_is_forced_behind_what_the_server_itself_places(
    server: Served, media: tuple[Media, ...]
) -> None:
    chat = ({"role": "user", "content": "hello"},)
    forced = EngineRequest(
        "f", request().sampling, PROMPT if media else None, chat=chat, media=media, forced_token_ids=(4, 5)
    )
    with adapter(server) as entered:
        asked = len(server.bodies)
        [output] = entered.generate([forced])
    assert output.error is not None
    assert output.error.type == "NotImplementedError"
    assert len(server.bodies) == asked


def test_a_refusal_is_a_named_error_and_the_others_are_served(server: Served) -> None:
    bad, good = ask(server, request("bad", top_p=7.0), request("good"))
    assert bad.error is not None
    assert bad.error.type == "ValueError"
    assert "top_p" in bad.error.message
    assert good.error is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, '{"error": {"message": "it broke", "type": "InternalServerError"}}'), "HTTP 500.*it broke"),
        ((200, "<html>"), "no JSON"),
        ((200, "[]"), "no JSON object"),
        ((200, "{}"), "has no choices"),
    ],
)
def test_a_broken_answer_is_the_servers_failure(server: Served, answer: tuple[int, str], told: str) -> None:
    with adapter(server) as entered:
        server.broken["/v1/completions"] = answer
        try:
            with pytest.raises(ServerFailed, match=told):
                entered.generate([request()])
        finally:
            server.broken.clear()


def test_nobody_listening_and_no_answer_in_time_are_told(source: ModelSource) -> None:
    nobody = Served(source, url="http://127.0.0.1:9/v1")
    with pytest.raises(ServerFailed, match="cannot be reached"):
        adapter(nobody).capabilities()


def test_a_slow_server_is_given_up(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr("urllib.request.urlopen", slow)
    with pytest.raises(ServerFailed, match="did not answer within 3 s"):
        adapter(server, timeout=3)._get("/models")


def test_a_model_it_does_not_serve_is_unavailable(server: Served, tmp_path: Path) -> None:
    other = Served(ModelSource("other", tmp_path, "w"), url=server.url)
    with pytest.raises(ModelUnavailable, match="does not serve other; it serves served"):
        adapter(other).capabilities()
    assert adapter(other, models={"other": "served"}).capabilities().engine == "openai"


def test_what_only_its_user_knows_must_be_told(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONFORMANCE_BASE_URL", raising=False)
    with pytest.raises(ValueError, match="--engine-option base_url="):
        OpenAIAdapter(source, {"server_dtype": "float32"})
    with pytest.raises(ValueError, match="--engine-option server_dtype="):
        OpenAIAdapter(source, {"base_url": "http://127.0.0.1:9/v1"})
    monkeypatch.setenv("CONFORMANCE_BASE_URL", "http://127.0.0.1:9/v1")
    assert OpenAIAdapter(source, {"server_dtype": "bfloat16"})._url == "http://127.0.0.1:9/v1"


def test_pictures_travel_as_data_urls(tmp_path: Path) -> None:
    from conformance.adapters.base import Media

    picture = tmp_path / "p.png"
    picture.write_bytes(b"bytes")
    parts = ({"type": "text", "text": "x"}, {"type": "image"})
    chat = ({"role": "user", "content": parts},)
    one = EngineRequest("r", {}, chat=chat, media=(Media("image", (picture,)),))
    [message] = openai._messages(one)
    assert message["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,Ynl0ZXM="},
    }
