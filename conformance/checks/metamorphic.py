"""same_under: the same request under another configuration answers the same.

Needs no golden: where the engine promises bits, bits are compared; else the golden's yardstick
bounds the difference; else tokens alone are compared, which is WEAK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.checks.arguments import arm_name, arm_names
from conformance.checks.bits import answer_difference, bit_difference, row_difference
from conformance.checks.case import BAND, Case, CheckInputError
from conformance.checks.claims import not_fired
from conformance.checks.logits import MIN_POSITIONS, logprob_band
from conformance.checks.tokens import judge_id
from conformance.history import Pass, RequestRun
from conformance.records import GoldenRecord
from conformance.verdicts import Finding, Verdict

__all__ = ["same_under"]

CHECK = "same_under"

#: What an engine needs before an arm can be asked of it: features, and options it honours.
_NEEDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "chunk": (("chunked_prefill",), ("max_num_batched_tokens",)),
    "block_size": (("block_size",), ("block_size",)),
    "batch": ((), ()),
    "prefix_cache": (("prefix_cache",), ("enable_prefix_caching",)),
    "preempt": (("stepped", "preempt"), ()),
    "preemption": (("stepped", "preempt"), ("preemption_mode",)),
    "backend": ((), ("attention_backend",)),
    "threads": ((), ("threads",)),
    "poison": (("stepped", "poison"), ()),
    "order": ((), ()),
}


def same_under(case: Case, args: Any) -> list[Finding]:
    """{axis: [values], …}: compare every arm's pass with the free pass, request by request.

    A missing arm, or one that did not do what it claims (no prompt split, nobody preempted), is
    an ERROR: agreement with it would prove nothing.
    """
    names = case.golden_requests(args["requests"]) if "requests" in args else _comparable(case)
    if not names:
        raise CheckInputError("no request that runs to its end")
    findings: list[Finding] = []
    for arm in [*arm_names(args), *_every_preemption(case, args), *_every_mode(case, args)]:
        axis, _, value = arm.partition("=")
        one = case.history.find(arm)
        if one is None:
            findings.append(_missing(case, arm, axis, value))
            continue
        if one.error is not None:
            findings.append(_broken(case, one))
            continue
        problem = not_fired(case, one, axis, value, names)
        if problem is not None:
            findings.append(Finding(Verdict.ERROR, CHECK, None, f"arm {arm}: {problem}"))
            continue
        compared = [_compare(case, one, name) for name in names]
        # By its name the arm can be run again, see `conformance.retrace`.
        findings += [replace(finding, detail={**finding.detail, "arm": arm}) for finding in compared]
    return findings


def _comparable(case: Case) -> list[str]:
    """Requests that run to their end: an abort hits another token in every arm."""
    unlike = case.error_expected() | case.aborted()
    return [name for name in case.free.requests if name not in unlike]


def _every_preemption(case: Case, args: Mapping[str, Any]) -> list[str]:
    """Arms of `preempt: every`: as many as steps that left a request of the scenario alive."""
    values = args.get("preempt")
    if values != "every" and not (isinstance(values, Sequence) and "every" in values):
        return []
    others = {arm_name("preempt", v) for v in values} if not isinstance(values, str) else set()
    return _arm_per_step(case, "preempt: every", "preempt=", others) or ["preempt=every"]


def _every_mode(case: Case, args: Mapping[str, Any]) -> list[str]:
    """Arms of `preemption`: for each mode, as many as steps that left a request alive."""
    return [
        arm
        for mode in args.get("preemption", ())
        for arm in _arm_per_step(case, f"preemption: {mode}", f"preemption={mode}@", set())
        or [f"preemption={mode}"]
    ]


def _arm_per_step(case: Case, what: str, prefix: str, others: Set[str]) -> list[str]:
    given = [p.name for p in case.history.passes if p.name.startswith(prefix) and p.name not in others]
    given += [arm for arm in _not_offered(case) if arm.startswith(prefix) and arm not in given]
    needed = _steps_left_alive(case.free) if case.has("traced") else 1
    if case.has("preempt") and case.has("stepped") and len(given) < max(1, needed):
        raise CheckInputError(f"{what} needs {max(1, needed)} arms, the history has {len(given)}")
    return given


def _steps_left_alive(one: Pass) -> int:
    live: set[str] = set()
    alive_after: set[str] | None = None
    count = 0
    for e in one.events:
        kind, name = e.get("event"), e.get("request_id")
        if kind == "submitted" and name in one.requests:
            live.add(str(name))
        elif kind in ("finished", "aborted", "failed"):
            live.discard(str(name))
            if alive_after is not None:
                alive_after.discard(str(name))
        elif kind == "planned":
            count += bool(alive_after)
            alive_after = set(live)
    return count + bool(alive_after)


def _not_offered(case: Case) -> dict[str, str]:
    """Arms the runner left out because the engine cannot be put into them → why."""
    return {
        arm_name(o.argument["axis"], o.argument["value"]): str(o.outcome)
        for o in case.free.operations
        if o.kind == "arm_not_offered"
    }


def _missing(case: Case, arm: str, axis: str, value: str) -> Finding:
    reason = _not_offered(case).get(arm)
    if reason is not None:
        return Finding(Verdict.SKIP, CHECK, None, f"arm {arm}: {reason}")
    features, options = _NEEDS[axis]
    if axis == "batch" and value in ("late", "aborted_neighbour"):
        features = (*features, "stepped")
    lacking = [case.why_missing(f) for f in features if not case.has(f)]
    honoured = case.history.capabilities.options
    lacking += [f"the option {o} is not honoured" for o in options if o not in honoured]
    if lacking:
        return Finding(Verdict.SKIP, CHECK, None, f"arm {arm}: {'; '.join(lacking)}")
    return Finding(Verdict.ERROR, CHECK, None, f"arm {arm} is missing from the history")


def _broken(case: Case, one: Pass) -> Finding:
    assert one.error is not None
    message = f"arm {one.name}: {one.error.type}: {one.error.message}"
    if "engine" in case.error_expected():
        return Finding(Verdict.ERROR, CHECK, None, f"{message} (an arm cannot be compared)")
    return case.fail(CHECK, None, message)


def _compare(case: Case, arm: Pass, name: str) -> Finding:
    base = case.run_of(name)
    if name not in arm.requests:
        return Finding(Verdict.ERROR, CHECK, name, f"arm {arm.name} has no request {name!r}")
    other = arm.requests[name]
    for pass_name, run in (("free", base), (arm.name, other)):
        if run.output is None or run.output.error is not None or run.refused is not None:
            return case.fail(CHECK, name, f"pass {pass_name!r}: it was not served, so nothing compares")
    assert base.output is not None
    assert other.output is not None
    if base.output.prompt_token_ids != other.output.prompt_token_ids:
        return case.fail(CHECK, name, f"arm {arm.name}: the prompt ids differ", saw="tokens")
    bitwise = case.has("bitwise") and all(p.options.get("batch_invariant") is True for p in (case.free, arm))
    if bitwise:
        return _compare_bits(case, arm, base, other)
    return _compare_band(case, arm, base, other)


def _compare_bits(case: Case, arm: Pass, base: RequestRun, other: RequestRun) -> Finding:
    name = base.request_id
    same_answer = answer_difference(base, other) is None
    if same_answer and case.has("stages") and not (base.output_rows and other.output_rows):
        return Finding(Verdict.ERROR, CHECK, name, f"arm {arm.name}: logits were not captured in both passes")
    difference, compared = bit_difference(base, other)
    if difference is not None:
        return case.fail(
            CHECK,
            name,
            f"arm {arm.name}: {difference.message}",
            position=difference.position,
            saw="bits",
            detail={"mode": "bits", **difference.detail},
        )
    if not compared:
        return Finding(
            Verdict.WEAK, CHECK, name, f"arm {arm.name}: same tokens; no bits to compare", saw="tokens"
        )
    return Finding(
        Verdict.PASS,
        CHECK,
        name,
        f"arm {arm.name}: the same bits ({compared} digests)",
        saw="bits",
        detail={"mode": "bits", "digests": compared},
    )


def _compare_band(case: Case, arm: Pass, base: RequestRun, other: RequestRun) -> Finding:
    """Compare within the golden's yardstick; without a golden by what the user sees, WEAK."""
    name = base.request_id
    record = case.golden(base) if base.golden_key is not None else None
    problem = answer_difference(base, other)
    if record is None:
        if problem is not None:
            message = f"arm {arm.name}: {problem.message}"
            return case.fail(CHECK, name, message, position=problem.position, saw="tokens")
        return Finding(
            Verdict.WEAK,
            CHECK,
            name,
            f"arm {arm.name}: same tokens; no golden bounds how far the logits may differ",
            saw="tokens",
        )
    verdict, remark, shared = Verdict.PASS, "same tokens", len(base.output_rows or ())
    if problem is not None:
        message, at = problem.message, problem.position
        if at is None or not _both_legal(record, at, base, other):
            return case.fail(CHECK, name, f"arm {arm.name}: {message}", position=at, saw="tokens")
        verdict, remark, shared = Verdict.NOISE, f"{message}, both legal; later ones unjudged", at + 1
    numbers = _numbers(case, arm, record, base, other, shared if problem is not None else None)
    if numbers is not None and numbers.verdict is Verdict.FAIL:
        return numbers
    seen = numbers.saw if numbers is not None else "tokens"
    if numbers is None or problem is not None:
        verdict = Verdict.worst((verdict, Verdict.WEAK))
    told = numbers.message if numbers is not None else "no logits or logprobs to compare"
    return Finding(
        case.soften(verdict),
        CHECK,
        name,
        f"arm {arm.name}: {remark}; {told}",
        saw=seen,
        detail={"mode": "band"},
    )


