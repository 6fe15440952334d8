"""What an answer says beside its tokens: reused tokens, reasons, text, errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from conformance.adapters.base import EngineError
from conformance.checks.case import Case, CheckFailed, align, expected_text, how_texts_differ, same_text
from conformance.checks.tokens import judge_id
from conformance.history import RequestRun
from conformance.verdicts import Finding, Verdict

__all__ = ["cached_tokens", "error", "finish_reason", "text_equals"]


def cached_tokens(case: Case, args: Any) -> list[Finding]:
    """{request: number | {min, max, equals}}: prompt tokens found in the prefix cache.

    Also: never the whole prompt (one token must be computed), and the count that the engine's own
    prefix_hit events tell, where it tells them. An engine with blocks of another size than the
    scenario's may reuse fewer tokens: then only the upper bounds hold.
    """
    check, findings = "cached_tokens", []
    for name, wanted in args.items():
        run = case.run_of(name)
        try:
            output = case.output(check, run)
        except CheckFailed as failed:
            findings.append(failed.finding)
            continue
        count = output.num_cached_tokens
        if count is None:
            if case.has("prefix_cache"):
                findings.append(case.fail(check, name, "the engine does not tell how many tokens it reused"))
            else:
                findings.append(Finding(Verdict.SKIP, check, name, case.why_missing("prefix_cache")))
            continue
        bounds = wanted if isinstance(wanted, Mapping) else {"equals": wanted}
        other_blocks = _has_other_blocks(case)
        if other_blocks:
            bounds = {"max": bounds.get("equals", bounds.get("max"))}
        problems = list(_cached_problems(case, run, count, bounds))
        if not problems and other_blocks:
            text = f"{count} tokens reused; its blocks have another size: judged only not to be too many"
            findings.append(Finding(Verdict.WEAK, check, name, text, saw="behaviour"))
        elif problems:
            findings.append(
                case.fail(check, name, "; ".join(problems), saw="behaviour", detail={"cached": count})
            )
        else:
            findings.append(Finding(Verdict.PASS, check, name, f"{count} tokens reused", saw="behaviour"))
    return findings


def _has_other_blocks(case: Case) -> bool:
    """Whether the scenario's block size is one that the engine did not honour."""
    wanted = {name for o in case.free.operations if o.kind == "options_not_honoured" for name in o.argument}
    wanted |= set(case.history.point)
    return "block_size" in wanted and "block_size" not in case.history.capabilities.options


def _cached_problems(case: Case, run: RequestRun, count: int, bounds: Mapping[str, Any]) -> Iterable[str]:
    equals, low, high = bounds.get("equals"), bounds.get("min"), bounds.get("max")
    if equals is not None and count != equals:
        yield f"{count} tokens reused, expected {equals}"
    if low is not None and count < low:
        yield f"{count} tokens reused, expected at least {low}"
    if high is not None and count > high:
        yield f"{count} tokens reused, expected at most {high}"
    assert run.output is not None
    prompt = run.output.prompt_token_ids or run.prompt_token_ids
    if count < 0 or (prompt is not None and count >= len(prompt)):
        yield f"{count} tokens reused of a prompt of {len(prompt) if prompt else 'unknown length'}"
    hits = [
        int(e["num_tokens"])
        for e in case.free.events
        if e.get("event") == "prefix_hit"
        and e.get("request_id") == run.request_id
        and not e.get("resumed", False)
    ]
    # At most one hit counts per request: the one at its first admission.
    if case.has("traced") and (sum(hits) != count or len(hits) > 1):
        yield f"{count} tokens reused, but its events tell of hits of {hits}"


def finish_reason(case: Case, args: Any) -> list[Finding]:
    """{request: reason | {reason, stop_reason}}: why it ended."""
    check, findings = "finish_reason", []
    for name, wanted in args.items():
        run = case.run_of(name)
        output = run.output
        if output is None:
            what = f"refused: {run.refused.type}" if run.refused else "never answered"
            findings.append(case.fail(check, name, f"expected {wanted!r}, but it was {what}"))
            continue
        reason = wanted["reason"] if isinstance(wanted, Mapping) else wanted
        problems = []
        if not output.finished:
            problems.append("the request never finished")
        if output.finish_reason != reason:
            problems.append(f"finish reason {output.finish_reason!r}, expected {reason!r}")
        if isinstance(wanted, Mapping) and "stop_reason" in wanted:
            stop = wanted["stop_reason"]
            if output.stop_reason != stop or type(output.stop_reason) is not type(stop):
                problems.append(f"stop reason {output.stop_reason!r}, expected {stop!r}")
        findings.append(
            case.fail(check, name, "; ".join(problems), saw="behaviour")
            if problems
            else Finding(Verdict.PASS, check, name, f"ended by {reason!r}", saw="behaviour")
        )
    return findings


