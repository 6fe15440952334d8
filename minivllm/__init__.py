"""minivllm: a compact paged-attention inference engine.

Public names are imported lazily, so that ``import minivllm.cache`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.config import EngineConfig
    from minivllm.engine import LLMEngine
    from minivllm.errors import MiniVLLMError
    from minivllm.llm import LLM
    from minivllm.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "MiniVLLMError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "LLM": "minivllm.llm",
    "CompletionOutput": "minivllm.request",
    "EngineConfig": "minivllm.config",
    "LLMEngine": "minivllm.engine",
    "Logprob": "minivllm.request",
    "MiniVLLMError": "minivllm.errors",
    "RequestOutput": "minivllm.request",
    "SamplingParams": "minivllm.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
