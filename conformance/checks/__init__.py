"""Checks: pure functions from a history, its goldens and some arguments to findings.

No engine, no clock and no disk: a history read back years later is judged the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from conformance import (
    HISTORY_SCHEMA,
    triage,  # a module that asks cases, too, so: by name, when used
)
from conformance.checks.answers import differ, equal
from conformance.checks.arguments import (
    lint_cached,
    lint_error,
    lint_finish_reason,
    lint_group,
    lint_nothing,
    lint_requests,
    lint_same_under,
    lint_text_equals,
    lint_yardstick,
)
from conformance.checks.case import Case, CheckInputError, CheckSpec, names_in
from conformance.checks.events import happened, lint_happened, pool_conserved
from conformance.checks.logits import logits_within_yardstick
from conformance.checks.logprobs import logprobs_by_value
from conformance.checks.metamorphic import same_under
from conformance.checks.outputs import cached_tokens, error, finish_reason, text_equals
from conformance.checks.sampling import sampled_within_kept_set
from conformance.checks.stages import stages_within_band
from conformance.checks.tokens import tokens_match_golden
from conformance.history import History
from conformance.power import power_of
from conformance.records import GoldenRecord
from conformance.verdicts import Finding, Judgement, Verdict

__all__ = ["CHECKS", "Check", "CheckInputError", "CheckSpec", "judge", "lint"]


@dataclass(frozen=True)
class Check:
    """One check: how it judges, and what is wrong with given arguments (before anything runs).

    `golden` says that it compares with a golden record.
    """

    judge: Callable[[Case, Any], list[Finding]]
    lint: Callable[[Any], list[str]]
    golden: bool = False


CHECKS: Mapping[str, Check] = {
    "tokens_match_golden": Check(tokens_match_golden, lint_requests, golden=True),
    "logits_within_yardstick": Check(logits_within_yardstick, lint_yardstick, golden=True),
    "logprobs_by_value": Check(logprobs_by_value, lint_requests, golden=True),
    "stages_within_band": Check(stages_within_band, lint_requests, golden=True),
    "cached_tokens": Check(cached_tokens, lint_cached),
    "finish_reason": Check(finish_reason, lint_finish_reason),
    "text_equals": Check(text_equals, lint_text_equals),
    "error": Check(error, lint_error),
    "happened": Check(happened, lint_happened),
    "pool_conserved": Check(pool_conserved, lint_nothing),
    "equal": Check(equal, lint_group),
    "differ": Check(differ, lint_group),
    "same_under": Check(same_under, lint_same_under),
    "sampled_within_kept_set": Check(sampled_within_kept_set, lint_requests),
}


def lint(name: str, args: Any) -> list[str]:
    """What is wrong with one entry of `checks:`; empty if nothing. For scenario loading."""
    if name not in CHECKS:
        return [f"unknown check {name!r}; known: {', '.join(sorted(CHECKS))}"]
    return CHECKS[name].lint(args)


def judge(
    history: History,
    checks: Sequence[CheckSpec],
    records: Callable[[str], GoldenRecord],
    level: str = "must",
    *,
    strict: bool = False,
) -> Judgement:
    """Judge one history. Never raises for what is in it: a checker that crashes is an ERROR.

    Args:
        records: key → golden record; what it raises becomes an ERROR finding.
        level: the scenario's, "must" or "should".
        strict: hold every case to minivllm's own bar (2 × the eager cached arm).
    """
    case = Case(history, records, tuple(checks), strict)
    findings = list(_guarded("history", lambda: _sanity(case)))
    for spec in checks:
        findings += _guarded(spec.name, lambda spec=spec: _run(case, spec))  # type: ignore[misc]  # mypy cannot type a lambda default
    if not checks:
        findings.append(Finding(Verdict.ERROR, "history", None, "the scenario has no checks"))
    findings = [_with_triage(case, _with_record(case, finding)) for finding in findings]
    power = power_of(case, findings)
    return Judgement(_combine(findings, bool(power.kinds)), tuple(findings), power, level)


def _run(case: Case, spec: CheckSpec) -> list[Finding]:
    problems = lint(spec.name, spec.args)
    if problems:
        raise CheckInputError("; ".join(problems))
    if _never_began(case):
        return [Finding(Verdict.SKIP, spec.name, None, "the engine failed before it took any request")]
    findings = CHECKS[spec.name].judge(case, spec.args)
    if not findings and case.free.error is not None and "engine" not in case.error_expected():
        return [Finding(Verdict.SKIP, spec.name, None, "the engine failed before this could be judged")]
    if not findings:
        raise CheckInputError("the check found nothing to judge")
    return findings


def _never_began(case: Case) -> bool:
    """Whether the engine failed where no failure is expected, as while loading: that is one FAIL, of the
    history, and nothing is left to judge."""
    free = case.history.find("free")
    failed = free is not None and free.error is not None and not free.requests
    return failed and "engine" not in case.error_expected()


def _guarded(name: str, run: Callable[[], list[Finding]]) -> Iterator[Finding]:
    try:
        yield from run()
    except CheckInputError as missing:
        yield Finding(Verdict.ERROR, name, None, str(missing))
    except Exception as crash:  # whatever a checker raises must become a verdict, never a pass
        last = traceback.extract_tb(crash.__traceback__)[-1]
        where = f"{PurePath(last.filename).name}:{last.lineno}"
        yield Finding(
            Verdict.ERROR, name, None, f"checker {name!r} crashed: {type(crash).__name__}: {crash} ({where})"
        )


def _sanity(case: Case) -> list[Finding]:
    """What must hold of any history: it ran, and every submitted request was answered."""
    history, findings = case.history, []
    if history.schema != HISTORY_SCHEMA:
        raise CheckInputError(f"history schema {history.schema}, this judge reads {HISTORY_SCHEMA}")
    names = [p.name for p in history.passes]
    if len(set(names)) != len(names):
        raise CheckInputError(f"two passes have the same name: {names}")
    if history.find("free") is None:
        raise CheckInputError('the history has no pass "free"')
    expected = case.error_expected()
    for one in history.passes:
        if one.error is not None and "engine" not in expected:
            findings.append(
                case.fail(
                    "history",
                    None,
                    f"pass {one.name!r}: the engine failed: {one.error.type}: {one.error.message}",
                )
            )
        if one.error is not None:
            continue
        submitted = {name for op in one.operations if op.kind == "submit" for name in names_in(op.argument)}
        for name in sorted(submitted - set(one.requests)):
            findings.append(
                case.fail("history", name, f"pass {one.name!r}: submitted, but nothing is known of it")
            )
        for name, run in one.requests.items():
            if run.output is None and run.refused is None:
                findings.append(case.fail("history", name, f"pass {one.name!r}: the engine never answered"))
            problem = run.refused or (run.output.error if run.output else None)
            if problem is None or name in expected:
                continue
            if one.name == "forced" and problem.type == NotImplementedError.__name__:
                # The suite asked for it, not the scenario.
                text = f"teacher forcing, for what follows a divergence: {problem.message}"
                findings.append(Finding(Verdict.SKIP, "history", name, text))
            else:
                how = "refused" if run.refused else "failed"
                text = f"pass {one.name!r}: the request was {how}: {problem.type}: {problem.message}"
                findings.append(case.fail("history", name, text))
    return findings


def _with_record(case: Case, finding: Finding) -> Finding:
    """A divergence from a golden names the record, so that the other side can be looked up too."""
    if finding.verdict is not Verdict.FAIL or finding.request is None or finding.check not in CHECKS:
        return finding
    run = case.free.requests.get(finding.request)
    if not CHECKS[finding.check].golden or run is None or run.golden_key is None:
        return finding
    record = case.golden(run)
    name = f"{record.model}/{record.case}"
    return replace(
        finding, message=f"{finding.message} (golden {name})", detail={**finding.detail, "record": name}
    )


def _with_triage(case: Case, finding: Finding) -> Finding:
    if finding.verdict is not Verdict.FAIL or finding.request is None or finding.check not in CHECKS:
        return finding
    if not CHECKS[finding.check].golden or "triage" in finding.detail:
        return finding
    try:
        found = triage.triage(case, finding.request)
    except Exception as crash:  # triage explains a FAIL; if it breaks, the FAIL must stand
        return replace(
            finding, detail={**finding.detail, "triage": f"triage crashed: {type(crash).__name__}: {crash}"}
        )
    if found is None:
        return finding
    return replace(finding, detail={**finding.detail, "triage": found.as_dict()})


def _combine(findings: Sequence[Finding], has_power: bool) -> Verdict:
    """The worst verdict, but for two rules.

    A skipped check beside judged ones makes a scenario WEAK, not SKIP: it did run. And where no
    kind of fault could have shown, there is no PASS.
    """
    verdicts = [f.verdict for f in findings]
    judged = [v for v in verdicts if v is not Verdict.SKIP]
    if not judged:
        return Verdict.SKIP
    verdict = Verdict.worst(judged)
    if len(judged) < len(verdicts) or not has_power:
        verdict = Verdict.worst((verdict, Verdict.WEAK))
    return verdict
