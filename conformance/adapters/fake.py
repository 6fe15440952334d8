"""A toy engine in pure Python, right or wrong on purpose, to try the harness on.

Its model is arithmetic (`conformance.adapters.fake_model`). Contexts of golden records it is given
answer with the record's logits instead, so it passes whatever a record asks. `FAULTS` lists the
ways in which it can be broken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    ModelSource,
    PoolState,
    TokenLogprob,
)
from conformance.adapters.fake_model import EOS, VOCAB, Logits, entries, replaying, toy_logits
from conformance.records import GoldenRecord

__all__ = ["FAULTS", "FakeEngine", "fake_engine", "minimal_engine"]

#: Ways to be wrong → what goes wrong.
FAULTS: Mapping[str, str] = {
    "wrong_token": "the fourth token is another than the logits say",
    "noisy_logits": "every logit is off by a hundredth",
    "nan_logits": "one logit of the third row is NaN",
    "early_stop": "generation ends one token early",
    "leaked_block": "a finished request's last block is never freed",
    "batch_leak": "a neighbour in the batch shifts the logits",
    "lost_on_preempt": "a preempted request forgets its last prompt token",
    "stale_prefix": "a cached prefix is matched by its length alone",
    "chunk_seam": "the logits depend on how the prompt was split",
    "poison_leak": "poisoned memory reaches the logits",
    "placement_leak": "the logits depend on whether a request's blocks lie side by side",
    "crash": "the third step raises",
    "hang": "nothing is ever scheduled",
}

#: What the toy does; named one by one, so that a new feature of the suite is not declared unseen.
_DECLARED = frozenset(
    {
        "token_ids",
        "output_ids",
        "logprobs",
        "chosen_logprobs",
        "prompt_logprobs",
        "forced_decode",
        "forced_prompt",
        "stepped",
        "preempt",
        "prefix_cache",
        "chunked_prefill",
        "block_size",
        "pool_size",
        "poison",
        "traced",
        "stages",
        "pool",
        "bitwise",
    }
)


@dataclass
class _Live:
    """One request inside the toy."""

    request: EngineRequest
    prompt: list[int]
    arrival: int
    output: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    computed: int = 0
    cached: int = -1
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    seams: int = 0
    poisoned: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class FakeEngine:
    """The toy as an adapter: tokens, numbers, steps and blocks, but no text and no sampling.

    See `conformance.adapters.base` for the methods.

    Args:
        logits: its model.
        fault: a key of `FAULTS`, or None for the right one.
        without: features it does not declare.
    """

    def __init__(
        self,
        model: ModelSource,  # noqa: ARG002  (every adapter takes one; the toy has no weights)
        options: Mapping[str, Any],
        logits: Logits = toy_logits,
        fault: str | None = None,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self._model, self._fault, self._without = logits, fault, without
        self._options = {"block_size": 16, "num_kv_blocks": 256, "max_num_batched_tokens": 64, **options}
        self._requests: dict[str, _Live] = {}
        self._free = list(range(1, self._options["num_kv_blocks"]))
        if "placement" in self._options:
            random.Random(self._options["placement"]).shuffle(self._free)
        self._index: dict[tuple[Any, ...], None] = {}
        self._events: list[Mapping[str, Any]] = []
        self._steps = 0
        self._leaked = 0

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.clear()

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="fake",
            version="1",
            dtypes=("float32",),
            features=_DECLARED - self._without,
            options=frozenset(
                {
                    "block_size",
                    "num_kv_blocks",
                    "max_num_batched_tokens",
                    "enable_prefix_caching",
                    "enable_chunked_prefill",
                    "batch_invariant",
                    "attention_backend",
                    "threads",
                    "placement",
                }
            ),
            missing=dict.fromkeys(self._without, "left out for a test"),
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        refused = {r.request_id: error for r in requests if (error := self.submit(r)) is not None}
        while self.advance():
            pass
        made = {output.request_id: output for output in self.outputs()}
        return [
            made[r.request_id]
            if r.request_id in made
            else EngineOutput(r.request_id, "", True, error=refused[r.request_id])
            for r in requests
        ]

    # ---- steps ----------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> EngineError | None:
        prompt = list(request.prompt_token_ids or ())
        most = (self._options["num_kv_blocks"] - 1) * self._options["block_size"]
        if not prompt:
            return EngineError("BadParameter", "the prompt is empty: give at least one token")
        if len(prompt) + request.sampling["max_tokens"] > most:
            return EngineError("CapacityError", f"the request needs more than the pool's {most} tokens")
        self._requests[request.request_id] = _Live(request, prompt, len(self._requests))
        self._tell("submitted", request_id=request.request_id, num_prompt_tokens=len(prompt))
        return None

    def advance(self) -> bool:
        """Compute up to the budget, oldest first; requests that find no blocks wait."""
        if self._fault == "crash" and self._steps == 2:
            raise RuntimeError("the toy crashed, as it was told to")
        budget = int(self._options["max_num_batched_tokens"])
        plan: list[tuple[_Live, int, int]] = []
        for live in () if self._fault == "hang" else self._unfinished():
            if budget > 0 and self._admit(live):
                size = min(budget, len(live.tokens) - live.computed)
                plan.append((live, live.computed, size))
                budget -= size
        scheduled = tuple((live.request.request_id, start, size) for live, start, size in plan)
        self._tell("planned", step=self._steps, scheduled=scheduled)
        self._steps += 1
        for live, start, size in plan:
            live.computed = start + size
            if live.computed == len(live.tokens):
                self._sample(live, len(plan))
            else:
                live.seams += 1
        return bool(self._unfinished())

    def abort(self, request_id: str) -> None:
        live = self._requests[request_id]
        live.finish_reason = "abort"
        self._release(live)
        self._tell("aborted", request_id=request_id)

    def outputs(self) -> list[EngineOutput]:
        return [self._output(live) for live in self._requests.values()]

    # ---- hooks ----------------------------------------------------------------------------------

    def preempt(self, request_id: str) -> bool:
        live = self._requests[request_id]
        if not live.blocks:
            return False
        self._tell("preempted", request_id=request_id, mode="recompute", num_computed_tokens=live.computed)
        self._release(live)
        live.computed, live.preemptions = 0, live.preemptions + 1
        return True

    def reset_prefix_cache(self) -> bool:
        if any(live.blocks for live in self._requests.values()):
            return False
        self._index.clear()
        return True

    def poison(self) -> int:
        for live in self._unfinished():
            live.poisoned = True
        return len(self._free) * int(self._options["block_size"]) + 1

    def pool(self) -> PoolState:
        held = sum(len(live.blocks) for live in self._requests.values()) + self._leaked
        return PoolState(total=len(self._free) + held, free=len(self._free), cached=0, in_use=held)

    def drain_events(self) -> list[Mapping[str, Any]]:
        events, self._events = self._events, []
        return events

    def stages(self, request_id: str) -> Mapping[str, NDArray[np.generic]]:
        live = self._requests[request_id]
        shown = {"logits": np.stack(live.rows)} if live.rows else {}
        if "prompt_logits" in live.request.capture and len(live.prompt) > 1:
            shown["prompt_logits"] = np.stack(self._prompt_rows(live))
        return shown

    # ---- inside ---------------------------------------------------------------------------------

    def _unfinished(self) -> list[_Live]:
        return [live for live in self._requests.values() if live.finish_reason is None]

    def _admit(self, live: _Live) -> bool:
        """Give the request the blocks for its next tokens, cached prefix first."""
        if live.computed == 0 and not live.blocks:
            hit = self._cached_prefix(live)
            live.cached = hit if live.cached < 0 else live.cached
            live.computed = hit
            if hit:
                resumed = live.preemptions > 0
                self._tell("prefix_hit", request_id=live.request.request_id, num_tokens=hit, resumed=resumed)
        need = -(-len(live.tokens) // self._options["block_size"]) - len(live.blocks)
        if need > len(self._free):
            return False
        live.blocks += [self._free.pop() for _ in range(need)]
        return True

    def _cached_prefix(self, live: _Live) -> int:
        size, hit = self._options["block_size"], 0
        while hit + size < len(live.tokens) and self._key(live, hit + size) in self._index:
            hit += size
        return hit

    def _key(self, live: _Live, end: int) -> tuple[Any, ...]:
        content = end if self._fault == "stale_prefix" else tuple(live.tokens[:end])
        return live.request.cache_salt, content

    def _sample(self, live: _Live, batch: int) -> None:
        row = self._row(live, batch)
        choice = int(np.nan_to_num(row, nan=-np.inf).argmax())
        position = len(live.output)
        if self._fault == "wrong_token" and position == 3:
            choice = int(np.argsort(-row)[5])
        forced = live.request.forced_token_ids or ()
        token = forced[position] if position < len(forced) else choice
        live.rows.append(row)
        live.output.append(token)
        live.choices.append(choice)
        if self._options.get("enable_prefix_caching", True):
            size = self._options["block_size"]
            for end in range(size, live.computed + 1, size):
                self._index[self._key(live, end)] = None
        self._tell("sampled", request_id=live.request.request_id, position=position, token_id=token)
        self._finish_if_done(live, token)

    def _row(self, live: _Live, batch: int) -> NDArray[np.float32]:
        context = list(live.tokens)
        if self._fault == "lost_on_preempt" and live.preemptions:
            del context[len(live.prompt) - 1]
        if self._fault == "stale_prefix" and live.cached > 0:
            context[0] = (context[0] + 1) % VOCAB
        row = self._model(context)
        if self._fault == "noisy_logits":
            row = row + np.where(np.arange(len(row)) % 2, 0.01, -0.01).astype(np.float32)
        if self._fault == "nan_logits" and len(live.output) == 2:
            row[int(row.argmin())] = np.nan
        if self._fault == "batch_leak" and batch > 1:
            row[3] += np.float32(batch) * 4
        if self._fault == "chunk_seam" and live.seams:
            row[4] += np.float32(live.seams) * 4
        if self._fault == "poison_leak" and live.poisoned:
            row[5] += np.float32(30)
        if self._fault == "placement_leak" and any(a != b + 1 for a, b in pairwise(live.blocks)):
            row[6] += np.float32(30)
        return row

    def _prompt_rows(self, live: _Live) -> list[NDArray[np.float32]]:
        """The logits after each prompt token but the last."""
        return [self._model(live.prompt[: i + 1]) for i in range(len(live.prompt) - 1)]

    def _prompt_logprobs(self, live: _Live, count: int) -> tuple[tuple[TokenLogprob, ...] | None, ...]:
        rows = zip(self._prompt_rows(live), live.prompt[1:], strict=True)
        return (None, *(entries(row, token, count) for row, token in rows))

    def _finish_if_done(self, live: _Live, token: int) -> None:
        sampling = live.request.sampling
        most = sampling["max_tokens"] - (self._fault == "early_stop")
        if token in sampling.get("stop_token_ids", ()):
            live.finish_reason, live.stop_reason = "stop", token
        elif token == EOS and not sampling.get("ignore_eos"):
            live.finish_reason = "stop"
        elif len(live.output) >= most:
            live.finish_reason = "length"
        if live.finish_reason is not None:
            self._release(live)
            count = len(live.output)
            name = live.request.request_id
            self._tell("finished", request_id=name, reason=live.finish_reason, num_output_tokens=count)

    def _release(self, live: _Live) -> None:
        if self._fault == "leaked_block" and live.blocks and live.finish_reason == "length":
            live.blocks.pop()
            self._leaked += 1
        self._free += reversed(live.blocks)
        live.blocks = []

    def _output(self, live: _Live) -> EngineOutput:
        count = live.request.sampling.get("logprobs")
        prompt_count = live.request.sampling.get("prompt_logprobs")
        return EngineOutput(
            request_id=live.request.request_id,
            text="",
            finished=live.finish_reason is not None,
            prompt_token_ids=tuple(live.prompt),
            token_ids=tuple(live.output),
            choice_token_ids=tuple(live.choices),
            logprobs=None
            if count is None
            else tuple(entries(r, t, count) for r, t in zip(live.rows, live.output, strict=True)),
            prompt_logprobs=None if prompt_count is None else self._prompt_logprobs(live, prompt_count),
            finish_reason=live.finish_reason,
            stop_reason=live.stop_reason,
            num_cached_tokens=max(0, live.cached),
            num_preemptions=live.preemptions,
        )

    def _tell(self, event: str, **facts: Any) -> None:
        self._events.append({"event": event, **facts})


class _Minimal:
    """Nothing but `capabilities` and `generate`: the least that can be judged."""

    def __init__(self, inner: FakeEngine) -> None:
        self._inner = inner

    def __enter__(self) -> _Minimal:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def capabilities(self) -> Capabilities:
        features = frozenset({"token_ids", "output_ids", "logprobs"})
        return replace(
            self._inner.capabilities(), engine="fake-minimal", features=features, options=frozenset()
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        return self._inner.generate(requests)


def fake_engine(
    records: Sequence[GoldenRecord] = (), fault: str | None = None, without: Sequence[str] = ()
) -> Callable[[ModelSource, Mapping[str, Any]], FakeEngine]:
    """A factory of toys that know these records."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; known: {sorted(FAULTS)}")
    logits = replaying(records)
    return lambda model, options: FakeEngine(model, options, logits, fault, frozenset(without))


def minimal_engine(
    records: Sequence[GoldenRecord] = (), fault: str | None = None
) -> Callable[[ModelSource, Mapping[str, Any]], _Minimal]:
    """A factory of toys that offer the two methods and nothing else."""
    made = fake_engine(records, fault)
    return lambda model, options: _Minimal(made(model, options))
