"""tokens_match_golden: the generated ids are the truth's, wherever the truth is decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from conformance.adapters.base import EngineOutput
from conformance.checks.case import (
    BAND,
    Aligned,
    Case,
    CheckFailed,
    CheckInputError,
    align,
    expected_text,
    first_difference,
    how_texts_differ,
    is_plain_greedy,
    wrong_text,
)
from conformance.history import RequestRun
from conformance.records import GoldenRecord
from conformance.verdicts import Finding, Verdict

__all__ = ["band", "gap", "is_decided", "judge_id", "tokens_match_golden"]

CHECK = "tokens_match_golden"

#: Of a float32 case's positions: most that may be NOISE, least that must be decided.
MAX_NOISE = 0.02
MIN_DECIDED = 0.90


def band(record: GoldenRecord) -> float:
    """B: how far a correct engine's logit may lie from the truth, in logits."""
    return BAND * record.yardstick.M


def is_decided(record: GoldenRecord, position: int) -> bool:
    """Whether no correct engine can choose another id here: the margin exceeds both errors."""
    return bool(record.output.margins[position] > 2 * band(record))


def gap(record: GoldenRecord, position: int, token: int) -> tuple[float, bool]:
    """How far below the truth's best logit `token` lies, and whether that is exact.

    Outside of the recorded top ids only a lower bound is known.
    """
    ids, logits = record.output.top_ids[position], record.output.top_logits[position]
    for candidate, logit in zip(ids.tolist(), logits.tolist(), strict=True):
        if candidate == token:
            return float(logits[0] - logit), True
    return float(logits[0] - logits[-1]), False


def judge_id(record: GoldenRecord, position: int, token: int) -> Verdict:
    """PASS: the truth's id. NOISE: the truth cannot tell them apart. WEAK: unknown. FAIL: wrong."""
    if token == record.token_ids[position]:
        return Verdict.PASS
    if is_decided(record, position):
        return Verdict.FAIL
    distance, exact = gap(record, position, token)
    if distance > 2 * band(record):
        return Verdict.FAIL
    return Verdict.NOISE if exact else Verdict.WEAK


def tokens_match_golden(case: Case, args: Any) -> list[Finding]:
    """Judge every plain greedy request (or those named) against its golden, id by id.

    The free run counts up to and including its first divergence, later positions come from the
    forced run; without one they are unjudged, which is reported and never a PASS.
    """
    findings: list[Finding] = []
    for name in case.golden_requests(args):
        run = case.run_of(name)
        if not is_plain_greedy(run):
            raise CheckInputError(f"request {name!r} is not plain greedy: no golden can judge its ids")
        try:
            findings += _judge(case, run)
        except CheckFailed as failed:
            findings.append(failed.finding)
    return findings


@dataclass
class _Tally:
    failures: list[Finding] = field(default_factory=list)
    judged: int = 0
    decided: int = 0
    noise: int = 0
    unjudged: int = 0


def _judge(case: Case, run: RequestRun) -> list[Finding]:
    record = case.golden(run)
    output = case.output(CHECK, run)
    knows_prompt = case.same_prompt(CHECK, run, record)
    if output.token_ids is None:
        return [_judge_text_only(case, run, record)]
    if not output.token_ids and run.request_id not in case.aborted():
        return [case.fail(CHECK, run.request_id, "the output is empty", position=0, saw="tokens")]
    if any(isinstance(t, bool) or not isinstance(t, int) for t in output.token_ids):
        return [case.fail(CHECK, run.request_id, f"ids that are no integers: {output.token_ids!r}")]
    aligned = align(case, run, record)
    tally = _Tally()
    _judge_ids(case, aligned, tally)
    if aligned.divergence is None:
        tally.failures += _judge_ending(case, run, record, output)
    else:
        tally.failures += _judge_loose_ending(case, run, record, output)
    tally.failures += _judge_shares(case, record, run, tally)
    if tally.failures:
        return tally.failures
    verdict = Verdict.NOISE if tally.noise else Verdict.PASS
    remarks = []
    if tally.unjudged:
        verdict = Verdict.WEAK
        remarks.append(f"{tally.unjudged} positions unjudged (no forced pass after a divergence)")
    if not knows_prompt:
        verdict = Verdict.WEAK
        remarks.append("the engine took text and tells no prompt ids")
    if not case.full_power():
        verdict = Verdict.WEAK
        remarks.append(f"in {case.history.dtype} ids alone hide small faults of all but recall checkpoints")
    message = f"{tally.judged} of {len(record.token_ids)} positions agree, {tally.decided} decided"
    if tally.noise:
        message += f", {tally.noise} noise"
    return [
        Finding(
            verdict,
            CHECK,
            run.request_id,
            "; ".join([message, *remarks]),
            saw="tokens",
            detail={
                "judged": tally.judged,
                "decided": tally.decided,
                "noise": tally.noise,
                "unjudged": tally.unjudged,
            },
        )
    ]


