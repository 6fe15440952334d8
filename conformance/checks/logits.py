"""logits_within_yardstick: the engine's numbers lie as close to the truth as correct ones do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.checks.case import BAND, Aligned, Case, CheckFailed, CheckInputError, align, is_plain_greedy
from conformance.history import LogitRow, RequestRun
from conformance.records import GoldenRecord, LogitTable
from conformance.verdicts import Finding, Verdict

__all__ = ["MIN_POSITIONS", "logits_within_yardstick", "logprob_band", "row_errors"]

CHECK = "logits_within_yardstick"

#: Fewer positions than this say too little about an rms: the 99th percentile of correct arms'
#: single positions is 3 × their rms.
MIN_POSITIONS = 16

#: minivllm's own bar on a case's rms, in multiples of the eager cached arm.
STRICT = 2.0


@dataclass
class _Measured:
    """Errors of one request: engine minus truth, [positions × ids]."""

    record: GoldenRecord
    run: RequestRun
    source: str
    errors: list[NDArray[np.float64]] = field(default_factory=list)
    failures: list[Finding] = field(default_factory=list)
    worst: float = 0.0
    worst_at: int | None = None
    unjudged: int = 0

    @property
    def positions(self) -> int:
        return len(self.errors)

    def squares(self) -> tuple[float, int]:
        flat = np.concatenate(self.errors) if self.errors else np.zeros(0)
        return float(np.sum(flat * flat)), flat.size

    def rms(self) -> float:
        total, count = self.squares()
        return float(np.sqrt(total / count)) if count else 0.0


def logprob_band(record: GoldenRecord, value: float) -> float:
    """How far a correct logprob may lie from the truth: 4 M for its logit, 4 R for logsumexp.

    logsumexp of correct computations errs by up to M itself (measured on SmolLM2 and tiny models),
    but mostly as the likeliest logit does, which cancels; together they stay below 2 M. The last
    term is float32 rounding of log_softmax itself.
    """
    rounding = 4 * float(np.finfo(np.float32).eps) * max(1.0, abs(value))
    return BAND * record.yardstick.M + BAND * record.yardstick.R + rounding


def row_errors(row: LogitRow, table: LogitTable, position: int) -> NDArray[np.float64]:
    """Engine minus truth at the truth's top ids of one position, then of logsumexp.

    Raises CheckInputError if the row was reduced to other ids.
    """
    values = dict(zip(row.ids, row.values, strict=True))
    ids = table.top_ids[position].tolist()
    missing = [i for i in ids if i not in values]
    if missing:
        raise CheckInputError(
            f"position {position}: the captured row lacks the golden's top ids {missing[:5]}"
        )
    mine = np.array([*(values[i] for i in ids), row.logsumexp], dtype=np.float64)
    truth = np.array([*table.top_logits[position], table.logsumexp[position]], dtype=np.float64)
    return mine - truth


def logits_within_yardstick(case: Case, args: Any) -> list[Finding]:
    """Judge raw logits (or, lacking them, logprobs) at the truth's top ids of every position.

    Of an engine that shows both, logprobs are judged too: what turns logits into them can be wrong.

    Every error at most 4 M; rms at most 4 R over a case of at least 16 positions. Shorter cases
    are pooled with the other cases of the history, each in units of its own R. `strict: true`
    also holds each long case to 2 × the rms of the eager cached arm.
    """
    strict = case.strict or (isinstance(args, Mapping) and bool(args.get("strict")))
    selected = None if isinstance(args, Mapping) and "requests" not in args else args
    findings: list[Finding] = []
    measured: list[_Measured] = []
    for name in case.golden_requests(selected):
        run = case.run_of(name)
        if not is_plain_greedy(run):
            raise CheckInputError(f"request {name!r} is not plain greedy: no golden can judge its logits")
        try:
            found = _measure(case, run)
        except CheckFailed as failed:
            findings.append(failed.finding)
            continue
        if isinstance(found, Finding):
            findings.append(found)
        else:
            measured.append(found)
    pooled = _pooled_ratio([m for m in measured if m.positions < MIN_POSITIONS], measured)
    for one in measured:
        findings += _verdict(case, one, pooled, strict)
        if one.source == "logits" and one.run.sampling.get("logprobs") is not None and case.has("logprobs"):
            findings.append(_logprobs_too(case, one))
    return findings


def _measure(case: Case, run: RequestRun) -> _Measured | Finding:
    record = case.golden(run)
    output = case.output(CHECK, run)
    case.same_prompt(CHECK, run, record)
    name = run.request_id
    if output.token_ids is None:
        return Finding(Verdict.SKIP, CHECK, name, "the engine returns text only: no position has a number")
    if not output.token_ids and name not in case.aborted():
        return case.fail(CHECK, name, "the output is empty", position=0, saw="logits")
    if run.output_rows or case.has("stages"):
        return _measure_rows(case, align(case, run, record))
    if output.logprobs is not None:
        return _measure_logprobs(case, align(case, run, record))
    why = f"{case.why_missing('stages')}; " + (
        "no logprobs were returned" if case.has("logprobs") else case.why_missing("logprobs")
    )
    return Finding(Verdict.SKIP, CHECK, name, why)


def _speakers(case: Case, aligned: Aligned, measured: _Measured) -> Iterator[tuple[int, RequestRun]]:
    seen = 0
    for position, run in aligned:
        seen += 1
        yield position, run
    if not case.may_end_early(aligned.free, aligned.record):
        measured.unjudged = len(aligned.record.token_ids) - seen


def _measure_rows(case: Case, aligned: Aligned) -> _Measured:
    record, name = aligned.record, aligned.free.request_id
    measured = _Measured(record, aligned.free, "logits")
    for run in (aligned.free, aligned.forced):
        ids = run.output.token_ids if run is not None and run.output else None
        if run is not None and ids is not None and len(run.output_rows) != len(ids):
            raise CheckFailed(
                case.fail(
                    CHECK,
                    name,
                    f"{len(run.output_rows)} rows of logits for {len(ids)} tokens "
                    f"({'forced' if run.forced else 'free'} pass)",
                    saw="logits",
                )
            )
    limit = BAND * record.yardstick.M
    for position, run in _speakers(case, aligned, measured):
        row = run.output_rows[position]
        if row.num_nan or not np.isfinite([*row.values, row.logsumexp]).all():
            measured.failures.append(
                case.fail(
                    CHECK,
                    name,
                    f"position {position}: {row.num_nan} logits are NaN, values {list(row.values[:3])}…",
                    position=position,
                    saw="logits",
                )
            )
            continue
        errors = row_errors(row, record.output, position)
        _note(case, measured, position, errors, limit, [*record.output.top_ids[position].tolist(), None])
        # logsumexp is judged by the largest-error rule only: the yardstick's rms is over top ids.
        measured.errors.append(errors[:-1])
    return measured


def _measure_logprobs(case: Case, aligned: Aligned) -> _Measured:
    record, name = aligned.record, aligned.free.request_id
    measured = _Measured(record, aligned.free, "logprobs")
    table = record.output
    for position, run in _speakers(case, aligned, measured):
        listed = (run.output.logprobs if run.output else None) or ()
        if position >= len(listed):
            raise CheckFailed(
                case.fail(
                    CHECK,
                    name,
                    f"{len(listed)} lists of logprobs, none for position {position}",
                    position=position,
                    saw="logprobs",
                )
            )
        mine = {e.token_id: e.logprob for e in listed[position]}
        ids = [i for i in table.top_ids[position].tolist() if i in mine]
        values = np.array([mine[i] for i in ids], dtype=np.float64)
        at = [table.top_ids[position].tolist().index(i) for i in ids]
        truth = table.top_logits[position][at] - table.logsumexp[position]
        if not ids or not np.isfinite(values).all():
            measured.failures.append(
                case.fail(
                    CHECK,
                    name,
                    f"position {position}: "
                    + ("no logprob of a likely id" if not ids else f"logprobs {values.tolist()}"),
                    position=position,
                    saw="logprobs",
                )
            )
            continue
        errors = values - truth
        limit = logprob_band(record, float(np.abs(truth).max()))
        _note(case, measured, position, errors, limit, ids)
        measured.errors.append(errors)
    return measured


def _logprobs_too(case: Case, of: _Measured) -> Finding:
    """The logprobs of a request whose logits were measured, by the largest-error rule."""
    try:
        one = _measure_logprobs(case, align(case, of.run, of.record))
    except CheckFailed as failed:
        return failed.finding
    if one.failures:
        first = one.failures[0]
        more = f"; {len(one.failures) - 1} more positions are off" if len(one.failures) > 1 else ""
        return replace(first, message=f"{first.message}{more}")
    verdict = case.soften(Verdict.PASS)
    if one.unjudged:
        verdict = Verdict.worst((verdict, Verdict.WEAK))
    message = f"{one.positions} positions by logprobs: max {one.worst / _unit(one.record.yardstick.M):.3g} M"
    return Finding(verdict, CHECK, one.run.request_id, message, saw="logprobs")


def _note(
    case: Case,
    measured: _Measured,
    position: int,
    errors: NDArray[np.float64],
    limit: float,
    ids: list[Any],
) -> None:
    worst = int(np.argmax(np.abs(errors)))
    size = float(abs(errors[worst]))
    if size > measured.worst:
        measured.worst, measured.worst_at = size, position
    if size > limit:
        what = "logsumexp" if ids[worst] is None else f"id {ids[worst]}"
        yardstick = measured.record.yardstick.M
        measured.failures.append(
            case.fail(
                CHECK,
                measured.run.request_id,
                f"position {position}: the {measured.source[:-1]} of {what} is off by {errors[worst]:+.4g}, "
                f"a correct engine by at most {limit:.4g}",
                position=position,
                size=size / yardstick if yardstick else None,
                saw=measured.source,
                detail={"error": float(errors[worst]), "limit": limit, "id": ids[worst]},
            )
        )


def _pooled_ratio(short: list[_Measured], everything: list[_Measured]) -> tuple[float, int]:
    """rms of the short cases' errors, each in units of its R; long cases join if still too few."""
    pool = short
    if sum(m.positions for m in pool) < MIN_POSITIONS:
        pool = everything
    total, count = 0.0, 0
    for one in pool:
        squares, size = one.squares()
        total += squares / _unit(one.record.yardstick.R) ** 2
        count += size
    ratio = float(np.sqrt(total / count)) if count else 0.0
    return ratio, sum(m.positions for m in pool)


