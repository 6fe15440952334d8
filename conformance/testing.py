"""Made-up goldens and histories, so that the oracle itself can be tested.

`make_record` invents a truth with known margins and a known yardstick; `answer` is an engine that
computes it with a given rounding error; `make_history` wraps answers up as the runner would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance import EDITION, HISTORY_SCHEMA, RECORD_SCHEMA
from conformance.adapters.base import FEATURES, Capabilities, EngineOutput, PoolState, TokenLogprob
from conformance.history import History, LogitRow, Operation, Pass, RequestRun
from conformance.records import ArmError, GoldenRecord, LogitTable, Yardstick

__all__ = [
    "EAGER",
    "M",
    "MODEL",
    "R",
    "Spec",
    "VOCAB",
    "answer",
    "logit_row",
    "make_events",
    "make_history",
    "make_pass",
    "make_record",
    "records_of",
    "replace_run",
    "truth_logits",
]

MODEL = "tiny-made-up"
VOCAB = 64
TOP = 20
#: The yardstick of every made-up record, in logits: typical float32 figures.
R, M = 1e-5, 4e-5
EAGER = ArmError(rms=8e-6, max=3.5e-5)


@dataclass(frozen=True, slots=True)
class Spec:
    """One check with its arguments, as a scenario would give it."""

    name: str
    args: Any = None
    line: int = 1


def truth_logits(key: str, positions: int, undecided: Sequence[int] = ()) -> NDArray[np.float64]:
    """[positions, VOCAB] made-up logits; decided by at least 0.3 except where told otherwise.

    At `undecided` positions the two best lie one M apart: within anybody's rounding.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    rng = np.random.default_rng(seed)
    # Steps of unequal size, so that no two rows hold the same values in another order.
    steps = rng.uniform(0.3, 0.7, size=(positions, VOCAB))
    logits = rng.permuted(np.cumsum(steps, axis=1), axis=1)
    for position in undecided:
        first, second = np.argsort(-logits[position])[:2]
        logits[position, second] = logits[position, first] - M
    return logits