def _judge_ids(case: Case, aligned: Aligned, tally: _Tally) -> None:
    record, name = aligned.record, aligned.free.request_id
    forced_ids: tuple[int, ...] = ()
    if aligned.forced is not None:
        forced_ids = _forced_choices(case, aligned.forced, record)
    covered = 0
    for position, speaker in aligned:
        output = speaker.output
        assert output is not None  # align yields only runs with output
        ids = forced_ids if speaker is aligned.forced else output.token_ids
        assert ids is not None
        covered += 1
        verdict = judge_id(record, position, ids[position])
        if verdict is Verdict.FAIL:
            tally.failures.append(_wrong(case, record, speaker, position, ids[position]))
            # Later positions of a wrong free run are judged too if they were forced: go on.
            continue
        if verdict is Verdict.WEAK:
            tally.unjudged += 1
            continue
        tally.judged += 1
        tally.decided += is_decided(record, position)
        tally.noise += verdict is Verdict.NOISE
    # The forced run's early positions have the golden's context as well: wrong there is wrong.
    early = covered if aligned.divergence is None else aligned.divergence + 1
    for position in range(min(early, len(forced_ids))):
        if judge_id(record, position, forced_ids[position]) is Verdict.FAIL:
            assert aligned.forced is not None
            tally.failures.append(_wrong(case, record, aligned.forced, position, forced_ids[position]))
    if aligned.divergence is not None and name not in case.aborted():
        tally.unjudged += len(record.token_ids) - covered


def _forced_choices(case: Case, run: RequestRun, record: GoldenRecord) -> tuple[int, ...]:
    """The engine's own choices along the golden continuation; raises CheckFailed if it left it."""
    output = case.output(CHECK, run)
    case.same_prompt(CHECK, run, record)
    if output.token_ids is not None and tuple(output.token_ids) != record.token_ids:
        raise CheckFailed(
            case.fail(
                CHECK,
                run.request_id,
                "the forced pass did not follow the forced ids: "
                f"{list(output.token_ids)} for {list(record.token_ids)}",
                saw="tokens",
            )
        )
    choices = output.choice_token_ids
    if choices is None or len(choices) != len(record.token_ids):
        raise CheckFailed(
            case.fail(
                CHECK,
                run.request_id,
                f"the forced pass gave {'no' if choices is None else len(choices)} choices "
                f"for {len(record.token_ids)} positions",
                saw="tokens",
            )
        )
    return tuple(choices)


def _wrong(case: Case, record: GoldenRecord, run: RequestRun, position: int, token: int) -> Finding:
    distance, exact = gap(record, position, token)
    size = distance / record.yardstick.M if record.yardstick.M else None
    return case.fail(
        CHECK,
        run.request_id,
        f"position {position} ({'forced' if run.forced else 'free'} pass): id {token} "
        f"where the truth is {record.token_ids[position]}, "
        f"{'' if exact else 'at least '}{distance:.4g} logits below the best; "
        f"a correct engine is off by at most {2 * band(record):.4g}",
        position=position,
        size=size,
        saw="tokens",
        detail={"token": token, "truth": record.token_ids[position], "gap": distance, "exact": exact},
    )


