"""Any OpenAI-compatible HTTP server as an engine to be judged, with nothing but the standard library.

What the server offers beyond the standard (prompts as ids, ids of tokens, prompt logprobs, counts of
cached tokens, pictures) is found out by small requests when its capabilities are first asked for; what it
does not answer is not declared. vLLM's names are used for these extensions.

Options, by `--engine-option NAME=VALUE`:
    base_url: of the server, up to and including /v1; or the environment's CONFORMANCE_BASE_URL.
    server_dtype: what it computes in, float32 or bfloat16: no server tells.
    models: {name in the suite: name the server knows it by}; else the names must be equal, or that of
        the directory the server says it loaded.
    timeout: seconds to wait for an answer, 120.
    max_logprobs: most logprobs per position the server gives, 20.
An API key is read from the environment's OPENAI_API_KEY.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from types import TracebackType
from typing import Any
from uuid import uuid4

from PIL import Image

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    ModelSource,
    TokenLogprob,
    sequence_names,
)
from conformance.adapters.prompts import forced_output, forced_prompt
from conformance.models import ModelUnavailable

__all__ = ["OpenAIAdapter", "ServerFailed"]

#: Most requests in flight at once.
_IN_FLIGHT = 32

#: Sampling parameters of the standard; the others are vLLM's extensions.
_STANDARD = {"temperature", "max_tokens", "top_p", "seed", "stop", "n", "presence_penalty"} | {
    "frequency_penalty",
    "logprobs",
    "logit_bias",
}
#: Names of the suite that HTTP servers have no use for.
_DROPPED = {"detokenize"}
_EXTENSIONS = frozenset(
    {"sampling", "penalties", "logit_control", "parallel_sampling", "stop_strings"}
)  # what a server that knows vLLM's extensions is asked for
_CLIENT_FAULTS = {400, 413, 422}


class ServerFailed(RuntimeError):
    """The server did not answer, answered 5xx, or answered what is no completion."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a server showed: features, and why others are missing."""

    features: frozenset[str]
    missing: Mapping[str, str]
    version: str


_probes: dict[tuple[str, str], _Probe] = {}


