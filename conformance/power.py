"""What a judgement could have seen. No power, no PASS."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.adapters.base import Capabilities
from conformance.kill_matrix import Row, committed
from conformance.verdicts import Finding, Power, Verdict

if TYPE_CHECKING:  # the checks ask for the power of what they found
    from conformance.checks.case import Case

__all__ = ["KINDS", "SeededPower", "power_of", "seeded_power"]

#: Kinds of fault, by the evidence that shows them → the features an engine needs for it.
KINDS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("output_ids",),
    "logprobs": ("logprobs",),
    "logits": ("stages",),
    "bits": ("bitwise", "stages"),
    "behaviour": (),
}

#: Evidence of the kill matrix → the features an engine needs to give it.
_EVIDENCE: Mapping[str, tuple[str, ...]] = {
    "tokens": ("output_ids",),
    "logprobs": ("output_ids", "logprobs"),
    "stages": ("output_ids", "stages"),
    "bits": ("output_ids", "stages", "bitwise"),
    "trace": ("traced", "pool"),
    "all": ("output_ids", "logprobs", "stages", "bitwise", "traced", "pool"),
}

#: Below this share of decided positions, agreement of tokens is no evidence (float32 bar).
_MIN_DECIDED = 0.90


def power_of(case: Case, findings: Sequence[Finding]) -> Power:
    """Which kinds of fault the findings' evidence would have shown, and why not the others."""
    seen = {f.saw for f in findings if f.saw and f.verdict not in (Verdict.SKIP, Verdict.ERROR)}
    judged = sum(int(f.detail.get("judged", 0)) for f in findings)
    decided = sum(int(f.detail.get("decided", 0)) for f in findings)
    unjudged = sum(int(f.detail.get("unjudged", 0)) for f in findings if f.check == "tokens_match_golden")
    kinds: list[str] = []
    blind: dict[str, str] = {}
    for kind, needs in KINDS.items():
        reason = _blind(case, kind, needs, seen, judged, decided)
        if reason is None:
            kinds.append(kind)
        else:
            blind[kind] = reason
    return Power(tuple(kinds), blind, judged, decided, unjudged)


def _blind(
    case: Case, kind: str, needs: tuple[str, ...], seen: set[str], judged: int, decided: int
) -> str | None:
    if kind not in seen:
        lacking = [case.why_missing(feature) for feature in needs if not case.has(feature)]
        return "; ".join(lacking) or "no check of this scenario compared it"
    if kind == "tokens" and judged and decided < _MIN_DECIDED * judged:
        return f"only {decided} of {judged} positions had one right answer ({case.history.dtype})"
    if kind in ("logits", "logprobs") and not case.full_power():
        return f"the {case.history.dtype} yardstick hides small faults of all but recall checkpoints"
    return None


@dataclass(frozen=True, slots=True)
class SeededPower:
    """Which seeded faults a run would have shown, had the engine had them.

    Attributes:
        shown: ids of faults.
        blind: id → why it would not have shown.
    """

    shown: tuple[str, ...]
    blind: Mapping[str, str]


def seeded_power(
    engine: Capabilities, judged: Collection[tuple[str, str]], rows: Sequence[Row] | None = None
) -> SeededPower:
    """What the kill matrix says about a run.

    Args:
        judged: (scenario, dtype) of what was not skipped.
        rows: the matrix; None: the committed one. Faults that only the fuzzer finds do not count:
            no engine is run for them.
    """
    shown: list[str] = []
    blind: dict[str, str] = {}
    ran = {scenario for scenario, _ in judged}
    for row in committed() if rows is None else rows:
        if row.outcome != "killed" or row.evidence not in _EVIDENCE:
            continue
        scenario = row.shown_by.partition("[")[0]
        wanted = (*_EVIDENCE[row.evidence], *row.needs)
        lacking = sorted(set(wanted) - engine.features)
        if lacking:
            blind[row.id] = f"{engine.engine} lacks {', '.join(lacking)}"
        elif scenario not in ran:
            blind[row.id] = "its scenario was not judged"
        elif (scenario, row.dtype) not in judged:
            blind[row.id] = f"it shows in {row.dtype}"
        else:
            shown.append(row.id)
    return SeededPower(tuple(shown), blind)
