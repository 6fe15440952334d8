"""End to end: random workloads on a whole engine, where every answer must be the solo one.

Works through an engine adapter (`conformance.adapters.base`), so the model, the sampler, the copies
and the text are in it too. An engine that promises bits is held to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from conformance.adapters.base import (
    Controlled,
    EngineAdapter,
    EngineOutput,
    EngineRequest,
    ModelSource,
    Stepped,
    Swapping,
    Traced,
    request_of,
    sequence_names,
)
from conformance.fuzz.laws import broken

__all__ = ["ACTIONS", "EndToEnd", "Job", "Workload"]

#: What a script may do between two steps, and "step" itself. Those but "submit" and "step" need features.
ACTIONS = ("submit", "step", "abort", "preempt", "swap", "reset", "poison")

#: Steps an engine may take per token of the whole workload, preempted again and again.
_STEPS_PER_TOKEN = 8


@dataclass(frozen=True, slots=True)
class Job:
    """One request to make.

    Attributes:
        prompt: its token ids; with `follows`, they continue what that job's request answers alone.
        sampling: as in `EngineRequest`.
        follows: number of an earlier job.
    """

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]
    cache_salt: str | None = None
    priority: int = 0
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """An engine's options, requests, and a script of (action, which request)."""

    options: Mapping[str, Any]
    jobs: tuple[Job, ...]
    script: tuple[tuple[str, int], ...]


@dataclass
class EndToEnd:
    """Runs workloads on fresh engines and compares each answer with the request's alone.

    Args:
        factory, source: the engine and its checkpoint.
        ample: options of the engine that serves one request alone, with room for everything.
        longest: most tokens of a prompt; what follows another job keeps its end.

    Attributes:
        seen: events of all workloads so far, by kind, and refusals.
    """

    factory: Callable[[ModelSource, Mapping[str, Any]], EngineAdapter]
    source: ModelSource
    ample: Mapping[str, Any]
    longest: int = 24
    seen: Counter[str] = field(default_factory=Counter)
    _solo: dict[str, Sequence[EngineOutput]] = field(default_factory=dict)

    def check(self, workload: Workload) -> None:
        """Run one workload.

        Raises:
            LawBroken: an answer, a leak or too many steps.
        """
        requests = self._requests(workload.jobs)
        with self.factory(self.source, workload.options) as adapter:
            run = _Run(adapter, requests, self.seen)
            for action, number in workload.script:
                run.act(action, number)
            run.drain()
            run.note_events()
            outputs = {output.request_id: output for output in run.stepped.outputs()}
            bits = adapter.capabilities().features >= {"bitwise"}
            for request in run.submitted:
                names = sequence_names(request.request_id, request.sampling)
                for name, alone in zip(names, self.solo(request), strict=True):
                    _compare(name, outputs[name], alone, aborted=name in run.aborted, bits=bits)
            if "pool" in adapter.capabilities().features:
                pool = cast("Controlled", adapter).pool()
                if pool.in_use or pool.free + pool.cached != pool.total:
                    broken("leak", f"the engine is empty, and its pool stands at {pool}")

    def solo(self, request: EngineRequest) -> Sequence[EngineOutput]:
        """What the request is answered when it is alone, one output per sequence."""
        alone = replace(request, request_id="solo", cache_salt=None, priority=0)
        key = repr(alone)
        if key not in self._solo:
            with self.factory(self.source, self.ample) as adapter:
                self._solo[key] = adapter.generate([alone])
        return self._solo[key]

    def _requests(self, jobs: Sequence[Job]) -> list[EngineRequest]:
        requests: list[EngineRequest] = []
        for number, job in enumerate(jobs):
            prompt = job.prompt
            if job.follows is not None:
                earlier = requests[job.follows]
                answer = self.solo(earlier)[0].token_ids or ()
                prompt = (*(earlier.prompt_token_ids or ()), *answer, *prompt)[: self.longest]
            requests.append(
                EngineRequest(
                    f"r{number}",
                    job.sampling,
                    prompt_token_ids=prompt,
                    cache_salt=job.cache_salt,
                    priority=job.priority,
                )
            )
        return requests


