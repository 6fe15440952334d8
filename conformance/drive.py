"""Drives one engine through the steps of one pass and notes what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from conformance.adapters.base import (
    Capabilities,
    Controlled,
    EngineAdapter,
    EngineError,
    EngineOutput,
    EngineRequest,
    Stepped,
    Swapping,
    Traced,
    Weights,
    request_of,
    sequence_names,
)
from conformance.adapters.received import (
    received,
    received_error,
    received_events,
    received_heads,
    received_pool,
)
from conformance.history import Operation
from conformance.prompts import filler_prompt
from conformance.scenario import Step

__all__ = ["ANCILLARY", "Drive", "NoProgress", "StepFailed", "filler", "step_features"]

#: Names of requests that only keep the others company start with this; they are not judged.
ANCILLARY = "~"

#: The feature each kind of step needs; the other kinds need none.
_FEATURES = {
    "advance": "stepped",
    "abort": "stepped",
    "fragment": "stepped",
    "preempt": "preempt",
    "swap": "swap",
    "reset_cache": "prefix_cache",
    "poison": "poison",
    "swap_weights": "update_weights",
}

#: Neighbours that a fragment step shares the pool among, and the most tokens it may hold.
_FRAGMENTS = 4
_LARGEST_FRAGMENTED_POOL = 4096


class NoProgress(RuntimeError):
    """Requests were still unfinished after more steps than any sound schedule needs."""


class StepFailed(RuntimeError):
    """A step of the scenario could not be done, so what follows would prove nothing."""


def step_features(steps: Sequence[Step]) -> set[str]:
    """Features an engine needs for these steps."""
    features = {_FEATURES[step.kind] for step in steps if step.kind in _FEATURES}
    for step in steps:
        if step.kind == "run":
            features |= {"preempt"} if step.argument["preempt"] else set()
            features |= {"poison"} if step.argument["poison"] else set()
    return features | ({"stepped"} if features else set())


def filler(number: int, length: int, max_tokens: int) -> EngineRequest:
    """A neighbour request that generates exactly `max_tokens` tokens unless it is aborted."""
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    # A salt of its own: a neighbour must never share cached blocks with a request that is judged.
    return EngineRequest(
        f"{ANCILLARY}filler{number}",
        sampling,
        prompt_token_ids=filler_prompt(number, length),
        cache_salt="conformance-filler",
    )


@dataclass
class Drive:
    """One engine, already entered, and the notes taken so far.

    Attributes:
        requests: everything that may be submitted, by name.
        options: the engine options in force, for sizes that depend on them.
        preempt_at: after this many engine steps, preempt every judged request. Sequences of one
            request count as requests, by their names.
        operations: the steps done, with their outcomes.
        events: the engine's events, in order.
        live_after: number of judged, unfinished requests after each engine step.
        texts: request → its text after each step in which it changed.
    """

    adapter: EngineAdapter
    capabilities: Capabilities
    requests: Mapping[str, EngineRequest]
    options: Mapping[str, Any]
    preempt_at: int | None = None
    operations: list[Operation] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    live_after: list[int] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, EngineError] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    _submitted: list[str] = field(default_factory=list)
    _pending: list[str] = field(default_factory=list)
    _generated: dict[str, EngineOutput] = field(default_factory=dict)
    _fillers: int = 0

    @property
    def stepped(self) -> Stepped | None:
        """The engine as one that runs step by step, if it declares so."""
        return cast("Stepped", self.adapter) if "stepped" in self.capabilities.features else None

    def execute(self, steps: Sequence[Step]) -> None:
        """Carry out the steps in order.

        Raises:
            NoProgress, StepFailed, and whatever the engine raises.
        """
        for step in steps:
            outcome = _STEPS[step.kind](self, step.argument)
            argument = step.argument
            if step.kind in ("submit", "abort"):  # neighbours are nobody's evidence
                argument = [name for name in argument if not name.startswith(ANCILLARY)]
            self.operations.append(Operation(step.kind, argument, outcome))

    def outputs(self) -> dict[str, EngineOutput]:
        """The latest output of every request submitted."""
        if self.stepped is not None:
            return received(self.stepped.outputs(), self._asked(), "outputs()")
        return dict(self._generated)

    def note_events(self) -> None:
        """Take over the events the engine has collected."""
        if "traced" in self.capabilities.features:
            self.events += received_events(cast("Traced", self.adapter).drain_events())

    # ---- steps; each returns what came of it ----------------------------------------------------

    def submit(self, names: list[str]) -> dict[str, str]:
        for name in names:
            self._submitted += sequence_names(name, self.requests[name].sampling)
            if self.stepped is None:
                self._pending.append(name)
                continue
            error = received_error(self.stepped.submit(self.requests[name]), f"submit(), {name}: the answer")
            if error is not None:
                self.refused[name] = error
        self.note_events()
        return {name: self.refused[name].type for name in names if name in self.refused}

    def expect_error(self, names: list[str]) -> dict[str, str | None]:
        """Submit; the outcome tells the type of each refusal, for a check to judge."""
        self.submit(names)
        if self.stepped is None:
            self._generate(names)
        return {name: self.refused[name].type if name in self.refused else None for name in names}

    def run(self, argument: Mapping[str, Any]) -> dict[str, int]:
        if self.stepped is None:
            count = len(self._pending)
            self._generate(list(self._pending))
            return {"generated": count}
        steps = preempted = poisoned = 0
        limit = self._step_limit()
        while self._unfinished():
            if steps >= limit:
                raise NoProgress(f"still unfinished after {steps} steps: {sorted(self._unfinished())}")
            if steps and argument["preempt"] and steps % argument["period"] == 0:
                preempted += len(self.preempt(argument["preempt"]))
            if argument["poison"]:
                poisoned += self._controlled().poison()
            self._advance()
            steps += 1
        return {"steps": steps, "preempted": preempted, "poisoned": poisoned}

    def advance(self, count: int) -> dict[str, int]:
        done = 0
        while done < count and self._unfinished():
            self._advance()
            done += 1
        if done < count:
            raise StepFailed(f"advance {count}: everything had finished after {done} steps")
        return {"steps": done}

    def abort(self, names: list[str]) -> dict[str, list[str]]:
        live = self._unfinished()
        for name in names:
            if name not in live:
                raise StepFailed(f"abort: request {name!r} had already ended")
            self._must_be_stepped().abort(name)
        self.note_events()
        return {"aborted": names}

    def preempt(self, names: list[str]) -> list[str]:
        """Names that really lost their blocks."""
        return self._take_blocks(names, self._controlled().preempt)

    def swap(self, names: list[str]) -> list[str]:
        """Names that lost their blocks, to host memory if there was room."""
        return self._take_blocks(names, cast("Swapping", self.adapter).swap)

    def reset_cache(self, _: None) -> dict[str, bool]:
        done = self._controlled().reset_prefix_cache()
        self.note_events()
        return {"reset": done}

    def poison(self, _: None) -> dict[str, int]:
        return {"poisoned": self._controlled().poison()}

    def swap_weights(self, names: list[str]) -> dict[str, list[str]]:
        cast("Weights", self.adapter).swap_weights(names[0], names[1])
        return {"swapped": names}

    def fragment(self, _: None) -> dict[str, Any]:
        """Make the order of free blocks irregular: fill the pool with neighbours, drop them out of order."""
        blocks = max(1, (self._pool_blocks() - 1) // _FRAGMENTS)
        length = blocks * self._block_size()
        if length * _FRAGMENTS > _LARGEST_FRAGMENTED_POOL:
            raise StepFailed(
                f"fragment fills the whole pool, and {length * _FRAGMENTS} tokens are too many to be quick: "
                f"give num_kv_blocks, for at most {_LARGEST_FRAGMENTED_POOL} tokens"
            )
        budget = self.options.get("max_num_batched_tokens", 2048)
        steps = _FRAGMENTS * length // budget + 2
        # Long enough to be alive when dropped, short enough to fit the pool alone.
        max_tokens = max(1, min(steps + 1, (_FRAGMENTS - 1) * length))
        fillers = [self.add_filler(max(1, length - 1), max_tokens) for _ in range(_FRAGMENTS)]
        self.submit(fillers)
        refused = [name for name in fillers if name in self.refused]
        if refused:
            raise StepFailed(f"fragment: {self.refused[refused[0]].message}")
        for _step in range(steps):
            self._advance()
        order = [fillers[i] for i in (2, 0, 3, 1)]
        live = self._unfinished()
        for name in order:
            if name in live:
                self._must_be_stepped().abort(name)
        self.note_events()
        return {"steps": steps, "aborted": len(live & set(order)), "blocks_each": blocks}

    # ---- machinery ------------------------------------------------------------------------------

    def _take_blocks(self, names: list[str], take: Callable[[str], bool]) -> list[str]:
        live = self._unfinished()
        wanted = sorted(live) if "every" in names else [name for name in names if name in live]
        fired = [name for name in wanted if not name.startswith(ANCILLARY) and take(name)]
        self.preempted += fired
        self.note_events()
        return fired

    def add_filler(self, length: int, max_tokens: int) -> str:
        """Make one more neighbour request; returns its name."""
        request = filler(self._fillers, length, max_tokens)
        self._fillers += 1
        self.requests = {**self.requests, request.request_id: request}
        return request.request_id

    def _advance(self) -> None:
        self._must_be_stepped().advance()
        self.note_events()
        outputs = self._heads()
        if "streaming" in self.capabilities.features:
            for name, output in outputs.items():
                seen = self.texts.setdefault(name, [])
                if output.text and (not seen or seen[-1] != output.text):
                    seen.append(output.text)
        live = [name for name in self._unfinished(outputs) if not name.startswith(ANCILLARY)]
        self.live_after.append(len(live))
        if self.preempt_at == len(self.live_after):
            self.preempt(["every"])

    def _unfinished(self, outputs: Mapping[str, EngineOutput] | None = None) -> set[str]:
        outputs = self._heads() if outputs is None else outputs
        ended = {name for name, output in outputs.items() if output.finished}
        return {name for name in self._submitted if request_of(name) not in self.refused} - ended

    def _heads(self) -> Mapping[str, EngineOutput]:
        """The latest outputs; what only the end matters for is not looked at in every step."""
        if self.stepped is None:
            return self._generated
        return received_heads(self.stepped.outputs(), self._asked(), "outputs()")

    def _asked(self) -> set[str]:
        return {*self._submitted, *map(request_of, self._submitted)}

    def _generate(self, names: list[str]) -> None:
        answers = self.adapter.generate([self.requests[name] for name in names])
        asked = {one for name in names for one in sequence_names(name, self.requests[name].sampling)}
        for output in received(answers, asked, "generate()").values():
            self._generated[output.request_id] = output
            if output.error is not None and not output.token_ids:
                self.refused[output.request_id] = output.error
        self._pending = [name for name in self._pending if name not in names]
        self.note_events()

    def _step_limit(self) -> int:
        """Far more steps than a sound schedule needs, even at one token per step."""
        total = 0
        for name in self._submitted:
            request = self.requests[request_of(name)]
            prompt = request.prompt_token_ids
            total += 1024 if prompt is None else len(prompt)
            total += int(request.sampling.get("max_tokens") or 1024)
        return 100 + 20 * total

    def _block_size(self) -> int:
        return int(self.options.get("block_size", 16))

    def _pool_blocks(self) -> int:
        if "pool" in self.capabilities.features:
            return received_pool(self._controlled().pool()).total
        return int(self.options.get("num_kv_blocks", 1 + 3 * _FRAGMENTS))

    def _must_be_stepped(self) -> Stepped:
        assert self.stepped is not None, "steps are checked against capabilities before a run"
        return self.stepped

    def _controlled(self) -> Controlled:
        return cast("Controlled", self.adapter)


_STEPS: Mapping[str, Callable[[Drive, Any], Any]] = {
    "submit": Drive.submit,
    "run": Drive.run,
    "advance": Drive.advance,
    "abort": Drive.abort,
    "preempt": Drive.preempt,
    "swap": Drive.swap,
    "reset_cache": Drive.reset_cache,
    "poison": Drive.poison,
    "fragment": Drive.fragment,
    "swap_weights": Drive.swap_weights,
    "expect_error": Drive.expect_error,
}
