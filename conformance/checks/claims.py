"""Did an arm of same_under do what its name claims? Agreement with one that did not proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from conformance.adapters.base import request_of
from conformance.checks.arguments import AXES
from conformance.checks.case import Case, names_in
from conformance.checks.events import chunked_requests, scheduled
from conformance.history import Pass

__all__ = ["not_fired"]


def not_fired(case: Case, one: Pass, axis: str, value: str, names: Sequence[str]) -> str | None:
    """What is missing for the arm to be what its name says; None if nothing is.

    Args:
        one: the arm's pass, named "<axis>=<value>".
        names: the requests that are compared.
    """
    return _CLAIMS[axis](case, one, value, names)


def _claim_preempt(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:  # noqa: ARG001
    told = {str(e["request_id"]) for e in one.events if e.get("event") == "preempted"}
    counted = {n for n, r in one.requests.items() if r.output is not None and r.output.num_preemptions}
    hit = told if case.has("traced") else counted
    return None if hit & set(names) else f"none of {list(names)} was preempted"


def _claim_preemption(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:
    """`value` is "<mode>@<step>"."""
    mode = value.partition("@")[0]
    if one.options.get("preemption_mode") != mode:
        return f"it ran with preemption_mode={one.options.get('preemption_mode')!r}, not {mode}"
    if not case.has("traced"):
        return _claim_preempt(case, one, value, names)
    hit = [e for e in one.events if e.get("event") == "preempted" and e["request_id"] in names]
    if not hit:
        return f"none of {list(names)} was preempted"
    if all(e.get("mode") != mode for e in hit):
        return f"no preemption of {list(names)} was by {mode}"
    back = {e["request_id"] for e in one.events if e.get("event") == "swapped_in"}
    if mode == "swap" and not back & set(names):
        return f"none of {list(names)} was swapped in again"
    return None


def _claim_chunk(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:
    if not case.has("traced"):
        return _claim_option("max_num_batched_tokens")(case, one, value, names)
    limit = int(value)
    largest = max((sum(size for *_, size in step) for step in scheduled(one)), default=0)
    if largest > limit:
        return f"a step had {largest} tokens, the budget is {limit}"
    split = chunked_requests(one)
    computed = {name for step in scheduled(one) for name, *_ in step}
    long = {
        str(e["request_id"])
        for e in one.events
        if e.get("event") == "submitted" and int(e["num_prompt_tokens"]) > limit
    }
    hits = {str(e["request_id"]) for e in one.events if e.get("event") == "prefix_hit"}
    whole = (long & computed & set(names)) - split - hits
    if whole:
        return f"the prompts of {sorted(whole)} exceed {limit} tokens but were not split"
    if largest < limit and not split & set(names):
        return f"no step reached {limit} tokens and no prompt was split: the budget never mattered"
    return None


def _claim_option(option: str) -> Callable[[Case, Pass, str, Sequence[str]], str | None]:
    def claim(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:  # noqa: ARG001
        got = one.options.get(option)
        return None if str(got) == value else f"it ran with {option}={got!r}, not {value}"

    return claim


def _claim_prefix_cache(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:
    reused = {
        n
        for n in names
        if (run := one.requests.get(n)) and run.output is not None and (run.output.num_cached_tokens or 0) > 0
    }
    if value == "off" and reused:
        return f"{sorted(reused)} reused cached tokens with the cache off"
    if value == "hit" and not reused:
        return f"none of {list(names)} reused a cached token"
    return _claim_option("enable_prefix_caching")(case, one, str(value != "off"), names)


def _claim_batch(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:
    if not case.has("traced"):
        return None
    # Sequences of one request keep each other company in every arm.
    shared = [
        step
        for step in scheduled(one)
        if len({request_of(n) for n, *_ in step}) > 1 and any(n in names for n, *_ in step)
    ]
    if value == "alone":
        return "a step held more than one request" if shared else None
    return None if shared else "no step held a compared request beside another one"


def _claim_poison(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:  # noqa: ARG001
    outcomes = [o.outcome for o in one.operations if isinstance(o.outcome, Mapping)]
    slots = sum(int(o.get("poisoned") or 0) for o in outcomes)
    return None if slots else "no slot was poisoned"


def _claim_order(case: Case, one: Pass, value: str, names: Sequence[str]) -> str | None:  # noqa: ARG001
    """Submitted in another order than in the free pass, all before the first step."""

    def order(of: Pass) -> list[str]:
        submitted = [n for o in of.operations if o.kind == "submit" for n in names_in(o.argument)]
        return [n for n in submitted if n in names]

    mine, free = order(one), order(case.free)
    if sorted(mine) != sorted(free):
        return f"it submitted {mine}, the free pass {free}"
    return None if mine != free else f"the order of submission is the free pass's: {mine}"


_CLAIMS: Mapping[str, Callable[[Case, Pass, str, Sequence[str]], str | None]] = {
    "chunk": _claim_chunk,
    "block_size": _claim_option("block_size"),
    "batch": _claim_batch,
    "prefix_cache": _claim_prefix_cache,
    "preempt": _claim_preempt,
    "preemption": _claim_preemption,
    "backend": _claim_option("attention_backend"),
    "threads": _claim_option("threads"),
    "poison": _claim_poison,
    "order": _claim_order,
}
assert set(_CLAIMS) == set(AXES)