def text_equals(case: Case, args: Any) -> list[Finding]:
    """{request: text | {equals: text, golden: true, streaming: consistent}}.

    `golden` expects the golden's text, cut at the request's stop strings. `streaming` expects that
    no shown text is ever taken back: each is a prefix of the next, and of the last one.
    """
    findings: list[Finding] = []
    for name, wanted in args.items():
        run = case.run_of(name)
        try:
            findings += _text(case, run, {"equals": wanted} if isinstance(wanted, str) else wanted)
        except CheckFailed as failed:
            findings.append(failed.finding)
    return findings


def _text(case: Case, run: RequestRun, wanted: Mapping[str, Any]) -> list[Finding]:
    check, name = "text_equals", run.request_id
    output = case.output(check, run)
    problems: list[str] = []
    verdict, remark = Verdict.PASS, f"{len(output.text)} characters as expected"
    if "equals" in wanted and output.text != wanted["equals"]:
        problems.append(f"text {how_texts_differ(output.text, wanted['equals'])}")
    if wanted.get("golden"):
        record = case.golden(run)
        expected, _ = expected_text(run, record)
        aligned = align(case, run, record)
        at = aligned.divergence
        ids = output.token_ids
        if at is not None and ids is not None and judge_id(record, at, ids[at]) is not Verdict.FAIL:
            verdict, remark = (
                Verdict.WEAK,
                f"text not judged: the ids took another legal way at position {at}",
            )
        elif not same_text(output.text, expected):
            problems.append(f"text {how_texts_differ(output.text, expected)}")
    if "streaming" in wanted:
        if not case.has("streaming"):
            return [Finding(Verdict.SKIP, check, name, case.why_missing("streaming"))]
        problems += _streaming_problems(run, output.text)
    if problems:
        return [case.fail(check, name, "; ".join(problems), saw="behaviour")]
    return [Finding(verdict, check, name, remark, saw="behaviour" if verdict is Verdict.PASS else "")]


def _streaming_problems(run: RequestRun, final: str) -> list[str]:
    if final and not run.texts:
        return ["no text was shown while it ran"]
    problems = [
        f"shown text was taken back: {earlier!r}, then {later!r}"
        for earlier, later in pairwise(run.texts)
        if not later.startswith(earlier)
    ]
    if run.texts and run.texts[-1] != final:
        problems.append(f"the last shown text {run.texts[-1]!r} is not the final text {final!r}")
    return problems


def error(case: Case, args: Any) -> list[Finding]:
    """{request, or "engine": type | any | {type, contains}}: an error that must have happened.

    `any` accepts every error that has a name and a message.
    """
    findings = []
    for name, wanted in args.items():
        if name == "engine":
            got: EngineError | None = case.free.error
            request, where = None, "loading or running the engine"
        else:
            run = case.run_of(name)
            got = run.refused or (run.output.error if run.output else None)
            request, where = name, f"request {name!r}"
        problems = _error_problems(got, wanted if isinstance(wanted, Mapping) else {"type": wanted})
        if problems:
            findings.append(case.fail("error", request, f"{where}: " + "; ".join(problems), saw="behaviour"))
        else:
            assert got is not None
            text = f"{where}: {got.type}: {got.message}"
            findings.append(Finding(Verdict.PASS, "error", request, text, saw="behaviour"))
    return findings


def _error_problems(got: EngineError | None, wanted: Mapping[str, Any]) -> list[str]:
    if got is None:
        return ["no error, though one is due"]
    problems = []
    types = _listed(wanted.get("type"))
    if types and "any" not in types and got.type not in types:
        problems.append(f"error type {got.type} ({got.message!r}), expected {' or '.join(types)}")
    missing = [w for w in _listed(wanted.get("contains")) if w.lower() not in got.message.lower()]
    if missing:
        problems.append(f"the message does not say {missing}: {got.message!r}")
    if not got.type or not got.message.strip():
        problems.append("the error has no name or no message")
    return problems


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(v) for v in value]