class _Run:
    """One engine in the middle of a workload."""

    def __init__(self, adapter: EngineAdapter, requests: Sequence[EngineRequest], seen: Counter[str]) -> None:
        self.adapter, self.stepped = adapter, cast("Stepped", adapter)
        self.submitted: list[EngineRequest] = []
        self.aborted: set[str] = set()
        self._queue = list(requests)
        self._seen = seen
        features = adapter.capabilities().features
        self._allowed = {"submit", "step"}
        needs = {"abort": "stepped", "preempt": "preempt", "swap": "swap", "poison": "poison"}
        self._allowed |= {action for action, feature in needs.items() if feature in features}
        self._allowed |= {"reset"} if "prefix_cache" in features else set()

    def act(self, action: str, number: int) -> None:
        """One line of the script; what the engine cannot do, or nobody is there for, is left out."""
        if action not in self._allowed:
            return
        if action == "submit":
            self._submit()
        elif action == "step":
            self.stepped.advance()
        elif action == "reset":
            cast("Controlled", self.adapter).reset_prefix_cache()
        elif action == "poison":
            cast("Controlled", self.adapter).poison()
        elif live := self._live():
            self._disturb(action, live[number % len(live)])

    def drain(self) -> None:
        """Submit what is left and step until nothing is."""
        while self._queue:
            self._submit()
        tokens = sum(
            (len(r.prompt_token_ids or ()) + r.sampling["max_tokens"]) * (r.sampling.get("n") or 1)
            for r in self.submitted
        )
        limit = 16 + _STEPS_PER_TOKEN * tokens
        for _ in range(limit):
            if not self.stepped.advance():
                return
        broken("progress", f"unfinished after {limit} steps: {self._live()}")

    def note_events(self) -> None:
        if "traced" in self.adapter.capabilities().features:
            events = cast("Traced", self.adapter).drain_events()
            self._seen.update(str(event["event"]) for event in events)

    def _submit(self) -> None:
        if not self._queue:
            return
        request = self._queue.pop(0)
        if self.stepped.submit(request) is None:
            self.submitted.append(request)
        else:
            self._seen["refused"] += 1

    def _live(self) -> list[str]:
        """Sequences to act on; before its first token a request's others do not exist yet."""
        return [
            output.request_id
            for output in self.stepped.outputs()
            if not output.finished
            and (output.token_ids or output.request_id == request_of(output.request_id))
        ]

    def _disturb(self, action: str, name: str) -> None:
        if action == "preempt":
            cast("Controlled", self.adapter).preempt(name)
        elif action == "swap":
            cast("Swapping", self.adapter).swap(name)
        else:
            self.stepped.abort(name)
            self.aborted |= {o.request_id for o in self.stepped.outputs() if o.finish_reason == "abort"}


def _compare(name: str, got: EngineOutput, alone: EngineOutput, *, aborted: bool, bits: bool) -> None:
    if not got.finished:
        broken("progress", f"{name} never finished")
    mine, theirs = got.token_ids or (), alone.token_ids or ()
    if aborted:
        if got.finish_reason != "abort" or mine != theirs[: len(mine)]:
            broken("solo", f"{name} was aborted as {got.finish_reason} after {mine}; alone: {theirs}")
        return
    for what in ("token_ids", "text", "finish_reason", "stop_reason"):
        if getattr(got, what) != getattr(alone, what):
            broken("solo", f"{what} of {name} is {getattr(got, what)!r}; alone: {getattr(alone, what)!r}")
    if bits and repr(got.logprobs) != repr(alone.logprobs):
        broken("solo", f"logprobs of {name} are {got.logprobs}; alone: {alone.logprobs}")
