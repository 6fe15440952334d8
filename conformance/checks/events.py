"""happened, pool_conserved: the path under test was taken, and nothing leaked on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from conformance.adapters.base import request_of
from conformance.checks.arguments import compare, lint_comparison
from conformance.checks.case import Case
from conformance.history import Pass
from conformance.verdicts import Finding, Verdict

__all__ = ["COUNTERS", "happened", "lint_happened", "pool_conserved"]

Event = Mapping[str, Any]


def _count(kind: str) -> Callable[[Pass], int]:
    return lambda one: sum(e.get("event") == kind for e in one.events)


def _prefix_hit(one: Pass) -> int:
    return sum(
        e.get("event") == "prefix_hit" and int(e["num_tokens"]) > 0 and not e.get("resumed", False)
        for e in one.events
    )


def _resumed_hit(one: Pass) -> int:
    return sum(
        e.get("event") == "prefix_hit" and int(e["num_tokens"]) > 0 and bool(e.get("resumed", False))
        for e in one.events
    )


def _prompt_lengths(one: Pass) -> dict[str, int]:
    return {
        str(e["request_id"]): int(e["num_prompt_tokens"]) for e in one.events if e.get("event") == "submitted"
    }


def scheduled(one: Pass) -> list[list[tuple[str, int, int]]]:
    """Per step: (request, first position, tokens), in the order planned."""
    return [
        [(str(name), int(start), int(size)) for name, start, size in e["scheduled"]]
        for e in one.events
        if e.get("event") == "planned"
    ]


def _planned_mixed(one: Pass) -> int:
    lengths = _prompt_lengths(one)
    return sum(
        any(start < lengths[request_of(name)] for name, start, _ in step)
        and any(start >= lengths[request_of(name)] for name, start, _ in step)
        for step in scheduled(one)
    )


def chunked_requests(one: Pass) -> set[str]:
    """Requests some step of which ended inside the prompt."""
    lengths = _prompt_lengths(one)
    return {
        name
        for step in scheduled(one)
        for name, start, size in step
        if start + size < lengths[request_of(name)]
    }


def _non_monotonic(one: Pass) -> int:
    """Requests that once held blocks whose ids do not increase: a fragmented pool was really used."""
    tables: dict[str, list[int]] = defaultdict(list)
    found: set[str] = set()
    for e in one.events:
        kind, name = e.get("event"), str(e.get("request_id"))
        if kind in ("allocated", "prefix_hit"):
            if kind == "prefix_hit" and not tables[name]:
                tables[name] = []
            tables[name] += [int(b) for b in e["block_ids"]]
            if any(b < a for a, b in pairwise(tables[name])):
                found.add(name)
        elif kind in ("preempted", "finished", "aborted", "failed"):
            tables.pop(name, None)
    return len(found)


def _poisoned(one: Pass) -> int:
    """Slots filled with NaN by the scenario's poison steps; run steps tell theirs as a mapping."""
    total = 0
    for operation in one.operations:
        outcome = operation.outcome
        if isinstance(outcome, Mapping):
            outcome = outcome.get("poisoned", 0)
        elif operation.kind != "poison":
            continue
        total += int(outcome or 0)
    return total


#: Names of requests that only keep the others company start with this; they are nobody's evidence.
ANCILLARY = "~"

#: Counters of a pass, by name. All but those of `_UNTRACED` need the engine's events. "lengths"
#: counts how many different numbers of tokens requests ended with.
COUNTERS: Mapping[str, Callable[[Pass], int]] = {
    **{
        kind: _count(kind)
        for kind in (
            "submitted",
            "allocated",
            "published",
            "evicted",
            "encoded",
            "media_evicted",
            "copied",
            "forked",
            "swapped_out",
            "swapped_in",
            "preempted",
            "sampled",
            "finished",
            "aborted",
            "failed",
        )
    },
    "prefix_hit": _prefix_hit,
    "resumed_hit": _resumed_hit,
    "hit_tokens": lambda one: sum(
        int(e["num_tokens"])
        for e in one.events
        if e.get("event") == "prefix_hit" and not e.get("resumed", False)
    ),
    "steps": lambda one: len(scheduled(one)),
    "batch": lambda one: max((len(step) for step in scheduled(one)), default=0),
    "tokens_in_step": lambda one: max((sum(size for *_, size in step) for step in scheduled(one)), default=0),
    "planned_mixed": _planned_mixed,
    "chunked": lambda one: len(chunked_requests(one)),
    "non_monotonic_blocks": _non_monotonic,
    "poisoned": _poisoned,
    "lengths": lambda one: len({e["num_output_tokens"] for e in one.events if e.get("event") == "finished"}),
    "refused": lambda one: sum(run.refused is not None for run in one.requests.values()),
    "unfinished": lambda one: sum(
        run.output is not None and not run.output.finished for run in one.requests.values()
    ),
}

