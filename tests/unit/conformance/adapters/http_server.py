"""A small OpenAI-compatible server on the loopback interface, which serves minivllm."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from conformance.adapters.base import EngineOutput, EngineRequest, ModelSource, TokenLogprob
from conformance.adapters.minivllm import MiniVLLMAdapter

#: Fields of a body that are no sampling parameters.
_NOT_SAMPLING = {
    "model",
    "prompt",
    "messages",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "top_logprobs",
    "cache_salt",
}


@dataclass
class Served:
    """What the server is, and what it was asked.

    Attributes:
        extended: whether it knows vLLM's extensions.
        salts: whether it heeds those of the prefix cache.
        broken: path → (status, body) answered instead.
        bodies: every body that came, by path.
    """

    source: ModelSource
    extended: bool = True
    salts: bool = True
    broken: dict[str, tuple[int, str]] = field(default_factory=dict)
    bodies: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    url: str = ""
    hits: int = 0


@contextmanager
def serve(source: ModelSource, *, extended: bool = True, salts: bool = True) -> Iterator[Served]:
    """Serve the checkpoint until the block ends."""
    served = Served(source, extended, salts)
    with MiniVLLMAdapter(source, {"dtype": "float32", "block_size": 4, "num_kv_blocks": 256}) as engine:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served, engine))
        served.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(served: Served, engine: MiniVLLMAdapter) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()
    count = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self._broken():
                return
            if self.path == "/v1/models":
                self._answer(200, {"data": [{"id": "served", "root": str(served.source.path)}]})
            elif self.path == "/version":
                self._answer(200, {"version": "7.7"})
            elif self.path == "/metrics":
                text = f'vllm:prefix_cache_hits_total{{engine="0"}} {served.hits}.0\n'
                self._answer(200, text + "vllm:num_preemptions_total 0.0\n")
            else:
                self._answer(404, {"error": {"message": "no such path", "type": "NotFoundError"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.bodies.append((self.path, body))
            if self._broken():
                return
            if "image_url" in json.dumps(body):
                self._answer(400, {"error": {"message": "no pictures here", "type": "BadRequestError"}})
                return
            with lock:
                heeded = body if served.salts else {**body, "cache_salt": None}
                request = _request(f"q{next(count)}", heeded)
                outputs = engine.generate([request])
            if outputs[0].error is not None:
                error = {"message": outputs[0].error.message, "type": "BadRequestError", "code": 400}
                self._answer(400, {"error": error})
                return
            served.hits += outputs[0].num_cached_tokens or 0
            self._answer(200, _answer(body, outputs, served.extended))

        def _broken(self) -> bool:
            if self.path not in served.broken:
                return False
            self._answer(*served.broken[self.path])
            return True

        def _answer(self, status: int, body: Any) -> None:
            raw = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    return Handler


def _request(name: str, body: Mapping[str, Any]) -> EngineRequest:
    sampling = {k: v for k, v in body.items() if k not in _NOT_SAMPLING}
    if sampling.get("logprobs") is True:
        sampling["logprobs"] = body.get("top_logprobs", 0)
    salt = body.get("cache_salt")
    if "messages" in body:
        chat = tuple(body["messages"])
        return EngineRequest(name, sampling, chat=chat, cache_salt=salt)
    if isinstance(body["prompt"], str):
        return EngineRequest(name, sampling, text=body["prompt"], cache_salt=salt)
    return EngineRequest(name, sampling, tuple(body["prompt"]), cache_salt=salt)


def _answer(body: Mapping[str, Any], outputs: list[EngineOutput], extended: bool) -> dict[str, Any]:
    chat = "messages" in body
    prompt = outputs[0].prompt_token_ids or ()
    answer: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": len(prompt)}}
    for i, output in enumerate(outputs):
        choice: dict[str, Any] = {"index": i, "finish_reason": output.finish_reason}
        choice |= {"message": {"content": output.text}} if chat else {"text": output.text}
        if output.logprobs is not None:
            make = _chat_logprobs if chat else _completion_logprobs
            choice["logprobs"] = make(output, extended)
        if extended:
            choice |= {"token_ids": output.token_ids, "stop_reason": output.stop_reason}
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
            (answer if chat else choice)["prompt_token_ids"] = prompt
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = [
                    row and {str(e.token_id): {"logprob": e.logprob, "rank": e.rank} for e in row}
                    for row in output.prompt_logprobs
                ]
        answer["choices"].append(choice)
    return answer


def _name(token: int, extended: bool) -> str:
    return f"token_id:{token}" if extended else f"<{token}>"


def _of(row: tuple[TokenLogprob, ...], token: int) -> float:
    return next(e.logprob for e in row if e.token_id == token)


def _completion_logprobs(output: EngineOutput, extended: bool) -> dict[str, Any]:
    pairs = list(zip(output.logprobs or (), output.token_ids or (), strict=True))
    return {
        "tokens": [_name(token, extended) for _, token in pairs],
        "token_logprobs": [_of(row, token) for row, token in pairs],
        "top_logprobs": [{_name(e.token_id, extended): e.logprob for e in row} for row, _ in pairs],
    }


def _chat_logprobs(output: EngineOutput, extended: bool) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": _name(token, extended),
                "logprob": _of(row, token),
                "top_logprobs": [{"token": _name(e.token_id, extended), "logprob": e.logprob} for e in row],
            }
            for row, token in zip(output.logprobs or (), output.token_ids or (), strict=True)
        ]
    }
