"""Narrows a fault down where an engine shows tokens and logprobs only: which relation breaks.

The failing request runs by itself, cold and whole; then in a batch, after a copy of itself has
filled the prefix cache, and in chunks. Where the first is right and another is not, the fault lies
in what the other adds. Its pictures are swapped for others, and back (`conformance.picture_probe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.checks import judge
from conformance.checks.logits import logprob_band
from conformance.history import History
from conformance.models import resolve_model
from conformance.outside import FROM_OUTSIDE
from conformance.picture_probe import COLD, PICTURES, can_swap, swap_pictures
from conformance.runner import EngineFactory, engine_requests, run_scenario
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
#: A log-probability below which rounding of log_softmax is not asked for.
_UNLIKELY = -50.0
#: What judges the request alone: its numbers too, where the engine shows any.
_JUDGED = ("tokens_match_golden", "logits_within_yardstick")
_AXES = {"batch": ["mixed"], "prefix_cache": ["hit"], "chunk": [5]}


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probes of one request showed.

    Attributes:
        relations: relation → verdict.
        text: the conclusion, in words.
    """

    relations: Mapping[str, Verdict]
    text: str

    @property
    def first(self) -> str | None:
        """The first relation that breaks: `ALONE` or a key of `RELATIONS`; None if none does."""
        broken = (name for name in (ALONE, *RELATIONS) if self.relations[name].fails_run)
        return next(broken, None)


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
    alone = [f for f in findings if not any(_about(f, arm) for arm in RELATIONS)]
    base = [f.verdict for f in alone if f.check in _JUDGED and f.verdict is not Verdict.SKIP]
    relations = {ALONE: Verdict.worst(base or [Verdict.SKIP])}
    for arm in RELATIONS:
        told = [f.verdict for f in findings if _about(f, arm)]
        # A named refusal is no wrong answer: the engine cannot be put into this arm.
        refused = _refused(history, arm, request)
        relations[arm] = Verdict.SKIP if refused else Verdict.worst(told or [Verdict.SKIP])
    pictures, trouble = _pictures(case, request, factory, store, history, root)
    relations |= pictures
    return Probed(relations, _conclusion(relations, case.scenario) + trouble)


def _pictures(
    case: Case,
    request: str,
    factory: EngineFactory,
    store: RecordStore,
    history: History,
    root: Path | None,
) -> tuple[dict[str, Verdict], str]:
    """What swapping the request's pictures shows, and why it could not be done; ({}, "") without any."""
    source = resolve_model(case.point["model"], root)
    alone = _alone(case.scenario, request)
    asked = engine_requests(alone, case.point, factory, source, store)[request]
    run = history.passes[0].requests.get(request)
    if not can_swap(asked) or run is None or run.golden_key is None:
        return {}, ""
    band = logprob_band(store.get(run.golden_key), _UNLIKELY)
    given = {**case.scenario.engine, **{k: v for k, v in case.point.items() if k != "model"}}
    honoured = {"dtype", "device", *history.capabilities.options}
    options = {k: v for k, v in given.items() if k in honoured}
    try:
        return swap_pictures(asked, lambda: factory(source, options), band), ""
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others; the other relations stand
        return {}, f"; its pictures could not be swapped: {type(error).__name__}: {error}"


def _alone(scenario: Scenario, request: str) -> Scenario:
    return replace(
        scenario,
        matrix={},
        requests={request: scenario.requests[request]},
        steps=(Step("submit", [request], 0), Step("run", {"preempt": None, "period": 1, "poison": False}, 0)),
        checks=(*(CheckSpec(name, request, 0) for name in _JUDGED), CheckSpec("same_under", dict(_AXES), 0)),
    )


def _about(finding: Finding, arm: str) -> bool:
    told = (f"arm {arm}:", f"pass {arm!r}:")
    return finding.detail.get("arm") == arm or finding.message.startswith(told)


def _refused(history: History, arm: str, request: str) -> bool:
    one = history.find(arm)
    run = one.requests.get(request) if one else None
    return run is not None and run.refused is not None


def _conclusion(relations: Mapping[str, Verdict], scenario: Scenario) -> str:
    known = {**RELATIONS, **PICTURES}
    if relations[ALONE].fails_run:
        blind = relations.get(COLD, Verdict.SKIP).fails_run
        where = f"breaks {PICTURES[COLD]}" if blind else "the model's own computation"
        return f"{ALONE} it is wrong already: {where}, not batching or caching"
    broken = [known[relation] for relation in known if relations.get(relation, Verdict.SKIP).fails_run]
    if broken:
        return f"right {ALONE}; breaks {'; breaks '.join(broken)}"
    seen = [relation for relation in known if relations.get(relation, Verdict.SKIP).is_agreement]
    kinds = ", ".join(dict.fromkeys(step.kind for step in scenario.steps))
    held = ", ".join(seen) or "nothing else"
    return f"right {ALONE} and under {held}: look at the scenario's own steps ({kinds})"