def _both_legal(record: GoldenRecord, at: int, base: RequestRun, other: RequestRun) -> bool:
    """Whether both took a way the truth allows, from the same context."""
    for run in (base, other):
        ids = (run.output.token_ids if run.output else None) or ()
        if at >= len(ids) or at >= len(record.token_ids) or ids[:at] != record.token_ids[:at]:
            return False
        if judge_id(record, at, ids[at]) not in (Verdict.PASS, Verdict.NOISE):
            return False
    return True


def _numbers(
    case: Case, arm: Pass, record: GoldenRecord, base: RequestRun, other: RequestRun, shared: int | None
) -> Finding | None:
    """Difference of logits (or logprobs) over the shared context, in the yardstick's units."""
    name, yardstick = base.request_id, record.yardstick
    a, b = base.output, other.output
    assert a is not None
    assert b is not None
    differences: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    if base.output_rows and other.output_rows:
        saw, limit = "logits", BAND * yardstick.M
        count = min(len(base.output_rows), len(other.output_rows)) if shared is None else shared
        if shared is None and len(base.output_rows) != len(other.output_rows):
            return case.fail(CHECK, name, f"arm {arm.name}: different numbers of logit rows", saw=saw)
        for x, y in zip(base.output_rows[:count], other.output_rows[:count], strict=True):
            differences.append(row_difference(x, y))
    elif a.logprobs and b.logprobs:
        saw, limit = "logprobs", logprob_band(record, float(np.abs(record.output.logsumexp).max()))
        count = min(len(a.logprobs), len(b.logprobs)) if shared is None else shared
        for mine, theirs in zip(a.logprobs[:count], b.logprobs[:count], strict=True):
            values = {e.token_id: e.logprob for e in theirs}
            differences.append(
                np.array([e.logprob - values[e.token_id] for e in mine if e.token_id in values], np.float64)
            )
    else:
        return None
    flat = np.concatenate(differences) if differences else np.zeros(0)
    if not flat.size:
        return None
    if not np.isfinite(flat).all():
        return case.fail(CHECK, name, f"arm {arm.name}: the {saw} are not finite", saw=saw)
    worst, rms = float(np.max(np.abs(flat))), float(np.sqrt(np.mean(flat * flat)))
    position = int(np.argmax([np.max(np.abs(d)) if d.size else 0.0 for d in differences]))
    enough = len(differences) >= MIN_POSITIONS
    if worst > limit or (enough and rms > BAND * yardstick.R):
        return case.fail(
            CHECK,
            name,
            f"arm {arm.name}: {saw} differ by up to {worst:.4g} (at position {position}), rms {rms:.4g}; "
            f"correct computations of this case by at most {limit:.4g} and {BAND * yardstick.R:.4g}",
            position=position,
            size=worst / yardstick.M if yardstick.M else None,
            saw=saw,
            detail={"mode": "band", "max": worst, "rms": rms},
        )
    unit_m, unit_r = max(yardstick.M, 1e-300), max(yardstick.R, 1e-300)
    return Finding(
        Verdict.PASS,
        CHECK,
        name,
        f"{saw} differ by rms {rms / unit_r:.3g} R, max {worst / unit_m:.3g} M",
        saw=saw,
    )