def _unit(yardstick: float) -> float:
    # A yardstick of exactly zero (all arms exact) still needs a finite ratio, also when squared.
    return max(yardstick, 1e-100)


def _verdict(case: Case, one: _Measured, pooled: tuple[float, int], strict: bool) -> list[Finding]:
    name, yardstick = one.run.request_id, one.record.yardstick
    failures = one.failures[:1]
    if one.positions == 0 and not failures:
        return [Finding(Verdict.SKIP, CHECK, name, "no position to judge")]
    rms = one.rms()
    long_enough = one.positions >= MIN_POSITIONS
    ratio, pool_size = (rms / _unit(yardstick.R), one.positions) if long_enough else pooled
    judged_by_rms = pool_size >= MIN_POSITIONS
    eager = yardstick.arms.get("eager_cached")
    detail: dict[str, Any] = {
        "source": one.source,
        "positions": one.positions,
        "failed_positions": len(one.failures),
        "unjudged": one.unjudged,
        "rms": rms,
        "rms_in_R": rms / _unit(yardstick.R),
        "max": one.worst,
        "max_in_M": one.worst / _unit(yardstick.M),
        "max_at": one.worst_at,
    }
    if eager is not None:
        detail["rms_to_eager_cached"] = rms / _unit(eager.rms)
        detail["max_to_eager_cached"] = one.worst / _unit(eager.max)
    if failures and len(one.failures) > 1:
        first = failures[0]
        more = f"; {len(one.failures) - 1} more positions are off"
        failures = [
            case.fail(
                CHECK,
                name,
                first.message + more,
                position=first.position,
                size=first.size,
                saw=first.saw,
                detail={**first.detail, **detail},
            )
        ]
    # Of pooled requests, only those that are off themselves are blamed: if the pool is, one of them is.
    if judged_by_rms and ratio > BAND and rms / _unit(yardstick.R) > BAND:
        whose = "" if long_enough else f" (pooled over {pool_size} positions)"
        failures.append(
            case.fail(
                CHECK,
                name,
                f"rms error is {ratio:.3g} R{whose}; a correct engine's is at most {BAND:g} R",
                position=one.worst_at,
                size=ratio,
                saw=one.source,
                detail=detail,
            )
        )
    if strict and long_enough:
        failures += _strict(case, one, rms, detail)
    if failures:
        return failures
    verdict, remarks = case.soften(Verdict.PASS), []
    if not judged_by_rms:
        remarks.append(f"too few to judge by rms ({pool_size} positions): largest error only")
    if one.unjudged:
        verdict = Verdict.worst((verdict, Verdict.WEAK))
        remarks.append(f"{one.unjudged} positions unjudged")
    message = (
        f"{one.positions} positions by {one.source}: rms {detail['rms_in_R']:.3g} R, "
        f"max {detail['max_in_M']:.3g} M"
    )
    if eager is not None:
        message += f", {detail['rms_to_eager_cached']:.3g} × eager cached"
    return [Finding(verdict, CHECK, name, "; ".join([message, *remarks]), saw=one.source, detail=detail)]


def _strict(case: Case, one: _Measured, rms: float, detail: Mapping[str, Any]) -> list[Finding]:
    eager = one.record.yardstick.arms.get("eager_cached")
    if eager is None:
        raise CheckInputError(f"{one.record.case}: strict needs the eager_cached arm, the record has none")
    if rms <= STRICT * eager.rms:
        return []
    return [
        case.fail(
            CHECK,
            one.run.request_id,
            f"strict: rms error is {rms / _unit(eager.rms):.3g} × the eager cached arm's, "
            f"at most {STRICT:g} × is allowed",
            size=rms / _unit(one.record.yardstick.R),
            saw=one.source,
            detail=detail,
        )
    ]