_UNTRACED = ("poisoned", "refused", "unfinished")


def lint_happened(args: Any) -> list[str]:
    """{counter: comparison}, or {event: {request: comparison}}."""
    if not isinstance(args, Mapping) or not args:
        return [f'expected {{counter: ">=1"}}, got {args!r}']
    problems = []
    for name, wanted in args.items():
        if name not in COUNTERS:
            problems.append(f"unknown counter {name!r}; known: {', '.join(sorted(COUNTERS))}")
        elif isinstance(wanted, Mapping):
            problems += [p for r, w in wanted.items() for p in lint_comparison(f"{name}.{r}", w)]
        else:
            problems += lint_comparison(name, wanted)
        if isinstance(wanted, Mapping) and name in ("poisoned", "evicted", "copied", "media_evicted"):
            problems.append(f'{name} is of no single request; write {name}: ">=1"')
    return problems


def happened(case: Case, args: Any) -> list[Finding]:
    """{counter: comparison}: a counter over the free pass meets its bound.

    {counter: {request: comparison}} counts only that request's events.
    """
    check, findings = "happened", []
    for name, wanted in args.items():
        if name not in _UNTRACED and not case.has("traced"):
            findings.append(
                Finding(Verdict.SKIP, check, None, f"{name}: not known; {case.why_missing('traced')}")
            )
            continue
        per_request = wanted.items() if isinstance(wanted, Mapping) else [(None, wanted)]
        for request, bound in per_request:
            value = COUNTERS[name](_only(case.free, request))
            met = compare(value, bound)
            text = f"{name} is {value}"
            findings.append(
                Finding(Verdict.PASS, check, request, text, saw="behaviour", detail={name: value})
                if met
                else case.fail(
                    check,
                    request,
                    f"{text}, expected {bound}: the path under test was not taken as planned",
                    saw="behaviour",
                    detail={name: value},
                )
            )
    return findings


def _only(one: Pass, request: str | None) -> Pass:
    """The pass as if it had had that request alone; None: all requests but the harness's own."""

    def counts(name: Any) -> bool:
        return name == request if request is not None else not str(name).startswith(ANCILLARY)

    events: list[Event] = []
    for e in one.events:
        if e.get("event") == "planned":
            mine = [s for s in e["scheduled"] if counts(s[0])]
            events += [{**e, "scheduled": mine}] if mine else []
        elif counts(e["request_id"]) if "request_id" in e else request is None:
            events.append(e)
    requests = {n: r for n, r in one.requests.items() if counts(n)}
    return replace(one, requests=requests, events=tuple(events))


def pool_conserved(case: Case, args: Any) -> list[Finding]:  # noqa: ARG001  (the table's signature)
    """After every pass all blocks are free or cached, none in use, and none lost."""
    check = "pool_conserved"
    if not case.has("pool"):
        return [Finding(Verdict.SKIP, check, None, case.why_missing("pool"))]
    findings: list[Finding] = []
    for one in case.history.passes:
        if one.error is not None:
            continue  # judged elsewhere; it has no pool any more
        problems = _pool_problems(one)
        findings.append(
            case.fail(check, None, f"pass {one.name!r}: " + "; ".join(problems), saw="behaviour")
            if problems
            else Finding(Verdict.PASS, check, None, f"pass {one.name!r}: no block lost", saw="behaviour")
        )
    return findings


def _pool_problems(one: Pass) -> Sequence[str]:
    after, before = one.pool_after, one.pool_before
    if after is None:
        return ["the engine does not tell how its pool stands after the pass"]
    problems = []
    if after.free + after.cached + after.in_use != after.total:
        problems.append(
            f"{after.free} free + {after.cached} cached + {after.in_use} in use is not {after.total}"
        )
    if after.in_use:
        problems.append(f"{after.in_use} blocks still in use after everything finished")
    if min(after.free, after.cached, after.in_use) < 0:
        problems.append(f"a negative count: {after}")
    if before is not None and before.total != after.total:
        problems.append(f"the pool had {before.total} blocks, now {after.total}")
    return problems
