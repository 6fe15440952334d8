"""Waivers: failures an engine's owner knows of. They live with the engine, never with the suite.

A waiver file is a YAML list::

    - scenario: prefix-cache/image-identity
      reason: blocks are keyed by token ids only
      issue: https://example.org/engine/issues/12
      scope: {device: cuda, dtype: bfloat16}   # optional; matched against the run
      expiry: 2027-01-31

A waived FAIL becomes WAIVED. An ERROR is never waived: nothing was judged. A waiver that matches
nothing, or whose scenario agrees everywhere, is STALE and fails the run; so does an expired one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from conformance.history import History
from conformance.verdicts import Finding, Judgement, Verdict

__all__ = ["Waiver", "WaiverError", "apply_waivers", "load_waivers"]

CHECK = "waivers"
_REQUIRED = ("scenario", "reason", "issue", "expiry")


class WaiverError(ValueError):
    """A waiver file is damaged; the message lists every problem."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """One known failure.

    Attributes:
        scope: name → value; every entry must equal the run's. Names: engine, version, model,
            dtype, device, and those of the matrix point.
        expiry: last day on which it holds.
    """

    scenario: str
    reason: str
    issue: str
    expiry: date
    scope: Mapping[str, Any]

    def covers(self, history: History) -> bool:
        """Whether this run is within the scope."""
        facts: dict[str, Any] = {
            **history.point,
            "engine": history.capabilities.engine,
            "version": history.capabilities.version,
            "model": history.model,
            "dtype": history.dtype,
            "device": history.device,
        }
        return self.scenario == history.scenario and all(
            name in facts and facts[name] == value for name, value in self.scope.items()
        )


def load_waivers(path: Path) -> tuple[Waiver, ...]:
    """Read a waiver file.

    Raises:
        WaiverError: unreadable, or an entry lacks a field, has an unknown one or a wrong type.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WaiverError(f"{path}: {error}") from error
    if data is None:
        return ()
    if not isinstance(data, list):
        raise WaiverError(f"{path}: expected a list of waivers, got {type(data).__name__}")
    problems, waivers = [], []
    for number, entry in enumerate(data, start=1):
        found = list(_problems(entry))
        problems += [f"{path}: waiver {number}: {p}" for p in found]
        if not found:
            waivers.append(
                Waiver(
                    entry["scenario"],
                    entry["reason"],
                    entry["issue"],
                    entry["expiry"],
                    entry.get("scope") or {},
                )
            )
    keys = [(w.scenario, repr(sorted(w.scope.items()))) for w in waivers]
    problems += [
        f"{path}: {k[0]} is waived twice with the same scope" for k in set(keys) if keys.count(k) > 1
    ]
    if problems:
        raise WaiverError("\n".join(problems))
    return tuple(waivers)


def _problems(entry: Any) -> Iterable[str]:
    if not isinstance(entry, Mapping):
        yield f"expected a mapping, got {entry!r}"
        return
    known = {*_REQUIRED, "scope"}
    yield from (f"unknown field {n!r}; known: {', '.join(sorted(known))}" for n in sorted(set(entry) - known))
    yield from (f"{n} is missing" for n in _REQUIRED if n not in entry)
    for name in ("scenario", "reason", "issue"):
        value = entry.get(name, "-")
        if not isinstance(value, str) or not value.strip():
            yield f"{name} must be text, got {value!r}"
    # A YAML timestamp with a time of day is a datetime, which is a date too but no day.
    if "expiry" in entry and type(entry["expiry"]) is not date:
        yield f"expiry must be a day such as 2027-01-31, got {entry['expiry']!r}"
    if not isinstance(entry.get("scope") or {}, Mapping):
        yield f"scope must be a mapping, got {entry['scope']!r}"


def apply_waivers(
    waivers: Sequence[Waiver], results: Sequence[tuple[History, Judgement]], today: date
) -> tuple[list[Judgement], list[Finding]]:
    """Turn waived FAILs into WAIVED.

    Args:
        results: what a whole run gave, unwaived.
        today: passed in, so that judging again gives the same.

    Returns:
        The judgements in the same order, and findings about the waivers themselves: STALE or, for
        an expired one, ERROR (it waives nothing any more).
    """
    valid = [w for w in waivers if w.expiry >= today]
    about = [
        Finding(
            Verdict.ERROR,
            CHECK,
            None,
            f"the waiver of {w.scenario} expired on {w.expiry}: fix it, or renew it with its reason",
        )
        for w in waivers
        if w.expiry < today
    ]
    judgements = [_waive(judgement, history, valid) for history, judgement in results]
    for waiver in valid:
        covered = [judgement for history, judgement in results if waiver.covers(history)]
        if not covered:
            message = f"the waiver of {waiver.scenario} {dict(waiver.scope) or ''} matches nothing that ran"
        elif all(j.verdict not in (Verdict.FAIL, Verdict.ERROR, Verdict.SKIP) for j in covered):
            message = f"the waiver of {waiver.scenario} is no longer needed: it agrees ({waiver.issue})"
        else:
            continue
        about.append(Finding(Verdict.STALE, CHECK, None, message))
    return judgements, about


def _waive(judgement: Judgement, history: History, waivers: Sequence[Waiver]) -> Judgement:
    waiver = next((w for w in waivers if w.covers(history)), None)
    if waiver is None or judgement.verdict is not Verdict.FAIL:
        return judgement
    findings = tuple(
        replace(f, verdict=Verdict.WAIVED, message=f"waived ({waiver.reason}, {waiver.issue}): {f.message}")
        if f.verdict is Verdict.FAIL
        else f
        for f in judgement.findings
    )
    return replace(judgement, verdict=Verdict.WAIVED, findings=findings)
