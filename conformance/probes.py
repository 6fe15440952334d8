"""Narrows a fault down where an engine shows tokens and logprobs only: which relation breaks.

The failing request runs by itself, cold and whole; then in a batch, after a copy of itself has
filled the prefix cache, and in chunks. Where the first is right and another is not, the fault lies
in what the other adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.checks import judge
from conformance.models import resolve_model
from conformance.runner import EngineFactory, run_scenario
from conformance.scenario import CheckSpec, Scenario, Step
from conformance.store import RecordStore
from conformance.suite import Case
from conformance.verdicts import Finding, Verdict

__all__ = ["ALONE", "RELATIONS", "Probed", "probe"]

#: Arm of same_under → what it adds to running alone, and where to look when it breaks.
RELATIONS: Mapping[str, str] = {
    "batch=mixed": "in a batch: rows, positions or sampling state of neighbours",
    "prefix_cache=hit": "after a copy of itself: prefix-cache keys, stale blocks, or rows a hit skips",
    "chunk=5": "prompt in chunks of 5 tokens: slot mapping, positions or masks at the seam",
}
ALONE = "alone, cold and whole"
_AXES = {"batch": ["mixed"], "prefix_cache": ["hit"], "chunk": [5]}


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probes of one request showed: relation → verdict, and the conclusion."""

    relations: Mapping[str, Verdict]
    text: str


def probe(
    case: Case, request: str, factory: EngineFactory, store: RecordStore, root: Path | None = None
) -> Probed:
    """Run the probes of one request.

    Raises:
        Skipped, ModelUnavailable: the request cannot be run alone here.
    """
    scenario = _alone(case.scenario, request)
    off = {"enable_prefix_caching": False}
    point = {**case.point, **{k: v for k, v in off.items() if k in case.point}}
    scenario = replace(scenario, engine={**scenario.engine, **off})
    source = resolve_model(case.point["model"], root)
    history = run_scenario(scenario, point, factory, source, store)
    findings = judge(history, scenario.checks, store.get).findings
    base = [f.verdict for f in findings if "arm" not in f.detail and f.check != "same_under"]
    relations = {ALONE: Verdict.worst(base or [Verdict.SKIP])}
    for arm in RELATIONS:
        told = [f.verdict for f in findings if _about(f, arm)]
        relations[arm] = Verdict.worst(told or [Verdict.SKIP])
    return Probed(relations, _conclusion(relations, case.scenario))


def _alone(scenario: Scenario, request: str) -> Scenario:
    return replace(
        scenario,
        matrix={},
        requests={request: scenario.requests[request]},
        steps=(Step("submit", [request], 0), Step("run", {"preempt": None, "period": 1, "poison": False}, 0)),
        checks=(CheckSpec("tokens_match_golden", request, 0), CheckSpec("same_under", dict(_AXES), 0)),
    )


def _about(finding: Finding, arm: str) -> bool:
    return finding.detail.get("arm") == arm or finding.message.startswith(f"arm {arm}:")


def _conclusion(relations: Mapping[str, Verdict], scenario: Scenario) -> str:
    if relations[ALONE].fails_run:
        return f"{ALONE} it is wrong already: the model's own computation, not batching or caching"
    broken = [RELATIONS[arm] for arm in RELATIONS if relations[arm].fails_run]
    if broken:
        return f"right {ALONE}; breaks {'; breaks '.join(broken)}"
    seen = [arm for arm in RELATIONS if relations[arm].is_agreement]
    kinds = ", ".join(dict.fromkeys(step.kind for step in scenario.steps))
    held = ", ".join(seen) or "nothing else"
    return f"right {ALONE} and under {held}: look at the scenario's own steps ({kinds})"
