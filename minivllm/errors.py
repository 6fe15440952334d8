"""Every error minivllm raises on purpose.

The tree::

    MiniVLLMError
    ├── ConfigError          the engine was asked for something contradictory or out of range
    ├── UnsupportedError     valid, but minivllm does not implement it (says what it would need)
    ├── WeightError          a checkpoint does not hold exactly what the model needs
    ├── RequestError         one request is wrong; the engine keeps serving the others
    │   ├── PromptTooLong    prompt (plus one token to generate) exceeds max_model_len
    │   ├── BadParameter     a sampling parameter is unknown or out of range
    │   ├── BadMedia         an image or video cannot be decoded or placed
    │   ├── DuplicateRequest a request id is already in use
    │   └── UnknownRequest   no live request has this id
    ├── CapacityError        a request can never fit the KV cache, however long it waits
    └── InvariantError       minivllm itself is wrong; please report it

A message states what was wrong, the value, the limit, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "BadMedia",
    "BadParameter",
    "CapacityError",
    "ConfigError",
    "DuplicateRequest",
    "InvariantError",
    "MiniVLLMError",
    "PromptTooLong",
    "RequestError",
    "UnknownRequest",
    "UnsupportedError",
    "WeightError",
]


class MiniVLLMError(Exception):
    """Base class of every error minivllm raises on purpose."""


class ConfigError(MiniVLLMError, ValueError):
    """The engine configuration is contradictory or out of range."""


class UnsupportedError(MiniVLLMError, NotImplementedError):
    """The model or option is valid but not implemented here."""


class WeightError(MiniVLLMError, ValueError):
    """A checkpoint is incomplete, damaged, or does not match the model."""


class RequestError(MiniVLLMError, ValueError):
    """One request cannot be served; other requests are unaffected."""


class PromptTooLong(RequestError):
    """The prompt leaves no room for even one generated token."""


class BadParameter(RequestError):
    """A sampling parameter is unknown, of the wrong type, or out of range."""


class BadMedia(RequestError):
    """An image or video cannot be decoded or placed in the prompt."""


class DuplicateRequest(RequestError):
    """A request with this id is already in the engine."""


class UnknownRequest(RequestError):
    """No live request has this id."""


class CapacityError(MiniVLLMError, ValueError):
    """A request needs more KV blocks than the whole pool has."""


class InvariantError(MiniVLLMError, AssertionError):
    """An internal law was broken: a bug in minivllm, never in the request."""
