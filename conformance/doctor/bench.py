"""What a probe works with: an engine on a small checkpoint, and short requests to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from conformance.adapters.base import (
    Capabilities,
    EngineAdapter,
    EngineOutput,
    EngineRequest,
    ModelSource,
    Stepped,
    sequence_names,
)
from conformance.adapters.received import received
from conformance.runner import EngineFactory

__all__ = ["LONG", "PROMPTS", "Bench", "ProbeFailed", "ids_of"]

#: Ids that every checkpoint of the suite has.
PROMPTS: tuple[tuple[int, ...], ...] = ((3, 20, 11, 27, 5), (9, 8, 7, 6, 5, 4, 3), (13, 21))

#: A prompt longer than four blocks of 16.
LONG = tuple(3 + (7 * i) % 61 for i in range(70))

_TOO_MANY_STEPS = 2000


class ProbeFailed(Exception):
    """An engine does not do what it declares; the message says what came instead."""


@dataclass(frozen=True)
class Bench:
    """An engine to be probed: every method works on an adapter of its own unless it is given one."""

    factory: EngineFactory
    source: ModelSource
    capabilities: Capabilities
    options: Mapping[str, Any]

    def has(self, feature: str) -> bool:
        return feature in self.capabilities.features

    def make(self, **options: Any) -> EngineAdapter:
        """A new adapter, not entered.

        Raises:
            ProbeFailed: the engine does not honour one of these options, so nothing could be seen.
        """
        if deaf := sorted(set(options) - self.capabilities.options):
            raise ProbeFailed(f"capabilities().options has no {', '.join(deaf)}, so it cannot be asked for")
        return self.factory(self.source, {**self.options, **options})

    def request(self, name: str = "r", prompt: Sequence[int] = PROMPTS[0], **sampling: Any) -> EngineRequest:
        """A greedy request of six tokens unless told otherwise; as text where the engine takes no ids."""
        given = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **sampling}
        if not self.has("token_ids"):
            if self.has("text"):
                return EngineRequest(name, given, text="The red boat is on the lake.")
            return EngineRequest(name, given, chat=({"role": "user", "content": "Where is the lamp?"},))
        return EngineRequest(name, given, tuple(prompt))

    def generate(
        self, requests: Sequence[EngineRequest], adapter: EngineAdapter | None = None, **options: Any
    ) -> dict[str, EngineOutput]:
        """Answers by sequence name; every one must be there, finished, and without an error."""
        if adapter is None:
            with self.make(**options) as own:
                return self.generate(requests, own)
        names = [name for r in requests for name in sequence_names(r.request_id, r.sampling)]
        return _whole(received(adapter.generate(list(requests)), names, "generate()"), names)

    def one(self, request: EngineRequest, **options: Any) -> EngineOutput:
        """The answer to one request."""
        return self.generate([request], **options)[request.request_id]

    def finish(self, adapter: EngineAdapter, names: Sequence[str]) -> dict[str, EngineOutput]:
        """Step to the end; the answers of these sequences."""
        stepped = cast("Stepped", adapter)
        for _step in range(_TOO_MANY_STEPS):
            if not stepped.advance():
                break
        else:
            raise ProbeFailed(f"advance() still says there is work after {_TOO_MANY_STEPS} steps")
        outputs = {o.request_id: o for o in stepped.outputs()}
        return _whole(outputs, names)

    def submit(self, adapter: EngineAdapter, request: EngineRequest) -> None:
        """Queue a request that must not be refused."""
        refused = cast("Stepped", adapter).submit(request)
        if refused is not None:
            raise ProbeFailed(f"submit() refuses {request.request_id}: {refused.type}: {refused.message}")

    def eos(self) -> int | None:
        """An id that ends a text of this checkpoint, if its configuration names one."""
        for name in ("generation_config.json", "config.json"):
            path = Path(self.source.path) / name
            if path.is_file():
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
                if value is not None:
                    return int(value[0] if isinstance(value, list) else value)
        return None


def ids_of(output: EngineOutput) -> tuple[int, ...]:
    """The generated ids.

    Raises:
        ProbeFailed: the output has none.
    """
    if not output.token_ids:
        raise ProbeFailed(f"the output of {output.request_id} has no token_ids")
    return tuple(output.token_ids)


def _whole(outputs: Mapping[str, EngineOutput], names: Sequence[str]) -> dict[str, EngineOutput]:
    for name in names:
        if name not in outputs:
            raise ProbeFailed(f"no output for {name}; there are {sorted(outputs)}")
        output = outputs[name]
        if output.error is not None:
            raise ProbeFailed(f"{name} is refused: {output.error.type}: {output.error.message}")
        if not output.finished:
            raise ProbeFailed(f"{name} is not finished")
    return {name: outputs[name] for name in names}