class OpenAIAdapter:
    """See the module."""

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        self._source = model
        url = options.get("base_url") or os.environ.get("CONFORMANCE_BASE_URL")
        if not url:
            raise ValueError("where is the server? --engine-option base_url=http://host:port/v1")
        self._dtype = options.get("server_dtype")
        if self._dtype not in ("float32", "bfloat16"):
            raise ValueError(
                "what does the server compute in? --engine-option server_dtype=float32 (or bfloat16); "
                f"got {self._dtype!r}"
            )
        self._url = str(url).rstrip("/")
        self._names: Mapping[str, str] = options.get("models") or {}
        self._timeout = float(options.get("timeout", 120))
        self._most = int(options.get("max_logprobs", 20))
        self._served: str | None = None
        self._salt = uuid4().hex  # a server outlives a scenario, and what it cached must not

    # ---- a minimal adapter ----------------------------------------------------------------------

    def __enter__(self) -> OpenAIAdapter:
        self._probe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._served = None

    def capabilities(self) -> Capabilities:
        """Asks the server; once per server and model.

        Raises:
            ModelUnavailable: the server does not serve this model.
            ServerFailed: it does not answer.
        """
        probe = self._probe()
        assert self._dtype is not None
        return Capabilities(
            engine="openai",
            version=probe.version,
            dtypes=(self._dtype,),
            features=probe.features,
            missing=probe.missing,
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        alone = len(requests) == 1
        before = self._counters() if alone else {}
        with ThreadPoolExecutor(min(_IN_FLIGHT, max(1, len(requests)))) as pool:
            answers = list(pool.map(self._serve, requests))
        outputs = [output for answer in answers for output in answer]
        if alone and len(outputs) == 1 and outputs[0].error is None:
            outputs = [self._counted(outputs[0], before, self._counters())]
        return outputs

    # ---- one request ----------------------------------------------------------------------------

    def _serve(self, request: EngineRequest) -> list[EngineOutput]:
        try:
            path, body = self._body(request)
            answer = self._post(path, body)
        except _Refused as refused:
            return [EngineOutput(request.request_id, "", True, error=refused.error)]
        names = sequence_names(request.request_id, request.sampling)
        choices = sorted(_list(answer, "choices"), key=lambda c: c.get("index", 0))
        if len(choices) != len(names):
            raise ServerFailed(f"{request.request_id}: {len(choices)} choices, asked for {len(names)}")
        outputs = [self._output(request, n, c, answer) for n, c in zip(names, choices, strict=True)]
        if request.forced_token_ids is not None:
            outputs = [forced_output(request, output) for output in outputs]
        return outputs

    def _body(self, request: EngineRequest) -> tuple[str, dict[str, Any]]:
        features = self._probe().features
        ids = request.prompt_token_ids
        sampling = dict(request.sampling)
        prompt: dict[str, Any]
        if request.prompt_embeds is not None or any(m.modality != "image" for m in request.media):
            raise _Refused(EngineError("NotImplementedError", "only text and pictures are sent by HTTP"))
        if request.forced_token_ids is not None:
            if ids is None or request.media:
                why = "ids are forced behind a prompt of ids; pictures and chats are placed by the server"
                raise _Refused(EngineError("NotImplementedError", why))
            prompt_ids, sampling = forced_prompt(request)
            path, prompt = "/completions", {"prompt": prompt_ids}
        elif ids is not None and not request.media and "token_ids" in features:
            path, prompt = "/completions", {"prompt": list(ids)}
        elif request.chat is not None:
            path, prompt = "/chat/completions", {"messages": _messages(request)}
        elif request.text is not None and not request.media:
            path, prompt = "/completions", {"prompt": request.text}
        else:
            raise _Refused(EngineError("NotImplementedError", "pictures are sent in chats only"))
        if "prefix_cache" in features:
            prompt["cache_salt"] = self._salted(request.cache_salt or "")
        elif request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        if request.mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = dict(request.mm_processor_kwargs)
        for name in _DROPPED & set(sampling):
            del sampling[name]
        count = sampling.pop("logprobs", None)
        if count is not None:
            count = min(int(count), self._most) if count >= 0 else self._most
            chat = path == "/chat/completions"
            sampling |= {"logprobs": True, "top_logprobs": count} if chat else {"logprobs": count}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        extensions = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return path, {
            "model": self._served,
            **prompt,
            **sampling,
            **(extensions if "output_ids" in features else {}),
        }

    def _output(
        self, request: EngineRequest, name: str, choice: Mapping[str, Any], answer: Mapping[str, Any]
    ) -> EngineOutput:
        message = choice.get("message") or {}
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        rows = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
        tokens = choice.get("token_ids")
        asked = request.sampling.get("logprobs")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return EngineOutput(
            request_id=name,
            text=choice.get("text") or message.get("content") or "",
            finished=choice.get("finish_reason") is not None,
            prompt_token_ids=None if prompt is None else tuple(prompt),
            token_ids=None if tokens is None else tuple(tokens),
            logprobs=None if asked is None else _logprobs(choice.get("logprobs"), tokens, int(asked)),
            prompt_logprobs=None
            if rows is None
            else tuple(None if row is None else _prompt_row(row) for row in rows),
            finish_reason=choice.get("finish_reason"),
            stop_reason=choice.get("stop_reason"),
            num_cached_tokens=details.get("cached_tokens"),
        )

    def _salted(self, salt: str) -> str:
        """This scenario's own, of characters that servers take."""
        return sha256(f"{self._salt}/{salt}".encode()).hexdigest()

    # ---- what the server offers -----------------------------------------------------------------

    def _probe(self) -> _Probe:
        if self._served is None:
            self._served = self._find_model()
        key = (self._url, self._served)
        if key not in _probes:
            _probes[key] = self._ask_what_it_offers()
        return _probes[key]

    def _find_model(self) -> str:
        models = _list(self._get("/models"), "data")
        wanted = self._names.get(self._source.name, self._source.name)
        for model in models:
            root = str(model.get("root") or "").rstrip("/")
            if wanted == model.get("id") or root == str(self._source.path):
                return str(model["id"])
        names = ", ".join(str(model.get("id")) for model in models)
        raise ModelUnavailable(f"{self._url} does not serve {wanted}; it serves {names}")

    def _ask_what_it_offers(self) -> _Probe:
        found, missing = {"text"}, {"stepped": "HTTP shows no steps"}
        ids = [5, 6, 7]
        plain = {"temperature": 0.0, "max_tokens": 2}
        extended = {**plain, "return_token_ids": True, "return_tokens_as_token_ids": True}

        def ask(path: str, body: Mapping[str, Any], *features: str) -> Mapping[str, Any]:
            """The first choice joined with the answer; nothing, and the reason noted, if refused."""
            try:
                answer = self._post(path, {"model": self._served, **body})
            except _Refused as refused:
                missing.update(dict.fromkeys(features, f"the server says: {refused.error.message}"))
                return {}
            [choice, *_] = _list(answer, "choices")
            return {**answer, **choice}

        def note(feature: str, shown: object, why: str) -> None:
            if shown:
                found.add(feature)
            else:
                missing.setdefault(feature, why)

        by_ids = ask("/completions", {"prompt": ids, **extended, "logprobs": 2}, "token_ids")
        usage = by_ids.get("usage") or {}
        note("token_ids", by_ids and usage.get("prompt_tokens") == len(ids), "its usage tells another length")
        note("output_ids", by_ids.get("token_ids"), "it returns no token_ids")
        tops = (by_ids.get("logprobs") or {}).get("top_logprobs") or [{}]
        named = all(_ID.fullmatch(str(token)) for token in tops[0])
        note("logprobs", tops[0] and named, "its logprobs do not tell the ids of tokens")
        note("prompt_ids", by_ids.get("prompt_token_ids"), "it returns no prompt_token_ids")
        if "prompt_ids" not in found:
            found.discard("text")
            missing["text"] = "it returns no prompt_token_ids"
        chat = {"messages": [{"role": "user", "content": "w"}], **extended}
        note(
            "chat", ask("/chat/completions", chat, "chat").get("prompt_token_ids"), "it returns no prompt ids"
        )
        rows = ask("/completions", {"prompt": ids, **extended, "prompt_logprobs": 1}, "prompt_logprobs")
        told = rows.get("prompt_logprobs")
        note("prompt_logprobs", told and len(told) == len(ids), "it returns no prompt_logprobs")
        if {"token_ids", "prompt_logprobs"} <= found:
            found.add("forced_prompt")
        if "output_ids" in found:
            found |= _EXTENSIONS
        cached = []
        for salt in map(self._salted, ("one", "one", "other")):
            again = ask("/completions", {"prompt": ids * 64, **plain, "cache_salt": salt}, "prefix_cache")
            details = (again.get("usage") or {}).get("prompt_tokens_details") or {}
            cached.append(details.get("cached_tokens"))
        note("prefix_cache", cached[1] and not cached[2], _why_no_cache(cached))
        picture = Image.new("RGB", (64, 48), (200, 30, 30))
        parts = [{"type": "image_url", "image_url": {"url": _data_url(picture)}}]
        seen = ask(
            "/chat/completions", {**chat, "messages": [{"role": "user", "content": parts}]}, "image"
        ).get("prompt_token_ids")
        note("image", seen, "it returns no prompt ids")
        if "image" in found:
            small = {**chat, "messages": [{"role": "user", "content": parts}]}
            settings = {"mm_processor_kwargs": {"do_convert_rgb": True}}
            heeded = ask("/chat/completions", {**small, **settings}, "media_settings")
            note("media_settings", heeded, "it refuses settings of the image processor")
        found.discard("prompt_ids")
        missing.pop("prompt_ids", None)
        return _Probe(frozenset(found), missing, self._version())

    def _version(self) -> str:
        root = self._url.removesuffix("/v1")
        try:
            answer = json.loads(self._fetch(f"{root}/version"))
        except (ServerFailed, _Refused, ValueError):
            return "unknown"
        return str(answer.get("version", "unknown")) if isinstance(answer, Mapping) else "unknown"

    def _counters(self) -> dict[str, float]:
        """Sums of the server's /metrics by name; nothing where it has none."""
        try:
            text = self._fetch(f"{self._url.removesuffix('/v1')}/metrics").decode()
        except (ServerFailed, _Refused, UnicodeDecodeError):
            return {}
        sums: dict[str, float] = {}
        for name, value in _METRIC.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    @staticmethod
    def _counted(
        output: EngineOutput, before: Mapping[str, float], after: Mapping[str, float]
    ) -> EngineOutput:
        """The only request's share of the server's counters is all that they moved."""

        def moved(name: str) -> int | None:
            return int(after[name] - before.get(name, 0.0)) if name in after else None

        hits = moved("vllm:prefix_cache_hits_total")
        cached = hits if output.num_cached_tokens is None else output.num_cached_tokens
        return replace(output, num_cached_tokens=cached, num_preemptions=moved("vllm:num_preemptions_total"))

    # ---- HTTP -----------------------------------------------------------------------------------

    def _get(self, path: str) -> Mapping[str, Any]:
        return _json(self._fetch(self._url + path))

    def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return _json(self._fetch(self._url + path, json.dumps(body).encode()))

    def _fetch(self, url: str, data: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            kind, message = _told(error)
            if error.code in _CLIENT_FAULTS:
                raise _Refused(EngineError("ValueError", message)) from error
            if error.code < 500:
                raise _Refused(EngineError(kind, f"HTTP {error.code}: {message}")) from error
            raise ServerFailed(f"{url}: HTTP {error.code}: {kind}: {message}") from error
        except TimeoutError as error:
            raise ServerFailed(f"{url} did not answer within {self._timeout:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ServerFailed(f"{url} did not answer within {self._timeout:g} s") from error
            raise ServerFailed(f"{url} cannot be reached: {error.reason}") from error


class _Refused(Exception):
    """The server refused one request; the others may be fine."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(error.message)
        self.error = error


_ID = re.compile(r"token_id:(\d+)")
_METRIC = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def _json(raw: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(raw)
    except ValueError as error:
        raise ServerFailed(f"the answer is no JSON: {raw[:80]!r}") from error
    if not isinstance(answer, Mapping):
        raise ServerFailed(f"the answer is no JSON object: {raw[:80]!r}")
    return answer


def _list(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = answer.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ServerFailed(f"the answer has no {name}: {json.dumps(answer)[:120]}")
    return found


def _told(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Type and message of an error's body, in the form of OpenAI or as it is."""
    raw = error.read().decode(errors="replace")
    try:
        body = json.loads(raw)
    except ValueError:
        body = {}
    inner = body.get("error", body) if isinstance(body, Mapping) else {}
    inner = inner if isinstance(inner, Mapping) else {"message": str(inner)}
    return str(inner.get("type") or error.reason), str(inner.get("message") or raw or error.reason)


def _messages(request: EngineRequest) -> list[dict[str, Any]]:
    media = iter(request.media)

    def content(value: Any) -> Any:
        if isinstance(value, str):
            return value
        return [part if part["type"] == "text" else picture(next(media).paths[0]) for part in value]

    def picture(path: Any) -> dict[str, Any]:
        kind = "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else path.suffix.lower().removeprefix(".")
        data = base64.b64encode(path.read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}

    return [{**message, "content": content(message["content"])} for message in request.chat or ()]


def _data_url(picture: Image.Image) -> str:
    raw = io.BytesIO()
    picture.save(raw, "PNG")
    return f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"


def _why_no_cache(cached: Sequence[int | None]) -> str:
    """Why hits cannot be judged, from the counts of a prompt, its copy, and its copy under another salt."""
    if cached[1] is None:
        return "its usage tells no cached_tokens"
    if not cached[1]:
        return "it reused nothing of an equal prompt"
    return "it heeds no cache_salt, so what other scenarios left in its cache cannot be kept apart"


def _logprobs(
    told: Any, tokens: Sequence[int] | None, asked: int
) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    """Lists of a completion's or a chat's logprobs whose tokens are written "token_id:5"."""
    if not isinstance(told, Mapping) or tokens is None:
        return None
    rows: list[dict[int, float]] = []
    if told.get("content") is not None:
        for item in told["content"]:
            entries = [*item.get("top_logprobs", ())[: max(asked, 0) or None], item]
            rows.append({_token(e["token"]): float(e["logprob"]) for e in entries})
    else:
        chosen = told.get("token_logprobs") or []
        for token, value, top in zip(tokens, chosen, told.get("top_logprobs") or [], strict=False):
            rows.append({**{_token(t): float(v) for t, v in (top or {}).items()}, token: float(value)})
    return tuple(
        tuple(TokenLogprob(t, v) for t, v in sorted(row.items(), key=lambda item: -item[1])) for row in rows
    )


def _token(text: str) -> int:
    match = _ID.fullmatch(text)
    if match is None:
        raise ServerFailed(f"asked for ids of tokens, the logprobs have {text!r}")
    return int(match[1])


def _prompt_row(row: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """{"5": {"logprob": …, "rank": …}, …} → most likely first."""
    entries = [TokenLogprob(int(t), float(e["logprob"]), e.get("rank")) for t, e in row.items()]
    return tuple(sorted(entries, key=lambda e: (-e.logprob, e.rank or 0)))