def make_record(
    key: str = "red",
    *,
    positions: int = 24,
    prompt: int = 7,
    undecided: Sequence[int] = (),
    dtype: str = "float32",
    model: str = MODEL,
    finish_reason: str = "length",
    stop_reason: int | str | None = None,
) -> GoldenRecord:
    """A golden record whose truth is `truth_logits(key, …)`."""
    logits = truth_logits(key, positions, undecided)
    token_ids = tuple(int(t) for t in logits.argmax(axis=1))
    prompt_ids = tuple(1 + (i * 5 + len(key)) % (VOCAB - 1) for i in range(prompt))
    return GoldenRecord(
        schema=RECORD_SCHEMA,
        edition=EDITION,
        key=f"key-{key}",
        model=model,
        case=key,
        request={"model": model, "dtype": dtype, "max_tokens": positions},
        provenance={"weights_sha256": "w"},
        dtype=dtype,
        prompt_token_ids=prompt_ids,
        token_ids=token_ids,
        text=text_of(token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        output=_table(logits),
        yardstick=Yardstick({"eager_cached": EAGER, "sdpa": ArmError(rms=R, max=M)}),
        prompt=_table(truth_logits(f"prompt of {key}", prompt - 1)),
    )


def text_of(token_ids: Sequence[int]) -> str:
    """The made-up tokenizer: one word per id."""
    return "".join(f" w{t}" for t in token_ids)


def _table(logits: NDArray[np.float64]) -> LogitTable:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    return LogitTable(
        top_ids=order.astype(np.int64),
        top_logits=np.take_along_axis(logits, order, axis=1),
        logsumexp=_logsumexp(logits),
    )


def _logsumexp(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    highest = logits.max(axis=-1)
    return np.asarray(highest + np.log(np.exp(logits - highest[..., None]).sum(axis=-1)))


def logit_row(logits: NDArray[np.float64], ids: Sequence[int]) -> LogitRow:
    """Reduce one row as the runner does."""
    return LogitRow(
        ids=tuple(int(i) for i in ids),
        values=tuple(float(logits[i]) for i in ids),
        logsumexp=float(_logsumexp(logits)),
        argmax=int(np.argmax(logits)),
        num_nan=int(np.isnan(logits).sum()),
        digest=hashlib.sha256(logits.tobytes()).hexdigest(),
    )


def answer(
    record: GoldenRecord,
    *,
    name: str | None = None,
    noise: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None,
    undecided: Sequence[int] = (),
    choices: Mapping[int, int] | None = None,
    forced: bool = False,
    logprobs: int | None = 5,
    prompt_logprobs: int | None = None,
    stages: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> RequestRun:
    """What a correct engine answers, with `noise` added to its logits.

    Args:
        undecided: as given to `make_record`.
        choices: position → id it takes instead of its argmax; from the first on, a free run's
            context is no longer the golden's, so its later ids and logits are arbitrary.
        logprobs, prompt_logprobs: how many top entries; None for none.
    """
    key, count = record.case, len(record.token_ids)
    logits = truth_logits(key, count, undecided)
    prompt_logits = truth_logits(f"prompt of {key}", len(record.prompt_token_ids) - 1)
    if noise is not None:
        logits, prompt_logits = noise(logits), noise(prompt_logits)
    chosen = {int(k): int(v) for k, v in (choices or {}).items()}
    if chosen and not forced:
        after = min(chosen) + 1
        logits[after:] = truth_logits(f"{key} after a divergence", count)[after:]
    own = [chosen.get(i, int(row.argmax())) for i, row in enumerate(logits)]
    ids = record.token_ids if forced else tuple(own)
    prompt = record.prompt_token_ids
    output = EngineOutput(
        request_id=name or key,
        text=text_of(ids),
        finished=True,
        prompt_token_ids=prompt,
        token_ids=ids,
        choice_token_ids=tuple(own),
        logprobs=None if logprobs is None else entries(logits, logprobs, ids),
        prompt_logprobs=None
        if prompt_logprobs is None
        else (None, *entries(prompt_logits, prompt_logprobs, prompt[1:])),
        finish_reason=record.finish_reason,
        stop_reason=record.stop_reason,
        num_cached_tokens=0,
        num_preemptions=0,
    )
    given = {
        "temperature": 0.0,
        "max_tokens": count,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return RequestRun(
        request_id=name or key,
        sampling={**{k: v for k, v in given.items() if v is not None}, **(sampling or {})},
        output=output,
        golden_key=record.key,
        prompt_token_ids=prompt,
        forced=forced,
        output_rows=tuple(logit_row(row, record.output.top_ids[i]) for i, row in enumerate(logits))
        if stages
        else (),
        kv_digests=("k0", "v0") if stages else (),
    )


def entries(
    logits: NDArray[np.float64], count: int, ids: Sequence[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Lists of the `count` likeliest ids and the token itself, with ranks."""
    lists = []
    for row, logsumexp, token in zip(logits, _logsumexp(logits), ids, strict=True):
        order = np.argsort(-row, kind="stable")
        listed = order[:count].tolist()
        if token not in listed:
            listed.append(token)
        rank = {int(t): 1 + i for i, t in enumerate(order)}
        lists.append(tuple(TokenLogprob(int(t), float(row[t] - logsumexp), rank[int(t)]) for t in listed))
    return tuple(lists)


def make_events(runs: Sequence[RequestRun], chunk: int | None = None) -> tuple[Mapping[str, Any], ...]:
    """The events of an engine that prefills everything (in chunks) and then decodes in step."""
    events: list[Mapping[str, Any]] = []
    lengths = {r.request_id: len(r.prompt_token_ids or ()) for r in runs}
    counts = {r.request_id: len((r.output.token_ids if r.output else None) or ()) for r in runs}
    for name, length in lengths.items():
        events.append({"event": "submitted", "request_id": name, "num_prompt_tokens": length})
    done = dict.fromkeys(lengths, 0)
    step = 0
    while any(done[n] < lengths[n] + counts[n] - 1 for n in done):
        room = chunk if chunk is not None else 10**9
        plan: list[tuple[str, int, int]] = []
        for name in done:
            target = lengths[name] if done[name] < lengths[name] else done[name] + 1
            size = min(target - done[name], room)
            if size <= 0 or done[name] >= lengths[name] + counts[name] - 1:
                continue
            room -= size
            plan.append((name, done[name], size))
            done[name] += size
        events.append({"event": "planned", "step": step, "scheduled": tuple(plan)})
        step += 1
        for name, *_ in plan:
            if done[name] >= lengths[name] + counts[name] - 1:
                events.append(
                    {
                        "event": "finished",
                        "request_id": name,
                        "reason": "length",
                        "num_output_tokens": counts[name],
                    }
                )
    return tuple(events)


def make_pass(name: str, runs: Sequence[RequestRun], **changes: Any) -> Pass:
    """One pass with sound events and a sound pool; `changes` replaces fields."""
    pool = PoolState(total=64, free=64, cached=0, in_use=0)
    made = Pass(
        name=name,
        options={"block_size": 16, "batch_invariant": False},
        operations=(Operation("submit", [r.request_id for r in runs]), Operation("run")),
        requests={r.request_id: r for r in runs},
        events=make_events(runs),
        pool_before=pool,
        pool_after=replace(pool, free=60, cached=4),
    )
    return replace(made, **changes)


def make_history(
    passes: Sequence[Pass],
    *,
    features: frozenset[str] = frozenset(FEATURES),
    dtype: str = "float32",
    model: str = MODEL,
) -> History:
    """A history of those passes on an engine that declares `features`."""
    options = frozenset(
        {"block_size", "max_num_batched_tokens", "enable_prefix_caching", "attention_backend", "threads"}
    )
    return History(
        schema=HISTORY_SCHEMA,
        edition=EDITION,
        scenario="made/up",
        point={"block_size": 16},
        model=model,
        weights_sha256="w",
        dtype=dtype,
        device="cpu",
        capabilities=Capabilities("made-up", "1", ("float32", "bfloat16"), features, options),
        environment={},
        passes=tuple(passes),
    )


def records_of(*records: GoldenRecord) -> Callable[[str], GoldenRecord]:
    """A store of these records."""
    return {r.key: r for r in records}.__getitem__


def replace_run(
    history: History, change: Callable[[RequestRun], RequestRun | None], name: str = "red", of: str = "free"
) -> History:
    """The history with one request of one pass changed, or taken away where `change` gives None."""
    passes = []
    for one in history.passes:
        if one.name == of:
            changed = change(one.requests[name])
            kept = {n: changed if n == name else r for n, r in one.requests.items()}
            one = replace(one, requests={n: r for n, r in kept.items() if r is not None})
        passes.append(one)
    return replace(history, passes=tuple(passes))