def _judge_ending(case: Case, run: RequestRun, record: GoldenRecord, output: EngineOutput) -> list[Finding]:
    """Length, reasons and text of a run whose ids never left the truth."""
    name, ids = run.request_id, output.token_ids or ()
    aborted = name in case.aborted()
    _text, stop = expected_text(run, record)
    may_be_short = aborted or stop is not None
    failures = []

    def fail(message: str, position: int | None = None) -> None:
        failures.append(case.fail(CHECK, name, message, position=position, saw="tokens"))

    if len(ids) > len(record.token_ids):
        fail(f"{len(ids)} tokens where the truth has {len(record.token_ids)}", len(record.token_ids))
    if len(ids) < len(record.token_ids) and not may_be_short:
        fail(f"stopped after {len(ids)} of {len(record.token_ids)} tokens", len(ids))
    reason, stop_reason = ("stop", stop) if stop is not None else (record.finish_reason, record.stop_reason)
    if aborted and len(ids) < len(record.token_ids):
        reason, stop_reason = "abort", None
    if not output.finished:
        fail("the request never finished")
    elif (output.finish_reason, output.stop_reason) != (reason, stop_reason) and not (
        # An abort may arrive after the end: then either ending is right.
        aborted and output.finish_reason == "abort"
    ):
        fail(
            f"finish reason {output.finish_reason!r} (stop reason {output.stop_reason!r}), "
            f"expected {reason!r} ({stop_reason!r})"
        )
    if not failures and (wrong := wrong_text(case, run, record)) is not None:
        fail(f"the ids are right, their text is not: {wrong}")
    return failures


def _judge_loose_ending(
    case: Case, run: RequestRun, record: GoldenRecord, output: EngineOutput
) -> list[Finding]:
    """What must hold of length and reason even after an accepted divergence."""
    name, count = run.request_id, len(output.token_ids or ())
    limit = run.sampling.get("max_tokens", record.request.get("max_tokens"))
    problem = None
    if name in case.aborted():
        return []
    if not output.finished:
        problem = "the request never finished"
    elif limit is not None and count > limit:
        problem = f"{count} tokens, max_tokens is {limit}"
    elif output.finish_reason not in ("stop", "length"):
        problem = f"finish reason {output.finish_reason!r}, expected 'stop' or 'length'"
    elif output.finish_reason == "length" and limit is not None and count != limit:
        problem = f"finish reason 'length' after {count} of {limit} tokens"
    elif output.finish_reason == "stop" and run.sampling.get("ignore_eos"):
        stops = set(run.sampling.get("stop_token_ids") or ())
        last = (output.token_ids or (None,))[-1]
        if last not in stops and not run.sampling.get("stop"):
            problem = f"finish reason 'stop' at id {last}, which stops nothing (ignore_eos is set)"
    return [case.fail(CHECK, name, problem, saw="tokens")] if problem else []


def _judge_shares(case: Case, record: GoldenRecord, run: RequestRun, tally: _Tally) -> list[Finding]:
    """In float32 near ties are rare: many of them, or much NOISE, is itself a finding."""
    if case.history.dtype != "float32" or not tally.judged:
        return []
    failures = []
    # One position is always allowed: it was proven a near tie, and 2 % of a short run is none.
    if tally.noise > max(1, MAX_NOISE * tally.judged):
        failures.append(
            case.fail(
                CHECK,
                run.request_id,
                f"{tally.noise} of {tally.judged} positions differ from the truth within its band; "
                f"more than {MAX_NOISE:.0%} is no rounding",
                saw="tokens",
            )
        )
    undecided = tally.judged - tally.decided
    if undecided > max(1, (1 - MIN_DECIDED) * tally.judged):
        failures.append(
            case.fail(
                CHECK,
                run.request_id,
                f"only {tally.decided} of {tally.judged} positions of {record.case} are decided "
                f"(at least {MIN_DECIDED:.0%} is needed); choose a prompt that decides more",
                saw="tokens",
            )
        )
    return failures


def _judge_text_only(case: Case, run: RequestRun, record: GoldenRecord) -> Finding:
    """An engine that returns text only: never more than WEAK."""
    output = case.output(CHECK, run)
    text, shown = (t.removeprefix(" ") for t in (expected_text(run, record)[0], output.text))
    all_decided = all(is_decided(record, i) for i in range(len(record.token_ids)))
    shared = first_difference(text, shown)
    if run.request_id in case.aborted() and text.startswith(shown):
        same = True
    else:
        same = shown == text
    problem = None
    if text and not shown and run.request_id not in case.aborted():
        problem = "the output is empty"
    elif not same and all_decided:
        problem = (
            f"the text differs at character {shared}, though every position is decided: "
            f"{how_texts_differ(shown, text)}"
        )
    if problem:
        return case.fail(CHECK, run.request_id, problem, saw="tokens")
    return Finding(
        Verdict.WEAK,
        CHECK,
        run.request_id,
        "the engine returns text only: "
        + (f"all {len(text)} characters agree" if same else f"{shared} of {len(text)} characters agree"),
        saw="tokens",
        detail={"judged": 0, "decided": 0, "noise": 0, "unjudged": 0 if same else len(record.token_ids)},
    )
