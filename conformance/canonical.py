"""The canonical form of a request: exactly what decides the greedy truth, and nothing else.

Two requests with the same canonical form have the same golden record, whatever scenario, engine
option, sampling detail or name they come from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DTYPES", "CanonicalError", "canonical_request", "media_parts", "parse_canonical", "request_key"]

#: Weights the truth may be computed from.
DTYPES = ("float32", "bfloat16")

_SOURCES = ("text", "chat", "messages", "token_ids")
_FIELDS = {
    "model",
    "dtype",
    "prompt",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "prompt_logprobs",
    "mm_processor_kwargs",
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class CanonicalError(ValueError):
    """A request has no canonical form: a field is unknown, missing, or of the wrong type."""


def canonical_request(
    *,
    model: str,
    prompt: Mapping[str, Any],
    max_tokens: int,
    dtype: str = "float32",
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    prompt_logprobs: bool = False,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the canonical form.

    Args:
        prompt: exactly one of `{"text": str}`, `{"token_ids": [int, …]}`, `{"chat": [part, …]}`
            (one user message made of `{"text": str}` parts) or `{"messages": [message, …]}` with
            `{"role": str, "content": str | [part, …]}`. A list of messages under "chat" is taken
            as "messages". Adjacent text parts are joined without a separator. A part may also be
            `{"image": digest}` or `{"video": {"frames": [digest, …], "fps": number}}`, a digest
            being "sha256:" and the SHA-256 of the file. Text and token ids take such parts beside
            them, under "media", in the order of their placeholders.
        prompt_logprobs: whether the truth about prompt positions is wanted too.
        mm_processor_kwargs: settings of the image processor for this request.

    Raises:
        CanonicalError: naming the field, the value and what is allowed.
    """
    if not isinstance(model, str) or not model:
        raise CanonicalError(f"model must be a name, got {model!r}")
    if dtype not in DTYPES:
        raise CanonicalError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    for name, flag in (("ignore_eos", ignore_eos), ("prompt_logprobs", prompt_logprobs)):
        if not isinstance(flag, bool):
            raise CanonicalError(f"{name} must be true or false, got {flag!r}")
    request = {
        "model": model,
        "dtype": dtype,
        "prompt": _prompt(prompt),
        "max_tokens": _integer("max_tokens", max_tokens, low=1),
        "ignore_eos": ignore_eos,
        "stop_token_ids": sorted(set(_token_ids("stop_token_ids", stop_token_ids))),
        "prompt_logprobs": prompt_logprobs,
    }
    settings = _settings(mm_processor_kwargs)
    # Requests without pictures keep the form, and so the key, that they had before there were any.
    return request | ({"mm_processor_kwargs": settings} if settings else {})


def parse_canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check plain data (from a file) and return its canonical form; idempotent.

    Raises:
        CanonicalError: also for unknown fields and for a missing model, prompt or max_tokens.
    """
    unknown = sorted(set(values) - _FIELDS)
    if unknown:
        raise CanonicalError(f"unknown field {', '.join(map(repr, unknown))}; known: {sorted(_FIELDS)}")
    missing = sorted({"model", "prompt", "max_tokens"} - set(values))
    if missing:
        raise CanonicalError(f"missing field {', '.join(map(repr, missing))}")
    return canonical_request(**values)


def request_key(request: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of the canonical form's JSON: sorted names, no spaces, ASCII."""
    text = json.dumps(parse_canonical(request), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def media_parts(prompt: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pictures and videos of a canonical prompt, in its order."""
    if "messages" not in prompt:
        return list(prompt.get("media", ()))
    contents = [message["content"] for message in prompt["messages"]]
    return [
        part for content in contents if not isinstance(content, str) for part in content if "text" not in part
    ]


def _prompt(prompt: Mapping[str, Any]) -> dict[str, Any]:
    names = set(prompt) - {"media"} if isinstance(prompt, Mapping) else set()
    if len(names) != 1 or not names <= set(_SOURCES):
        raise CanonicalError(f"prompt must hold exactly one of {', '.join(_SOURCES)}, got {prompt!r}")
    (kind,) = names
    value = prompt[kind]
    if "media" in prompt and kind in ("chat", "messages"):
        raise CanonicalError(
            f"media belong into the parts of a {kind}; only text and token_ids have them beside"
        )
    media = {"media": _media(prompt["media"])} if "media" in prompt else {}
    if kind == "text":
        if not isinstance(value, str):
            raise CanonicalError(f"prompt text must be a string, got {value!r}")
        return {"text": value, **media}
    if kind == "token_ids":
        token_ids = _token_ids("prompt token_ids", value)
        if not token_ids:
            raise CanonicalError("prompt token_ids must hold at least one id, got []")
        return {"token_ids": token_ids, **media}
    if not _is_list(value) or not value:
        raise CanonicalError(f"prompt {kind} must be a list that is not empty, got {value!r}")
    if kind == "chat" and not any(isinstance(item, Mapping) and "role" in item for item in value):
        value = [{"role": "user", "content": value}]
    return {"messages": [_message(message) for message in value]}


def _media(value: Any) -> list[dict[str, Any]]:
    if not _is_list(value) or not value:
        raise CanonicalError(f"prompt media must be a list that is not empty, got {value!r}")
    return [_media_part(part) for part in value]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise CanonicalError(f"a message must hold exactly role and content, got {message!r}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise CanonicalError(f"a message's role must be a string such as 'user', got {role!r}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not _is_list(content) or not content:
        raise CanonicalError(f"a message's content must be text or a list of parts, got {content!r}")
    parts: list[dict[str, Any]] = []
    for part in content:
        one = _part(part)
        if "text" in one and parts and "text" in parts[-1]:
            parts[-1] = {"text": parts[-1]["text"] + one["text"]}
        else:
            parts.append(one)
    if all("text" in part for part in parts):
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    if isinstance(part, Mapping) and set(part) == {"text"} and isinstance(part["text"], str):
        return {"text": part["text"]}
    return _media_part(part)


def _media_part(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and set(part) == {"image"}:
        return {"image": _digest(part["image"])}
    if isinstance(part, Mapping) and set(part) == {"video"}:
        video = part["video"]
        if isinstance(video, Mapping) and {"frames"} <= set(video) <= {"frames", "fps"}:
            frames = video["frames"]
            if _is_list(frames) and frames:
                return {"video": {"frames": [_digest(frame) for frame in frames], **_fps(video.get("fps"))}}
        raise CanonicalError(f"a video must be {{frames: [file, …], fps: number}}, got {video!r}")
    raise CanonicalError(
        f"a content part must be text, {{text: …}}, {{image: …}} or {{video: …}}, got {part!r}"
    )


def _fps(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CanonicalError(f"fps must be a number above 0, got {value!r}")
    return {"fps": float(value)}


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise CanonicalError(f"a picture must be named by its content, 'sha256:…' in hex, got {value!r}")
    return value


def _settings(values: Any) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CanonicalError(f"mm_processor_kwargs must be a mapping of names, got {values!r}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CanonicalError(f"mm_processor_kwargs must be plain data, got {values!r}") from error
    return plain


def _token_ids(name: str, value: Any) -> list[int]:
    if not _is_list(value):
        raise CanonicalError(f"{name} must be a list of token ids, got {value!r}")
    return [_integer(name, item, low=0) for item in value]


def _integer(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise CanonicalError(f"{name} must be an integer of at least {low}, got {value!r}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
