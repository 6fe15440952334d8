"""What a judgement could have seen. No power, no PASS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance.checks.case import Case
from conformance.verdicts import Finding, Power, Verdict

__all__ = ["KINDS", "power_of"]

#: Kinds of fault, by the evidence that shows them → the features an engine needs for it.
KINDS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("output_ids",),
    "logprobs": ("logprobs",),
    "logits": ("stages",),
    "bits": ("bitwise", "stages"),
    "behaviour": (),
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
        return f"the {case.history.dtype} yardstick of a real model hides small faults"
    return None
