"""The canonical form of a request: exactly what decides the greedy truth, and nothing else.

Two requests with the same canonical form have the same golden record, whatever scenario, engine
option, sampling detail or name they come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DTYPES", "CanonicalError", "canonical_request", "parse_canonical", "request_key"]

#: Weights the truth may be computed from.
DTYPES = ("float32", "bfloat16")

_SOURCES = ("text", "chat", "messages", "token_ids")
_FIELDS = {"model", "dtype", "prompt", "max_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs"}


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
) -> dict[str, Any]:
    """Build the canonical form.

    Args:
        prompt: exactly one of `{"text": str}`, `{"token_ids": [int, …]}`, `{"chat": [part, …]}`
            (one user message made of `{"text": str}` parts) or `{"messages": [message, …]}` with
            `{"role": str, "content": str | [part, …]}`. A list of messages under "chat" is taken
            as "messages". Adjacent text parts are joined without a separator.
        prompt_logprobs: whether the truth about prompt positions is wanted too.

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
    return {
        "model": model,
        "dtype": dtype,
        "prompt": _prompt(prompt),
        "max_tokens": _integer("max_tokens", max_tokens, low=1),
        "ignore_eos": ignore_eos,
        "stop_token_ids": sorted(set(_token_ids("stop_token_ids", stop_token_ids))),
        "prompt_logprobs": prompt_logprobs,
    }


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


def _prompt(prompt: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(prompt, Mapping) or len(prompt) != 1 or next(iter(prompt)) not in _SOURCES:
        raise CanonicalError(f"prompt must hold exactly one of {', '.join(_SOURCES)}, got {prompt!r}")
    kind, value = next(iter(prompt.items()))
    if kind == "text":
        if not isinstance(value, str):
            raise CanonicalError(f"prompt text must be a string, got {value!r}")
        return {"text": value}
    if kind == "token_ids":
        token_ids = _token_ids("prompt token_ids", value)
        if not token_ids:
            raise CanonicalError("prompt token_ids must hold at least one id, got []")
        return {"token_ids": token_ids}
    if not _is_list(value) or not value:
        raise CanonicalError(f"prompt {kind} must be a list that is not empty, got {value!r}")
    if kind == "chat" and not any(isinstance(item, Mapping) and "role" in item for item in value):
        value = [{"role": "user", "content": value}]
    return {"messages": [_message(message) for message in value]}


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise CanonicalError(f"a message must hold exactly role and content, got {message!r}")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise CanonicalError(f"a message's role must be a string such as 'user', got {role!r}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not _is_list(content) or not content:
        raise CanonicalError(f"a message's content must be text or a list of parts, got {content!r}")
    return {"role": role, "content": "".join(_text_part(part) for part in content)}


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and set(part) == {"text"} and isinstance(part["text"], str):
        return part["text"]
    raise CanonicalError(f"a content part must be text or {{text: …}}, got {part!r}")


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
