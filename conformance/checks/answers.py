"""equal, differ: how the answers to several requests of one pass relate. Needs no golden."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from conformance.checks.bits import bit_difference
from conformance.checks.case import Case, CheckFailed
from conformance.history import RequestRun
from conformance.verdicts import Finding, Verdict

__all__ = ["differ", "equal"]


def equal(case: Case, args: Any) -> list[Finding]:
    """[name, name, …]: requests that ask the same, one way or another, are answered with equal bits.

    Skipped where bits are not promised: a draw may then fall on either side of a rounding error.
    """
    check = "equal"
    if not case.has("bitwise") or case.free.options.get("batch_invariant") is not True:
        reason = "batch_invariant is off" if case.has("bitwise") else case.why_missing("bitwise")
        return [Finding(Verdict.SKIP, check, None, f"bits are not promised: {reason}")]
    try:
        first, *others = _answered(case, check, args)
    except CheckFailed as failed:
        return [failed.finding]
    findings = []
    for other in others:
        difference, compared = bit_difference(first, other)
        pair = f"{first.request_id} and {other.request_id}"
        if difference is not None:
            message = f"{pair}: {difference.message}"
            findings.append(
                case.fail(check, other.request_id, message, position=difference.position, saw="bits")
            )
        elif not compared:
            message = f"{pair}: the same tokens; no bits to compare"
            findings.append(Finding(Verdict.WEAK, check, other.request_id, message, saw="tokens"))
        else:
            message = f"{pair}: the same bits ({compared} digests)"
            findings.append(Finding(Verdict.PASS, check, other.request_id, message, saw="bits"))
    return findings


def differ(case: Case, args: Any) -> list[Finding]:
    """[name, name, …]: any two of these took different tokens at some position that both reached."""
    check = "differ"
    try:
        runs = _answered(case, check, args)
    except CheckFailed as failed:
        return [failed.finding]
    findings = []
    for one, other in combinations(runs, 2):
        pair = f"{one.request_id} and {other.request_id}"
        # Zip on purpose: that one is longer is no difference in what was drawn.
        if any(a != b for a, b in zip(_units(one), _units(other), strict=False)):
            findings.append(Finding(Verdict.PASS, check, other.request_id, f"{pair} differ", saw="behaviour"))
        else:
            message = f"{pair} answer the same as far as both go: {list(_units(one))[:8]}"
            findings.append(case.fail(check, other.request_id, message, saw="behaviour"))
    return findings


def _answered(case: Case, check: str, names: Sequence[str]) -> list[RequestRun]:
    runs = [case.run_of(name) for name in names]
    for run in runs:
        case.output(check, run)
    return runs


def _units(run: RequestRun) -> Sequence[Any]:
    """Token ids, or the characters of an engine that tells only text."""
    assert run.output is not None
    return run.output.text if run.output.token_ids is None else run.output.token_ids
